"""The state machine of a producer that is not the coordinator (protocol §3.5-3.6). Pure.

It encodes its own pieces for an attempt that the coordinator opened, seals them with a manifest, and waits for the
outcome. It never commits; like anyone it may abort, and does so when it fails or when the outcome stays away too long:
nobody waits for it then, and the register says the same to all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deltarefit.errors import ProtocolError
from deltarefit.manifest import Intent, Outcome, ProducerManifest
from deltarefit.protocol.attempts import abort
from deltarefit.protocol.messages import (
    Action,
    AttemptRead,
    AwaitOutcome,
    Created,
    CreateManifest,
    CreateOutcome,
    Encode,
    Encoded,
    EncodeFailed,
    Event,
    ManifestRead,
    NotCreated,
    ReadAttempt,
    ReadManifest,
    allowed,
)


class Phase(enum.Enum):
    ENCODING = "encoding"
    SEALING = "sealing"
    WAITING = "waiting"
    FAILING = "failing"
    """Closing the attempt after an error or a deadline."""
    COMMITTED = "committed"
    ABORTED = "aborted"
    LOST = "lost"
    """Committed, but not with what this producer made: somebody else sealed in its place."""


FINAL = frozenset({Phase.COMMITTED, Phase.ABORTED, Phase.LOST})
Step = tuple["Producer", tuple[Action, ...]]


@dataclass(frozen=True)
class Producer:
    """Producer ``number`` in the attempt of ``intent``."""

    intent: Intent
    number: int
    nonce: str
    phase: Phase = Phase.ENCODING
    manifest: ProducerManifest | None = None
    outcome: Outcome | None = None
    reason: str = ""

    def start(self) -> Step:
        return self, (Encode(self.intent),)

    def on(self, event: Event) -> Step:
        """The next state and what to do. ``ProtocolError`` for an event that this phase does not allow."""
        return allowed(_HANDLERS, self.phase, event, "a producer")(self, event)

    def _encoded(self, event: Encoded) -> Step:
        manifest, intent = event.manifest, self.intent
        if (manifest.attempt, manifest.base, manifest.producer) != (intent.attempt, intent.base, self.number):
            raise ProtocolError(f"a manifest of producer {manifest.producer} came back for {self.number}")
        return replace(self, phase=Phase.SEALING, manifest=manifest), (CreateManifest(manifest),)

    def _sealed(self, event: Created) -> Step:
        return replace(self, phase=Phase.WAITING), (AwaitOutcome(self.intent.attempt),)

    def _reread(self, event: NotCreated) -> Step:
        return self, (ReadManifest(self.intent.attempt, self.number),)

    def _seal_answer(self, event: ManifestRead) -> Step:
        """The key was taken or the answer was lost: by content, for nobody else has reason to write there."""
        if event.manifest is None and self.manifest is not None:
            return self, (CreateManifest(self.manifest),)
        if event.manifest != self.manifest:
            return self._fail(EncodeFailed("somebody else sealed this attempt in its place"))
        return self._sealed(Created())

    def _decided(self, event: AttemptRead) -> Step:
        outcome = event.attempt.outcome
        if outcome is None:
            return replace(self, phase=Phase.WAITING), (AwaitOutcome(self.intent.attempt),)
        ended = replace(self, outcome=outcome, reason=self.reason or outcome.reason)
        if not event.attempt.committed:
            return replace(ended, phase=Phase.ABORTED), ()
        if self.manifest is None or self.manifest.content_hash() != outcome.manifests[self.number]:
            return replace(ended, phase=Phase.LOST, reason="it was committed with the manifest of somebody else"), ()
        return replace(ended, phase=Phase.COMMITTED), ()

    def _fail(self, event: EncodeFailed) -> Step:
        failing = replace(self, phase=Phase.FAILING, reason=f"producer {self.number}: {event.reason}"[:1000])
        return failing._abort()

    def _abort(self) -> Step:
        intent = self.intent
        return self, (CreateOutcome(abort(intent.run, intent.attempt, intent.base, self.nonce, self.reason)),)

    def _closed(self, event: Event) -> Step:
        """Ours or another's ABORT, or a COMMIT that came first: the register decides, so read it."""
        return self, (ReadAttempt(self.intent.attempt),)

    def _failed(self, event: AttemptRead) -> Step:
        return self._decided(event) if event.attempt.outcome else self._abort()


_HANDLERS: dict[tuple[Phase, type[Event]], Callable[[Producer, Any], Step]] = {
    (Phase.ENCODING, Encoded): Producer._encoded,
    (Phase.ENCODING, EncodeFailed): Producer._fail,
    (Phase.SEALING, Created): Producer._sealed,
    (Phase.SEALING, NotCreated): Producer._reread,
    (Phase.SEALING, ManifestRead): Producer._seal_answer,
    (Phase.SEALING, EncodeFailed): Producer._fail,
    (Phase.WAITING, AttemptRead): Producer._decided,
    (Phase.WAITING, EncodeFailed): Producer._fail,
    (Phase.FAILING, Created): Producer._closed,
    (Phase.FAILING, NotCreated): Producer._closed,
    (Phase.FAILING, AttemptRead): Producer._failed,
}
