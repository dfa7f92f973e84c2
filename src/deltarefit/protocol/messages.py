"""Actions and events of the two state machines, and the rule that both share (docs/protocol.md).

Pure: nothing here sleeps, reads, writes, or asks a clock. A machine is a frozen dataclass; ``on(event)`` returns the
next machine and the actions to carry out in order. A driver (publisher, receiver, simulator, model checker) carries
them out and feeds what came of them back as events. A crash loses the machine but never the truth: a new machine
starts from the header beside the weights and from the log.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import Anchor, Decision, Header, Intent, Outcome, PayloadRef, ProducerManifest
from deltarefit.records import Digest


@dataclass(frozen=True)
class Attempt:
    """What the log says of attempt ``number``; None where nothing is written yet. ``manifests`` are those of producers
    0, 1, ... up to the first that is missing."""

    number: int
    intent: Intent | None = None
    manifests: tuple[ProducerManifest, ...] = ()
    outcome: Outcome | None = None

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
    def payloads(self) -> tuple[PayloadRef, ...]:
        """All payloads, producer by producer."""
        return tuple(ref for manifest in self.manifests for ref in manifest.payloads)


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


def adds_up(attempt: Attempt) -> bool:
    """Everything is sealed and makes one version: what a COMMIT takes, and staging before it. A producer seals before
    anybody has held its part against the others', so a sealed attempt may still be wrong, and end in ABORT."""
    intent = attempt.intent
    if intent is None or not attempt.sealed:
        return False
    try:
        check_manifests(intent, attempt.manifests)
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


def new_digest(intent: Intent, manifests: tuple[ProducerManifest, ...]) -> Digest:
    """The digest of the version that ``manifests`` make. Raises ``IntegrityError`` unless what the producers own adds
    up to what follows from base and payloads: else a baseline was wrong, or an element has two owners or none."""
    digest = sum((manifest.part for manifest in manifests), Digest())
    follows = intent.base_digest + sum((manifest.shift for manifest in manifests), Digest())
    if intent.base and digest != follows:
        what = f"attempt {intent.attempt}: digests do not telescope: the parts are not the base with its changes"
        raise IntegrityError(what, expected=follows, found=digest)
    return digest


# ---------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class ReadAttempt:
    """Read all records of an attempt; answer ``AttemptRead``."""

    number: int


@dataclass(frozen=True)
class AwaitAttempt:
    """Wait until something new may be known of an attempt, then read it; answer ``AttemptRead``."""

    number: int


@dataclass(frozen=True)
class FindAnchor:
    """Look for the newest anchor of a committed version; answer ``AnchorFound`` or ``NoAnchor``."""


@dataclass(frozen=True)
class LoadAnchor:
    """Set every element from the anchor and sum up what the weights then hold; answer ``AnchorLoaded``."""

    anchor: Anchor


@dataclass(frozen=True)
class FinishSeed:
    """Put the seeded weights where users look."""


@dataclass(frozen=True)
class WriteHeader:
    """Make this state durable beside the weights, before the next action."""

    header: Header


@dataclass(frozen=True)
class Stage:
    """Fetch, check and keep all payloads, sum the live bits at their positions before and after; answer ``Staged``, or
    ``NotStaged`` if a payload is lost or damaged for good and an anchor beyond this version exists."""

    attempt: Attempt


@dataclass(frozen=True)
class DropStage:
    """Forget staged payloads."""


@dataclass(frozen=True)
class Pause:
    """Stop generation."""


@dataclass(frozen=True)
class Resume:
    """Let generation go on."""


@dataclass(frozen=True)
class Classify:
    """Sum the live bits at each payload's positions; answer ``Classified``."""

    attempt: Attempt


class Op(enum.Enum):
    """What guarded XOR does with one payload (protocol §3.3)."""

    APPLY = "apply"
    SKIP = "skip"
    SET = "set"


@dataclass(frozen=True)
class Write:
    """Write each payload as told, make the bytes durable, sum them again; answer ``Written`` or ``ValuesLost``."""

    attempt: Attempt
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class CreateIntent:
    """Create-once; answer ``Created`` or ``NotCreated``."""

    intent: Intent


@dataclass(frozen=True)
class Encode:
    """Bring the baseline to ``intent.base``, encode own pieces against it and upload; answer ``Encoded`` or
    ``EncodeFailed``."""

    intent: Intent


@dataclass(frozen=True)
class ReadManifest:
    """Read what stands in the place of one producer's manifest; answer ``ManifestRead``."""

    number: int
    producer: int


@dataclass(frozen=True)
class Gather:
    """Wait until all producers have sealed; answer ``Gathered``, ``EncodeFailed`` if one stays away beyond its
    deadline, or ``AttemptRead`` if the attempt is decided meanwhile."""

    intent: Intent


@dataclass(frozen=True)
class AwaitOutcome:
    """Wait for the outcome; answer ``AttemptRead``, or ``EncodeFailed`` if it stays away beyond its deadline."""

    number: int


@dataclass(frozen=True)
class CreateManifest:
    """Create-once; answer ``Created`` or ``NotCreated``."""

    manifest: ProducerManifest


@dataclass(frozen=True)
class CreateOutcome:
    """Create-once; answer ``Created`` or ``NotCreated``."""

    outcome: Outcome


Action = (
    ReadAttempt | AwaitAttempt | FindAnchor | LoadAnchor | FinishSeed | WriteHeader | Stage | DropStage | Pause
    | Resume | Classify | Write | CreateIntent | Encode | CreateManifest | ReadManifest
    | Gather | AwaitOutcome | CreateOutcome
)  # fmt: skip

# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class HeaderRead:
    """The driver started and read the header beside the weights (None: there is none)."""

    header: Header | None


@dataclass(frozen=True)
class AttemptRead:
    """The records of one attempt, read and checked."""

    attempt: Attempt


@dataclass(frozen=True)
class ManifestRead:
    """One producer's manifest as it stands in the log; None if there is none."""

    manifest: ProducerManifest | None


@dataclass(frozen=True)
class AnchorFound:
    """An anchor of a committed version, with the digest that its COMMIT states."""

    anchor: Anchor
    committed_digest: Digest


@dataclass(frozen=True)
class NoAnchor:
    """The log has no usable anchor yet."""


@dataclass(frozen=True)
class AnchorLoaded:
    """``digest`` is of the weights as they are after the anchor was written, read back."""

    digest: Digest


@dataclass(frozen=True)
class Sums:
    """Digest sums at one payload's positions: live now, and as they will be (or are) after it."""

    pre: Digest
    post: Digest


@dataclass(frozen=True)
class Staged:
    """All payloads are in the spool; one ``Sums`` each, computed from live bits."""

    sums: tuple[Sums, ...]


@dataclass(frozen=True)
class NotStaged:
    """A payload is lost or damaged for good; an anchor leads past it."""


@dataclass(frozen=True)
class Classified:
    """Live sums per payload."""

    live: tuple[Digest, ...]


@dataclass(frozen=True)
class Written:
    """Live sums per payload, read back after writing."""

    live: tuple[Digest, ...]


@dataclass(frozen=True)
class ValuesLost:
    """A torn payload cannot be set: its absolute values are gone from the spool."""


@dataclass(frozen=True)
class Created:
    """The create-once object is ours."""


@dataclass(frozen=True)
class NotCreated:
    """The key was taken or the answer was lost: read back and compare nonces (protocol §3.5 rule 5)."""


@dataclass(frozen=True)
class Encoded:
    """All payloads of this producer are in the store."""

    manifest: ProducerManifest


@dataclass(frozen=True)
class Gathered:
    """All manifests, in order, each sealed in the log, with every payload in the store at its full length. ``anchor``
    is the newest known."""

    manifests: tuple[ProducerManifest, ...]
    anchor: int


@dataclass(frozen=True)
class EncodeFailed:
    """Encoding, uploading or sealing ended with an error, here or at another producer, or a deadline passed."""

    reason: str


Event = (
    HeaderRead | AttemptRead | ManifestRead | AnchorFound | NoAnchor | AnchorLoaded | Staged | NotStaged | Classified
    | Written | ValuesLost | Created | NotCreated | Encoded | Gathered | EncodeFailed
)  # fmt: skip


H = TypeVar("H")
P = TypeVar("P", bound=enum.Enum)


def allowed(handlers: Mapping[tuple[P, type[Event]], H], phase: P, event: Event, who: str) -> H:
    """What a machine does about an event; ``ProtocolError`` if its phase does not allow it."""
    handler = handlers.get((phase, type(event)))
    if handler is None:
        raise ProtocolError(f"{who} in phase {phase.value} met {type(event).__name__}")
    return handler
