"""Does anybody notice? Each rule of the two paths is broken once; one named short check must then fail.

The checks are small cousins of the suites beside this file, and pass as long as nothing is broken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard

from deltarefit import MemoryBaseline, Publisher, Receiver, anchors, codec, publisher
from deltarefit.elements import Elements
from deltarefit.errors import AttemptLostError, IntegrityError, NotFoundError, RefitError
from deltarefit.manifest import Header, ProducerManifest, State
from deltarefit.protocol import coordinator as c
from deltarefit.protocol import follower as f
from deltarefit.protocol import messages as m
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, payload_prefix
from deltarefit.stores.object import ObjectStore
from deltarefit.weights import Weights
from tests import helpers as h
from tests import killing as k
from tests import test_codec, test_publisher, test_receiver

Patch = pytest.MonkeyPatch
NOTICED = (AssertionError, RefitError, pytest.fail.Exception)


def rng() -> np.random.Generator:
    return np.random.default_rng(31)


def chain_of(*kinds: str) -> h.Chain:
    return h.publish_chain(rng(), kinds or ("some", "nothing", "back"))


def strict(chain: h.Chain) -> h.StrictTarget:
    return h.StrictTarget(RunLog.open(chain.store).run)


# ------------------------------------------------------------------------------------------ checks


def follows() -> None:
    """Bits and versions of a plain chain."""
    chain, heard = chain_of(), h.Heard()
    target = strict(chain)
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert h.bits(target) == chain.history[chain.head]
    assert [e.version for e in heard.events if e.type == "clean"] == sorted(chain.history)


def recovers_from_tears() -> None:
    """Killed in each write: right bits in the end, and no anchor is loaded again once there is a version."""
    chain, random = chain_of("some", "many"), rng()
    for fuse in k.fuses(after=True):
        target, heard = strict(chain), h.Heard()
        with contextlib.suppress(k.Killed):
            h.followed(chain.store, k.KillingTarget(target, fuse, random))
        header = target.read_header()
        assert h.followed(chain.store, target, emit=heard) == chain.head
        assert h.bits(target) == chain.history[chain.head]
        assert not (header and header.state is not State.UNKNOWN and heard.phases("seed"))


def survives_power_loss() -> None:
    chain = chain_of("many")
    target = strict(chain)
    target.sleeping = True
    h.followed(chain.store, target)
    target.crash(rng())
    assert h.bits(target) == chain.history[chain.head]


class _Forgetful(h.StrictTarget):
    """The first write in each state of the header does not stick, and nobody is told."""

    def __init__(self, run: str, state: State) -> None:
        super().__init__(run)
        self._left = {state}

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        before, header = self._arrays[tensor][start:stop].copy(), self.read_header()
        with super().window(tensor, start, stop) as (array, first):
            yield array, first
            if header and header.state in self._left and (array != before).any():
                self._left.remove(header.state)
                array[:] = before


def notices_a_write_that_did_not_stick() -> None:
    chain = chain_of("some")
    target = _Forgetful(RunLog.open(chain.store).run, State.DIRTY)
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


def proves_a_seed() -> None:
    chain = chain_of("some")
    target = _Forgetful(RunLog.open(chain.store).run, State.UNKNOWN)
    target.sleeping = True
    with pytest.raises(IntegrityError, match="seeded weights"):
        h.followed(chain.store, target)
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


def refuses_flipped_bits() -> None:
    data, ref = test_codec.build(*test_codec.changes(10, "some"), 600)
    test_codec.test_every_flipped_bit_is_refused((data[:], ref))


def refuses_what_is_out_of_bounds() -> None:
    test_codec.test_table_rules(test_codec.take_apart(*test_codec.build(*test_codec.changes(10, "some"), 600)))


def refuses_frames_of_another_size() -> None:
    parts = test_codec.take_apart(*test_codec.build(*test_codec.changes(10, "some"), 600))
    test_codec.test_frames_of_another_size(parts)


def a_failed_publish_leaves_no_trace() -> None:
    source, store = test_publisher._FailingSource(h.random_model(rng())), h.new_store()
    with contextlib.closing(Publisher(store, source, threads=1)) as one:
        one.publish()
        h.step(rng(), source.model, "many")
        source.error = ValueError("boom")
        with pytest.raises(ValueError, match="boom"):
            one.publish()
        source.error = None
        version = one.publish().version
    target = h.StrictTarget(RunLog.open(store).run)
    assert h.followed(store, target) == version
    assert h.bits(target) == h.bytes_of(source.model)


def overtaken(name: str, after: bool = False) -> None:
    """Another publisher acts in the middle of ours: what each says is what the log holds."""
    store, model = h.new_store(), h.random_model(rng(), h.SMALL)
    mine, other = (h.ArraySource(h.copy_of(model), h.SMALL) for _ in range(2))
    h.published(store, mine)
    h.step(np.random.default_rng(1), mine.model, "some")
    h.step(np.random.default_rng(2), other.model, "some")
    said: list[int] = []
    between = test_publisher._Interposed(store, name, lambda: said.append(h.published(store, other)), after)
    with contextlib.suppress(AttemptLostError):
        said.append(h.published(between, mine))
    assert sorted(said) == h.check_linear(store)[1:]
    assert said
    last = mine if said[-1] == max(said) and len(said) > 1 else other
    target = h.StrictTarget(RunLog.open(store).run)
    h.followed(store, target)
    assert h.bits(target) == h.bytes_of(last.model)


def overtaken_at_the_intent() -> None:
    overtaken("intent")


def overtaken_at_the_outcome() -> None:
    overtaken("outcome")


def a_publisher_that_was_away_catches_up() -> None:
    test_publisher.test_a_publisher_that_was_away_for_versions_publishes_on_top(rng())


def our_commit_is_never_called_lost() -> None:
    from tests import test_faults

    chain = h.publish_chain(rng(), ("some",), h.SMALL)
    test_faults.test_a_lost_race_is_not_a_committed_version(chain)


def gets_no_commit_without_payloads() -> None:
    test_publisher.test_a_store_that_loses_payloads_gets_no_commit(rng(), 0.0, 1)


def finds_bits_changed_before_the_start() -> None:
    test_receiver.test_bits_changed_behind_its_back_are_found_at_the_start(chain_of())


def refuses_another_base() -> None:
    test_receiver.test_a_delta_of_another_base_is_refused_and_not_for_ever_fetched(rng(), test_receiver.other_base)


def refuses_other_sums() -> None:
    test_receiver.test_a_delta_of_another_base_is_refused_and_not_for_ever_fetched(rng(), test_receiver.other_sums)


def forgets_another_run() -> None:
    """Both runs have as many versions, so that only the run tells them apart."""
    chain, other = chain_of("some"), h.publish_chain(np.random.default_rng(32), ("some",))
    target = MemoryBaseline()
    h.followed(other.store, target)
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


def drops_what_was_aborted() -> None:
    test_receiver.test_a_staged_attempt_that_aborts_leaves_nothing(rng())


def waits_for_its_own_writes() -> None:
    test_receiver.test_no_write_goes_on_after_follow_has_raised(rng())


def walks_past_the_hint() -> None:
    test_publisher.test_a_wrong_hint_only_costs_time(rng())


def fetches_damaged_payloads_again() -> None:
    chain = chain_of("some")
    manifest = RunLog.open(chain.store).attempt(2).manifest
    assert manifest is not None
    bad = [payload_prefix(2) + ref.sha256 for ref in manifest.payloads]

    class Once(k.KillingStore):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            data = super().get(key, start, length)
            if key in bad:
                bad.remove(key)
                return data[:-1] + bytes([data[-1] ^ 1])
            return data

    target = strict(chain)
    assert h.followed(Once(chain.store, k.Fuse(1 << 60)), target) == 2
    assert not bad


def can_stop_anywhere() -> None:
    test_receiver.test_stopped_anywhere_users_can_go_on(chain_of("some"))


def an_anchor_without_a_part_is_refused() -> None:
    """The record leaves out its last payload, and claims the digest of the rest."""
    chain = chain_of("some")
    log = RunLog.open(chain.store)
    anchor, first = log.anchor(1), log.attempt(1)
    assert anchor is not None
    assert first.outcome is not None
    short = replace(anchor, payloads=anchor.payloads[:-1])
    chain.store.put("anchor/0000000001/anchor", short.to_bytes())
    with pytest.raises(IntegrityError, match="an anchor ends at tensor"):
        h.followed(chain.store, MemoryBaseline())


CHECKS = [
    follows, recovers_from_tears, survives_power_loss, notices_a_write_that_did_not_stick, proves_a_seed,
    refuses_flipped_bits, refuses_what_is_out_of_bounds, refuses_frames_of_another_size, a_failed_publish_leaves_no_trace,
    overtaken_at_the_intent, overtaken_at_the_outcome, a_publisher_that_was_away_catches_up,
    our_commit_is_never_called_lost, gets_no_commit_without_payloads, finds_bits_changed_before_the_start,
    refuses_another_base, refuses_other_sums, forgets_another_run,
    drops_what_was_aborted, waits_for_its_own_writes, walks_past_the_hint, fetches_damaged_payloads_again,
    can_stop_anywhere, an_anchor_without_a_part_is_refused,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_check_passes_unbroken(check: Callable[[], None]) -> None:
    check()


# ------------------------------------------------------------------------------------------ mutants


def handler(patch: Patch, phase: f.Phase, event: type, broken: Callable[..., Any]) -> None:
    patch.setitem(f._HANDLERS, (phase, event), broken)  # type: ignore[arg-type]


def baseline_moves_at_encode(patch: Patch) -> None:
    real = Publisher._encode_segment

    def encode(self: Publisher, segment: Any) -> Any:
        encoded = real(self, segment)
        tensor, start, stop = segment
        with self._baseline.window(tensor, start, stop) as (array, _), self.source.read(tensor, start, stop) as new:
            array[:] = new
        return encoded

    patch.setattr(Publisher, "_encode_segment", encode)


def baseline_is_not_brought_up(patch: Patch) -> None:
    """What is encoded against is whatever the baseline held last."""
    patch.setattr(Publisher, "_move_baseline", lambda self, version: self._recent.forget())


def hash_not_checked(patch: Patch) -> None:
    patch.setattr(codec, "check_object", lambda data, sha256, size, where: None)


def bounds_not_checked(patch: Patch) -> None:
    patch.setattr(codec, "_check_rows", lambda rows, ref, catalog, where: None)


def declared_size_not_checked(patch: Patch) -> None:
    def decompress(tensor: Any, size: int, where: str) -> bytes:
        raw: bytes = zstandard.ZstdDecompressor().decompress(bytes(tensor["data"]), max_output_size=1 << 30)
        return raw

    patch.setattr(codec, "_decompress", decompress)


def coverage_of_anchor_not_checked(patch: Patch) -> None:
    patch.setattr(anchors._Coverage, "finish", lambda self: None)


def written_not_read_back(patch: Patch) -> None:
    handler(patch, f.Phase.WRITING, m.Written, lambda self, event: self._committed())


def seed_not_proven(patch: Patch) -> None:
    def believe(self: f.Follower, event: m.AnchorLoaded) -> f.Step:
        assert self.anchor is not None
        return f.Follower._seeded(self, m.AnchorLoaded(self.anchor.digest))

    handler(patch, f.Phase.SEEDING, m.AnchorLoaded, believe)


def start_not_proven(patch: Patch) -> None:
    patch.setattr(Receiver, "_believable_header", lambda self: self.target.read_header())


def dirty_not_written(patch: Patch) -> None:
    real = Receiver._do_WriteHeader
    keep = lambda self, action: None if action.header.state is State.DIRTY else real(self, action)  # noqa: E731
    patch.setattr(Receiver, "_do_WriteHeader", keep)


def not_paused(patch: Patch) -> None:
    patch.setattr(Receiver, "_do_Pause", lambda self, action: None)


def not_flushed(patch: Patch) -> None:
    real = Receiver._write

    def write(self: Receiver, *arguments: Any) -> None:
        flush, self.target.flush = self.target.flush, lambda: None  # type: ignore[method-assign]
        try:
            real(self, *arguments)
        finally:
            self.target.flush = flush  # type: ignore[method-assign]

    patch.setattr(Receiver, "_write", write)


def values_not_spooled(patch: Patch) -> None:
    patch.setattr(Receiver, "_values", lambda self, attempt, ref: None)


def payloads_not_spooled_nor_fetched_again(patch: Patch) -> None:
    def once(self: RunLog, key: str, check: Callable[[bytes], Any], damaged: Any = None) -> Any:
        return check(self.store.get(key))

    patch.setattr(RunLog, "fetch", once)


def torn_is_applied_again(patch: Patch) -> None:
    patch.setattr(f, "_op", lambda live, pre, post: m.Op.SKIP if live == post else m.Op.APPLY)


def done_is_applied_again(patch: Patch) -> None:
    patch.setattr(f, "_op", lambda live, pre, post: m.Op.APPLY)


def create_replaces(patch: Patch) -> None:
    patch.setattr(ObjectStore, "create", ObjectStore.put)


def nonce_not_compared(patch: Patch) -> None:
    done = lambda self, event: (replace(self, phase=c.Phase.COMMITTED), ())  # noqa: E731
    patch.setitem(c._HANDLERS, (c.Phase.COMMITTING, m.AttemptRead), done)


def base_not_compared(patch: Patch) -> None:
    patch.setattr(f.Follower, "_is_base_of", lambda self, attempt: True)


def live_sums_not_compared(patch: Patch) -> None:
    def staged(self: f.Follower, event: m.Staged) -> f.Step:
        return replace(self, phase=f.Phase.STAGED)._decided(self._attempt())

    handler(patch, f.Phase.STAGING, m.Staged, staged)


def empty_delta_is_no_version(patch: Patch) -> None:
    def seen(self: f.Follower, event: m.AttemptRead) -> f.Step:
        found = event.attempt
        if found.committed and found.number > 1 and found.manifest and not found.manifest.payloads:
            return self, (m.ReadAttempt(found.number + 1),)
        return f.Follower._seen(self, event)

    handler(patch, f.Phase.CLEAN, m.AttemptRead, seen)


def any_run_will_do(patch: Patch) -> None:
    def boot(self: f.Follower, event: m.HeaderRead) -> f.Step:
        header: Header | None = event.header and replace(event.header, run=self.run)
        return f.Follower._boot(self, m.HeaderRead(header))

    handler(patch, f.Phase.BOOT, m.HeaderRead, boot)


def abort_is_a_commit(patch: Patch) -> None:
    def decided(self: f.Follower, event: m.AttemptRead) -> f.Step:
        ops = (m.Op.APPLY,) * len(self._manifest_refs())
        dirty = m.WriteHeader(self._header(State.DIRTY, event.attempt.number))
        writing = replace(self, phase=f.Phase.WRITING, attempt=event.attempt)
        return writing, (m.Pause(), dirty, m.Write(event.attempt, ops))

    handler(patch, f.Phase.STAGED, m.AttemptRead, decided)


def last_payload_not_summed(patch: Patch) -> None:
    def shift(self: ProducerManifest) -> Digest:
        return sum((p.post - p.pre for p in self.payloads[:-1]), Digest())

    patch.setattr(ProducerManifest, "shift", property(shift))


def last_element_not_compared(patch: Patch) -> None:
    def encode(tensor: int, old: Any, new: Any, start: int, key: int) -> Any:
        kept = new.copy()
        kept[-1:] = old[-1:]
        return codec.encode_delta(tensor, old, kept, start, key)

    patch.setattr(publisher, "encode_delta", encode)


def stored_payloads_not_checked(patch: Patch) -> None:
    patch.setattr(Publisher, "_check_stored", lambda self, prefix, refs: None)


def errors_after_the_commit_are_raised(patch: Patch) -> None:
    patch.setattr(Publisher, "_settle", lambda self, phase, work: work())


def writes_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(Weights, "_each", lambda self, work, items: list(self._pool.map(work, items)))


def hint_is_trusted(patch: Patch) -> None:
    def head(self: RunLog) -> m.Attempt | None:
        hinted = self.hint().head
        if not hinted:
            raise NotFoundError("no hint")
        return self.attempt(hinted)

    patch.setattr(RunLog, "head", head)


def stops_anywhere(patch: Patch) -> None:
    patch.setattr("deltarefit.receiver.STOPS", object)


MUTANTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (baseline_moves_at_encode, a_failed_publish_leaves_no_trace),
    (baseline_is_not_brought_up, a_publisher_that_was_away_catches_up),
    (hash_not_checked, refuses_flipped_bits),
    (bounds_not_checked, refuses_what_is_out_of_bounds),
    (declared_size_not_checked, refuses_frames_of_another_size),
    (coverage_of_anchor_not_checked, an_anchor_without_a_part_is_refused),
    (written_not_read_back, notices_a_write_that_did_not_stick),
    (seed_not_proven, proves_a_seed),
    (start_not_proven, finds_bits_changed_before_the_start),
    (dirty_not_written, follows),
    (not_paused, follows),
    (not_flushed, survives_power_loss),
    (values_not_spooled, recovers_from_tears),
    (payloads_not_spooled_nor_fetched_again, fetches_damaged_payloads_again),
    (torn_is_applied_again, recovers_from_tears),
    (done_is_applied_again, recovers_from_tears),
    (create_replaces, overtaken_at_the_outcome),
    (create_replaces, overtaken_at_the_intent),
    (nonce_not_compared, overtaken_at_the_outcome),
    (base_not_compared, refuses_another_base),
    (live_sums_not_compared, refuses_other_sums),
    (empty_delta_is_no_version, follows),
    (any_run_will_do, forgets_another_run),
    (abort_is_a_commit, drops_what_was_aborted),
    (last_payload_not_summed, follows),
    (last_element_not_compared, a_failed_publish_leaves_no_trace),
    (stored_payloads_not_checked, gets_no_commit_without_payloads),
    (errors_after_the_commit_are_raised, our_commit_is_never_called_lost),
    (writes_are_not_waited_for, waits_for_its_own_writes),
    (hint_is_trusted, walks_past_the_hint),
    (stops_anywhere, can_stop_anywhere),
]


@pytest.mark.parametrize(
    ("mutant", "check"), MUTANTS, ids=[f"{mutant.__name__}: {check.__name__}" for mutant, check in MUTANTS]
)
def test_the_mutant_is_noticed(mutant: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch) -> None:
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.05)
    mutant(monkeypatch)
    with pytest.raises(NOTICED):
        check()
