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

from deltarefit.errors import ProtocolError
from deltarefit.manifest import Anchor, Batch, Header, Held, Intent, Outcome, PayloadRef, ProducerManifest
from deltarefit.protocol.attempts import Attempt
from deltarefit.records import Digest

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
    """Fetch, check and keep payloads ``refs``, sum the live bits at their positions before and after; answer
    ``Staged``, or ``NotStaged`` if that cannot be done and an anchor beyond this version exists, or nothing is
    committed."""

    attempt: Attempt
    refs: tuple[PayloadRef, ...]


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
    refs: tuple[PayloadRef, ...]


@dataclass(frozen=True)
class Prove:
    """Sum up all live bits; answer ``Proven``."""


@dataclass(frozen=True)
class CastVote:
    """Tell the coordinator what is held of an attempt. Nobody waits for it to arrive."""

    attempt: Attempt
    held: Held


class Op(enum.Enum):
    """What guarded XOR does with one payload (protocol §3.3)."""

    APPLY = "apply"
    SKIP = "skip"
    SET = "set"


@dataclass(frozen=True)
class Write:
    """Write each payload as told, make the bytes durable, sum them again; answer ``Written`` or ``ValuesLost``."""

    attempt: Attempt
    refs: tuple[PayloadRef, ...]
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class EndLists:
    """See to it that nothing more is announced in aborted attempts ``numbers``; answer ``Created``."""

    numbers: tuple[int, ...]


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
class Poll:
    """Wait for the votes on ``manifests`` (hashes) that the policy asks for; answer ``Polled``, ``EncodeFailed`` if
    there are too few, or ``AttemptRead`` if the attempt is decided meanwhile."""

    intent: Intent
    manifests: tuple[str, ...]


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
    | Resume | Classify | Prove | CastVote | Write | EndLists | CreateIntent | Encode | CreateManifest | ReadManifest
    | Gather | Poll | AwaitOutcome | CreateOutcome
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
    """The payloads are in the spool; one ``Sums`` each, computed from live bits."""

    sums: tuple[Sums, ...]


@dataclass(frozen=True)
class NotStaged:
    """A payload is lost or damaged for good, or there is no room for it: an anchor leads past it, or the attempt is not
    committed."""


@dataclass(frozen=True)
class Classified:
    """Live sums per payload, and whether its absolute values are kept: only then may it be applied or set."""

    live: tuple[Digest, ...]
    kept: tuple[bool, ...]


@dataclass(frozen=True)
class Proven:
    """Digest of all live bits."""

    digest: Digest


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
    is the newest known; ``batches``, in mode stream, what each producer has announced."""

    manifests: tuple[ProducerManifest, ...]
    anchor: int
    batches: tuple[tuple[Batch, ...], ...] = ()


@dataclass(frozen=True)
class Polled:
    """Enough receivers hold what is to be committed; ``evicted`` are others that were there."""

    members: tuple[str, ...]
    evicted: tuple[str, ...]


@dataclass(frozen=True)
class EncodeFailed:
    """Encoding, uploading or sealing ended with an error, here or at another producer, or a deadline passed."""

    reason: str


Event = (
    HeaderRead | AttemptRead | ManifestRead | AnchorFound | NoAnchor | AnchorLoaded | Staged | NotStaged | Classified
    | Proven | Written | ValuesLost | Created | NotCreated | Encoded | Gathered | Polled | EncodeFailed
)  # fmt: skip


H = TypeVar("H")
P = TypeVar("P", bound=enum.Enum)


def allowed(handlers: Mapping[tuple[P, type[Event]], H], phase: P, event: Event, who: str) -> H:
    """What a machine does about an event; ``ProtocolError`` if its phase does not allow it."""
    handler = handlers.get((phase, type(event)))
    if handler is None:
        raise ProtocolError(f"{who} in phase {phase.value} met {type(event).__name__}")
    return handler
