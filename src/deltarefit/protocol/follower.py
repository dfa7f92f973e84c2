"""The receiver's state machine, both modes, guarded XOR and the union rule included (protocol §3.2-3.6). Pure.

Mode stage: everything is kept beside the weights first, and written after COMMIT. Mode stream: payloads are written as
they are announced, while generation is paused; what an attempt that aborts leaves behind is overwritten by the next one
on the same base. The source baseline runs the same machine, without streaming: it is receiver number zero.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import Anchor, Header, Held, PayloadRef, State
from deltarefit.protocol.attempts import Attempt, adds_up
from deltarefit.protocol.messages import (
    Action,
    AnchorFound,
    AnchorLoaded,
    AttemptRead,
    AwaitAttempt,
    CastVote,
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
    Prove,
    Proven,
    ReadAttempt,
    Resume,
    Stage,
    Staged,
    Sums,
    ValuesLost,
    Write,
    WriteHeader,
    Written,
    allowed,
)
from deltarefit.records import Digest


class Phase(enum.Enum):
    BOOT = "boot"
    LOST = "lost"
    """No version: looking for an anchor."""
    SEEDING = "seeding"
    CLEAN = "clean"
    ADRIFT = "adrift"
    """DIRTY after an attempt that aborted: waiting for one that overwrites what it left."""
    STAGING = "staging"
    STAGED = "staged"
    REDO = "redo"
    """DIRTY at start: waiting for the records of the target."""
    CLASSIFYING = "classifying"
    STREAMING = "streaming"
    """DIRTY: waiting for more of the attempt, or for its outcome."""
    FILLING = "filling"
    """DIRTY: payloads that were not kept before are being staged."""
    WRITING = "writing"
    PROVING = "proving"


Step = tuple["Follower", tuple[Action, ...]]
Refs = tuple[PayloadRef, ...]


@dataclass(frozen=True)
class Follower:
    """One copy of the weights on its way along the log.

    ``version`` and ``digest`` are what the header calls CLEAN; ``attempt`` is being staged or written; ``refs`` are
    those of its payloads that the last action was about, ``written`` those that were read back as they should be.
    ``target`` is the header's: the highest attempt of which something may be in the bits (0: nothing). ``mixed``: of
    attempts before it, too. ``proven``: the bits as a whole are those of ``attempt``. ``sets`` is true while the
    present write contains absolute values (it is not tried a third way). ``refused``: payloads of ``attempt``, which is
    not committed, do not fit the bits. ``streams``: takes part in mode stream before COMMIT.
    """

    run: str
    catalog: str
    incarnation: str
    streams: bool = False
    phase: Phase = Phase.BOOT
    version: int = 0
    digest: Digest = Digest()
    attempt: Attempt | None = None
    anchor: Anchor | None = None
    target: int = 0
    mixed: bool = False
    proven: bool = False
    refs: Refs = ()
    written: frozenset[str] = frozenset()
    sets: bool = False
    refused: bool = False

    def on(self, event: Event) -> Step:
        """The next state and what to do. ``ProtocolError`` for an event that this phase does not allow."""
        if isinstance(event, AttemptRead) and self.is_pruned(event.attempt):
            return self._lost()
        return allowed(_HANDLERS, self.phase, event, "a receiver")(self, event)

    def is_pruned(self, attempt: Attempt) -> bool:
        """Whether ``attempt`` would be the way on and is gone: only an anchor leads past it."""
        return attempt.pruned and attempt.number > self.version and self.phase is not Phase.LOST

    # ------------------------------------------------------------------------------------ start

    def _boot(self, event: HeaderRead) -> Step:
        header = event.header
        if header is None or header.run != self.run or header.catalog != self.catalog:
            return self._lost()
        if header.state is State.UNKNOWN:
            return self._lost()
        known = replace(self, version=header.version, digest=header.digest)
        if header.state is State.DIRTY:
            # whether attempts between the two have left something, nobody remembers
            mixed = header.target > header.version + 1
            redo = replace(known, phase=Phase.REDO, target=header.target, mixed=mixed)
            return redo, (Pause(), ReadAttempt(header.target))
        after, actions = known._clean()
        return after, (Resume(), DropStage(), *actions)  # the last agent may have died between CLEAN and its own

    def _lost(self) -> Step:
        """The bits are of no known version; the late-joiner path is the way back (protocol §3.7)."""
        lost = replace(self._idle(Phase.LOST), version=0, digest=Digest(), target=0, mixed=False)
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
        clean = replace(self._idle(Phase.CLEAN), target=0, mixed=False)
        return clean, (ReadAttempt(self.version + 1),)

    def _idle(self, phase: Phase) -> Follower:
        """Without an attempt."""
        idle = replace(self, phase=phase, attempt=None, refs=(), written=frozenset())
        return replace(idle, proven=False, sets=False, refused=False)

    def _seen(self, event: AttemptRead) -> Step:
        attempt = event.attempt
        if attempt.number <= max(self.version, self.target):
            return self, ()
        if attempt.outcome and not attempt.committed:
            return self, (ReadAttempt(attempt.number + 1),)
        if attempt.streams and not attempt.committed:
            return self._join(attempt)
        if not (attempt.outcome or adds_up(attempt)):
            return self, (AwaitAttempt(attempt.number),)
        return self._stage(attempt)

    def _join(self, attempt: Attempt) -> Step:
        """Take part in a stream, once there is something to write: until then generation goes on."""
        if not self.streams or not (attempt.announced or attempt.sealed) or not self._is_base_of(attempt):
            return self, (AwaitAttempt(attempt.number),)
        dirty, actions = self._dirty(attempt)
        after, more = dirty._go_on(attempt)
        return after, (*actions, *more)

    def _dirty(self, attempt: Attempt) -> Step:
        """The header comes first: what an attempt may have written must be known before it writes (lemma 1)."""
        dirty = replace(self, attempt=attempt, target=attempt.number, mixed=bool(self.target))
        return dirty, (Pause(), WriteHeader(dirty._header(State.DIRTY)))

    def _stage(self, attempt: Attempt) -> Step:
        """Only a delta against exactly our bits is staged; another base means that our bits are not of the log."""
        if not self._is_base_of(attempt):
            return self._lost()
        staging = replace(self, phase=Phase.STAGING, attempt=attempt, refs=attempt.payloads, refused=False)
        return staging, (Stage(attempt, staging.refs),)

    def _staged(self, event: Staged) -> Step:
        if not self._fits(event.sums):
            # it adds up, and sets all that streams left: DIRTY, ours are wrong, and would refuse what follows, too
            return self._lost() if self.target else self._refuse(Phase.STAGED)
        staged = replace(self, phase=Phase.STAGED)
        if self._attempt().outcome is None:  # it may have been decided meanwhile
            return staged, (ReadAttempt(self._attempt().number),)
        return staged._decided(self._attempt())

    def _fits(self, sums: tuple[Sums, ...]) -> bool:
        """Whether the live bits are those that the payloads were made for; overwrites take any. ``IntegrityError`` if
        payloads of a version are not what its manifests say: nothing of them is written."""
        pairs = list(zip(sums, self.refs, strict=True))
        if any(found.pre != ref.pre for found, ref in pairs if not ref.overwrites):
            return False
        for found, ref in pairs:
            if found.post != ref.post and self._attempt().committed:
                what = f"payload {ref.sha256[:12]} does not lead where its manifest says"
                raise IntegrityError(what, expected=ref.post, found=found.post)
        return all(found.post == ref.post for found, ref in pairs)

    def _refuse(self, phase: Phase) -> Step:
        """What is committed fits the bits of its base: ours are not those. Before that nobody knows whose fault it is,
        for a producer announces, and seals, before its baseline is proven (F4)."""
        if self._attempt().committed or self.target:
            return self._decline(phase)
        # all bits should be the version's: that is decided, or this might refuse for ever
        return replace(self, phase=Phase.PROVING, refs=(), refused=True), (DropStage(), Prove())

    def _decline(self, phase: Phase) -> Step:
        """Take no part in an attempt, and wait for its outcome; what is committed must be had."""
        if self._attempt().committed:
            return self._lost()
        return replace(self, phase=phase, refs=(), refused=True), (DropStage(), ReadAttempt(self._attempt().number))

    def _outcome(self, event: AttemptRead) -> Step:
        attempt, known = event.attempt, self._attempt()
        seen = len(attempt.manifests)
        if attempt.number != known.number or attempt.manifests != known.manifests[:seen]:
            raise IntegrityError(f"attempt {known.number} changed its manifest while it was staged")
        if attempt.outcome is None and seen < len(known.manifests):  # they were there (F13)
            return self, (AwaitAttempt(attempt.number),)
        return replace(self, attempt=attempt)._decided(attempt)

    def _decided(self, attempt: Attempt) -> Step:
        if attempt.outcome is None:
            held = Held.REFUSED if self.refused else Held.STAGED
            return self, (CastVote(attempt, held), AwaitAttempt(attempt.number))
        if not attempt.committed:
            return self._pass(attempt)
        if self.refused:
            return self._stage(attempt)
        dirty, actions = self._dirty(attempt)
        after, more = dirty._apply(self.refs)
        return after, (*actions, *more)

    def _pass(self, attempt: Attempt) -> Step:
        """On to the next attempt; what this one may have written stays in the bits, and in the header."""
        phase = Phase.ADRIFT if self.target else Phase.CLEAN
        return self._idle(phase), (DropStage(), ReadAttempt(attempt.number + 1))

    # ------------------------------------------------------------------------------------ dirty

    def _go_on(self, attempt: Attempt) -> Step:
        """DIRTY, and nothing is half written: what is next?"""
        now = replace(self, phase=Phase.STREAMING, attempt=attempt, refs=())
        if attempt.outcome and not attempt.committed:
            return now._pass(attempt)
        announced = attempt.announced
        if not self.written <= {ref.sha256 for ref in announced}:  # read before it is all visible again (F13), or twins
            return now._lost() if attempt.committed else (now, (AwaitAttempt(attempt.number),))
        if self.refused and not attempt.committed:
            return now, (CastVote(attempt, Held.REFUSED), AwaitAttempt(attempt.number))
        if fresh := tuple(ref for ref in announced if ref.sha256 not in self.written):
            return replace(now, phase=Phase.FILLING, refs=fresh), (Stage(attempt, fresh),)
        if not (attempt.outcome or adds_up(attempt)):
            return now, (AwaitAttempt(attempt.number),)
        if self.mixed and not self.proven:
            return replace(now, phase=Phase.PROVING), (Prove(),)
        if attempt.outcome is None:
            return now, (CastVote(attempt, Held.APPLIED), AwaitAttempt(attempt.number))
        return now._committed()

    def _streamed(self, event: AttemptRead) -> Step:
        number = self._attempt().number
        if event.attempt.number != number:
            raise ProtocolError(f"attempt {event.attempt.number} was read in place of {number}")
        if event.attempt.intent is None:  # it was there: a store that has not caught up says nothing (F13)
            return self, (AwaitAttempt(number),)
        return self._go_on(event.attempt)

    def _filled(self, event: Staged) -> Step:
        return self._apply(self.refs) if self._fits(event.sums) else self._refuse(Phase.STREAMING)

    def _apply(self, refs: Refs) -> Step:
        ops = (Op.APPLY,) * len(refs)
        return replace(self, phase=Phase.WRITING, refs=refs, sets=False), (Write(self._attempt(), refs, ops),)

    def _redo(self, event: AttemptRead) -> Step:
        """DIRTY at start. In mode stage nothing is written before COMMIT, so the target must be committed."""
        attempt = event.attempt
        if not (attempt.outcome or attempt.streams):  # not visible yet: the header is younger than they (F13)
            return self, (AwaitAttempt(attempt.number),)
        if not (attempt.committed or attempt.streams):
            raise IntegrityError(f"weights are being written to version {attempt.number}, which is not committed")
        if attempt.outcome and not attempt.committed:
            return self._pass(attempt)
        if not self._is_base_of(attempt):
            return self._lost()
        refs = attempt.announced
        redo = replace(self, phase=Phase.CLASSIFYING, attempt=attempt, refs=refs)
        return redo, (Classify(attempt, refs),)

    def _classified(self, event: Classified) -> Step:
        """Guarded XOR: finished payloads are skipped, untouched ones applied, torn ones set. What is untouched and not
        kept, and what overwrites anyway, is staged anew afterwards."""
        found = list(zip(self.refs, event.live, event.kept, strict=True))
        ops = {ref: _op(live, ref) for ref, live, kept in found if kept}
        if any(_op(live, ref) is Op.SET and not kept for ref, live, kept in found):
            return self._refuse(Phase.STREAMING)
        refs, done = tuple(ops), {ref.sha256 for ref, live, _ in found if live == ref.post}
        writing = replace(self, phase=Phase.WRITING, refs=refs, written=frozenset(done), sets=Op.SET in ops.values())
        return writing, (Write(self._attempt(), refs, tuple(ops.values())),)

    def _written(self, event: Written) -> Step:
        pairs = list(zip(self.refs, event.live, strict=True))
        if all(live == ref.post for ref, live in pairs):
            done = self.written.union(ref.sha256 for ref in self.refs)
            if self._attempt().committed:
                return replace(self, written=done)._go_on(self._attempt())
            reading = replace(self, phase=Phase.STREAMING, written=done, refs=(), sets=False)
            return reading, (DropStage(), ReadAttempt(self._attempt().number))
        if self.sets:
            return self._refuse(Phase.STREAMING)
        ops = tuple(_op(live, ref) for ref, live in pairs)
        return replace(self, sets=True), (Write(self._attempt(), self.refs, ops),)

    def _proven(self, event: Proven) -> Step:
        """What failed attempts left must be gone from everywhere, not only where this one has written."""
        if not self.target:  # asked by ``_refuse``
            if event.digest != self.digest:
                return self._lost()
            return replace(self, phase=Phase.STAGED), (ReadAttempt(self._attempt().number),)
        if event.digest != self._target_digest():
            return self._lost()
        return replace(self, proven=True)._go_on(self._attempt())

    def _target_digest(self) -> Digest:
        return sum((manifest.part for manifest in self._attempt().manifests), Digest())

    def _committed(self) -> Step:
        outcome = self._attempt().outcome
        if outcome is None:
            raise ProtocolError(f"attempt {self._attempt().number} was written without an outcome")
        done = replace(self, version=outcome.attempt, digest=outcome.digest)
        after, actions = done._clean()
        return after, (WriteHeader(after._header(State.CLEAN)), DropStage(), Resume(), *actions)

    # ------------------------------------------------------------------------------------ parts

    def _is_base_of(self, attempt: Attempt) -> bool:
        intent = attempt.intent
        return intent is not None and (intent.base, intent.base_digest) == (self.version, self.digest)

    def _attempt(self) -> Attempt:
        if self.attempt is None:
            raise ProtocolError(f"a receiver in phase {self.phase.value} has no attempt")
        return self.attempt

    def _header(self, state: State) -> Header:
        return Header(self.run, self.catalog, state, self.version, self.target, self.digest, 0, self.incarnation)


def _op(live: Digest, ref: PayloadRef) -> Op:
    if live == ref.post:
        return Op.SKIP
    return Op.APPLY if live == ref.pre or ref.overwrites else Op.SET


_HANDLERS: dict[tuple[Phase, type[Event]], Callable[[Follower, Any], Step]] = {
    (Phase.BOOT, HeaderRead): Follower._boot,
    (Phase.LOST, AttemptRead): lambda self, event: (self, ()),
    (Phase.LOST, NoAnchor): Follower._no_anchor,
    (Phase.LOST, AnchorFound): Follower._seed,
    (Phase.SEEDING, AnchorLoaded): Follower._seeded,
    (Phase.SEEDING, NotStaged): lambda self, event: self._lost(),
    (Phase.CLEAN, AttemptRead): Follower._seen,
    (Phase.ADRIFT, AttemptRead): Follower._seen,
    (Phase.STAGING, Staged): Follower._staged,
    (Phase.STAGING, NotStaged): lambda self, event: self._decline(Phase.STAGED),
    (Phase.STAGED, AttemptRead): Follower._outcome,
    (Phase.REDO, AttemptRead): Follower._redo,
    (Phase.CLASSIFYING, Classified): Follower._classified,
    (Phase.STREAMING, AttemptRead): Follower._streamed,
    (Phase.FILLING, Staged): Follower._filled,
    (Phase.FILLING, NotStaged): lambda self, event: self._decline(Phase.STREAMING),
    (Phase.WRITING, Written): Follower._written,
    (Phase.WRITING, ValuesLost): lambda self, event: self._refuse(Phase.STREAMING),
    (Phase.PROVING, Proven): Follower._proven,
}
