"""Faults of docs/failures.md that no other test shows from end to end: each as a user would meet it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, open_store
from deltarefit.errors import AttemptLostError, UnavailableError
from deltarefit.manifest import Outcome, State
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from deltarefit.stores.wrappers import Fault, Faulty, Kind
from deltarefit.targets import agent_client
from tests import fleet
from tests import helpers as h
from tests import killing as k
from tests import live_ranks as live

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
    attempt is aborted. A new publisher has a right baseline."""
    store, baseline = h.new_store(), MemoryBaseline()
    with fleet_of_two(store, source, baseline) as (followers, publisher):
        before = h.bytes_of(source.model)
        baseline._arrays[0][5] ^= 1
        changed(source)
        with pytest.raises(AttemptLostError, match="all receivers refuse it: r1, r2"):
            publisher.publish()
        for one in followers:
            assert one.clean(1)
            assert h.bits(one.target) == before
        version = h.published(store, source)
        for one in followers:
            fleet.until(lambda one=one: one.clean(version))  # type: ignore[misc]
            assert h.bits(one.target) == h.bytes_of(source.model)
            assert one.target.seeds == 1


@contextlib.contextmanager
def fleet_of_two(
    store: Store, source: h.ArraySource, baseline: MemoryBaseline
) -> Iterator[tuple[list[fleet.Follower], Publisher]]:
    """Two receivers at version 1, and a publisher that proves nothing."""
    publisher = Publisher(store, source, threads=1, baseline=baseline, prove=False)
    with contextlib.closing(publisher):
        publisher.publish()
        with fleet.following(store, 1, 2) as followers:
            yield followers, publisher


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
    for fuse in (k.Fuse(at, after=bool(at % 2)) for at in range(1, 40, 3)):
        with contextlib.suppress(k.Killed):
            h.published(k.KillingStore(open_store(where), fuse), changed(source), mode=mode)
        again = h.ArraySource(h.copy_of(old))
        version = h.published(open_store(where), again, fuse.at, mode=mode)
        assert h.check_linear(open_store(where))[-1] == version
        assert h.received(open_store(where)) == h.bytes_of(old)


def test_a_rank_that_hangs_in_a_write_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F34: the follower says so within its deadline, and generation does not go on upon what is half written. With the
    engine started anew, the same command goes on."""
    monkeypatch.setattr(agent_client, "WORK_S", 1.0)
    chain = h.publish_chain(np.random.default_rng(5), ("many",), live.SHAPES)
    with contextlib.closing(live.Engine(tmp_path / "engine", 2, chain.models[1])) as serving:
        target = serving.target()
        write = target.write

        def hang(*arguments: Any) -> None:
            os.kill(serving.workers[1].pid, signal.SIGSTOP)
            os.waitpid(serving.workers[1].pid, os.WUNTRACED)
            write(*arguments)

        monkeypatch.setattr(target, "write", hang)
        with pytest.raises(UnavailableError, match="no answer to write within 1 s"):
            live.followed(chain.store, target)
        header = serving.header()
        assert header is not None
        assert (header.state, serving.paused) == (State.DIRTY, True)
        for rank in range(2):
            serving.restart(rank)
        assert live.followed(chain.store, serving.target()) == 2
        assert not serving.wrong(chain.models[2])
        assert not serving.paused
