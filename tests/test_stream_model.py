"""The receiver machine in both modes, state by state; each rule of the protocol has a mutant that dies (§3.10).

M1, M2, M6, M7 and M8 break what openers and memory do, M3 to M5 and M9 to M13 the machine; M14 to M16 of mode stage are
in ``test_follower`` as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from deltarefit.manifest import Held, State
from deltarefit.protocol import follower as f
from deltarefit.protocol import messages as m
from deltarefit.protocol.attempts import Attempt
from deltarefit.protocol.follower import Follower, Phase
from tests import stream_explorer as s
from tests.explorer import Mutant
from tests.stream_explorer import A, B, C
from tests.stream_log import BASE, STAGE, STREAM, Fate


@pytest.mark.parametrize("name", s.EACH_CHANGE)
def test_every_reachable_state_is_right_and_recovers(name: str) -> None:
    found = s.explore(s.EACH_CHANGE[name])
    assert found.bad is None, found
    assert found.complete


@pytest.mark.parametrize("name", s.RELEASE)
def test_walks_in_depth_find_nothing_wrong(name: str) -> None:
    found = s.explore(s.RELEASE[name], limit=2_000, seed=1)
    assert found.bad is None, found
    assert found.states >= 2_000


def test_a_walk_in_depth_finds_what_is_wrong() -> None:
    """The depth that a fault of the second attempt needs, at some seed or other."""
    broken = replace(s.RELEASE["three, one crash"], union="changed", machine=NoProof)
    assert "I3" in (s.explore(broken, limit=50_000, seed=1).bad or "")


def test_a_trace_leads_to_what_is_wrong() -> None:
    """Breadth first: nothing shorter breaks a machine that generates on after ABORT."""
    found = s.explore(Fate((((STREAM, C),),), machine=ResumesAdrift))
    assert found.bad == "I7: DIRTY while generation runs"
    assert found.trace[0] == "open 2 stream (1, 0, 0)"
    assert "abort 2" in found.trace


# ------------------------------------------------------------------------------------------ mutants of the machine


class AppliesAtRedo(Mutant):
    """M5, M14: a new agent does again what it finds kept, from its first position."""

    def _classified(self, event: m.Classified) -> f.Step:
        kept = tuple(ref for ref, there in zip(self.refs, event.kept, strict=True) if there)
        return self._apply(kept)


class MarksWhatIsKept(Mutant):
    """M4: what is in the spool counts as written."""

    def _classified(self, event: m.Classified) -> f.Step:
        done = frozenset(ref.sha256 for ref, kept in zip(self.refs, event.kept, strict=True) if kept)
        return replace(self, phase=Phase.STREAMING, written=done)._go_on(self._attempt())


class MarksBeforeWriting(Mutant):
    """M4: payloads count as written once they are kept."""

    def _filled(self, event: m.Staged) -> f.Step:
        done = self.written.union(ref.sha256 for ref in self.refs)
        return replace(self, written=done)._go_on(self._attempt())


class BelievesWrites(Mutant):
    """What was written is not read back."""

    def _written(self, event: m.Written) -> f.Step:
        return super()._written(m.Written(tuple(ref.post for ref in self.refs)))


class TriesForEver(Mutant):
    """A write that fails is tried the same way once more, whatever it has left."""

    def _written(self, event: m.Written) -> f.Step:
        if all(live == ref.post for live, ref in zip(event.live, self.refs, strict=True)):
            return super()._written(event)
        return self._apply(self.refs)


@dataclass(frozen=True)
class TakesOlder(Mutant):
    """M3: what an older attempt has announced is written after a newer one was accepted."""

    older: Attempt | None = None

    def _pass(self, attempt: Attempt) -> f.Step:
        after, actions = super()._pass(attempt)
        return replace(after, older=attempt if attempt.streams else None), actions  # type: ignore[call-arg]

    def _join(self, attempt: Attempt) -> f.Step:
        after, actions = super()._join(attempt)
        if self.older is None or after.phase is not Phase.FILLING:
            return after, actions
        late, more = replace(after, attempt=self.older)._apply(self.older.announced)
        return late, (*actions[:2], *more)


class AppliesTwice(Mutant):
    """M10: what was written is forgotten when more is announced."""

    def _streamed(self, event: m.AttemptRead) -> f.Step:
        return replace(self, written=frozenset())._go_on(event.attempt)

    def _fits(self, sums: tuple[m.Sums, ...]) -> bool:
        return True


class ForgetsWritten(Mutant):
    """M10, but the sums before each write are looked at: nothing is written twice, and nothing goes on."""

    def _streamed(self, event: m.AttemptRead) -> f.Step:
        return replace(self, written=frozenset())._go_on(event.attempt)


class CleanAfterAbort(Mutant):
    """M11: ABORT leads back to the version before."""

    def _pass(self, attempt: Attempt) -> f.Step:
        after, actions = super()._pass(attempt)
        if not self.target:
            return after, actions
        clean = replace(after, phase=Phase.CLEAN, target=0, mixed=False)
        return clean, (m.WriteHeader(clean._header(State.CLEAN)), m.Resume(), *actions)


class CleanOnCommit(Mutant):
    """M9: COMMIT makes it CLEAN, whatever it has written."""

    def _go_on(self, attempt: Attempt) -> f.Step:
        if attempt.committed:
            return replace(self, attempt=attempt)._committed()
        return super()._go_on(attempt)


@dataclass(frozen=True)
class NoBaseCheck(Mutant):
    """M12: takes a delta whatever its base; here it passes over attempt 2 if there is another."""

    passed: Attempt | None = None

    def _seen(self, event: m.AttemptRead) -> f.Step:
        attempt = event.attempt
        if attempt.committed and attempt.number == 2:
            return replace(self, passed=attempt), (m.ReadAttempt(3),)
        if self.passed and attempt.intent is None:
            return super()._seen(m.AttemptRead(self.passed))
        return super()._seen(event)

    def _is_base_of(self, attempt: Attempt) -> bool:
        return True

    def _fits(self, sums: tuple[m.Sums, ...]) -> bool:
        return True


class HeaderLate(Mutant):
    """M13, M15: the header says DIRTY after the first write."""

    def _dirty(self, attempt: Attempt) -> f.Step:
        after, actions = super()._dirty(attempt)
        return after, actions[:1]

    def _apply(self, refs: f.Refs) -> f.Step:
        after, actions = super()._apply(refs)
        return after, (*actions, m.WriteHeader(self._header(State.DIRTY)))


class HeaderKeepsFirst(Mutant):
    """The header goes on naming the first attempt that was accepted."""

    def _dirty(self, attempt: Attempt) -> f.Step:
        after, actions = super()._dirty(attempt)
        first = replace(after, target=self.target or attempt.number)
        return after, (actions[0], m.WriteHeader(first._header(State.DIRTY)))


class VotesEarly(Mutant):
    """Votes once it has written what it knows of."""

    def _go_on(self, attempt: Attempt) -> f.Step:
        after, actions = super()._go_on(attempt)
        if after.phase is Phase.STREAMING and isinstance(actions[0], m.AwaitAttempt):
            return after, (m.CastVote(attempt, Held.APPLIED), *actions)
        return after, actions


class VotesBeforeWriting(Mutant):
    """Votes for what it keeps, as in mode stage."""

    def _filled(self, event: m.Staged) -> f.Step:
        after, actions = super()._filled(event)
        vote = (m.CastVote(self._attempt(), Held.APPLIED),) if self._attempt().sealed else ()
        return after, (*vote, *actions)


class ResumesAdrift(Mutant):
    """Generation goes on between an attempt that failed and the next."""

    def _pass(self, attempt: Attempt) -> f.Step:
        after, actions = super()._pass(attempt)
        return after, (m.Resume(), *actions)


class GuardsOverwrites(Mutant):
    """Overwrites only where it finds the base."""

    def _fits(self, sums: tuple[m.Sums, ...]) -> bool:
        return super()._fits(sums) and all(one.pre == ref.pre for one, ref in zip(sums, self.refs, strict=True))


class CountsProgress(Mutant):
    """How many payloads are written is all that is known, and not of which attempt: an attempt with few looks complete
    (the slip of protocol §3.10)."""

    def _idle(self, phase: Phase) -> Follower:
        return replace(super()._idle(phase), written=self.written)

    def _go_on(self, attempt: Attempt) -> f.Step:
        if attempt.outcome and not attempt.committed:
            return super()._go_on(attempt)
        names = frozenset(ref.sha256 for ref in attempt.announced[: len(self.written)])
        return Follower._go_on(replace(self, written=names), attempt)


class KeepsWritten(Mutant):
    """What one attempt has written counts for the next."""

    def _idle(self, phase: Phase) -> Follower:
        return replace(super()._idle(phase), written=self.written)


class DropsBeforeWriting(Mutant):
    """The absolute values are forgotten before they may be needed."""

    def _apply(self, refs: f.Refs) -> f.Step:
        after, actions = super()._apply(refs)
        return after, (m.DropStage(), *actions)


class KeepsStageAfterAbort(Mutant):
    """What is kept of an attempt that failed stays beside the next one's."""

    def _go_on(self, attempt: Attempt) -> f.Step:
        after, actions = super()._go_on(attempt)
        return after, tuple(one for one in actions if not isinstance(one, m.DropStage))


class TakesAbortedForStaged(Mutant):
    """After a failed attempt, one in mode stage is written before its COMMIT."""

    def _decided(self, attempt: Attempt) -> f.Step:
        if attempt.outcome or not self.target:
            return super()._decided(attempt)
        dirty, actions = self._dirty(attempt)
        after, more = dirty._apply(self.refs)
        return after, (*actions, *more)


class CondemnsItself(Mutant):
    """A payload that does not fit is taken for proof that its own bits are wrong (F4)."""

    def _refuse(self, phase: Phase) -> f.Step:
        return self._lost()


class CondemnsItselfAtRedo(Mutant):
    """The same only after a crash, of a payload that is neither applied nor untouched."""

    def _classified(self, event: m.Classified) -> f.Step:
        after, actions = super()._classified(event)
        return self._lost() if after.refused else (after, actions)


class AppliesWhatDoesNotFit(Mutant):
    """Writes a payload wherever it leads."""

    def _fits(self, sums: tuple[m.Sums, ...]) -> bool:
        return True


class NeverMixed(Mutant):
    """Does not remember that an attempt before may have left something."""

    def _dirty(self, attempt: Attempt) -> f.Step:
        after, actions = super()._dirty(attempt)
        return replace(after, mixed=False), actions


class ForgetsMixed(Mutant):
    """The same after a crash."""

    def _boot(self, event: m.HeaderRead) -> f.Step:
        after, actions = super()._boot(event)
        return replace(after, mixed=False), actions


class KeepsProof(Mutant):
    """What was proven of one attempt is believed of the next."""

    def _idle(self, phase: Phase) -> Follower:
        return replace(super()._idle(phase), proven=self.proven)


class NoProof(Mutant):
    """Bits that failed attempts have written to are not proven as a whole."""

    def _go_on(self, attempt: Attempt) -> f.Step:
        return Follower._go_on(replace(self, proven=True), attempt)


FATES = {
    "one": Fate((((STREAM, A),),), slips=1),
    "two": Fate((((STREAM, A),), ((STREAM, B), (STREAM, BASE))), tight=True),
    "stage": Fate((((STREAM, A),), ((STAGE, B),)), tight=True),
    "flawed": s.EACH_CHANGE["a flawed stream, stream"],
}
WRONG_UNION = Fate(
    (((STREAM, A),), ((STREAM, A),), ((STREAM, BASE),)), union="changed", loads=True, orders=False, tight=True
)
MUTANTS: list[tuple[type[Mutant], str, str]] = [
    (AppliesAtRedo, "one", "I9"),
    (MarksWhatIsKept, "one", "I3"),
    (MarksBeforeWriting, "one", "I3"),
    (BelievesWrites, "one", "I3"),
    (TriesForEver, "one", "I9"),
    (TakesOlder, "two", "I10"),
    (AppliesTwice, "two", "I9"),
    (ForgetsWritten, "two", "refuses"),
    (CleanAfterAbort, "one", "I1"),
    (CleanOnCommit, "one", "I1"),
    (NoBaseCheck, "two", "I9"),
    (HeaderLate, "one", "I10"),
    (HeaderKeepsFirst, "two", "I10"),
    (VotesEarly, "one", "I3"),
    (VotesBeforeWriting, "one", "I3"),
    (ResumesAdrift, "one", "I7"),
    (GuardsOverwrites, "two", "refuses"),
    (CountsProgress, "two", "I3"),
    (KeepsWritten, "two", "I6"),
    (DropsBeforeWriting, "one", "refuses"),
    (KeepsStageAfterAbort, "two", "beside"),
    (TakesAbortedForStaged, "stage", "I2"),
    (CondemnsItself, "flawed", "anchor"),
    (CondemnsItselfAtRedo, "flawed", "anchor"),
    (AppliesWhatDoesNotFit, "flawed", "I9"),
]


def test_the_harness_itself_passes_an_unbroken_mutant() -> None:
    assert s.explore(replace(FATES["two"], machine=Mutant), limit=20_000).bad is None


@pytest.mark.parametrize(("mutant", "fate", "dies_of"), MUTANTS, ids=lambda one: getattr(one, "__name__", ""))
def test_every_mutant_dies(mutant: type[Mutant], fate: str, dies_of: str) -> None:
    found = s.explore(replace(FATES[fate], machine=mutant))
    assert dies_of in (found.bad or ""), f"{mutant.__name__}: {found}"


# ------------------------------------------------------------------------------------------ and of the rules around it


def without(**broken: object) -> Fate:
    return replace(FATES["two"], **broken)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fate", "dies_of"),
    [
        pytest.param(without(union="none"), "refuses", id="M1 the next attempt ships its changes again"),
        pytest.param(without(union="changed"), "anchor", id="M2 it overwrites only what it changes"),
        pytest.param(without(keeps=False), "I1", id="M6 M16 the header outlives the weights"),
        pytest.param(without(ends=False), "refuses", id="M7 it opens before all lists are at their end"),
        pytest.param(without(committed_base=False), "I6", id="M8 the baseline moves before COMMIT"),
    ],
)
def test_receivers_need_what_the_opener_does(fate: Fate, dies_of: str) -> None:
    found = s.explore(fate)
    assert dies_of in (found.bad or ""), found


def test_the_proof_stands_between_a_wrong_union_and_wrong_weights() -> None:
    """With the right union it never fails. With a wrong one it costs a load; without it, weights are wrong."""
    assert s.explore(without(machine=NoProof), limit=50_000).bad is None
    assert "anchor" in (s.explore(without(union="changed")).bad or "")
    assert s.explore(WRONG_UNION).bad is None


@pytest.mark.parametrize("mutant", [NoProof, NeverMixed, ForgetsMixed, KeepsProof], ids=lambda one: one.__name__)
def test_each_way_around_the_proof_leads_to_wrong_weights(mutant: type[Mutant]) -> None:
    found = s.explore(replace(WRONG_UNION, machine=mutant))
    assert (found.bad or "")[:2] in ("I1", "I3"), found
