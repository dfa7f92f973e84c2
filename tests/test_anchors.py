"""Anchors that are damaged or half written are passed over; several writers of one anchor are one (F49-F51, I15)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Receiver, runtime
from deltarefit.anchoring import write_anchor
from deltarefit.anchors import check_complete
from deltarefit.errors import (
    AlreadyExistsError,
    AttemptLostError,
    DigestMismatch,
    IntegrityError,
    NotFoundError,
    UsageError,
)
from deltarefit.manifest import Hint
from deltarefit.ports import Store
from deltarefit.protocol.messages import AnchorLoaded
from deltarefit.records import Digest
from deltarefit.retention import PINS, Doomed, Tombstone, tomb_key, version_of
from deltarefit.runlog import RunLog, anchor_prefix
from deltarefit.stores.wrappers import Fault, Faulty, Kind
from tests import helpers as h
from tests import killing as k

Harm = Callable[[h.Chain, int], None]


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> h.Chain:
    """Six versions; 1, 3 and 5 are anchors."""
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.0)
    return anchored_chain(np.random.default_rng(20261130))


def anchored_chain(rng: np.random.Generator, versions: int = 6, anchors: tuple[int, ...] = (3, 5)) -> h.Chain:
    model = h.random_model(rng, h.SMALL)
    chain = h.Chain(h.new_store(), h.ArraySource(model, h.SMALL))
    for number in range(1, versions + 1):
        if number > 1:
            h.step(rng, model, "some")
        version = h.published(chain.store, chain.source, number)
        chain.history[version], chain.models[version] = h.bytes_of(model), h.copy_of(model)
        if version in anchors:
            write_anchor(chain.store, MemoryBaseline(), payload_bytes=300)
    return chain


def objects_of(chain: h.Chain, version: int, kind: str) -> list[str]:
    return [key for key, _ in chain.store.list(anchor_prefix(version) + kind)]


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def harm(kind: str, how: Callable[[bytes], bytes | None]) -> Harm:
    def do(chain: h.Chain, version: int) -> None:
        key = objects_of(chain, version, kind)[-1] if kind != "anchor" else anchor_prefix(version) + "anchor"
        data = how(chain.store.get(key))
        chain.store.delete(key) if data is None else chain.store.put(key, data)

    return do


def lie(chain: h.Chain, version: int) -> None:
    """A record that is whole and promises other bits than its version's."""
    anchor = RunLog.open(chain.store).anchor(version)
    assert anchor is not None
    chain.store.put(anchor_prefix(version) + "anchor", replace(anchor, digest=Digest(1, 2)).to_bytes())


def miss(chain: h.Chain, version: int) -> None:
    """A record that is whole and leaves some elements out."""
    anchor = RunLog.open(chain.store).anchor(version)
    assert anchor is not None
    chain.store.put(anchor_prefix(version) + "anchor", replace(anchor, payloads=anchor.payloads[1:]).to_bytes())


HARMS: dict[str, Harm] = {
    "record corrupt": harm("anchor", flip),
    "record short": harm("anchor", lambda data: data[:40]),
    "record empty": harm("anchor", lambda _: b""),
    "payload missing": harm("pl", lambda _: None),
    "payload short": harm("pl", lambda data: data[:-1]),
    "payload corrupt": harm("pl", flip),
    "file missing": harm("file", lambda _: None),
    "file corrupt": harm("file", flip),
    "another digest": lie,
    "elements left out": miss,
}


@pytest.mark.parametrize("name", HARMS)
@pytest.mark.parametrize("versions", [(5,), (5, 3)], ids=str)
def test_a_joiner_passes_over_damaged_anchors(chain: h.Chain, name: str, versions: tuple[int, ...]) -> None:
    for version in versions:
        HARMS[name](chain, version)
    target, heard = h.strict_target(chain.store), h.Heard()
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert h.bits(target) == chain.history[chain.head]
    assert {event.version for event in heard.events if event.type == "skipped"} == set(versions)
    assert [event.version for event in heard.events if event.phase == "seed" and event.type == "phase"][-1] == (
        1 if 3 in versions else 3
    )


@pytest.mark.parametrize("name", HARMS)
def test_if_no_anchor_is_left_a_fault_is_told(chain: h.Chain, name: str) -> None:
    for version in (1, 3, 5):
        HARMS[name](chain, version)
    with pytest.raises((IntegrityError, NotFoundError)):
        h.followed(chain.store, h.strict_target(chain.store))
    assert list(chain.store.list(PINS)) == []


def test_an_anchor_without_record_is_nothing(chain: h.Chain) -> None:
    """A writer that died before the end leaves a directory: nobody hears of it (F51)."""
    chain.store.delete(anchor_prefix(5) + "anchor")
    target, heard = h.strict_target(chain.store), h.Heard()
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert (heard["skipped"], h.bits(target)) == (0, chain.history[chain.head])


def test_bits_that_came_out_wrong_lead_to_the_next_anchor(chain: h.Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason, memory among them: what was read back decides."""
    target, heard = h.strict_target(chain.store), h.Heard()
    with contextlib.closing(Receiver(chain.store, target, threads=1, emit=heard)) as receiver:
        landing = receiver._staging.landing
        real, calls = landing.digest, iter([True])
        monkeypatch.setattr(landing, "digest", lambda: Digest(7, 7) if next(calls, False) else real())
        assert receiver.follow(once=True) == chain.head
    assert (heard["skipped"], heard.phases("seed"), h.bits(target)) == (1, 2, chain.history[chain.head])


def test_all_anchors_are_found_without_the_hint(chain: h.Chain) -> None:
    log = RunLog.open(chain.store)
    for hint in (Hint(0, 0), Hint(6, 5), Hint(6, 3), Hint(99, 99), Hint(2, 1)):
        chain.store.put("head", hint.to_bytes())
        assert [anchor.version for anchor, _ in log.anchors(lambda *_: None)] == [5, 3, 1]
    chain.store.delete("head")
    assert [anchor.version for anchor, _ in log.anchors(lambda *_: None)] == [5, 3, 1]


def test_condemned_anchors_come_last(chain: h.Chain) -> None:
    log = RunLog.open(chain.store)
    tomb = Tombstone(log.run, Doomed.ANCHOR, 5, 1, 1, 6)
    chain.store.create(tomb_key(Doomed.ANCHOR, 5), tomb.to_bytes())
    assert [anchor.version for anchor, _ in log.anchors(lambda *_: None)] == [3, 1, 5]
    chain.store.put(tomb_key(Doomed.ANCHOR, 3), b"damaged, and still a tombstone")
    assert [anchor.version for anchor, _ in log.anchors(lambda *_: None)] == [1, 5, 3]


def test_the_newest_anchors_record_is_whole_or_told(chain: h.Chain) -> None:
    log = RunLog.open(chain.store)
    HARMS["record corrupt"](chain, 5)
    found = log.newest_anchor()
    assert found is not None
    assert (found[0].version, found[1].number) == (3, 3)
    for version in (1, 3):
        HARMS["record corrupt"](chain, version)
    with pytest.raises(IntegrityError, match="anchor/0000000005"):
        log.newest_anchor()


# ------------------------------------------------------------------------------------------ writers


class At(runtime.SystemRuntime):
    """Does something once, at a named point."""

    def __init__(self, name: str, do: Callable[[], object]) -> None:
        self.name, self.do = name, do

    def point(self, name: str) -> None:
        if name == self.name:
            self.name = ""
            self.do()


@pytest.mark.parametrize("other", [300, 10_000], ids=["the same payloads", "other payloads"])
def test_of_two_writers_the_first_wins_and_both_are_right(chain: h.Chain, other: int) -> None:
    first: list[bool] = []

    def rival() -> None:
        first.append(write_anchor(chain.store, MemoryBaseline(), payload_bytes=other).created)

    with runtime.using(At("anchor seal", rival)):
        done = write_anchor(chain.store, MemoryBaseline(), payload_bytes=300)
    assert (first, done.version) == ([True], chain.head)
    assert done.created is (other == 300)  # the same record: nobody can tell whose it is
    target = h.strict_target(chain.store)
    for number in range(2, chain.head + 1):
        for key, _ in list(chain.store.list(f"a/{number:010d}/pl/")):
            chain.store.delete(key)
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


class Halving(k.KillingStore):
    """Keeps half of each payload that is uploaded, and tells nobody."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, k.Fuse(1 << 60))

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, bytes(data)[: len(data) // 2] if "/pl/" in key else data)

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data[: len(data) // 2] if "/pl/" in key else data)


def test_what_a_writer_saw_whole_no_other_one_cuts_short(chain: h.Chain) -> None:
    """Its record is on its way when another writer uploads the same payloads."""

    def rival() -> None:
        write_anchor(Halving(chain.store), MemoryBaseline(), payload_bytes=300)

    with runtime.using(At("anchor seal", rival)):
        write_anchor(chain.store, MemoryBaseline(), payload_bytes=300)
    anchor = RunLog.open(chain.store).anchor(chain.head)
    assert anchor is not None
    check_complete(RunLog.open(chain.store), anchor, deep=True)


class Watching(k.KillingStore):
    """Notes what is written to, and keeps some payloads from being found by one read."""

    def __init__(self, store: Store, hidden: tuple[str, ...] = ()) -> None:
        super().__init__(store, k.Fuse(1 << 60))
        self.puts: list[str] = []
        self.creates: list[str] = []
        self._hidden = list(hidden)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.puts.append(key)
        super().put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self.creates.append(key)
        super().create(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key in self._hidden:
            self._hidden.remove(key)
            raise NotFoundError(f"{key} is not there")
        return super().get(key, start, length)


def left_by_a_dead_writer(chain: h.Chain) -> list[str]:
    """Payloads of the head's anchor, without its record."""
    write_anchor(chain.store, MemoryBaseline(), payload_bytes=300)
    chain.store.delete(anchor_prefix(chain.head) + "anchor")
    return objects_of(chain, chain.head, "pl")


@pytest.mark.parametrize("how", [flip, lambda data: data[:-1], lambda data: data + b"x"], ids=["bad", "short", "long"])
def test_of_what_a_dead_writer_left_only_what_is_damaged_is_written_again(
    chain: h.Chain, how: Callable[[bytes], bytes]
) -> None:
    keys, store = left_by_a_dead_writer(chain), Watching(chain.store)
    chain.store.put(keys[0], how(chain.store.get(keys[0])))
    assert write_anchor(store, MemoryBaseline(), payload_bytes=300).created
    assert len(keys) > 1
    assert [key for key in (*store.puts, *store.creates) if key in keys] == keys[:1]
    log = RunLog.open(chain.store)
    anchor = log.anchor(chain.head)
    assert anchor is not None
    check_complete(log, anchor, deep=True)


def test_a_payload_that_is_not_seen_yet_is_not_put_over(chain: h.Chain) -> None:
    keys = left_by_a_dead_writer(chain)
    store = Watching(chain.store, hidden=tuple(keys))
    assert write_anchor(store, MemoryBaseline(), payload_bytes=300).created
    assert sorted(key for key in store.creates if key in keys) == keys
    assert not set(store.puts) & set(keys)


def test_a_writer_that_finds_other_bits_than_its_own_says_so(chain: h.Chain) -> None:
    def rival() -> None:
        write_anchor(chain.store, MemoryBaseline(), payload_bytes=10_000)
        lie(chain, chain.head)

    with runtime.using(At("anchor seal", rival)), pytest.raises(AlreadyExistsError):
        write_anchor(chain.store, MemoryBaseline(), payload_bytes=300)


def test_an_anchor_of_other_bits_is_not_taken_for_done(chain: h.Chain) -> None:
    write_anchor(chain.store, MemoryBaseline())
    lie(chain, chain.head)
    with pytest.raises(IntegrityError, match="digest of its version"):
        write_anchor(chain.store, MemoryBaseline())


def test_an_anchor_that_was_condemned_while_it_was_written_is_given_up(chain: h.Chain) -> None:
    log = RunLog.open(chain.store)

    def condemn() -> None:
        chain.store.create(
            tomb_key(Doomed.ANCHOR, chain.head), Tombstone(log.run, Doomed.ANCHOR, 6, 1, 1, 9).to_bytes()
        )

    with runtime.using(At("payload put", condemn)), pytest.raises(AttemptLostError, match="version 6"):
        write_anchor(chain.store, MemoryBaseline())
    assert log.anchor(chain.head) is None
    assert list(chain.store.list(PINS)) == []


def test_an_anchor_is_written_from_an_older_one_and_the_chain(chain: h.Chain) -> None:
    """No baseline of anybody is needed, nor the newest anchor."""
    HARMS["payload missing"](chain, 5)
    HARMS["file missing"](chain, 3)
    done = write_anchor(chain.store, MemoryBaseline())
    assert (done.version, done.created) == (chain.head, True)
    target = h.strict_target(chain.store)
    assert h.followed(chain.store, target, emit=(heard := h.Heard())) == chain.head
    assert (heard["skipped"], h.bits(target)) == (0, chain.history[chain.head])
    found = RunLog.open(chain.store).version(chain.head).outcome
    assert found is not None
    assert RunLog.open(chain.store).anchor(chain.head).digest == found.digest  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------ pins


class ReadOnly:
    """A store of which the credentials may only read."""

    def __init__(self, store: object) -> None:
        self.store = store
        self.refused = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def put(self, key: str, data: bytes) -> None:
        self.refused += 1
        raise UsageError(f"cannot write {key!r}", found="HTTP 403")

    create = delete = put  # type: ignore[assignment]


def test_who_may_not_write_goes_on_without_a_pin(chain: h.Chain) -> None:
    store, heard = ReadOnly(chain.store), h.Heard()
    HARMS["payload corrupt"](chain, 5)
    target = h.strict_target(chain.store)
    assert h.followed(store, target, emit=heard) == chain.head  # type: ignore[arg-type]
    assert (h.bits(target), heard["unpinned"], store.refused) == (chain.history[chain.head], 1, 1)


def test_a_catch_up_is_pinned_from_its_anchor_on_until_the_head(chain: h.Chain) -> None:
    seen: dict[str, list[int]] = {}

    class Watch(runtime.SystemRuntime):
        def point(self, name: str) -> None:
            pins = [chain.store.get(key) for key, _ in chain.store.list(PINS)]
            seen.setdefault(name, []).append(int(pins[0].split(b'"version":')[1].split(b"}")[0]) if pins else -1)

    with runtime.using(Watch()):
        receiver = Receiver(chain.store, h.strict_target(chain.store), threads=1)
        with contextlib.closing(receiver):
            receiver.follow(once=True)
            assert list(chain.store.list(PINS)) == []
    assert seen["receiver LoadAnchor"] == [5]
    assert set(seen["payload fill"]) == set(seen["payload stage"]) == {5}
    assert list(chain.store.list(PINS)) == []


class Acting(ReadOnly):
    """A store of which everything may be done; ``on_pin`` happens after each pin is put."""

    def __init__(self, store: object, on_pin: Callable[[int], object]) -> None:
        super().__init__(store)
        self.pins = 0
        self.on_pin = on_pin

    def put(self, key: str, data: bytes) -> None:
        self.store.put(key, data)  # type: ignore[attr-defined]
        if key.startswith(PINS):
            self.pins += 1
            self.on_pin(self.pins)

    def delete(self, key: str) -> None:  # type: ignore[override]
        self.store.delete(key)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("condemned", "start"), [((5,), 3), ((5, 3), 1), ((5, 3, 1), 5)])
def test_what_is_condemned_while_a_pin_is_put_is_left_alone(
    chain: h.Chain, condemned: tuple[int, ...], start: int
) -> None:
    """The pruner may not have seen the pin; so whoever put it looks again. If all are condemned, the newest will do."""
    log, heard = RunLog.open(chain.store), h.Heard()

    def condemn(number: int) -> None:
        if number <= len(condemned):
            version = condemned[number - 1]
            tomb = Tombstone(log.run, Doomed.ANCHOR, version, 1, 1, 6)
            chain.store.create(tomb_key(Doomed.ANCHOR, version), tomb.to_bytes())

    target = h.strict_target(chain.store)
    assert h.followed(Acting(chain.store, condemn), target, emit=heard) == chain.head  # type: ignore[arg-type]
    assert [event.version for event in heard.events if event.phase == "seed" and event.type == "phase"] == [start]
    assert h.bits(target) == chain.history[chain.head]


def test_a_pin_is_lowered_for_an_older_anchor(chain: h.Chain) -> None:
    HARMS["payload corrupt"](chain, 5)
    held: list[int] = []

    def note(_: int) -> None:
        ((key, _),) = chain.store.list(PINS)
        held.append(version_of(chain.store.get(key)) or 0)

    h.followed(Acting(chain.store, note), h.strict_target(chain.store))  # type: ignore[arg-type]
    assert held == [5, 3]


def test_a_pin_beats_while_there_is_progress(chain: h.Chain) -> None:
    class Late(runtime.SystemRuntime):
        clock = 0.0

        def now(self) -> float:
            self.clock += 1.0
            return self.clock

    beats: set[bytes] = set()
    store = Acting(chain.store, lambda _: beats.update(chain.store.get(key) for key, _ in chain.store.list(PINS)))
    with runtime.using(Late()):
        h.followed(store, h.strict_target(chain.store))  # type: ignore[arg-type]
    assert len(beats) == store.pins > 1
    assert list(chain.store.list(PINS)) == []


def test_a_receiver_that_lags_pins_the_chain_and_one_that_does_not_leaves_the_store_alone(chain: h.Chain) -> None:
    target = h.strict_target(chain.store)
    from deltarefit.asof import AsOf

    h.followed(AsOf(RunLog.open(chain.store), 3), target)
    puts: list[str] = []

    class Noting(ReadOnly):
        def put(self, key: str, data: bytes) -> None:
            puts.append(key)
            self.store.put(key, data)  # type: ignore[attr-defined]

        def delete(self, key: str) -> None:  # type: ignore[override]
            self.store.delete(key)  # type: ignore[attr-defined]

    assert h.followed(Noting(chain.store), target) == 6  # type: ignore[arg-type]
    assert len(puts) == 1
    assert list(chain.store.list(PINS)) == []
    chain.store.put("head", Hint(6, 5).to_bytes())
    h.step(np.random.default_rng(1), chain.source.model, "some")
    h.published(chain.store, chain.source)
    puts.clear()
    assert h.followed(Noting(chain.store), target) == 7  # type: ignore[arg-type]
    assert puts == []


def test_the_machine_goes_from_an_anchor_that_is_not_whole_to_the_next(chain: h.Chain) -> None:
    from deltarefit.protocol import messages as m
    from deltarefit.protocol.follower import Follower, Phase

    log = RunLog.open(chain.store)
    anchor = log.anchor(5)
    assert anchor is not None
    lost, _ = Follower(log.run, log.catalog.identity, "0").on(m.HeaderRead(None))
    seeding, actions = lost.on(m.AnchorFound(anchor, anchor.digest))
    assert actions == (m.LoadAnchor(anchor),)
    again, actions = seeding.on(m.NotStaged())
    assert (again.phase, actions[-1]) == (Phase.LOST, m.FindAnchor())
    with pytest.raises(IntegrityError):
        seeding.on(AnchorLoaded(Digest(1, 1)))
    assert issubclass(DigestMismatch, IntegrityError)


def test_a_receiver_that_failed_looks_at_every_anchor_again() -> None:
    """What was read damaged, twice, may be read whole the next time (F15): an error is no knowledge of the store."""
    made = h.publish_chain(np.random.default_rng(3), ("some",), h.SMALL)
    keys = [Fault(Kind.TRUNCATE, "get", "anchor/0000000001/anchor", first=1, last=4)]
    target = h.StrictTarget(RunLog.open(made.store).run)
    with contextlib.closing(Receiver(Faulty(made.store, keys), target, threads=1)) as receiver:
        with pytest.raises(IntegrityError):
            receiver.follow(once=True)
        for _ in range(3):
            with contextlib.suppress(IntegrityError):
                assert receiver.follow(once=True) == made.head
    assert h.bits(target) == made.history[made.head]
