"""The receiver's behaviour on real stores: following, joining, waiting, and refusing what is not of its log."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, Receiver, open_store
from deltarefit.errors import NotFoundError
from deltarefit.manifest import Decision, Intent, Mode, Outcome, State
from deltarefit.ports import Store
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, attempt_key
from tests import helpers as h


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return h.new_store() if request.param == "memory" else open_store(str(tmp_path / "store"))


@pytest.fixture(scope="module")
def chain() -> h.Chain:
    return h.publish_chain(np.random.default_rng(12), ("some", "all", "nothing", "back"))


# ------------------------------------------------------------------------------------------ following


@pytest.mark.parametrize("threads", [1, 4])
def test_holds_every_version_as_it_comes(store: Store, rng: np.random.Generator, threads: int) -> None:
    source = h.ArraySource(h.random_model(rng))
    before, receiver, target = h.copy_of(source.model), None, None
    with contextlib.closing(Publisher(store, source, threads=threads, payload_bytes=700)) as publisher:
        for number, kind in enumerate(("nothing", *h.STEPS)):
            last = h.copy_of(source.model)
            h.step(rng, source.model, kind, before)
            before = last
            version = publisher.publish(number).version
            target = target or h.strict_target(store)
            receiver = receiver or Receiver(store, target, threads=threads)
            assert receiver.follow(once=True) == version == receiver.version
            assert h.bits(target) == h.bytes_of(source.model), kind
            assert receiver.follow(once=True) == version, "nothing new, nothing done"
    assert receiver is not None
    receiver.close()
    assert target is not None
    assert (target.seeds, target.finished) == (1, 1)


def test_a_late_joiner_ends_with_the_same_bits(store: Store, rng: np.random.Generator) -> None:
    chain = h.publish_chain(rng, ("some", "nothing", "many", "block"), store=store)
    target, heard = h.strict_target(store), h.Heard()
    assert h.followed(store, target, emit=heard) == 5
    assert h.bits(target) == chain.history[5]
    assert heard.phases("seed") == 1


def test_many_segments_and_threads(chain: h.Chain, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Tensors are cut into many deltas, as large ones are."""
    monkeypatch.setattr("deltarefit.weights.SEGMENT_BYTES", 96)
    own = h.publish_chain(rng, ("some", "all", "block"))
    target = h.strict_target(own.store)
    assert h.followed(own.store, target, threads=4) == own.head
    assert h.bits(target) == own.history[own.head]


def test_an_empty_delta_is_a_version(chain: h.Chain) -> None:
    """Version 4 changed nothing; the header must still move, or the next base would not fit."""
    heard, target = h.Heard(), h.strict_target(chain.store)
    h.followed(chain.store, target, emit=heard)
    assert [e.version for e in heard.events if e.type == "clean"] == [1, 2, 3, 4, 5]


def test_progress_reaches_its_total_once_per_phase(chain: h.Chain) -> None:
    heard = h.Heard()
    h.followed(chain.store, h.strict_target(chain.store), emit=heard)
    steps = [e for e in heard.events if e.type == "progress"]
    assert steps
    assert all(0 < e.done <= e.total for e in steps)
    for event, after in zip(steps, [*steps[1:], None], strict=True):
        same = after is not None and (after.phase, after.version) == (event.phase, event.version)
        assert same == (event.done < event.total), f"{event.phase} of {event.version} ended at {event.done}"


def test_a_model_of_nothing(store: Store) -> None:
    shapes = {"a": ("F32", (0, 3)), "b": ("BOOL", (0,))}
    source = h.ArraySource(h.random_model(np.random.default_rng(), shapes), shapes)
    for _ in range(2):
        h.published(store, source)
    target = h.strict_target(store)
    assert h.followed(store, target) == 2
    assert h.bits(target) == [b"", b""]


def test_two_targets_of_one_store_are_equal(chain: h.Chain) -> None:
    targets = [h.strict_target(chain.store) for _ in range(2)]
    threads = [threading.Thread(target=h.followed, args=(chain.store, t)) for t in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [h.bits(t) for t in targets] == [chain.history[chain.head]] * 2


# ------------------------------------------------------------------------------------------ waiting and stopping


def wait_for(good: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not good():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def test_follows_live_until_it_is_stopped(store: Store, rng: np.random.Generator) -> None:
    source, stop = h.ArraySource(h.random_model(rng)), threading.Event()
    with contextlib.closing(Publisher(store, source, threads=1)) as publisher:
        publisher.publish()
        target = h.strict_target(store)
        receiver = Receiver(store, target, threads=1, poll_s=0.01)
        thread = threading.Thread(target=lambda: receiver.follow(stop=stop.is_set))
        thread.start()
        for number in range(2, 6):
            h.step(rng, source.model, "some")
            assert publisher.publish().version == number
            wait_for(lambda number=number: receiver.version == number)  # type: ignore[misc]
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    receiver.close()
    assert h.bits(target) == h.bytes_of(source.model)


def test_stop_is_heard_while_waiting(chain: h.Chain) -> None:
    stop = threading.Event()
    with contextlib.closing(Receiver(chain.store, h.strict_target(chain.store), threads=1, poll_s=60)) as receiver:
        thread = threading.Thread(target=lambda: receiver.follow(stop=stop.is_set))
        thread.start()
        wait_for(lambda: receiver.version == chain.head)
        stop.set()
        thread.join(5)
        assert not thread.is_alive(), "poll_s is not a time for which stop may be deaf"


def test_stopped_anywhere_users_can_go_on(chain: h.Chain) -> None:
    """``follow`` returns with whole weights and users running, or with no version at all, never in between."""
    for after in range(1, 200):
        asked, target = iter(range(after)), h.strict_target(chain.store)

        def stop(asked: Iterator[int] = asked) -> bool:
            return next(asked, None) is None

        with contextlib.closing(Receiver(chain.store, target, threads=1)) as receiver:
            version = receiver.follow(once=True, stop=stop)
            if version:
                assert h.state_of(target) == (State.CLEAN, version)
                assert not target.paused, f"stopped at look {after}: users wait for ever"
                assert h.bits(target) == chain.history[version]
            if version == chain.head:
                return
            assert receiver.follow(once=True) == chain.head
    raise AssertionError("never done")


def test_nothing_to_follow_is_said_and_not_waited_for(store: Store, rng: np.random.Generator) -> None:
    with pytest.raises(NotFoundError, match="Publish a checkpoint"):
        Receiver(store, MemoryBaseline())
    source = h.ArraySource(h.random_model(rng))
    RunLog.open_or_create(store, source.catalog)
    target = h.strict_target(store)
    with contextlib.closing(Receiver(store, target, threads=1)) as receiver:
        for _ in range(2):
            with pytest.raises(NotFoundError, match="nothing to start from"):
                receiver.follow(once=True)
        assert h.published(store, source) == 1
        assert receiver.follow(once=True) == 1
    assert h.bits(target) == h.bytes_of(source.model)


# ------------------------------------------------------------------------------------------ attempts that end otherwise


def take_out_outcome(store: Store, number: int) -> Outcome:
    """Make a committed attempt an open one; the COMMIT that it had."""
    outcome = RunLog.open(store).attempt(number).outcome
    assert outcome is not None
    store.delete(attempt_key(number, "outcome"))
    return outcome


def open_last(chain: h.Chain) -> tuple[Store, Outcome]:
    store = h.copy_store(chain.store)
    outcome = take_out_outcome(store, chain.head)
    store.put("head", b"")
    return store, outcome


def test_an_open_attempt_is_staged_and_written_after_its_commit(chain: h.Chain) -> None:
    own = h.publish_chain(np.random.default_rng(13), ("some", "some"))
    store, commit = open_last(own)
    target, heard = h.strict_target(store), h.Heard()
    with contextlib.closing(Receiver(store, target, threads=1, emit=heard)) as receiver:
        assert receiver.follow(once=True) == 2
        assert heard.phases("stage") == 2
        assert h.bits(target) == own.history[2]
        store.create(attempt_key(3, "outcome"), commit.to_bytes())
        assert receiver.follow(once=True) == 3
    assert heard.phases("stage") == 2, "staged again"
    assert h.bits(target) == own.history[3]


def test_a_staged_attempt_that_aborts_leaves_nothing(rng: np.random.Generator) -> None:
    own = h.publish_chain(rng, ("some", "some"))
    store, commit = open_last(own)
    target = h.strict_target(store)
    with contextlib.closing(Receiver(store, target, threads=1)) as receiver:
        assert receiver.follow(once=True) == 2
        abort = replace(commit, decision=Decision.ABORT, digest=Digest(), manifests=(), reason="test")
        store.create(attempt_key(3, "outcome"), abort.to_bytes())
        assert receiver.follow(once=True) == 2
        assert h.bits(target) == own.history[2]
        assert h.published(store, own.source) == 4
        assert receiver.follow(once=True) == 4
    assert h.bits(target) == h.bytes_of(own.source.model)


def test_attempts_without_a_manifest_are_passed_once_closed(chain: h.Chain, rng: np.random.Generator) -> None:
    store, log = h.copy_store(chain.store), RunLog.open(chain.store)
    head = log.head()
    assert head is not None
    assert head.outcome is not None
    intent = Intent(log.run, head.number + 1, head.number, head.outcome.digest, Mode.STAGE, "gone")
    store.create(attempt_key(intent.attempt, "intent"), intent.to_bytes())
    target = h.strict_target(store)
    with contextlib.closing(Receiver(store, target, threads=1)) as receiver:
        assert receiver.follow(once=True) == chain.head
        assert h.published(store, chain.source) == chain.head + 2
        assert receiver.follow(once=True) == chain.head + 2
