"""Every named point of both paths x {crash, error, full, hang, late wake} x {first, middle, last hit} x {1, 2
receivers} x {same, newer target}. Points are enumerated by a run in which nothing fails, so that a new one is covered
by itself.
"""

from __future__ import annotations

import pytest

from deltarefit.publishing.shard_baseline import ShardBaseline
from tests import failpoints as f
from tests import test_kills_storm as storm
from tests.failpoints import World
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


def all_cases(base: f.Base, mode: str, fault: f.Fault) -> list[f.Case]:
    """In an order that has some of every point in any share of it."""
    kind = KINDS[mode]
    return [case for number in (1, 2) for case in f.cases(f.recorded(base, number, kind), number, fault, kind)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("fault", f.Fault, ids=lambda fault: fault.name.lower())
def test_a_fault_at_any_point(base: f.Base, mode: str, fault: f.Fault) -> None:
    wanted = all_cases(base, mode, fault)[:: SHARES[mode]]
    results = f.run_all(base, wanted)
    assert not results.wrong, f"{len(results.wrong)} of {results.run} cases:\n" + "\n".join(results.wrong[:5])
    assert results.run - results.missed >= len(wanted) * 0.7
    assert mode == "stream" or not results.missed


def caught(base: f.Base, name: str, fault: f.Fault) -> int:
    """Cases at one point that go wrong."""
    wanted = list(f.cases(f.Counter({name: 6}), 2, fault))
    assert wanted
    return len(f.run_all(base, wanted).wrong)


def test_torn_writes_that_are_applied_again_are_noticed(base: f.Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm.follower, "_op", storm.never_set)
    monkeypatch.setattr(storm.follower, "_HANDLERS", dict(storm.follower._HANDLERS))
    storm.unguarded()
    assert caught(base, "payload write", f.Fault.CRASH)


def test_a_baseline_that_stays_behind_is_noticed(base: f.Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardBaseline, "move", lambda self, version: None)
    assert caught(base, "payload put", f.Fault.ERROR)
