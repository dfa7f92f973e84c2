"""The coordinator's state machine (protocol §3.5-3.6). Pure. It is producer 0 as well; the others are ``producer``.

It walks the log to its tail, closes an open attempt it finds there with ABORT, sees to it that nothing more is
announced in aborted streams, opens the next attempt, has its own pieces encoded, gathers the manifests of all
producers, waits for the votes that the policy asks for, and decides by one create-once outcome. Every create whose
answer is lost is read back and told apart by nonce.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import Decision, Intent, Mode, Outcome, ProducerManifest
from deltarefit.protocol.attempts import Attempt, abort, check_lists, check_manifests, new_digest
from deltarefit.protocol.messages import (
    Action,
    AttemptRead,
    Created,
    CreateIntent,
    CreateManifest,
    CreateOutcome,
    Encode,
    Encoded,
    EncodeFailed,
    EndLists,
    Event,
    Gather,
    Gathered,
    NotCreated,
    Poll,
    Polled,
    ReadAttempt,
    allowed,
)
from deltarefit.records import Digest


class Phase(enum.Enum):
    TAIL = "tail"
    ABORTING = "aborting"
    """Closing somebody's open attempt."""
    ENDING = "ending"
    """Ending the lists of aborted streams: what receivers may have written must be known for good before it is
    overwritten (the union rule, protocol §3.2)."""
    OPENING = "opening"
    ENCODING = "encoding"
    SEALING = "sealing"
    GATHERING = "gathering"
    """Waiting for the other producers."""
    POLLING = "polling"
    """Waiting for the receivers."""
    COMMITTING = "committing"
    FAILING = "failing"
    """Closing our own attempt after an error."""
    COMMITTED = "committed"
    LOST = "lost"
    """Somebody else decided our attempt, or opened it before us."""
    FAILED = "failed"


T = TypeVar("T")
FINAL = frozenset({Phase.COMMITTED, Phase.LOST, Phase.FAILED})
Step = tuple["Coordinator", tuple[Action, ...]]


@dataclass(frozen=True)
class Coordinator:
    """One publish by ``producers`` producers in mode ``mode``; ``polls``: receivers are asked before COMMIT. Starts by
    reading attempt ``number``; ``base`` and ``digest`` are of the last COMMIT seen, ``loose`` are streams that were
    aborted since."""

    run: str
    nonce: str
    producers: int = 1
    mode: Mode = Mode.STAGE
    polls: bool = False
    loose: tuple[int, ...] = ()
    phase: Phase = Phase.TAIL
    number: int = 1
    base: int = 0
    digest: Digest = Digest()
    intent: Intent | None = None
    manifest: ProducerManifest | None = None
    outcome: Outcome | None = None
    reason: str = ""

    def start(self) -> Step:
        return self, (ReadAttempt(self.number),)

    def on(self, event: Event) -> Step:
        """The next state and what to do. ``ProtocolError`` for an event that this phase does not allow."""
        return allowed(_HANDLERS, self.phase, event, "a coordinator")(self, event)

    # ------------------------------------------------------------------------------------ finding the tail

    def _tail(self, event: AttemptRead) -> Step:
        attempt = event.attempt
        if attempt.intent is None:
            return self._end_lists(attempt.number)
        if attempt.intent.base != self.base:
            what = f"history is not linear at attempt {attempt.number}"
            raise IntegrityError(what, expected=f"base {self.base}", found=f"base {attempt.intent.base}")
        if attempt.open:
            abort = self._abort_of(attempt.number, attempt.intent.base, "closed by the next opener")
            return replace(self, phase=Phase.ABORTING, number=attempt.number), (CreateOutcome(abort),)
        return self._past(attempt)

    def _past(self, attempt: Attempt) -> Step:
        passed = replace(self, phase=Phase.TAIL, number=attempt.number + 1)
        if attempt.committed and attempt.outcome is not None:
            passed = replace(passed, base=attempt.number, digest=attempt.outcome.digest, loose=())
        elif attempt.streams:
            passed = replace(passed, loose=(*self.loose, attempt.number))
        return passed, (ReadAttempt(passed.number),)

    def _aborted(self, event: Event) -> Step:
        """Ours, another's ABORT, or a COMMIT that came first: the register decides, so read it."""
        return replace(self, phase=Phase.TAIL), (ReadAttempt(self.number),)

    # ------------------------------------------------------------------------------------ opening

    def _end_lists(self, number: int) -> Step:
        if not self.loose:
            return self._open(number)
        return replace(self, phase=Phase.ENDING, number=number), (EndLists(self.loose),)

    def _ended(self, event: Created) -> Step:
        return self._open(self.number)

    def _open(self, number: int) -> Step:
        mode = self.mode if self.base else Mode.STAGE  # a first version is an anchor: there is nothing to stream
        intent = Intent(self.run, number, self.base, self.digest, mode, self.nonce, self.producers)
        return replace(self, phase=Phase.OPENING, number=number, intent=intent), (CreateIntent(intent),)

    def _opened(self, event: Created) -> Step:
        return replace(self, phase=Phase.ENCODING), (Encode(self._intent()),)

    def _reread(self, event: NotCreated) -> Step:
        return self, (ReadAttempt(self.number),)

    def _open_answer(self, event: AttemptRead) -> Step:
        found = event.attempt.intent
        if found is None:
            return self, (CreateIntent(self._intent()),)
        if found.nonce != self.nonce:
            return self._stop(Phase.LOST, f"attempt {self.number} was opened by another publisher")
        return self._opened(Created())

    # ------------------------------------------------------------------------------------ sealing

    def _encoded(self, event: Encoded) -> Step:
        intent, manifest = self._intent(), event.manifest
        if (manifest.attempt, manifest.base, manifest.producer) != (intent.attempt, intent.base, 0):
            raise ProtocolError(f"a manifest of attempt {manifest.attempt} came back for {intent.attempt}")
        return replace(self, phase=Phase.SEALING, manifest=manifest), (CreateManifest(manifest),)

    def _sealed(self, event: Created) -> Step:
        return replace(self, phase=Phase.GATHERING)._wait()

    def _seal_answer(self, event: AttemptRead) -> Step:
        if event.attempt.outcome is not None:
            return self._decided(event)
        if not event.attempt.manifests:
            return self, (CreateManifest(self._manifest()),)
        if event.attempt.manifests[0] != self.manifest:
            return self._fail(EncodeFailed("another producer sealed this attempt with other payloads"))
        return self._sealed(Created())

    def _gathered(self, event: Gathered) -> Step:
        """Rule (4) of protocol §3.5: COMMIT only what all producers sealed, and only if it adds up."""
        intent, manifests = self._intent(), event.manifests
        if len(manifests) != intent.producers or manifests[0] != self.manifest:
            raise ProtocolError(f"{len(manifests)} manifests were gathered for {intent.producers} producers")
        try:
            check_manifests(intent, manifests)
            check_lists(intent, manifests, event.batches)
            digest = new_digest(intent, manifests)
        except IntegrityError as error:
            return self._fail(EncodeFailed(str(error)))
        hashes = tuple(manifest.content_hash() for manifest in manifests)
        commit = Decision.COMMIT
        outcome = Outcome(self.run, self.number, commit, self.base, digest, hashes, event.anchor, self.nonce)
        ready = replace(self, phase=Phase.POLLING, outcome=outcome)
        return ready._wait() if self.polls and self.base else ready._commit()

    def _polled(self, event: Polled) -> Step:
        return replace(self, outcome=replace(self._outcome(), members=event.members, evicted=event.evicted))._commit()

    def _commit(self) -> Step:
        return replace(self, phase=Phase.COMMITTING), (CreateOutcome(self._outcome()),)

    # ------------------------------------------------------------------------------------ deciding

    def _committed(self, event: Created) -> Step:
        return replace(self, phase=Phase.COMMITTED), ()

    def _decided(self, event: AttemptRead) -> Step:
        found = event.attempt.outcome
        if found is None:
            return self, (CreateOutcome(self._outcome()),)
        if found.nonce != self.nonce:
            return self._stop(Phase.LOST, found.reason or f"attempt {self.number} was decided by another publisher")
        return replace(self, phase=Phase.COMMITTED if event.attempt.committed else Phase.FAILED), ()

    def _taken_over(self, event: AttemptRead) -> Step:
        """Read while gathering or polling: undecided means that the wait goes on."""
        return self._decided(event) if event.attempt.outcome else self._wait()

    def _wait(self) -> Step:
        if self.phase is Phase.GATHERING:
            return self, (Gather(self._intent()),)
        return self, (Poll(self._intent(), self._outcome().manifests),)

    def _fail(self, event: EncodeFailed) -> Step:
        abort = self._abort_of(self.number, self.base, event.reason)
        failing = replace(self, phase=Phase.FAILING, outcome=abort, reason=event.reason)
        return failing, (CreateOutcome(abort),)

    def _failed(self, event: Event) -> Step:
        """Whether our ABORT was first does not matter: any outcome closes the attempt, and it is not our COMMIT."""
        return self._stop(Phase.FAILED, self.reason)

    # ------------------------------------------------------------------------------------ parts

    def _stop(self, phase: Phase, reason: str) -> Step:
        return replace(self, phase=phase, reason=reason), ()

    def _abort_of(self, number: int, base: int, reason: str) -> Outcome:
        return abort(self.run, number, base, self.nonce, reason)

    def _intent(self) -> Intent:
        return _present(self.intent, "intent")

    def _manifest(self) -> ProducerManifest:
        return _present(self.manifest, "manifest")

    def _outcome(self) -> Outcome:
        return _present(self.outcome, "outcome")


def _present(value: T | None, name: str) -> T:
    if value is None:
        raise ProtocolError(f"the coordinator has no {name} yet")
    return value


_HANDLERS: dict[tuple[Phase, type[Event]], Callable[[Coordinator, Any], Step]] = {
    (Phase.TAIL, AttemptRead): Coordinator._tail,
    (Phase.ABORTING, Created): Coordinator._aborted,
    (Phase.ABORTING, NotCreated): Coordinator._aborted,
    (Phase.ENDING, Created): Coordinator._ended,
    (Phase.OPENING, Created): Coordinator._opened,
    (Phase.OPENING, NotCreated): Coordinator._reread,
    (Phase.OPENING, AttemptRead): Coordinator._open_answer,
    (Phase.ENCODING, Encoded): Coordinator._encoded,
    (Phase.ENCODING, EncodeFailed): Coordinator._fail,
    (Phase.SEALING, Created): Coordinator._sealed,
    (Phase.SEALING, NotCreated): Coordinator._reread,
    (Phase.SEALING, AttemptRead): Coordinator._seal_answer,
    (Phase.SEALING, EncodeFailed): Coordinator._fail,
    (Phase.GATHERING, Gathered): Coordinator._gathered,
    (Phase.GATHERING, EncodeFailed): Coordinator._fail,
    (Phase.GATHERING, AttemptRead): Coordinator._taken_over,
    (Phase.POLLING, Polled): Coordinator._polled,
    (Phase.POLLING, EncodeFailed): Coordinator._fail,
    (Phase.POLLING, AttemptRead): Coordinator._taken_over,
    (Phase.COMMITTING, Created): Coordinator._committed,
    (Phase.COMMITTING, NotCreated): Coordinator._reread,
    (Phase.COMMITTING, AttemptRead): Coordinator._decided,
    (Phase.FAILING, Created): Coordinator._failed,
    (Phase.FAILING, NotCreated): Coordinator._failed,
}
