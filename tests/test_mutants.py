"""Does anybody notice? Each rule of the two paths is broken once; one named short check must then fail.

The checks are small cousins of the suites beside this file, and pass as long as nothing is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import zstandard

from deltarefit import Publisher, Receiver, anchors, codec, runlog
from deltarefit.beginning import Beginning
from deltarefit.errors import NotFoundError, RefitError
from deltarefit.landing import Windows
from deltarefit.manifest import Header, ProducerManifest, State
from deltarefit.protocol import attempts
from deltarefit.protocol import coordinator as c
from deltarefit.protocol import follower as f
from deltarefit.protocol import messages as m
from deltarefit.publishing import encoding
from deltarefit.publishing.encoding import SegmentEncoder
from deltarefit.publishing.shard_baseline import ShardBaseline
from deltarefit.publishing.share import Share
from deltarefit.records import Digest
from deltarefit.runlog import RunLog
from deltarefit.staging import Staging
from deltarefit.stores.object import ObjectStore
from deltarefit.weights import Weights
from tests import mutant_checks as checks

Patch = pytest.MonkeyPatch
NOTICED = (AssertionError, RefitError, pytest.fail.Exception)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_the_check_passes_unbroken(check: Callable[[], None]) -> None:
    check()


# ------------------------------------------------------------------------------------------ mutants


def handler(patch: Patch, phase: f.Phase, event: type, broken: Callable[..., Any]) -> None:
    patch.setitem(f._HANDLERS, (phase, event), broken)


def baseline_moves_at_encode(patch: Patch) -> None:
    real = SegmentEncoder.delta

    def encode(self: SegmentEncoder, segment: Any) -> Any:
        encoded = real(self, segment)
        piece, start, stop = segment
        with self._baseline.read(piece, start, stop) as old, self._source.read(piece, start, stop) as new:
            old[:] = new
        return encoded

    patch.setattr(SegmentEncoder, "delta", encode)


def baseline_is_not_brought_up(patch: Patch) -> None:
    """What is encoded against is whatever the baseline held last."""
    patch.setattr(ShardBaseline, "move", lambda self, version: None)


def hash_not_checked(patch: Patch) -> None:
    patch.setattr(codec, "check_object", lambda data, sha256, size, where: None)


def bounds_not_checked(patch: Patch) -> None:
    patch.setattr(codec, "_check_table", lambda deltas, ref, catalog, where: None)


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
    patch.setattr("deltarefit.receiver.check_loaded", lambda anchor, digest: None)


def start_not_proven(patch: Patch) -> None:
    patch.setattr(Beginning, "header", lambda self, ours: self.target.read_header())


def dirty_not_written(patch: Patch) -> None:
    real = Receiver._do_WriteHeader
    keep = lambda self, action: None if action.header.state is State.DIRTY else real(self, action)  # noqa: E731
    patch.setattr(Receiver, "_do_WriteHeader", keep)


def not_paused(patch: Patch) -> None:
    patch.setattr(Receiver, "_do_Pause", lambda self, action: None)


def not_flushed(patch: Patch) -> None:
    real = Staging.write

    def write(self: Staging, *arguments: Any) -> None:
        landing: Any = self.landing
        target = landing.weights.target
        flush, target.flush = target.flush, lambda: None
        try:
            real(self, *arguments)
        finally:
            target.flush = flush

    patch.setattr(Staging, "write", write)


def values_not_spooled(patch: Patch) -> None:
    patch.setattr(Windows, "_values", lambda self, ref: None)


def payloads_not_spooled_nor_fetched_again(patch: Patch) -> None:
    def once(self: RunLog, key: str, check: Callable[[bytes], Any], damaged: Any = None, **more: Any) -> Any:
        return check(self.store.get(key))

    patch.setattr(RunLog, "fetch", once)


def torn_is_applied_again(patch: Patch) -> None:
    patch.setattr(f, "_op", lambda live, ref: m.Op.SKIP if live == ref.post else m.Op.APPLY)


def done_is_applied_again(patch: Patch) -> None:
    patch.setattr(f, "_op", lambda live, ref: m.Op.APPLY)


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
        if found.committed and found.number > 1 and not found.payloads:
            return self, (m.ReadAttempt(found.number + 1),)
        return f.Follower._seen(self, event)

    handler(patch, f.Phase.CLEAN, m.AttemptRead, seen)


def sealed_is_staged(patch: Patch) -> None:
    patch.setattr(f, "adds_up", lambda attempt: attempt.sealed)
    patch.setattr(f.Follower, "_refuse", lambda self, phase: self._lost())


def what_was_not_committed_is_checked(patch: Patch) -> None:
    def check(attempt: m.Attempt) -> None:
        if attempt.intent:
            attempts.check_manifests(attempt.intent, attempt.manifests)

    patch.setattr(runlog, "check_attempt", check)


def any_run_will_do(patch: Patch) -> None:
    def boot(self: f.Follower, event: m.HeaderRead) -> f.Step:
        header: Header | None = event.header and replace(event.header, run=self.run)
        return f.Follower._boot(self, m.HeaderRead(header))

    handler(patch, f.Phase.BOOT, m.HeaderRead, boot)


def abort_is_a_commit(patch: Patch) -> None:
    def decided(self: f.Follower, event: m.AttemptRead) -> f.Step:
        dirty, actions = self._dirty(event.attempt)
        after, more = dirty._apply(self.refs)
        return after, (*actions, *more)

    handler(patch, f.Phase.STAGED, m.AttemptRead, decided)


def last_payload_not_summed(patch: Patch) -> None:
    def shift(self: ProducerManifest) -> Digest:
        return sum((p.post - p.pre for p in self.payloads[:-1]), Digest())

    patch.setattr(ProducerManifest, "shift", property(shift))


def last_element_not_compared(patch: Patch) -> None:
    def encode(tensor: int, old: Any, new: Any, start: int, key: int, **more: Any) -> Any:
        kept = new.copy()
        kept[-1:] = old[-1:]
        return codec.encode_delta(tensor, old, kept, start, key, **more)

    patch.setattr(encoding, "encode_delta", encode)


def stored_payloads_not_checked(patch: Patch) -> None:
    patch.setattr(Share, "_check_stored", lambda self, prefix, refs: None)


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
    (baseline_moves_at_encode, checks.a_failed_publish_leaves_no_trace),
    (baseline_is_not_brought_up, checks.a_publisher_that_was_away_catches_up),
    (hash_not_checked, checks.refuses_flipped_bits),
    (bounds_not_checked, checks.refuses_what_is_out_of_bounds),
    (declared_size_not_checked, checks.refuses_frames_of_another_size),
    (coverage_of_anchor_not_checked, checks.an_anchor_without_a_part_is_refused),
    (written_not_read_back, checks.notices_a_write_that_did_not_stick),
    (seed_not_proven, checks.proves_a_seed),
    (start_not_proven, checks.finds_bits_changed_before_the_start),
    (dirty_not_written, checks.follows),
    (not_paused, checks.follows),
    (not_flushed, checks.survives_power_loss),
    (values_not_spooled, checks.recovers_from_tears),
    (payloads_not_spooled_nor_fetched_again, checks.fetches_damaged_payloads_again),
    (torn_is_applied_again, checks.recovers_from_tears),
    (done_is_applied_again, checks.recovers_from_tears),
    (create_replaces, checks.overtaken_at_the_outcome),
    (create_replaces, checks.overtaken_at_the_intent),
    (nonce_not_compared, checks.overtaken_at_the_outcome),
    (base_not_compared, checks.refuses_another_base),
    (live_sums_not_compared, checks.refuses_other_sums),
    (empty_delta_is_no_version, checks.follows),
    (sealed_is_staged, checks.waits_for_what_does_not_add_up),
    (what_was_not_committed_is_checked, checks.passes_what_was_sealed_wrongly),
    (any_run_will_do, checks.forgets_another_run),
    (abort_is_a_commit, checks.drops_what_was_aborted),
    (last_payload_not_summed, checks.follows),
    (last_element_not_compared, checks.a_failed_publish_leaves_no_trace),
    (stored_payloads_not_checked, checks.gets_no_commit_without_payloads),
    (errors_after_the_commit_are_raised, checks.our_commit_is_never_called_lost),
    (writes_are_not_waited_for, checks.waits_for_its_own_writes),
    (hint_is_trusted, checks.walks_past_the_hint),
    (stops_anywhere, checks.can_stop_anywhere),
]


@pytest.mark.parametrize(
    ("mutant", "check"), MUTANTS, ids=[f"{mutant.__name__}: {check.__name__}" for mutant, check in MUTANTS]
)
def test_the_mutant_is_noticed(mutant: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch) -> None:
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.05)
    mutant(monkeypatch)
    with pytest.raises(NOTICED):
        check()
