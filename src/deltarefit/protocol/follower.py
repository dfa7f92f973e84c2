"""The receiver's state machine, mode stage, guarded XOR included (protocol §3.3, §3.6). Pure.

The source baseline runs the same machine: it is receiver number zero.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import Anchor, Header, PayloadRef, State
from deltarefit.protocol.messages import (
    Action,
    AnchorFound,
    AnchorLoaded,
    Attempt,
    AttemptRead,
    AwaitAttempt,
    Classified,
    Classify,
    DropStage,
    Event,
    FindAnchor,
    FinishSeed,
    HeaderRead,
    LoadAnchor,
    NoAnchor,
    NotStaged,
    Op,
    Pause,
    ReadAttempt,
    Resume,
    Stage,
    Staged,
    ValuesLost,
    Write,
    WriteHeader,
    Written,
    adds_up,
    allowed,
)
from deltarefit.records import Digest


class Phase(enum.Enum):
    BOOT = "boot"
    LOST = "lost"
    """No version: looking for an anchor."""
    SEEDING = "seeding"
    CLEAN = "clean"
    STAGING = "staging"
    STAGED = "staged"
    REDO = "redo"
    """DIRTY at start: waiting for the records of the target."""
    CLASSIFYING = "classifying"
    WRITING = "writing"


Step = tuple["Follower", tuple[Action, ...]]


@dataclass(frozen=True)
class Follower:
    """One copy of the weights on its way along the log.

    ``version`` and ``digest`` are what the header calls CLEAN; ``attempt`` is being staged or written.
    ``sets`` is true while the present write contains absolute values (it is not tried a third way).
    """

    run: str
    catalog: str
    incarnation: str
    phase: Phase = Phase.BOOT
    version: int = 0
    digest: Digest = Digest()
    attempt: Attempt | None = None
    anchor: Anchor | None = None
    sets: bool = False

    def on(self, event: Event) -> Step:
        """The next state and what to do. ``ProtocolError`` for an event that this phase does not allow."""
        return allowed(_HANDLERS, self.phase, event, "a receiver")(self, event)

    # ------------------------------------------------------------------------------------ start

    def _boot(self, event: HeaderRead) -> Step:
        header = event.header
        if header is None or header.run != self.run or header.catalog != self.catalog:
            return self._lost()
        if header.state is State.UNKNOWN:
            return self._lost()
        known = replace(self, version=header.version, digest=header.digest)
        if header.state is State.DIRTY:
            return replace(known, phase=Phase.REDO), (Pause(), ReadAttempt(header.target))
        after, actions = known._clean()
        return after, (Resume(), DropStage(), *actions)  # the last agent may have died between CLEAN and its own

    def _lost(self) -> Step:
        """The bits are of no known version; the late-joiner path is the way back (protocol §3.7)."""
        lost = replace(self, phase=Phase.LOST, version=0, digest=Digest(), attempt=None, sets=False)
        return lost, (Pause(), WriteHeader(lost._header(State.UNKNOWN)), DropStage(), FindAnchor())

    def _no_anchor(self, event: NoAnchor) -> Step:
        return self, (AwaitAttempt(1), FindAnchor())

    def _seed(self, event: AnchorFound) -> Step:
        anchor = event.anchor
        if anchor.digest != event.committed_digest:
            what = f"anchor {anchor.version} does not have the digest of its version"
            raise IntegrityError(what, expected=event.committed_digest, found=anchor.digest)
        return replace(self, phase=Phase.SEEDING, anchor=anchor), (LoadAnchor(anchor),)

    def _seeded(self, event: AnchorLoaded) -> Step:
        anchor = self.anchor
        if anchor is None or event.digest != anchor.digest:
            expected = anchor.digest if anchor else None
            raise IntegrityError("seeded weights are wrong", expected=expected, found=event.digest)
        clean = replace(self, version=anchor.version, digest=anchor.digest, anchor=None)
        after, actions = clean._clean()
        return after, (FinishSeed(), WriteHeader(clean._header(State.CLEAN)), Resume(), *actions)

    # ------------------------------------------------------------------------------------ following

    def _clean(self) -> Step:
        return replace(self, phase=Phase.CLEAN, attempt=None, sets=False), (ReadAttempt(self.version + 1),)

    def _seen(self, event: AttemptRead) -> Step:
        attempt = event.attempt
        if attempt.number <= self.version:
            return self, ()
        if not (attempt.outcome or adds_up(attempt)):
            return self, (AwaitAttempt(attempt.number),)
        if attempt.outcome and not attempt.committed:
            return self, (ReadAttempt(attempt.number + 1),)
        return self._stage(attempt)

    def _stage(self, attempt: Attempt) -> Step:
        """Only a delta against exactly our bits is staged; another base means that our bits are not of the log."""
        if not self._is_base_of(attempt):
            return self._lost()
        return replace(self, phase=Phase.STAGING, attempt=attempt), (Stage(attempt),)

    def _staged(self, event: Staged) -> Step:
        refs = self._manifest_refs()
        if any(sums.pre != ref.pre for sums, ref in zip(event.sums, refs, strict=True)):
            return self._lost()
        for sums, ref in zip(event.sums, refs, strict=True):
            if sums.post != ref.post:
                what = f"payload {ref.sha256[:12]} does not lead where its manifest says"
                raise IntegrityError(what, expected=ref.post, found=sums.post)
        staged = replace(self, phase=Phase.STAGED)
        if self._attempt().outcome is None:  # it may have been decided meanwhile
            return staged, (ReadAttempt(self._attempt().number),)
        return staged._decided(self._attempt())

    def _not_staged(self, event: NotStaged) -> Step:
        return self._lost()

    def _outcome(self, event: AttemptRead) -> Step:
        attempt = event.attempt
        if attempt.number != self._attempt().number or attempt.manifests != self._attempt().manifests:
            raise IntegrityError(f"attempt {self._attempt().number} changed its manifest while it was staged")
        return replace(self, attempt=attempt)._decided(attempt)

    def _decided(self, attempt: Attempt) -> Step:
        if attempt.outcome is None:
            return self, (AwaitAttempt(attempt.number),)
        if not attempt.committed:
            clean = replace(self, phase=Phase.CLEAN, attempt=None)
            return clean, (DropStage(), ReadAttempt(attempt.number + 1))
        ops = (Op.APPLY,) * len(self._manifest_refs())
        dirty = WriteHeader(self._header(State.DIRTY, attempt.number))
        return replace(self, phase=Phase.WRITING), (Pause(), dirty, Write(attempt, ops))

    # ------------------------------------------------------------------------------------ writing

    def _redo(self, event: AttemptRead) -> Step:
        """DIRTY at start. In mode stage nothing is written before COMMIT, so the target must be committed."""
        attempt = event.attempt
        if not attempt.committed:
            raise IntegrityError(f"weights are being written to version {attempt.number}, which is not committed")
        if not self._is_base_of(attempt):
            return self._lost()
        return replace(self, phase=Phase.CLASSIFYING, attempt=attempt), (Classify(attempt),)

    def _classified(self, event: Classified) -> Step:
        """Guarded XOR: untouched payloads are applied, finished ones skipped, torn ones set."""
        ops = tuple(_op(live, ref.pre, ref.post) for live, ref in zip(event.live, self._manifest_refs(), strict=True))
        writing = replace(self, phase=Phase.WRITING, sets=Op.SET in ops)
        return writing, (Write(self._attempt(), ops),)

    def _written(self, event: Written) -> Step:
        refs = self._manifest_refs()
        if all(live == ref.post for live, ref in zip(event.live, refs, strict=True)):
            return self._committed()
        if self.sets:
            return self._lost()
        ops = tuple(_op(live, ref.pre, ref.post) for live, ref in zip(event.live, refs, strict=True))
        return replace(self, sets=True), (Write(self._attempt(), ops),)

    def _committed(self) -> Step:
        outcome = self._attempt().outcome
        if outcome is None:
            raise ProtocolError(f"attempt {self._attempt().number} was written without an outcome")
        done = replace(self, version=outcome.attempt, digest=outcome.digest)
        after, actions = done._clean()
        return after, (WriteHeader(done._header(State.CLEAN)), DropStage(), Resume(), *actions)

    def _values_lost(self, event: ValuesLost) -> Step:
        return self._lost()

    # ------------------------------------------------------------------------------------ parts

    def _is_base_of(self, attempt: Attempt) -> bool:
        intent = attempt.intent
        return intent is not None and (intent.base, intent.base_digest) == (self.version, self.digest)

    def _attempt(self) -> Attempt:
        if self.attempt is None:
            raise ProtocolError(f"a receiver in phase {self.phase.value} has no attempt")
        return self.attempt

    def _manifest_refs(self) -> tuple[PayloadRef, ...]:
        return self._attempt().payloads

    def _header(self, state: State, target: int = 0) -> Header:
        return Header(self.run, self.catalog, state, self.version, target, self.digest, 0, self.incarnation)


def _op(live: Digest, pre: Digest, post: Digest) -> Op:
    if live == post:
        return Op.SKIP
    return Op.APPLY if live == pre else Op.SET


_HANDLERS: dict[tuple[Phase, type[Event]], Callable[[Follower, Any], Step]] = {
    (Phase.BOOT, HeaderRead): Follower._boot,
    (Phase.LOST, AttemptRead): lambda self, event: (self, ()),
    (Phase.LOST, NoAnchor): Follower._no_anchor,
    (Phase.LOST, AnchorFound): Follower._seed,
    (Phase.SEEDING, AnchorLoaded): Follower._seeded,
    (Phase.CLEAN, AttemptRead): Follower._seen,
    (Phase.STAGING, Staged): Follower._staged,
    (Phase.STAGING, NotStaged): Follower._not_staged,
    (Phase.STAGED, AttemptRead): Follower._outcome,
    (Phase.REDO, AttemptRead): Follower._redo,
    (Phase.CLASSIFYING, Classified): Follower._classified,
    (Phase.WRITING, Written): Follower._written,
    (Phase.WRITING, ValuesLost): Follower._values_lost,
}
