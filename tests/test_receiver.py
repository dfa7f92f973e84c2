"""The receiver's behaviour on real stores: following, joining, waiting, and refusing what is not of its log."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, Receiver, open_store
from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch, FormatError, IntegrityError, NotFoundError, UnavailableError
from deltarefit.manifest import Catalog, Decision, Header, Intent, Mode, Outcome, ProducerManifest, State
from deltarefit.ports import Store
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, attempt_key, payload_prefix
from tests import helpers as h
from tests import killing as k


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return h.new_store() if request.param == "memory" else open_store(str(tmp_path / "store"))


@pytest.fixture(scope="module")
def chain() -> h.Chain:
    return h.publish_chain(np.random.default_rng(12), ("some", "all", "nothing", "back"))


def target_of(store: Store) -> h.StrictTarget:
    return h.StrictTarget(RunLog.open(store).run)


def state_of(target: h.StrictTarget) -> tuple[State, int]:
    header = target.read_header()
    assert header is not None
    return header.state, header.version


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
            target = target or target_of(store)
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
    target, heard = target_of(store), h.Heard()
    assert h.followed(store, target, emit=heard) == 5
    assert h.bits(target) == chain.history[5]
    assert heard.phases("seed") == 1


def test_many_segments_and_threads(chain: h.Chain, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Tensors are cut into many deltas, as large ones are."""
    monkeypatch.setattr("deltarefit.weights.SEGMENT_BYTES", 96)
    own = h.publish_chain(rng, ("some", "all", "block"))
    target = target_of(own.store)
    assert h.followed(own.store, target, threads=4) == own.head
    assert h.bits(target) == own.history[own.head]


def test_an_empty_delta_is_a_version(chain: h.Chain) -> None:
    """Version 4 changed nothing; the header must still move, or the next base would not fit."""
    heard, target = h.Heard(), target_of(chain.store)
    h.followed(chain.store, target, emit=heard)
    assert [e.version for e in heard.events if e.type == "clean"] == [1, 2, 3, 4, 5]


def test_progress_reaches_its_total_once_per_phase(chain: h.Chain) -> None:
    heard = h.Heard()
    h.followed(chain.store, target_of(chain.store), emit=heard)
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
    target = target_of(store)
    assert h.followed(store, target) == 2
    assert h.bits(target) == [b"", b""]


def test_two_targets_of_one_store_are_equal(chain: h.Chain) -> None:
    targets = [target_of(chain.store) for _ in range(2)]
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
        target = target_of(store)
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
    with contextlib.closing(Receiver(chain.store, target_of(chain.store), threads=1, poll_s=60)) as receiver:
        thread = threading.Thread(target=lambda: receiver.follow(stop=stop.is_set))
        thread.start()
        wait_for(lambda: receiver.version == chain.head)
        stop.set()
        thread.join(5)
        assert not thread.is_alive(), "poll_s is not a time for which stop may be deaf"


def test_stopped_anywhere_users_can_go_on(chain: h.Chain) -> None:
    """``follow`` returns with whole weights and users running, or with no version at all, never in between."""
    for after in range(1, 200):
        asked, target = iter(range(after)), target_of(chain.store)

        def stop(asked: Iterator[int] = asked) -> bool:
            return next(asked, None) is None

        with contextlib.closing(Receiver(chain.store, target, threads=1)) as receiver:
            version = receiver.follow(once=True, stop=stop)
            if version:
                assert state_of(target) == (State.CLEAN, version)
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
    target = target_of(store)
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
    target, heard = target_of(store), h.Heard()
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
    target = target_of(store)
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
    target = target_of(store)
    with contextlib.closing(Receiver(store, target, threads=1)) as receiver:
        assert receiver.follow(once=True) == chain.head
        assert h.published(store, chain.source) == chain.head + 2
        assert receiver.follow(once=True) == chain.head + 2


# ------------------------------------------------------------------------------------------ not of this log


def test_bits_changed_behind_its_back_are_found_at_the_start(chain: h.Chain) -> None:
    target, heard = target_of(chain.store), h.Heard()
    h.followed(chain.store, target)
    target._arrays[0][5] ^= 1
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert h.bits(target) == chain.history[chain.head]
    assert heard["diverged"] == 1
    assert target.seeds == 2


def test_bits_changed_behind_its_back_are_found_when_they_are_touched(rng: np.random.Generator) -> None:
    own, heard = h.publish_chain(rng, ("some",)), h.Heard()
    target = target_of(own.store)
    with contextlib.closing(Receiver(own.store, target, threads=1, emit=heard)) as receiver:
        receiver.follow(once=True)
        target._arrays[0][:] ^= 1
        h.step(rng, own.source.model, "all")
        h.published(own.store, own.source)
        assert receiver.follow(once=True) == 3
    assert h.bits(target) == h.bytes_of(own.source.model)
    assert heard["diverged"] == 1


def test_a_header_of_another_run_means_nothing(chain: h.Chain, rng: np.random.Generator) -> None:
    other = h.publish_chain(rng, ("some",))
    target = h.StrictTarget(RunLog.open(other.store).run)
    target._run = RunLog.open(other.store).run
    h.followed(other.store, target)
    target._run = RunLog.open(chain.store).run
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


class _DamagedHeader(h.StrictTarget):
    damaged = True

    def read_header(self) -> Header | None:
        if self.damaged:
            raise FormatError("header: corrupt")
        return super().read_header()

    def write_header(self, header: Header) -> None:
        self.damaged = False
        super().write_header(header)


def test_a_damaged_header_is_as_good_as_none(chain: h.Chain) -> None:
    target = _DamagedHeader(RunLog.open(chain.store).run)
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a.weight", ("BF16", (33, 40))),
        ("a.weight", ("F16", (40, 33))),
        ("b.weight", ("BF16", (7, 5, 3))),
        ("z.more", ("BF16", (3,))),
        ("i.weight", None),
    ],
    ids=["shape", "dtype", "width", "another tensor", "missing tensor"],
)
def test_a_target_of_another_model_is_refused_unchanged(
    chain: h.Chain, rng: np.random.Generator, name: str, change: tuple[str, tuple[int, ...]] | None
) -> None:
    shapes = {**h.MIXED, name: change} if change else {n: s for n, s in h.MIXED.items() if n != name}
    other = h.Chain(h.new_store(), h.ArraySource(h.random_model(rng, shapes), shapes))
    h.published(other.store, other.source)
    target = MemoryBaseline()
    h.followed(other.store, target)
    with pytest.raises(BaseMismatch):
        h.followed(chain.store, target)
    assert h.bits(target) == h.bytes_of(other.source.model)


def test_users_are_stopped_before_the_header_says_unknown(chain: h.Chain) -> None:
    """I7: no token is produced while the weights are UNKNOWN, however long an anchor takes to come."""
    states: list[tuple[State, bool]] = []

    class Watched(h.StrictTarget):
        def write_header(self, header: Header) -> None:
            states.append((header.state, self.paused))
            super().write_header(header)

    target = Watched(RunLog.open(chain.store).run)
    h.followed(chain.store, target)
    target._arrays[0][5] ^= 1
    states.clear()
    h.followed(chain.store, target)
    assert (State.UNKNOWN, False) not in states


# ------------------------------------------------------------------------------------------ a wrong log


def wrong_base(store: Store, change: Callable[[Intent, ProducerManifest], tuple[Intent, ProducerManifest]]) -> None:
    """Rewrite the last attempt, consistently, as a publisher with a wrong baseline would have written it."""
    log = RunLog.open(store)
    head = log.head()
    assert head is not None
    assert head.intent is not None
    assert head.manifest is not None
    assert head.outcome is not None
    intent, manifest = change(head.intent, head.manifest)
    digest = intent.base_digest + manifest.shift
    outcome = replace(head.outcome, digest=digest, manifests=(manifest.content_hash(),))
    for name, record in (("intent", intent), ("p/0", manifest), ("outcome", outcome)):
        store.put(attempt_key(head.number, name), record.to_bytes())


def other_sums(intent: Intent, manifest: ProducerManifest) -> tuple[Intent, ProducerManifest]:
    refs = tuple(replace(ref, pre=ref.pre + Digest(1, 2)) for ref in manifest.payloads)
    return intent, replace(manifest, payloads=refs)


def other_base(intent: Intent, manifest: ProducerManifest) -> tuple[Intent, ProducerManifest]:
    return replace(intent, base_digest=intent.base_digest + Digest(1, 2)), manifest


@pytest.mark.parametrize("change", [other_sums, other_base])
def test_a_delta_of_another_base_is_refused_and_not_for_ever_fetched(
    rng: np.random.Generator, change: Callable[[Intent, ProducerManifest], tuple[Intent, ProducerManifest]]
) -> None:
    """F4: one reload may cure wrong bits here; if the anchor's bits do not fit either, the log is wrong."""
    own = h.publish_chain(rng, ("some", "some"))
    wrong_base(own.store, change)
    target, heard = target_of(own.store), h.Heard()
    with contextlib.closing(Receiver(own.store, target, threads=1, emit=heard)) as receiver:
        for _ in range(2):
            with pytest.raises(IntegrityError, match="does not apply"):
                receiver.follow(once=True)
            assert state_of(target) == (State.CLEAN, 2)
            assert h.bits(target) == own.history[2]
            assert not target.paused
    assert heard.phases("seed") <= 3


def test_a_payload_lost_from_the_store_is_an_error_and_harmless(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.3)
    own = h.publish_chain(rng, ("some", "some"))
    manifest = RunLog.open(own.store).attempt(3).manifest
    assert manifest is not None
    own.store.delete(payload_prefix(3) + manifest.payloads[-1].sha256)
    target = target_of(own.store)
    with pytest.raises(NotFoundError):
        h.followed(own.store, target)
    assert state_of(target) == (State.CLEAN, 2)
    assert h.bits(target) == own.history[2]


def test_a_payload_swapped_for_another_is_refused(rng: np.random.Generator) -> None:
    own = h.publish_chain(rng, ("some", "many"))
    manifest = RunLog.open(own.store).attempt(3).manifest
    assert manifest is not None
    first, second, *_ = (payload_prefix(3) + ref.sha256 for ref in manifest.payloads)
    own.store.put(first, own.store.get(second))
    target, heard = target_of(own.store), h.Heard()
    with pytest.raises(IntegrityError):
        h.followed(own.store, target, emit=heard)
    assert heard["refetch"] == 1
    assert h.bits(target) == own.history[2]


# ------------------------------------------------------------------------------------------ errors in the middle


def torn(chain: h.Chain) -> h.StrictTarget:
    """A target that is DIRTY with a torn payload."""
    rng = np.random.default_rng(14)
    for fuse in k.fuses(after=True):
        target = target_of(chain.store)
        dying = k.KillingTarget(target, fuse, rng)
        with contextlib.suppress(k.Killed):
            h.followed(chain.store, dying)
        header = target.read_header()
        if dying.tore and header is not None and header.state is State.DIRTY:
            return target
    raise AssertionError("no write was torn")


def shorten(data: bytes) -> bytes:
    return data[:-1]


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("damage", [shorten, flip, None], ids=["short", "wrong", "gone"])
def test_absolute_values_that_are_damaged_lead_to_the_anchor(
    chain: h.Chain, damage: Callable[[bytes], bytes] | None
) -> None:
    target = torn(chain)
    for name, data in list(target.spool._entries.items()):
        if "." in name:
            del target.spool._entries[name]
            if damage:
                target.spool.put(name, damage(data))
    heard = h.Heard()
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert h.bits(target) == chain.history[chain.head]
    assert heard.phases("seed") == 1


def test_a_payload_damaged_in_the_spool_is_fetched_again(chain: h.Chain) -> None:
    target, heard = torn(chain), h.Heard()
    for name, data in list(target.spool._entries.items()):
        if "." not in name:
            target.spool.put(name, flip(data))
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert heard["refetch"] > 0
    assert heard.phases("seed") == 0
    assert h.bits(target) == chain.history[chain.head]


class _SlowAndFailing(h.StrictTarget):
    """Once armed, the window of the first delta fails while those of later ones linger."""

    armed = False

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        header = self.read_header()
        writing = self.armed and header is not None and header.state is State.DIRTY
        if writing and tensor == 0:
            raise UnavailableError("the disk is away")
        with super().window(tensor, start, stop) as got:
            if writing:
                time.sleep(0.3)
            yield got


def test_no_write_goes_on_after_follow_has_raised(rng: np.random.Generator) -> None:
    """I10: the next try must not meet a write of the last one."""
    own = h.publish_chain(rng, ("many",), payload_bytes=1 << 20)
    target = _SlowAndFailing(RunLog.open(own.store).run)
    target.armed = True
    with contextlib.closing(Receiver(own.store, target, threads=4)) as receiver:
        with pytest.raises(UnavailableError):
            receiver.follow(once=True)
        assert target.open_windows == 0
        assert state_of(target) == (State.DIRTY, 1)
        assert target.paused
        target.armed = False
        assert receiver.follow(once=True) == 2
    assert h.bits(target) == own.history[2]


class _FailingPause(h.StrictTarget):
    def pause(self) -> None:
        super().pause()
        header = self.read_header()
        if header and header.state is State.CLEAN:
            raise UnavailableError("cannot pause")


def test_an_error_before_the_first_write_lets_users_go_on(chain: h.Chain) -> None:
    target = _FailingPause(RunLog.open(chain.store).run)
    with pytest.raises(UnavailableError):
        h.followed(chain.store, target)
    assert state_of(target) == (State.CLEAN, 1)
    assert not target.paused


class _Fixed(MemoryBaseline):
    """A target whose side files nobody needs; counts what it was given."""

    given: Mapping[str, bytes] | None = None

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        self.given = files
        super().seed(catalog, files)


def test_the_side_files_arrive(chain: h.Chain) -> None:
    target = _Fixed()
    h.followed(chain.store, target)
    assert target.given == h.FILES
