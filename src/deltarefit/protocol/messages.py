"""Actions and events of the two state machines, and the rule that both share (docs/protocol.md).

Pure: nothing here sleeps, reads, writes, or asks a clock. A machine is a frozen dataclass; ``on(event)`` returns the
next machine and the actions to carry out in order. A driver (publisher, receiver, simulator, model checker) carries
them out and feeds what came of them back as events. A crash loses the machine but never the truth: a new machine
starts from the header beside the weights and from the log.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deltarefit.errors import IntegrityError
from deltarefit.manifest import Anchor, Decision, Header, Intent, Outcome, ProducerManifest
from deltarefit.records import Digest


@dataclass(frozen=True)
class Attempt:
    """What the log says of attempt ``number``; None where nothing is written yet."""

    number: int
    intent: Intent | None = None
    manifest: ProducerManifest | None = None
    outcome: Outcome | None = None

    @property
    def committed(self) -> bool:
        return self.outcome is not None and self.outcome.decision is Decision.COMMIT

    @property
    def open(self) -> bool:
        return self.intent is not None and self.outcome is None


def check_attempt(attempt: Attempt) -> None:
    """The records of one attempt must belong together: base, manifest hash, telescoping digest (protocol §3.5).

    Raises ``IntegrityError``. An attempt that is merely unfinished passes.
    """
    intent, manifest, outcome = attempt.intent, attempt.manifest, attempt.outcome
    where = f"attempt {attempt.number}"
    if intent is None:
        if manifest or outcome:
            raise IntegrityError(f"{where} has an outcome or manifest but no intent")
        return
    if manifest and (manifest.attempt, manifest.base) != (intent.attempt, intent.base):
        raise IntegrityError(f"{where}: manifest base", expected=intent.base, found=manifest.base)
    if not attempt.committed or outcome is None:
        return
    if outcome.base != intent.base:
        raise IntegrityError(f"{where}: outcome base", expected=intent.base, found=outcome.base)
    if manifest is None:
        raise IntegrityError(f"{where} is committed but its manifest is missing")
    if outcome.manifests != (manifest.content_hash(),):
        raise IntegrityError(f"{where}: manifest hash", expected=outcome.manifests, found=manifest.content_hash())
    if intent.base and outcome.digest != intent.base_digest + manifest.shift:
        found = intent.base_digest + manifest.shift
        raise IntegrityError(f"{where}: digests do not telescope", expected=outcome.digest, found=found)


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
    """Bring the baseline to ``intent.base``, encode against it and upload; answer ``Encoded`` or ``EncodeFailed``."""

    intent: Intent


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
    | Resume | Classify | Write | CreateIntent | Encode | CreateManifest | CreateOutcome
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
    """All payloads are in the store. ``digest`` is the new version's; ``anchor`` the newest anchor known."""

    manifest: ProducerManifest
    digest: Digest
    anchor: int


@dataclass(frozen=True)
class EncodeFailed:
    """Encoding or uploading ended with an error."""

    reason: str


Event = (
    HeaderRead | AttemptRead | AnchorFound | NoAnchor | AnchorLoaded | Staged | NotStaged | Classified | Written
    | ValuesLost | Created | NotCreated | Encoded | EncodeFailed
)  # fmt: skip
