"""Faults of docs/failures.md that no other test shows from end to end: each as a user would meet it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, open_store
from deltarefit.errors import AttemptLostError
from deltarefit.manifest import Outcome
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from deltarefit.stores.wrappers import Fault, Faulty, Kind
from tests import fleet
from tests import helpers as h
from tests import killing as k

DEADLINE_S = 1.0


@pytest.fixture
def source() -> h.ArraySource:
    return h.ArraySource(h.random_model(np.random.default_rng(3)))


def changed(source: h.ArraySource) -> h.ArraySource:
    source.model["a.weight"][0, 0] ^= 1
    return source


def outcome_of(store: Store, number: int) -> Outcome:
    outcome = RunLog.open(store).attempt(number).outcome
    assert outcome is not None
    return outcome


def test_a_delta_from_a_wrong_baseline_is_refused_by_all_receivers(source: h.ArraySource) -> None:
    """F4, where the publisher proves nothing: receivers write none of it, find that their own bits are right, and the
    attempt is aborted. The next publish rebuilds the baseline."""
    store, baseline = h.new_store(), MemoryBaseline()
    with contextlib.closing(Publisher(store, source, threads=1, baseline=baseline, prove=False)) as publisher:
        publisher.publish()
        before = h.bytes_of(source.model)
        with fleet.following(store, 1, 2) as followers:
            baseline._arrays[0][5] ^= 1
            changed(source)
            with pytest.raises(AttemptLostError, match="all receivers refuse it: r1, r2"):
                publisher.publish()
            for one in followers:
                assert one.clean(1)
                assert h.bits(one.target) == before
            version = publisher.publish().version
            for one in followers:
                fleet.until(lambda one=one: one.clean(version))  # type: ignore[misc]
                assert h.bits(one.target) == h.bytes_of(source.model)
                assert one.target.seeds == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Kind.BEFORE, "put", "a/*/v/*", last=None),
        Fault(Kind.DELAY, "get", "a/0000000002/pl/*", seconds=3 * DEADLINE_S),
    ],
    ids=["votes are lost", "slow"],
)
def test_who_cannot_vote_in_time_is_left_behind_and_catches_up(source: h.ArraySource, fault: Fault) -> None:
    """F21, F33: it delays a commit by the deadline, is named as evicted, and learns from the log what became of it."""
    store = h.new_store()
    h.published(store, source)
    with fleet.following(store, 1), fleet.following(Faulty(store, [fault]), 2) as (late,):
        started = time.monotonic()
        version = h.published(store, changed(source), deadline_s=DEADLINE_S)
        assert time.monotonic() - started >= DEADLINE_S, "it was not waited for"
        outcome = outcome_of(store, version)
        assert (outcome.members, outcome.evicted) == (("r1",), ("r2",))
        fleet.until(lambda: late.clean(version))
        assert h.bits(late.target) == h.bytes_of(source.model)
        assert late.target.seeds == 1


def test_wall_clocks_decide_nothing(source: h.ArraySource, monkeypatch: pytest.MonkeyPatch) -> None:
    """F52: it jumps by years at every look, forwards and back."""
    rng = np.random.default_rng(4)
    monkeypatch.setattr(time, "time", lambda: float(rng.uniform(0, 4e9)))
    store = h.new_store()
    h.published(store, source)
    with fleet.following(store, 1, 2) as followers:
        for _ in range(3):
            version = h.published(store, changed(source))
            assert (outcome_of(store, version).members, outcome_of(store, version).evicted) == (("r1", "r2"), ())
        for one in followers:
            fleet.until(lambda one=one: one.clean(version))  # type: ignore[misc]
            assert h.bits(one.target) == h.bytes_of(source.model)


@pytest.mark.parametrize("mode", ["stage", "stream"])
def test_a_whole_site_that_loses_power(source: h.ArraySource, tmp_path: Path, mode: str) -> None:
    """F54: trainer, baseline, receivers and their weights are gone at any call of a publish; the store's directory is
    what is left. A trainer that begins from older weights publishes, and new receivers hold it."""
    old, where = h.copy_of(source.model), str(tmp_path / "store")
    h.published(open_store(where), source)
    for fuse in (k.Fuse(at, after) for at in range(1, 40, 3) for after in (False, True)):
        with contextlib.suppress(k.Killed):
            h.published(k.KillingStore(open_store(where), fuse), changed(source), mode=mode)
        again = h.ArraySource(h.copy_of(old))
        version = h.published(open_store(where), again, fuse.at, mode=mode)
        assert h.check_linear(open_store(where))[-1] == version
        assert h.received(open_store(where)) == h.bytes_of(old)
