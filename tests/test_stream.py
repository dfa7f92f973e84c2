"""Mode stream: written on arrival, overwritten by the union rule, and committed after the votes; real receivers."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from deltarefit import Publisher, runtime
from deltarefit.errors import AttemptLostError, UnavailableError, UsageError
from deltarefit.manifest import Batch, Decision, Mode
from deltarefit.ports import Store
from deltarefit.publishing import touched
from deltarefit.publishing.announcing import Announcing
from deltarefit.runlog import RunLog, attempt_key, batch_key
from deltarefit.runtime import SystemRuntime
from deltarefit.stores.wrappers import Fault, Faulty, Kind
from tests import fleet
from tests import helpers as h

SMALL = 300
"""Bytes of a payload: several in every version."""


def streaming(store: Store, source: h.ArraySource, step: int = 0, mode: str = "stream", **options: object) -> int:
    return h.published(store, source, step, mode=mode, payload_bytes=SMALL, **options)


@pytest.fixture
def run() -> tuple[Store, h.ArraySource, np.random.Generator]:
    rng = np.random.default_rng(5)
    store, source = h.new_store(), h.ArraySource(h.random_model(rng))
    streaming(store, source)
    return store, source, rng


Run = tuple[Store, h.ArraySource, np.random.Generator]


def test_versions_are_written_on_arrival(run: Run) -> None:
    store, source, rng = run
    with fleet.following(store, 1, 2) as followers:
        for number, kind in enumerate(("few", "nothing", "many", "back", "all", "block"), 2):
            h.step(rng, source.model, kind)
            assert streaming(store, source, number) == number
            outcome = RunLog.open(store).version(number).outcome
            assert outcome is not None
            assert (outcome.members, outcome.evicted) == (("r1", "r2"), ())
            for one in followers:
                fleet.until(lambda one=one, number=number: one.clean(number) and not one.target.paused)  # type: ignore[misc]
                assert h.bits(one.target) == h.bytes_of(source.model)
    assert [one.target.seeds for one in followers] == [1, 1]
    assert h.followed(store, late := h.StrictTarget(RunLog.open(store).run)) == 7
    assert h.bits(late) == h.bytes_of(source.model)


class Failing(SystemRuntime):
    """The trainer dies at the n-th announcement."""

    def __init__(self, at: int) -> None:
        self.at = at

    def point(self, name: str) -> None:
        if name == "trainer announce":
            self.at -= 1
            if self.at == 0:
                raise fleet.Died(name)


def fail(store: Store, source: h.ArraySource, at: int) -> None:
    with runtime.using(Failing(at)), contextlib.suppress(fleet.Died):
        streaming(store, source)


AFTER = ("same", "newer", "base", "empty base")
"""What is published after failures: the same bits, others, or those of the base, in part or wholly."""


@pytest.mark.parametrize(("after", "mode"), list(itertools.product(AFTER, ("stream", "stage"))))
def test_what_failed_attempts_wrote_is_overwritten(run: Run, after: str, mode: str) -> None:
    store, source, rng = run
    base = h.copy_of(source.model)
    with fleet.following(store, 1, 2) as followers:
        for kind, at in (("many", 3), ("some", 2), ("few", 1), ("block", 4)):
            h.step(rng, source.model, kind, base)
            fail(store, source, at)
        fleet.until(lambda: all(one.dirty() for one in followers))
        if after == "newer":
            h.step(rng, source.model, "some")
        if after.endswith("base"):
            for name, array in base.items():
                source.model[name][...] = array
        if after == "base":
            h.step(rng, source.model, "one")
        version = streaming(store, source, mode=mode)
        for one in followers:
            fleet.until(lambda one=one: one.clean(version))  # type: ignore[misc]
            assert h.bits(one.target) == h.bytes_of(source.model)
            assert one.target.seeds == 1
            assert not one.heard["diverged"]
    assert h.followed(store, late := h.StrictTarget(RunLog.open(store).run)) == version
    assert h.bits(late) == h.bytes_of(source.model)


def test_who_waits_for_the_next_version_says_so(run: Run) -> None:
    store, source, rng = run
    with fleet.following(store, 1) as (one,):
        h.step(rng, source.model, "many")
        fail(store, source, 3)
        fleet.until(one.dirty)
        fail(store, source, 1)  # it closes the other, and announces nothing
        fleet.until(lambda: one.heard["adrift"] > 0)
        assert one.target.paused
        version = streaming(store, source)
        fleet.until(lambda: one.clean(version))


def test_without_the_union_it_is_noticed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that forgets what failed attempts announced: the proof of all bits finds what is left of them, and an
    anchor is loaded."""
    store, source, rng = run
    base = h.copy_of(source.model)
    with fleet.following(store, 1) as (one,):
        h.step(rng, source.model, "many")
        fail(store, source, 4)
        fleet.until(one.dirty)
        for name, array in base.items():
            source.model[name][...] = array
        monkeypatch.setattr("deltarefit.publishing.share.touched_since", lambda *_: touched.Touched())
        version = streaming(store, source, votes="none")
        fleet.until(lambda: one.clean(version))
        assert h.bits(one.target) == h.bytes_of(source.model)
        assert one.target.seeds == 2
        assert one.heard["diverged"]


@pytest.mark.parametrize("seed", range(8))
def test_agents_and_trainers_die_at_random(seed: int) -> None:
    """Nobody loads an anchor again, and what is CLEAN has exactly its bits (``StrictTarget`` looks)."""
    rng = np.random.default_rng(seed)
    store, source = h.new_store(), h.ArraySource(h.random_model(rng, h.SMALL), h.SMALL)
    streaming(store, source)
    base, version = h.copy_of(source.model), 1
    with fleet.following(store, 10 + seed, 20 + seed) as followers:
        for one in followers:
            one.mortal.rate = 0.05
        for kind in rng.choice(h.STEPS, 8):
            h.step(rng, source.model, str(kind), base)
            if rng.random() < 0.5:
                fail(store, source, int(rng.integers(1, 6)))
                continue
            version = streaming(store, source, mode=str(rng.choice(("stream", "stage"))))
            base = h.copy_of(source.model)
        version = streaming(store, source)
        for one in followers:
            one.mortal.rate = 0.0
            fleet.until(lambda one=one: one.clean(version))  # type: ignore[misc]
            assert h.bits(one.target) == h.bytes_of(source.model)
            assert one.target.seeds == 1
    h.check_linear(store)


def test_an_interrupted_publish_closes_its_attempt(run: Run) -> None:
    """So that receivers that were written to need not wait for the next publish to learn of it."""
    store, source, rng = run
    h.step(rng, source.model, "many")
    with contextlib.closing(Publisher(store, source, threads=1, payload_bytes=SMALL, mode="stream")) as publisher:
        publisher.abandon()  # nothing is open: nothing happens
        with runtime.using(Failing(3)), pytest.raises(fleet.Died):
            publisher.publish()
        log = RunLog.open(store)
        assert log.attempt(2).open
        publisher.abandon()
        outcome = RunLog.open(store).attempt(2).outcome
        assert outcome is not None
        assert (outcome.decision, outcome.reason) == (Decision.ABORT, "interrupted")
        assert publisher.publish().version == 3
        publisher.abandon()
    assert h.check_linear(store) == [1, 3]


def test_once_does_not_take_part(run: Run) -> None:
    """``follow --once`` leaves an open stream alone, and says so if its target was left in one."""
    store, source, rng = run
    followed = h.StrictTarget(RunLog.open(store).run)
    assert h.followed(store, followed) == 1
    with fleet.following(store, 1) as (one,):
        h.step(rng, source.model, "many")
        fail(store, source, 3)
        assert h.followed(store, followed) == 1
        fleet.until(one.dirty)
    with pytest.raises(UnavailableError, match="attempt 2 is partly written"):
        h.followed(store, one.target)
    version = streaming(store, source)
    assert h.followed(store, one.target) == version
    assert h.bits(one.target) == h.bytes_of(source.model)


def test_a_baseline_that_was_left_in_a_stream_is_rebuilt(run: Run) -> None:
    """Receiver number zero waits for nobody: who should commit for it?"""
    store, source, rng = run
    with fleet.following(store, 1) as (one,):
        h.step(rng, source.model, "many")
        fail(store, source, 3)
        fleet.until(one.dirty)
    version = streaming(store, source, baseline=one.target, votes="none")
    assert one.clean(version)
    assert h.bits(one.target) == h.bytes_of(source.model)


# ------------------------------------------------------------------------------------------ lists


def opened(run: Run) -> tuple[RunLog, h.ArraySource, Iterator[Batch]]:
    """A log whose attempt 2 was aborted after three announcements."""
    store, source, rng = run
    h.step(rng, source.model, "many")
    fail(store, source, 4)
    log = RunLog.open(store)
    return log, source, iter(log.attempt(2).batches[0])


def test_an_ended_list_takes_nothing_more(run: Run) -> None:
    log, _, batches = opened(run)
    intent = log.attempt(2).intent
    assert intent is not None
    slow = Announcing(log, intent, 0)
    slow._number = len(list(batches))
    touched.end_lists(log, 2, "ab" * 16)
    assert log.attempt(2).ended
    with pytest.raises(AttemptLostError, match="attempt 2 was closed"):
        slow.end()
    touched.end_lists(log, 2, "cd" * 16)
    assert log.attempt(2).batches[0][-1].nonce == "ab" * 16


def test_of_two_who_end_a_list_one_wins(run: Run) -> None:
    log, _, _ = opened(run)
    store = log.store
    threads = [
        threading.Thread(target=touched.end_lists, args=(RunLog.open(store), 2, f"{number:032x}"))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(fleet.WAIT_S)
    listed = log.attempt(2).batches[0]
    assert [batch.end for batch in listed] == [False] * (len(listed) - 1) + [True]


def test_the_next_attempt_waits_for_the_end_of_the_lists(run: Run) -> None:
    """While a list cannot be ended nothing is opened: what receivers may have written is not known."""
    log, source, batches = opened(run)
    place = batch_key(2, 0, len(list(batches)))
    bad = Faulty(log.store, [Fault(Kind.BEFORE, "create", place, last=None)])
    with pytest.raises(UnavailableError, match="did not take"):
        streaming(bad, source)
    assert log.attempt(3).intent is None
    assert streaming(log.store, source) == 3


def test_a_list_that_is_not_seen_whole_stops_the_publish(run: Run) -> None:
    log, source, batches = opened(run)
    last = batch_key(2, 0, len(list(batches)))
    touched.end_lists(log, 2, "ab" * 16)
    with pytest.raises(UnavailableError, match="not at its end"):
        touched.touched_since(RunLog.open(Faulty(log.store, [Fault(Kind.MISSING, "get", last)])), 1, 3, source.pieces)
    hidden = Faulty(log.store, [Fault(Kind.MISSING, "get", attempt_key(2, "intent"))])
    with pytest.raises(UnavailableError, match="not visible"):
        touched.touched_since(RunLog.open(hidden), 1, 3, source.pieces)


def test_a_lost_payload_of_a_failed_attempt_counts_as_everything(run: Run) -> None:
    log, source, batches = opened(run)
    ref = next(batches).payloads[0]
    touched.end_lists(log, 2, "ab" * 16)
    log.store.delete(attempt_key(2, f"pl/{ref.sha256}"))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.05)
        found = touched.touched_since(log, 1, 3, source.pieces)
    for number in range(ref.first, ref.last + 1):
        length = source.pieces[number].length
        assert found.within(number, 0, length).tolist() == list(range(length))


def test_every_announced_element_is_in_the_union(run: Run) -> None:
    """Against the bits themselves: what differs between base and target of the attempt was announced."""
    store, source, rng = run
    base = h.copy_of(source.model)
    h.step(rng, source.model, "some")
    with pytest.raises(UnavailableError):
        streaming(Faulty(store, [Fault(Kind.BEFORE, "create", "*/outcome", last=None)]), source)
    log = RunLog.open(store)
    touched.end_lists(log, 2, "ab" * 16)
    found = touched.touched_since(log, 1, 3, source.pieces)
    for piece, (name, array) in enumerate(sorted(source.model.items())):
        differs = np.flatnonzero(array.reshape(-1) != base[name].reshape(-1))
        assert set(differs.tolist()) <= set(found.within(piece, 0, array.size).tolist())


# ------------------------------------------------------------------------------------------ usage


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(UsageError, match="mode"):
        Publisher(h.new_store(), h.ArraySource(h.random_model(np.random.default_rng(0))), mode="both")


def test_a_first_version_is_staged(run: Run) -> None:
    intent = RunLog.open(run[0]).attempt(1).intent
    assert intent is not None
    assert intent.mode is Mode.STAGE
