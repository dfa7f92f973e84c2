"""The receiver machine: explored state by state with crashes; each rule has a mutant that dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import Header, Held, State
from deltarefit.protocol import follower as f
from deltarefit.protocol import messages as m
from deltarefit.protocol.attempts import Attempt
from deltarefit.protocol.follower import Follower, Phase
from deltarefit.records import Digest
from tests import explorer as x
from tests.explorer import Mutant

PART, SEALED, COMMITTED = 1, 2, 3
"""How far an attempt of ``explorer.LOG`` is."""


def test_every_reachable_state_is_right_and_recovers() -> None:
    states, bad = x.explore()
    assert bad is None
    assert states > 1_000


def test_more_crashes() -> None:
    states, bad = x.explore(crashes=3, losses=0)
    assert bad is None
    assert states > 1_000


class NoClassify(Mutant):
    """M14: redo without classification."""

    def _classified(self, event: m.Classified) -> f.Step:
        return self._apply(self.refs)

    def _written(self, event: m.Written) -> f.Step:
        return self._committed()


class NoPostCheck(Mutant):
    """CLEAN without reading back, with a redo that trusts nothing was torn."""

    def _classified(self, event: m.Classified) -> f.Step:
        pairs = zip(event.live, self.refs, strict=True)
        ops = tuple(m.Op.SKIP if live != ref.pre else m.Op.APPLY for live, ref in pairs)
        return replace(self, phase=Phase.WRITING), (m.Write(self._attempt(), self.refs, ops),)

    def _written(self, event: m.Written) -> f.Step:
        return self._committed()


class HeaderLate(Mutant):
    """M15: the header says DIRTY only after the bytes were written."""

    def _decided(self, attempt: Attempt) -> f.Step:
        after, actions = super()._decided(attempt)
        if len(actions) == 3 and isinstance(actions[2], m.Write):
            return after, (actions[0], actions[2], actions[1])
        return after, actions


class NoBaseCheck(Mutant):
    """M12: a delta is staged whatever its base."""

    def _is_base_of(self, attempt: Attempt) -> bool:
        return True

    def _staged(self, event: m.Staged) -> f.Step:
        return replace(self, phase=Phase.STAGED)._decided(self._attempt())

    def _seen(self, event: m.AttemptRead) -> f.Step:
        if event.attempt.number == 2 and event.attempt.intent:
            return self, (m.ReadAttempt(4),)
        return super()._seen(event)


def written_now(machine: Follower, attempt: Attempt) -> f.Step:
    dirty, actions = machine._dirty(attempt)
    after, more = dirty._apply(machine.refs)
    return after, (*actions, *more)


class AppliesAborted(Mutant):
    """Takes any outcome for a COMMIT."""

    def _seen(self, event: m.AttemptRead) -> f.Step:
        attempt = event.attempt
        if attempt.number > self.version and attempt.outcome and not attempt.committed:
            return self._stage(attempt)
        return super()._seen(event)

    def _decided(self, attempt: Attempt) -> f.Step:
        return written_now(self, attempt) if attempt.outcome else super()._decided(attempt)


class WritesBeforeCommit(Mutant):
    """Mode stage must not write before the outcome is known."""

    def _decided(self, attempt: Attempt) -> f.Step:
        return written_now(self, attempt)


class ResumesDirty(Mutant):
    """Generation goes on before the weights are whole."""

    def _decided(self, attempt: Attempt) -> f.Step:
        after, actions = super()._decided(attempt)
        if len(actions) == 3 and isinstance(actions[2], m.Write):
            return after, (actions[0], actions[1], m.Resume(), actions[2])
        return after, actions


class DropsStageEarly(Mutant):
    """The absolute values are forgotten before they may be needed."""

    def _decided(self, attempt: Attempt) -> f.Step:
        after, actions = super()._decided(attempt)
        if len(actions) == 3 and isinstance(actions[2], m.Write):
            return after, (m.DropStage(), *actions)
        return after, actions


class KeepsStageAtStart(Mutant):
    """The last agent died between CLEAN and the drop: what it staged would be taken for the next equal payload."""

    def _boot(self, event: m.HeaderRead) -> f.Step:
        after, actions = super()._boot(event)
        clean = event.header is not None and event.header.state is State.CLEAN
        return after, tuple(a for a in actions if not (clean and isinstance(a, m.DropStage)))


class ForgetsDirty(Mutant):
    """A DIRTY header is taken for CLEAN at its old version."""

    def _boot(self, event: m.HeaderRead) -> f.Step:
        if event.header and event.header.state is State.DIRTY:
            clean = replace(self, version=event.header.version, digest=event.header.digest)
            after, actions = clean._clean()
            return after, (m.Resume(), m.DropStage(), *actions)
        return super()._boot(event)

    def _staged(self, event: m.Staged) -> f.Step:
        return replace(self, phase=Phase.STAGED)._decided(self._attempt())

    def _written(self, event: m.Written) -> f.Step:
        return self._committed()


class SkipsEmpty(Mutant):
    """An empty delta is not taken for a version."""

    def _seen(self, event: m.AttemptRead) -> f.Step:
        attempt = event.attempt
        if attempt.sealed and not attempt.payloads and attempt.number > self.version:
            return self, (m.ReadAttempt(event.attempt.number + 1),)
        return super()._seen(event)


class StagesWhatDoesNotAddUp(Mutant):
    """Takes what is sealed for right, though nobody has held the producers' parts against each other, and its own bits
    for wrong if it does not apply to them."""

    def _refuse(self, phase: Phase) -> f.Step:
        return self._lost()

    def _seen(self, event: m.AttemptRead) -> f.Step:
        attempt = event.attempt
        if attempt.number > self.version and attempt.sealed and not attempt.outcome:
            return self._stage(attempt)
        return super()._seen(event)


class StagesPart(Mutant):
    """Does not wait for the other producers."""

    def _seen(self, event: m.AttemptRead) -> f.Step:
        attempt = event.attempt
        if attempt.number > self.version and attempt.manifests and not attempt.sealed:
            return self._stage(attempt)
        return super()._seen(event)


class NoAnchorProof(Mutant):
    """Seeded weights are believed without reading them back; here the loader forgets the last element."""

    def _seeded(self, event: m.AnchorLoaded) -> f.Step:
        return super()._seeded(m.AnchorLoaded(x.digest(x.W[1])))


MUTANTS = [
    NoClassify, NoPostCheck, HeaderLate, NoBaseCheck, AppliesAborted, WritesBeforeCommit, ResumesDirty,
    DropsStageEarly, KeepsStageAtStart, ForgetsDirty, SkipsEmpty, StagesWhatDoesNotAddUp, StagesPart,
]  # fmt: skip


def test_the_harness_itself_passes_an_unbroken_mutant() -> None:
    assert x.explore(lambda: Mutant(x.RUN, x.CATALOG, "i"), limit=4_000)[1] is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda c: c.__name__)
def test_every_mutant_dies(mutant: type[Follower]) -> None:
    states, bad = x.explore(lambda: mutant(x.RUN, x.CATALOG, "i"))
    assert bad is not None, f"{mutant.__name__} survived {states} states"


def test_disk_marker_that_outlives_the_weights_dies() -> None:
    """M6/M16: the header survives, the memory does not. The proof at start is what saves us (receiver ``prove``)."""

    def on_crash(world: x.World) -> x.World:
        return replace(world, bits=x.W[0], spool=None)

    assert x.explore(on_crash=on_crash)[1] is not None


def test_unproven_anchor_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    real = x.write

    def forgetful(
        world: x.World, rest: tuple[m.Action, ...], prims: list[x.Prim], answer: Callable[[x.World], m.Event]
    ) -> x.World:
        load = isinstance(world.queue[0], m.LoadAnchor)
        return real(world, rest, prims[:-1] if load else prims, answer)

    monkeypatch.setattr(x, "write", forgetful)
    assert "seeded weights are wrong" in (x.explore()[1] or "")
    assert x.explore(lambda: NoAnchorProof(x.RUN, x.CATALOG, "i"))[1] is not None


def follower(**fields: object) -> Follower:
    return replace(Follower(x.RUN, x.CATALOG, "i"), **fields)  # type: ignore[arg-type]


def test_an_event_out_of_place_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="boot met Created"):
        follower().on(m.Created())


def test_nothing_staged_survives_a_start() -> None:
    header = Header(x.RUN, x.CATALOG, State.CLEAN, 1, 0, x.digest(x.W[1]), 0, "i")
    after, actions = follower().on(m.HeaderRead(header))
    assert (after.phase, after.version) == (Phase.CLEAN, 1)
    assert actions == (m.Resume(), m.DropStage(), m.ReadAttempt(2))


def test_wrong_live_bits_lead_to_the_anchor() -> None:
    commit = x.LOG[2, COMMITTED]
    clean = follower(phase=Phase.CLEAN, version=1, digest=Digest(1, 1))
    after, actions = clean.on(m.AttemptRead(commit))
    assert after.phase is Phase.LOST
    assert any(isinstance(a, m.FindAnchor) for a in actions)


@pytest.mark.parametrize(("number", "done"), [(2, PART), (2, 0), (x.WRONG, SEALED), (x.WRONG, PART)])
def test_what_is_not_sealed_or_does_not_add_up_is_waited_for(number: int, done: int) -> None:
    """One producer's wrong baseline must not make receivers doubt their own bits."""
    base = x.base_of(number)
    clean = follower(phase=Phase.CLEAN, version=base, digest=x.digest(x.W[base]))
    seen = x.LOG[number, done] if done else Attempt(number)
    assert clean.on(m.AttemptRead(seen)) == (clean, (m.AwaitAttempt(number),))


def test_what_all_producers_sealed_is_staged_before_the_outcome() -> None:
    clean = follower(phase=Phase.CLEAN, version=1, digest=x.digest(x.W[1]))
    staging, actions = clean.on(m.AttemptRead(x.LOG[2, SEALED]))
    stage = m.Stage(x.LOG[2, SEALED], x.LOG[2, SEALED].payloads)
    assert (staging.phase, actions) == (Phase.STAGING, (stage,))


def test_a_payload_that_leads_elsewhere_is_refused() -> None:
    commit = x.LOG[2, COMMITTED]
    sums = tuple(m.Sums(ref.pre, ref.post + Digest(1, 0)) for ref in commit.payloads)
    staging = follower(phase=Phase.STAGING, version=1, digest=x.digest(x.W[1]), attempt=commit, refs=commit.payloads)
    with pytest.raises(IntegrityError, match="does not lead where"):
        staging.on(m.Staged(sums))


def test_a_manifest_that_changes_while_staged_is_refused() -> None:
    staged = follower(phase=Phase.STAGED, version=1, digest=x.digest(x.W[1]), attempt=x.LOG[2, SEALED])
    with pytest.raises(IntegrityError, match="changed its manifest"):
        staged.on(m.AttemptRead(x.LOG[4, COMMITTED]))


def test_dirty_towards_an_uncommitted_version_is_refused() -> None:
    redo = follower(phase=Phase.REDO, version=2, digest=x.digest(x.W[2]))
    with pytest.raises(IntegrityError, match="not committed"):
        redo.on(m.AttemptRead(x.LOG[x.WRONG, COMMITTED]))


def test_dirty_towards_what_is_not_visible_yet_waits() -> None:
    """The header was written after intent and COMMIT were seen: a store that does not show them says nothing (F13)."""
    redo = follower(phase=Phase.REDO, version=1, digest=x.digest(x.W[1]))
    for seen in (m.Attempt(2), x.LOG[2, SEALED]):
        assert redo.on(m.AttemptRead(seen)) == (redo, (m.AwaitAttempt(2),))


def test_a_clean_receiver_that_refuses_proves_itself() -> None:
    """Its own bits are wrong: an anchor. They are right: it refuses, and waits for the outcome."""
    attempt = x.LOG[2, SEALED]
    staging = follower(phase=Phase.STAGING, version=1, digest=x.digest(x.W[1]), attempt=attempt, refs=attempt.payloads)
    wrong = tuple(m.Sums(Digest(9, 9), ref.post) for ref in attempt.payloads)
    proving, actions = staging.on(m.Staged(wrong))
    assert actions == (m.DropStage(), m.Prove())
    assert proving.on(m.Proven(Digest(1, 2)))[0].phase is Phase.LOST
    staged, actions = proving.on(m.Proven(x.digest(x.W[1])))
    assert (staged.phase, actions) == (Phase.STAGED, (m.ReadAttempt(2),))
    _, actions = staged.on(m.AttemptRead(attempt))
    assert actions == (m.CastVote(attempt, Held.REFUSED), m.AwaitAttempt(2))
    again, actions = staged.on(m.AttemptRead(x.LOG[2, COMMITTED]))
    assert actions == (m.Stage(x.LOG[2, COMMITTED], attempt.payloads),)
    assert again.on(m.Staged(wrong))[0].phase is Phase.LOST


def test_an_anchor_of_other_bits_is_refused() -> None:
    with pytest.raises(IntegrityError, match="digest of its version"):
        follower(phase=Phase.LOST).on(m.AnchorFound(x.ANCHOR, Digest(1, 1)))


def test_late_duplicates_are_ignored() -> None:
    clean = follower(phase=Phase.CLEAN, version=4, digest=x.digest(x.W[4]))
    assert clean.on(m.AttemptRead(x.LOG[2, COMMITTED])) == (clean, ())
