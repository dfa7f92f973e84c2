"""What the log says of one attempt, and the rule that makes it a version (protocol §3.5). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deltarefit.errors import IntegrityError
from deltarefit.manifest import Batch, Decision, Intent, Mode, Outcome, PayloadRef, ProducerManifest
from deltarefit.records import Digest


@dataclass(frozen=True)
class Attempt:
    """What the log says of attempt ``number``; None where nothing is written yet. ``manifests`` are those of producers
    0, 1, ... up to the first that is missing; ``batches``, in mode stream, what each producer has announced, in order.
    """

    number: int
    intent: Intent | None = None
    manifests: tuple[ProducerManifest, ...] = ()
    outcome: Outcome | None = None
    batches: tuple[tuple[Batch, ...], ...] = ()

    @property
    def streams(self) -> bool:
        """Receivers may have written some of it, whatever became of it."""
        return self.intent is not None and self.intent.mode is Mode.STREAM

    @property
    def committed(self) -> bool:
        return self.outcome is not None and self.outcome.decision is Decision.COMMIT

    @property
    def open(self) -> bool:
        return self.intent is not None and self.outcome is None

    @property
    def sealed(self) -> bool:
        """Every producer has said what it made."""
        return self.intent is not None and len(self.manifests) == self.intent.producers

    @property
    def pruned(self) -> bool:
        """Committed, and what led there is gone: only an anchor leads past it."""
        return self.committed and not self.sealed

    @property
    def payloads(self) -> tuple[PayloadRef, ...]:
        """All payloads, producer by producer."""
        return tuple(ref for manifest in self.manifests for ref in manifest.payloads)

    @property
    def announced(self) -> tuple[PayloadRef, ...]:
        """What receivers may write now: of a stream that is not committed what its batches list, and never what only a
        manifest does, for nobody could tell any more that nothing is added to it."""
        if self.streams and not self.committed:
            return tuple(ref for listed in self.batches for ref in payloads_of(listed))
        return self.payloads

    @property
    def ended(self) -> bool:
        """Nothing can be announced any more."""
        return len(self.batches) == (self.intent.producers if self.intent else 0) and all(map(ends, self.batches))


def payloads_of(batches: tuple[Batch, ...]) -> tuple[PayloadRef, ...]:
    """What one producer has announced, in order."""
    return tuple(ref for batch in batches for ref in batch.payloads)


def ends(batches: tuple[Batch, ...]) -> bool:
    """Whether a producer's list is at its end."""
    return bool(batches) and batches[-1].end


def check_attempt(attempt: Attempt) -> None:
    """The records of a committed attempt must belong together: base, manifest hashes, telescoping digest (protocol
    §3.5). Raises ``IntegrityError``.

    An attempt that is open or aborted passes, whatever its producers sealed: nobody goes by it, and those who close it
    or pass it must be able to.
    """
    intent, outcome = attempt.intent, attempt.outcome
    where = f"attempt {attempt.number}"
    if intent is None:
        if attempt.manifests or outcome:
            raise IntegrityError(f"{where} has an outcome or manifest but no intent")
        return
    if not attempt.committed or outcome is None:
        return
    check_manifests(intent, attempt.manifests)
    if outcome.base != intent.base:
        raise IntegrityError(f"{where}: outcome base", expected=intent.base, found=outcome.base)
    if not attempt.sealed:
        found = f"{len(attempt.manifests)} of {intent.producers}"
        raise IntegrityError(f"{where} is committed but a manifest is missing", found=found)
    hashes = tuple(manifest.content_hash() for manifest in attempt.manifests)
    if outcome.manifests != hashes:
        raise IntegrityError(f"{where}: manifest hash", expected=outcome.manifests, found=hashes)
    if outcome.digest != (digest := new_digest(intent, attempt.manifests)):
        raise IntegrityError(f"{where}: digests do not telescope", expected=outcome.digest, found=digest)


def abort(run: str, number: int, base: int, nonce: str, reason: str) -> Outcome:
    """What closes an attempt; anyone may."""
    return Outcome(run, number, Decision.ABORT, base, Digest(), (), 0, nonce, reason[:1000])


def adds_up(attempt: Attempt) -> bool:
    """Everything is sealed and makes one version: what a COMMIT takes, and staging before it. A producer seals before
    anybody has held its part against the others', so a sealed attempt may still be wrong, and end in ABORT."""
    intent = attempt.intent
    if intent is None or not attempt.sealed:
        return False
    try:
        check_manifests(intent, attempt.manifests)
        check_lists(intent, attempt.manifests, attempt.batches)
        new_digest(intent, attempt.manifests)
    except IntegrityError:
        return False
    return True


def check_manifests(intent: Intent, manifests: tuple[ProducerManifest, ...]) -> None:
    """Manifests are of this attempt, stand in order, and agree on base and step. Raises ``IntegrityError``."""
    where = f"attempt {intent.attempt}"
    for producer, manifest in enumerate(manifests):
        if (manifest.run, manifest.attempt) != (intent.run, intent.attempt):
            found = f"attempt {manifest.attempt} of run {manifest.run}"
            raise IntegrityError(f"{where}: manifest of another attempt", expected=f"run {intent.run}", found=found)
        if manifest.base != intent.base:
            raise IntegrityError(f"{where}: manifest base", expected=intent.base, found=manifest.base)
        if manifest.producer != producer or producer >= intent.producers:
            raise IntegrityError(f"{where}: manifest of producer", expected=producer, found=manifest.producer)
        if manifest.step != manifests[0].step:
            what = f"{where}: producers publish different steps"
            raise IntegrityError(what, expected=f"{manifests[0].step} (0)", found=f"{manifest.step} ({producer})")


def check_lists(
    intent: Intent, manifests: tuple[ProducerManifest, ...], batches: tuple[tuple[Batch, ...], ...]
) -> None:
    """In mode stream each manifest holds just what its producer announced, for that is what receivers have written.
    Raises ``IntegrityError``."""
    if intent.mode is not Mode.STREAM:
        return
    for manifest, listed in zip(manifests, (*batches, *[()] * len(manifests)), strict=False):
        if not ends(listed) or payloads_of(listed) != manifest.payloads:
            what = f"attempt {intent.attempt}: producer {manifest.producer} has announced other payloads than it sealed"
            raise IntegrityError(what, expected=len(manifest.payloads), found=len(payloads_of(listed)))


def new_digest(intent: Intent, manifests: tuple[ProducerManifest, ...]) -> Digest:
    """The digest of the version that ``manifests`` make. Raises ``IntegrityError`` unless what the producers own adds
    up to what follows from base and payloads: else a baseline was wrong, or an element has two owners or none."""
    digest = sum((manifest.part for manifest in manifests), Digest())
    follows = intent.base_digest + sum((manifest.shift for manifest in manifests), Digest())
    if intent.base and digest != follows:
        what = f"attempt {intent.attempt}: digests do not telescope: the parts are not the base with its changes"
        raise IntegrityError(what, expected=follows, found=digest)
    return digest
