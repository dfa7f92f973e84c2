"""A trainer of several ranks: each row of the producer's machine; then all machines in every order, and mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import Decision, Intent, Outcome, ProducerManifest
from deltarefit.protocol import attempts
from deltarefit.protocol import coordinator as c
from deltarefit.protocol import messages as m
from deltarefit.protocol import producer as p
from deltarefit.protocol.producer import Phase, Producer
from deltarefit.records import Digest
from tests import trainer_explorer as t
from tests.test_coordinator import RUN, attempt, intent_of, manifest_of, manifests_of

INTENT = intent_of("me", 2, 1, producers=2)
MINE = manifests_of(INTENT)[1]
Patch = pytest.MonkeyPatch


def producer(**fields: Any) -> Producer:
    return replace(Producer(INTENT, 1, "p1"), **fields)


def walk(machine: Producer, *events: m.Event) -> tuple[Producer, tuple[m.Action, ...]]:
    actions: tuple[m.Action, ...] = ()
    for event in events:
        machine, actions = machine.on(event)
    return machine, actions


def waiting() -> Producer:
    return walk(producer(), m.Encoded(MINE), m.Created())[0]


def decided(end: str) -> m.AttemptRead:
    return m.AttemptRead(attempt(2, "me", 1, end, producers=2))


def abort(reason: str) -> Outcome:
    return Outcome(RUN, 2, Decision.ABORT, 1, Digest(), (), 0, "p1", f"producer 1: {reason}")


# ------------------------------------------------------------------------------------------ one producer


def test_encodes_seals_and_waits() -> None:
    machine, actions = producer().start()
    assert actions == (m.Encode(INTENT),)
    machine, actions = walk(machine, m.Encoded(MINE))
    assert (machine.phase, actions) == (Phase.SEALING, (m.CreateManifest(MINE),))
    machine, actions = walk(machine, m.Created())
    assert (machine.phase, actions) == (Phase.WAITING, (m.AwaitOutcome(2),))


@pytest.mark.parametrize(
    "wrong", [manifest_of("me", 3, 1, producer=1), manifest_of("me", 2, 0, producer=1), manifest_of("me", 2, 1)]
)
def test_a_manifest_of_another_attempt_or_producer_is_a_bug(wrong: ProducerManifest) -> None:
    with pytest.raises(ProtocolError, match="came back for 1"):
        walk(producer(), m.Encoded(wrong))


@pytest.mark.parametrize(("end", "phase"), [("commit", Phase.COMMITTED), ("abort", Phase.ABORTED)])
def test_the_register_decides(end: str, phase: Phase) -> None:
    machine, actions = walk(waiting(), decided(end))
    assert (machine.phase, actions) == (phase, ())
    assert machine.outcome == decided(end).attempt.outcome
    assert machine.reason == ("by z" if end == "abort" else "")


def test_what_is_not_decided_yet_is_waited_for() -> None:
    assert walk(waiting(), decided("sealed")) == (waiting(), (m.AwaitOutcome(2),))


def ambiguous() -> Producer:
    machine, actions = walk(producer(), m.Encoded(MINE), m.NotCreated())
    assert (machine.phase, actions) == (Phase.SEALING, (m.ReadManifest(2, 1),))
    return machine


def test_an_ambiguous_manifest_that_is_not_there_is_created_again() -> None:
    assert walk(ambiguous(), m.ManifestRead(None)) == (ambiguous(), (m.CreateManifest(MINE),))


def test_an_ambiguous_manifest_that_is_ours_counts() -> None:
    assert walk(ambiguous(), m.ManifestRead(MINE)) == (waiting(), (m.AwaitOutcome(2),))


def test_another_manifest_in_our_place_ends_in_abort() -> None:
    machine, actions = walk(ambiguous(), m.ManifestRead(replace(MINE, step=9)))
    assert (machine.phase, actions) == (
        Phase.FAILING, (m.CreateOutcome(abort("somebody else sealed this attempt in its place")),),
    )  # fmt: skip


@pytest.mark.parametrize("when", [producer, ambiguous, waiting], ids=["encoding", "sealing", "waiting"])
def test_who_fails_closes_the_attempt_and_reads_what_became_of_it(when: Callable[[], Producer]) -> None:
    failing, actions = walk(when(), m.EncodeFailed("disk full"))
    assert (failing.phase, actions) == (Phase.FAILING, (m.CreateOutcome(abort("disk full")),))
    for answer in (m.Created(), m.NotCreated()):
        assert walk(failing, answer) == (failing, (m.ReadAttempt(2),))
    machine, actions = walk(failing, m.NotCreated(), decided("abort"))
    assert (machine.phase, machine.reason, actions) == (Phase.ABORTED, "producer 1: disk full", ())


def test_an_abort_that_did_not_arrive_is_created_again() -> None:
    failing, _ = walk(waiting(), m.EncodeFailed("late"))
    assert walk(failing, m.NotCreated(), decided("sealed")) == (failing, (m.CreateOutcome(abort("late")),))


def test_a_commit_that_came_before_our_abort_counts() -> None:
    machine, actions = walk(waiting(), m.EncodeFailed("late"), m.NotCreated(), decided("commit"))
    assert (machine.phase, actions) == (Phase.COMMITTED, ())


@pytest.mark.parametrize("manifest", [None, replace(MINE, step=9)], ids=["none", "another"])
def test_a_commit_without_what_we_made_is_not_ours(manifest: ProducerManifest | None) -> None:
    failing = producer(phase=Phase.FAILING, manifest=manifest, reason="x")
    machine, actions = walk(failing, m.NotCreated(), decided("commit"))
    assert (machine.phase, actions) == (Phase.LOST, ())
    assert "somebody else" in machine.reason


def test_long_reasons_fit_into_a_record() -> None:
    _, (create,) = walk(producer(), m.EncodeFailed("x" * 5000))
    assert isinstance(create, m.CreateOutcome)
    assert Outcome.from_bytes(create.outcome.to_bytes()) == create.outcome


EVENTS: tuple[m.Event, ...] = (
    m.Encoded(MINE), m.EncodeFailed("x"), m.Created(), m.NotCreated(), m.ManifestRead(None), decided("sealed"),
    m.Gathered((), 0), m.HeaderRead(None),
)  # fmt: skip
ALLOWED = {
    Phase.ENCODING: {0, 1}, Phase.SEALING: {1, 2, 3, 4}, Phase.WAITING: {1, 5}, Phase.FAILING: {2, 3, 5},
}  # fmt: skip


@pytest.mark.parametrize("phase", Phase)
def test_what_a_phase_does_not_allow_is_a_protocol_error(phase: Phase) -> None:
    machine = replace(waiting(), phase=phase)
    for number, event in enumerate(EVENTS):
        if number in ALLOWED.get(phase, set()):
            machine.on(event)
        else:
            with pytest.raises(ProtocolError, match=f"in phase {phase.value} met"):
                machine.on(event)


# ------------------------------------------------------------------------------------------ all of them, in every order

ONE, ONE_OF_THREE = t.written((), t.FIRST, 2), t.written((), t.FIRST, 3)
LEFT_OPEN, CLOSED = t.written(ONE, t.OURS, 2, "", sealed=1), t.written(ONE, t.OURS, 2, "abort")
ALL = ("committed", "committed")
GIVEN_UP = {("lost", "aborted"), ("failed", "aborted")}


@pytest.mark.parametrize(
    ("fate", "log", "states", "ends"),
    [
        (t.Fate(failures=1), (), 500, {ALL, *GIVEN_UP}),
        (t.Fate(failures=1), ONE, 500, {ALL, *GIVEN_UP}),
        (t.Fate(losses=2), ONE, 1_500, {ALL, *GIVEN_UP}),
        (t.Fate(), LEFT_OPEN, 500, {ALL, *GIVEN_UP, ("lost",)}),
        (t.Fate(3), ONE_OF_THREE, 5_000, {(*ALL, "committed"), ("lost", "aborted", "aborted")}),
        (t.Fate(stale=True), CLOSED, 500, {ALL, *GIVEN_UP}),
        (t.Fate(rival=True, losses=0), (), 1_000, {(*ALL, "committed"), ("lost", "aborted", "committed")}),
        (t.Fate(rival=True), ONE, 10_000, {(*ALL, "committed"), (*ALL, "lost"), ("lost", "aborted", "committed")}),
        (t.Fate(twin=True), ONE, 5_000, {(*ALL, "lost"), ("committed", "lost", "committed")}),
    ],
    ids=[
        "first version", "next version", "two lost answers", "one left open", "three producers", "an old report",
        "a rival for the first version", "a rival", "a twin",
    ],
)  # fmt: skip
def test_a_trainer_in_every_order(fate: t.Fate, log: t.Log, states: int, ends: set[tuple[str, ...]]) -> None:
    explorer = t.Explorer(fate)
    assert explorer.run(t.start(fate, log)) > states
    assert ends <= explorer.ends


@pytest.mark.parametrize("flaw", ["baseline", "twice", "step"])
def test_what_does_not_add_up_is_never_committed(flaw: str) -> None:
    explorer = t.Explorer(t.Fate(flaw=flaw))
    assert explorer.run(t.start(explorer.fate, ONE)) > 300
    assert explorer.ends == GIVEN_UP


# ------------------------------------------------------------------------------------------ mutants


class _Coordinator(c.Coordinator):
    """Handlers are looked up by name, so that a subclass can break one of them."""

    def on(self, event: m.Event) -> c.Step:
        handler = c._HANDLERS.get((self.phase, type(event)))
        mutated = getattr(self, handler.__name__, None) if handler else None
        return mutated(event) if mutated else super().on(event)


class _Producer(p.Producer):
    def on(self, event: m.Event) -> p.Step:
        handler = p._HANDLERS.get((self.phase, type(event)))
        mutated = getattr(self, handler.__name__, None) if handler else None
        return mutated(event) if mutated else super().on(event)


class CommitsWithoutTheOthers(_Coordinator):
    """Who stays away is left out."""

    def _fail(self, event: m.EncodeFailed) -> c.Step:
        if self.phase is not c.Phase.GATHERING:
            return super()._fail(event)
        alone = replace(self, intent=replace(self._intent(), producers=1))
        return alone._gathered(m.Gathered((self._manifest(),), 1))


class GathersForEver(_Coordinator):
    """Does not look whether somebody closed the attempt."""

    def _taken_over(self, event: m.AttemptRead) -> c.Step:
        return self, (m.Gather(self._intent()),)


class TakesNoAnswerForCommit(_Coordinator):
    """A producer's ABORT may have been first."""

    def _reread(self, event: m.NotCreated) -> c.Step:
        return self._committed(m.Created()) if self.phase is c.Phase.COMMITTING else super()._reread(event)


class DoesNotReseal(_Coordinator):
    """A manifest without an answer is taken for sealed."""

    def _reread(self, event: m.NotCreated) -> c.Step:
        return self._sealed(m.Created()) if self.phase is c.Phase.SEALING else super()._reread(event)


class BelievesAnswerless(_Producer):
    """A manifest without an answer is taken for sealed, and reported."""

    def _reread(self, event: m.NotCreated) -> p.Step:
        return self._sealed(m.Created())


class TakesAnyManifest(_Producer):
    """Whatever was sealed in its place counts."""

    def _seal_answer(self, event: m.ManifestRead) -> p.Step:
        return super()._seal_answer(event) if event.manifest is None else self._sealed(m.Created())


class LeavesSilently(_Producer):
    """Who fails does not close the attempt."""

    def _fail(self, event: m.EncodeFailed) -> p.Step:
        return replace(self, phase=Phase.ABORTED, reason=event.reason), ()


class TakesItsAbortForFirst(_Producer):
    """A COMMIT may have been first."""

    def _closed(self, event: m.Event) -> p.Step:
        return replace(self, phase=Phase.ABORTED), ()


class AbortsOnce(_Producer):
    """An ABORT that did not arrive is not created again."""

    def _failed(self, event: m.AttemptRead) -> p.Step:
        return super()._failed(event) if event.attempt.outcome else (replace(self, phase=Phase.ABORTED), ())


class TakesAnyOutcomeForCommit(_Producer):
    def _decided(self, event: m.AttemptRead) -> p.Step:
        after, actions = super()._decided(event)
        return (replace(after, phase=Phase.COMMITTED) if after.outcome else after), actions


class TakesAnyCommitForItsOwn(_Producer):
    """Does not look whether its manifest is in it."""

    def _decided(self, event: m.AttemptRead) -> p.Step:
        after, actions = super()._decided(event)
        return (replace(after, phase=Phase.COMMITTED) if after.phase is Phase.LOST else after), actions


class WaitsForEver(_Producer):
    """Its coordinator may be dead."""

    def _fail(self, event: m.EncodeFailed) -> p.Step:
        return super()._fail(event) if self.phase is not Phase.WAITING else (self, (m.AwaitOutcome(2),))


def sums_not_compared(intent: Intent, manifests: tuple[ProducerManifest, ...]) -> Digest:
    return sum((manifest.part for manifest in manifests), Digest())


def parts_not_summed(intent: Intent, manifests: tuple[ProducerManifest, ...]) -> Digest:
    return intent.base_digest + sum((manifest.shift for manifest in manifests), Digest())


def last_part_not_summed(intent: Intent, manifests: tuple[ProducerManifest, ...]) -> Digest:
    return attempts.new_digest(intent, manifests) - manifests[-1].part


def nothing_compared(intent: Intent, manifests: tuple[ProducerManifest, ...]) -> None:
    pass


def steps_not_compared(intent: Intent, manifests: tuple[ProducerManifest, ...]) -> None:
    attempts.check_manifests(intent, tuple(replace(manifest, step=0) for manifest in manifests))


def attempts_not_compared(intent: Intent, manifests: tuple[ProducerManifest, ...]) -> None:
    attempts.check_manifests(intent, tuple(replace(manifest, attempt=intent.attempt) for manifest in manifests))


MACHINES: list[tuple[type[_Coordinator] | type[_Producer], t.Fate, t.Log]] = [
    (CommitsWithoutTheOthers, t.Fate(), ()),
    (GathersForEver, t.Fate(), ONE),
    (TakesNoAnswerForCommit, t.Fate(), ONE),
    (DoesNotReseal, t.Fate(), ONE),
    (BelievesAnswerless, t.Fate(), ONE),
    (TakesAnyManifest, t.Fate(twin=True, losses=0), ONE),
    (LeavesSilently, t.Fate(losses=0), ONE),
    (TakesItsAbortForFirst, t.Fate(losses=0), ONE),
    (AbortsOnce, t.Fate(), ONE),
    (TakesAnyOutcomeForCommit, t.Fate(losses=0), ONE),
    (TakesAnyCommitForItsOwn, t.Fate(twin=True, losses=0), ONE),
    (WaitsForEver, t.Fate(losses=0), ONE),
]
FUNCTIONS: list[tuple[Callable[..., object], str, t.Fate, t.Log]] = [
    (sums_not_compared, "new_digest", t.Fate(flaw="baseline"), ONE),
    (sums_not_compared, "new_digest", t.Fate(flaw="twice"), ONE),
    (parts_not_summed, "new_digest", t.Fate(flaw="baseline"), ONE),
    (parts_not_summed, "new_digest", t.Fate(), ()),
    (last_part_not_summed, "new_digest", t.Fate(), ONE),
    (nothing_compared, "check_manifests", t.Fate(stale=True), CLOSED),
    (attempts_not_compared, "check_manifests", t.Fate(stale=True), CLOSED),
    (steps_not_compared, "check_manifests", t.Fate(flaw="step"), ONE),
]
DEAD = (AssertionError, IntegrityError, ProtocolError)


@pytest.mark.parametrize(("mutant", "fate", "log"), MACHINES, ids=[mutant.__name__ for mutant, *_ in MACHINES])
def test_the_exploration_finds_broken_machines(mutant: type[Any], fate: t.Fate, log: t.Log) -> None:
    of = "coordinator" if issubclass(mutant, c.Coordinator) else "producer"
    fate = replace(fate, **{of: mutant})
    with pytest.raises(DEAD):
        t.Explorer(fate).run(t.start(fate, log))


@pytest.mark.parametrize(
    ("mutant", "name", "fate", "log"),
    FUNCTIONS,
    ids=[f"{mutant.__name__} {fate.flaw}" for mutant, _, fate, _ in FUNCTIONS],
)
def test_the_exploration_finds_broken_sums(
    mutant: Callable[..., object], name: str, fate: t.Fate, log: t.Log, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(c, name, mutant)
    with pytest.raises(DEAD):
        t.Explorer(fate).run(t.start(fate, log))


def test_the_harness_itself_passes_unbroken_mutants() -> None:
    fate = t.Fate(coordinator=_Coordinator, producer=_Producer)
    assert t.Explorer(fate).run(t.start(fate, ONE)) > 300
