"""Every named point of both paths x {crash, error, full, hang, late wake} x {first, middle, last hit} x {1, 2
receivers} x {same, newer target}. Points are enumerated by a run in which nothing fails, so that a new one is covered
by itself.
"""

from __future__ import annotations

from collections import Counter

import pytest

from deltarefit.publishing.shard_baseline import ShardBaseline
from tests import failpoints as f
from tests import planted
from tests.failing import Fault
from tests.failpoints import World
from tests.failpoints_ranks import trainer_cases
from tests.failpoints_stream import StreamWorld

LEAST_POINTS = 25
KINDS = {"stage": World, "stream": StreamWorld}
SHARES = {"stage": 3, "stream": 7}
"""One in so many cases is run for each change; the release run takes all."""


@pytest.fixture(scope="module")
def base() -> f.Base:
    return f.Base.make()


@pytest.mark.parametrize("mode", KINDS)
def test_points_are_many(base: f.Base, mode: str) -> None:
    hits = f.recorded(base, 2, KINDS[mode])
    assert len(hits) >= LEAST_POINTS, sorted(hits)
    for room in ("receiver ", "trainer ", "payload ", "baseline ", "anchor "):
        assert any(name.startswith(room) for name in hits), f"no point of {room}"


def all_cases(base: f.Base, mode: str, fault: Fault) -> list[f.Case]:
    """In an order that has some of every point in any share of it."""
    kind = KINDS[mode]
    return [case for number in (1, 2) for case in f.cases(f.recorded(base, number, kind), number, fault, kind)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_a_fault_at_any_point(base: f.Base, mode: str, fault: Fault) -> None:
    wanted = all_cases(base, mode, fault)[:: SHARES[mode]]
    results = f.run_all(base, wanted)
    assert not results.wrong, f"{len(results.wrong)} of {results.run} cases:\n" + "\n".join(results.wrong[:5])
    assert results.run - results.missed >= len(wanted) * 0.7
    assert mode == "stream" or not results.missed


@pytest.mark.slow
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_a_fault_at_any_point_of_one_of_two_ranks(base: f.Base, fault: Fault) -> None:
    wanted = list(trainer_cases(base, fault))[::11]
    assert any("AwaitOutcome" in case.name for case in trainer_cases(base, fault)) or fault is Fault.FULL
    results = f.run_all(base, wanted)
    assert not results.wrong, f"{len(results.wrong)} of {results.run} cases:\n" + "\n".join(results.wrong[:5])


def caught(base: f.Base, name: str, fault: Fault) -> int:
    """Cases at one point that go wrong."""
    wanted = list(f.cases(Counter({name: 6}), 2, fault))
    assert wanted
    return len(f.run_all(base, wanted).wrong)


def test_torn_writes_that_are_applied_again_are_noticed(base: f.Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted.follower, "_op", planted.never_set)
    monkeypatch.setattr(planted.follower, "_HANDLERS", dict(planted.follower._HANDLERS))
    planted.unguarded()
    assert caught(base, "payload write", Fault.CRASH)


def test_a_baseline_that_stays_behind_is_noticed(base: f.Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardBaseline, "move", lambda self, version: None)
    assert caught(base, "payload put", Fault.ERROR)
