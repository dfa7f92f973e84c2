"""What a receiver refuses, and what it is cured of: bits, headers, logs and payloads that are not what they should."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Receiver
from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch, FormatError, IntegrityError, UnavailableError
from deltarefit.manifest import Catalog, Header, Intent, ProducerManifest, State
from deltarefit.ports import Store
from deltarefit.records import Digest, Record
from deltarefit.runlog import RunLog, attempt_key, payload_prefix
from tests import helpers as h
from tests import killing as k


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture(scope="module")
def chain() -> h.Chain:
    return h.publish_chain(np.random.default_rng(12), ("some", "all", "nothing", "back"))


# ------------------------------------------------------------------------------------------ not of this log


def test_bits_changed_behind_its_back_are_found_at_the_start(chain: h.Chain) -> None:
    target, heard = h.strict_target(chain.store), h.Heard()
    h.followed(chain.store, target)
    target._arrays[0][5] ^= 1
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert h.bits(target) == chain.history[chain.head]
    assert heard["diverged"] == 1
    assert target.seeds == 2


def test_bits_changed_behind_its_back_are_found_when_they_are_touched(rng: np.random.Generator) -> None:
    own, heard = h.publish_chain(rng, ("some",)), h.Heard()
    target = h.strict_target(own.store)
    with contextlib.closing(Receiver(own.store, target, threads=1, emit=heard)) as receiver:
        receiver.follow(once=True)
        target._arrays[0][:] ^= 1
        h.step(rng, own.source.model, "all")
        h.published(own.store, own.source)
        assert receiver.follow(once=True) == 3
    assert h.bits(target) == h.bytes_of(own.source.model)
    assert heard["diverged"] == 1


def test_weights_of_another_run_are_not_replaced_unasked(chain: h.Chain, rng: np.random.Generator) -> None:
    other = h.publish_chain(rng, ("some",))
    target = MemoryBaseline()
    h.followed(other.store, target)
    before = target.read_header()
    with pytest.raises(BaseMismatch, match="another run"):
        h.followed(chain.store, target)
    assert target.read_header() == before
    assert h.bits(target) == other.history[other.head]
    assert h.followed(other.store, target) == other.head


def test_a_header_of_another_run_means_nothing(chain: h.Chain, rng: np.random.Generator) -> None:
    other = h.publish_chain(rng, ("some",))
    target = h.StrictTarget(RunLog.open(other.store).run)
    target._run = RunLog.open(other.store).run
    h.followed(other.store, target)
    target._run = RunLog.open(chain.store).run
    assert h.followed(chain.store, target, switch_run=True) == chain.head
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
    assert head.outcome is not None
    intent, manifest = change(head.intent, head.manifests[0])
    digest = intent.base_digest + manifest.shift
    manifest = replace(manifest, part=digest)
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
    target, heard = h.strict_target(own.store), h.Heard()
    with contextlib.closing(Receiver(own.store, target, threads=1, emit=heard)) as receiver:
        for _ in range(2):
            with pytest.raises(IntegrityError, match="does not apply"):
                receiver.follow(once=True)
            assert h.state_of(target) == (State.CLEAN, 2)
            assert h.bits(target) == own.history[2]
            assert not target.paused
    assert heard.phases("seed") <= 3


def test_a_payload_lost_from_the_store_is_an_error_and_harmless(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.3)
    own = h.publish_chain(rng, ("some", "some"))
    own.store.delete(payload_prefix(3) + RunLog.open(own.store).attempt(3).payloads[-1].sha256)
    target = h.strict_target(own.store)
    with pytest.raises(IntegrityError, match="lost a payload"):
        h.followed(own.store, target)
    assert h.state_of(target) == (State.CLEAN, 2)
    assert h.bits(target) == own.history[2]


def test_a_payload_swapped_for_another_is_refused(rng: np.random.Generator) -> None:
    own = h.publish_chain(rng, ("some", "many"))
    first, second, *_ = (payload_prefix(3) + ref.sha256 for ref in RunLog.open(own.store).attempt(3).payloads)
    own.store.put(first, own.store.get(second))
    target, heard = h.strict_target(own.store), h.Heard()
    with pytest.raises(IntegrityError):
        h.followed(own.store, target, emit=heard)
    assert heard["refetch"] == 1
    assert h.bits(target) == own.history[2]


# ------------------------------------------------------------------------------------------ errors in the middle


def torn(chain: h.Chain) -> h.StrictTarget:
    """A target that is DIRTY with a torn payload."""
    rng = np.random.default_rng(14)
    for fuse in k.fuses(after=True):
        target = h.strict_target(chain.store)
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
        assert h.state_of(target) == (State.DIRTY, 1)
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
    assert h.state_of(target) == (State.CLEAN, 1)
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


# ------------------------------------------------------------------------------------------ records out of place


def swap(store: Store, key: str, record: Record) -> None:
    store.put(key, record.to_bytes())


def test_records_of_another_run_are_refused(chain: h.Chain) -> None:
    for name in ("intent", "p/0", "outcome"):
        store, attempt = h.copy_store(chain.store), RunLog.open(chain.store).attempt(2)
        record: Any = {"intent": attempt.intent, "p/0": attempt.manifests[0], "outcome": attempt.outcome}[name]
        swap(store, attempt_key(2, name), replace(record, run="0" * 32))
        with pytest.raises(BaseMismatch, match="another run"):
            h.followed(store, MemoryBaseline())


def test_records_in_the_place_of_others_are_refused(chain: h.Chain) -> None:
    log = RunLog.open(chain.store)
    for name in ("intent", "p/0", "outcome"):
        store = h.copy_store(chain.store)
        store.put(attempt_key(3, name), store.get(attempt_key(2, name)))
        with pytest.raises(IntegrityError):
            h.followed(store, MemoryBaseline())
    store, anchor = h.copy_store(chain.store), log.anchor(1)
    assert anchor is not None
    swap(store, "anchor/0000000001/anchor", replace(anchor, version=2))
    with pytest.raises(FormatError, match="anchor of version 2 stands in the place of 1"):
        h.followed(store, MemoryBaseline())
    swap(store, f"catalog/{log.catalog.identity}", replace(log.catalog, tensors=log.catalog.tensors[:-1]))
    with pytest.raises(FormatError, match="not the one of this run"):
        h.followed(store, MemoryBaseline())


def test_an_anchor_with_another_digest_than_its_version_is_refused(chain: h.Chain) -> None:
    store, anchor = h.copy_store(chain.store), RunLog.open(chain.store).anchor(1)
    assert anchor is not None
    swap(store, "anchor/0000000001/anchor", replace(anchor, digest=Digest(1, 2)))
    with pytest.raises(IntegrityError, match="digest of its version"):
        h.followed(store, MemoryBaseline())


@pytest.mark.parametrize(
    ("payloads", "says"),
    [("first", "owned 0 times"), ("twice", "owned 2 times"), ("delta", "does not set every element")],
)
def test_an_anchor_that_does_not_set_everything_once_is_refused(chain: h.Chain, payloads: str, says: str) -> None:
    store, log = h.copy_store(chain.store), RunLog.open(chain.store)
    anchor, deltas = log.anchor(1), log.attempt(2).payloads
    assert anchor is not None
    refs = {"first": anchor.payloads[1:], "twice": anchor.payloads[:1] * 2, "delta": deltas}[payloads]
    for ref in deltas:
        store.put("anchor/0000000001/pl/" + ref.sha256, store.get(payload_prefix(2) + ref.sha256))
    swap(store, "anchor/0000000001/anchor", replace(anchor, payloads=refs))
    target = h.strict_target(store)
    with pytest.raises(FormatError, match=says):
        h.followed(store, target)
    assert h.state_of(target) == (State.UNKNOWN, 0)


def test_dirty_on_top_of_unknown_bits_leads_to_the_anchor(chain: h.Chain) -> None:
    """A header that names another digest for its version than the log is of some other history."""
    target, heard = torn(chain), h.Heard()
    header = target.read_header()
    assert header is not None
    target.write_header(replace(header, digest=header.digest + Digest(1, 0)))
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert (heard["diverged"], heard.phases("seed")) == (1, 1)
    assert h.bits(target) == chain.history[chain.head]
