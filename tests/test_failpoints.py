"""Every named point of both paths x {crash, error, full, hang, late wake} x {first, middle, last hit} x {1, 2
receivers} x {same, newer target}. Points are enumerated by a run in which nothing fails, so that a new one is covered
by itself.
"""

from __future__ import annotations

import pytest

from deltarefit.errors import RefitError
from deltarefit.publishing.shard_baseline import ShardBaseline
from tests import failpoints as f
from tests import test_kills_storm as storm

LEAST_POINTS = 25


@pytest.fixture(scope="module")
def base() -> f.Base:
    return f.Base.make()


def test_points_are_many(base: f.Base) -> None:
    hits = f.recorded(base, 2)
    assert len(hits) >= LEAST_POINTS, sorted(hits)
    for room in ("receiver ", "trainer ", "payload ", "baseline ", "anchor "):
        assert any(name.startswith(room) for name in hits), f"no point of {room}"


@pytest.mark.slow
@pytest.mark.parametrize("receivers", [1, 2])
@pytest.mark.parametrize("fault", f.Fault, ids=lambda fault: fault.name.lower())
def test_a_fault_at_any_point(base: f.Base, receivers: int, fault: f.Fault) -> None:
    count, wrong = f.run_all(base, receivers, fault)
    assert not wrong, f"{len(wrong)} of {count} cases:\n" + "\n".join(wrong[:5])
    assert count >= LEAST_POINTS


def caught(base: f.Base, name: str, fault: f.Fault) -> int:
    """Cases at one point that go wrong."""
    count, wrong = 0, 0
    for case in f.cases(f.Plan(hits=f.Counter({name: 6})).hits, 2, fault):
        count += 1
        try:
            f.run_case(base, case)
        except (AssertionError, RefitError):
            wrong += 1
    assert count
    return wrong


def test_torn_writes_that_are_applied_again_are_noticed(base: f.Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm.follower, "_op", storm.never_set)
    monkeypatch.setattr(storm.follower, "_HANDLERS", dict(storm.follower._HANDLERS))
    storm.unguarded()
    assert caught(base, "payload write", f.Fault.CRASH)


def test_a_baseline_that_stays_behind_is_noticed(base: f.Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardBaseline, "move", lambda self, version: None)
    assert caught(base, "payload put", f.Fault.ERROR)
