"""The coordinator machine: each row of protocol §3.6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import Decision, Intent, Mode, Outcome, PayloadRef, ProducerManifest
from deltarefit.protocol import messages as m
from deltarefit.protocol.coordinator import Coordinator, Phase
from deltarefit.records import Digest

RUN, SHA, D1 = "ab" * 16, "{:064x}", Digest(10, 20)


def manifest_of(nonce: str, attempt: int, base: int) -> ProducerManifest:
    """Deltas whose content depends on who encodes them."""
    mark = sum(nonce.encode()) + attempt
    refs = (PayloadRef(SHA.format(mark), 1, {}, 1, 1, Digest(1, 1), Digest(1 + mark, 7)),) if base else ()
    return ProducerManifest(RUN, attempt, base, 0, 0, refs)


def encoded(intent: Intent) -> m.Encoded:
    manifest = manifest_of(intent.nonce, intent.attempt, intent.base)
    digest = intent.base_digest + manifest.shift if intent.base else Digest(sum(intent.nonce.encode()), 1)
    return m.Encoded(manifest, digest, 1)


def intent_of(nonce: str, number: int, base: int, digest: Digest = D1) -> Intent:
    return Intent(RUN, number, base, digest if base else Digest(), Mode.STAGE, nonce)


def abort_of(nonce: str, number: int, base: int) -> Outcome:
    return Outcome(RUN, number, Decision.ABORT, base, Digest(), (), 0, nonce, f"by {nonce}")


def commit_of(intent: Intent) -> tuple[ProducerManifest, Outcome]:
    made = encoded(intent)
    hashes = (made.manifest.content_hash(),)
    outcome = Outcome(RUN, intent.attempt, Decision.COMMIT, intent.base, made.digest, hashes, 1, intent.nonce)
    return made.manifest, outcome


def attempt(number: int, nonce: str, base: int, end: str = "", digest: Digest = D1) -> m.Attempt:
    """Attempt ``number`` of ``nonce``: open, "sealed", "abort" or "commit"."""
    intent = intent_of(nonce, number, base, digest)
    manifest, commit = commit_of(intent)
    outcome = {"abort": abort_of("z", number, base), "commit": commit}.get(end)
    return m.Attempt(number, intent, manifest if end in ("sealed", "commit") else None, outcome)


def mine(**fields: Any) -> Coordinator:
    """A coordinator of nonce "me" after version 1."""
    return replace(Coordinator(RUN, "me", number=2, base=1, digest=D1), **fields)


def walk(machine: Coordinator, *events: m.Event) -> tuple[Coordinator, tuple[m.Action, ...]]:
    actions: tuple[m.Action, ...] = ()
    for event in events:
        machine, actions = machine.on(event)
    return machine, actions


def opened() -> Coordinator:
    return walk(mine(), m.AttemptRead(m.Attempt(2)), m.Created())[0]


def sealed() -> Coordinator:
    return walk(opened(), encoded(intent_of("me", 2, 1)), m.Created())[0]


READ_2 = (m.ReadAttempt(2),)

# ------------------------------------------------------------------------------------------ the tail


def test_starts_at_the_tail() -> None:
    assert mine().start() == (mine(), READ_2)


def test_passes_closed_attempts_and_takes_the_last_commit_for_its_base() -> None:
    events = [attempt(2, "a", 1, "abort"), attempt(3, "b", 1, "commit"), m.Attempt(4)]
    machine, actions = walk(mine(), *map(m.AttemptRead, events))
    assert (machine.phase, machine.base, machine.number) == (Phase.OPENING, 3, 4)
    committed = events[1].outcome
    assert committed is not None
    assert actions == (m.CreateIntent(Intent(RUN, 4, 3, committed.digest, Mode.STAGE, "me")),)


@pytest.mark.parametrize("end", ["", "sealed"])
@pytest.mark.parametrize("answer", [m.Created(), m.NotCreated()], ids=["created", "not created"])
def test_an_open_attempt_of_another_is_aborted_and_read_again(end: str, answer: m.Event) -> None:
    machine, actions = walk(mine(), m.AttemptRead(attempt(2, "a", 1, end)))
    assert machine.phase is Phase.ABORTING
    (create,) = actions
    assert isinstance(create, m.CreateOutcome)
    assert (create.outcome.decision, create.outcome.attempt, create.outcome.base) == (Decision.ABORT, 2, 1)
    assert walk(machine, answer) == (replace(machine, phase=Phase.TAIL), READ_2)


def test_a_commit_that_came_before_our_abort_is_the_new_base() -> None:
    machine, _ = walk(mine(), m.AttemptRead(attempt(2, "a", 1)), m.NotCreated())
    machine, actions = walk(machine, m.AttemptRead(attempt(2, "a", 1, "commit")))
    assert (machine.phase, machine.base, actions) == (Phase.TAIL, 2, (m.ReadAttempt(3),))


def test_a_history_that_is_not_linear_is_refused() -> None:
    with pytest.raises(IntegrityError, match="not linear at attempt 3"):
        walk(mine(number=3, base=2), m.AttemptRead(attempt(3, "a", 1, "commit")))


# ------------------------------------------------------------------------------------------ opening


def test_a_created_intent_is_encoded() -> None:
    machine, actions = walk(mine(), m.AttemptRead(m.Attempt(2)), m.Created())
    assert (machine.phase, actions) == (Phase.ENCODING, (m.Encode(intent_of("me", 2, 1)),))


def ambiguous_intent() -> Coordinator:
    machine, actions = walk(mine(), m.AttemptRead(m.Attempt(2)), m.NotCreated())
    assert (machine.phase, actions) == (Phase.OPENING, READ_2)
    return machine


def test_an_ambiguous_intent_that_is_not_there_is_created_again() -> None:
    machine, actions = walk(ambiguous_intent(), m.AttemptRead(m.Attempt(2)))
    assert (machine.phase, actions) == (Phase.OPENING, (m.CreateIntent(intent_of("me", 2, 1)),))


def test_an_ambiguous_intent_that_is_ours_counts() -> None:
    machine, actions = walk(ambiguous_intent(), m.AttemptRead(attempt(2, "me", 1)))
    assert (machine.phase, actions) == (Phase.ENCODING, (m.Encode(intent_of("me", 2, 1)),))


@pytest.mark.parametrize("end", ["", "abort", "commit"])
def test_a_lost_race_for_the_intent_ends_here(end: str) -> None:
    machine, actions = walk(ambiguous_intent(), m.AttemptRead(attempt(2, "a", 1, end)))
    assert (machine.phase, actions) == (Phase.LOST, ())
    assert "opened by another" in machine.reason


# ------------------------------------------------------------------------------------------ sealing


def test_an_encode_failure_ends_in_abort() -> None:
    machine, actions = walk(opened(), m.EncodeFailed("disk full"))
    (create,) = actions
    assert isinstance(create, m.CreateOutcome)
    assert (machine.phase, create.outcome.decision, create.outcome.reason) == (
        Phase.FAILING,
        Decision.ABORT,
        "disk full",
    )
    for answer in (m.Created(), m.NotCreated()):
        after, nothing = walk(machine, answer)
        assert (after.phase, after.reason, nothing) == (Phase.FAILED, "disk full", ())


def test_sums_that_do_not_telescope_end_in_abort() -> None:
    made = encoded(intent_of("me", 2, 1))
    machine, actions = walk(opened(), replace(made, digest=made.digest + Digest(1, 0)))
    (create,) = actions
    assert isinstance(create, m.CreateOutcome)
    assert create.outcome.decision is Decision.ABORT
    assert machine.phase is Phase.FAILING
    assert "does not follow" in machine.reason


@pytest.mark.parametrize("wrong", [manifest_of("me", 3, 1), manifest_of("me", 2, 0)])
def test_a_manifest_of_another_attempt_is_a_bug(wrong: ProducerManifest) -> None:
    with pytest.raises(ProtocolError, match="came back for 2"):
        walk(opened(), m.Encoded(wrong, D1, 1))


def test_the_first_version_needs_no_telescoping() -> None:
    first = walk(Coordinator(RUN, "me"), m.AttemptRead(m.Attempt(1)), m.Created())[0]
    machine, actions = walk(first, encoded(intent_of("me", 1, 0)))
    assert machine.phase is Phase.SEALING
    assert isinstance(actions[0], m.CreateManifest)


def test_the_commit_names_the_manifest_by_hash() -> None:
    made = encoded(intent_of("me", 2, 1))
    sealing, actions = walk(opened(), made)
    assert actions == (m.CreateManifest(made.manifest),)
    committing, actions = walk(sealing, m.Created())
    (create,) = actions
    assert isinstance(create, m.CreateOutcome)
    outcome = create.outcome
    assert (outcome.manifests, outcome.digest, outcome.anchor) == ((made.manifest.content_hash(),), made.digest, 1)
    assert (outcome.decision, outcome.nonce, outcome.base) == (Decision.COMMIT, "me", 1)
    assert walk(committing, m.Created())[0].phase is Phase.COMMITTED


def ambiguous_manifest() -> Coordinator:
    machine, actions = walk(opened(), encoded(intent_of("me", 2, 1)), m.NotCreated())
    assert (machine.phase, actions) == (Phase.SEALING, READ_2)
    return machine


def test_an_ambiguous_manifest_that_is_not_there_is_created_again() -> None:
    machine, actions = walk(ambiguous_manifest(), m.AttemptRead(attempt(2, "me", 1)))
    assert (machine.phase, actions) == (Phase.SEALING, (m.CreateManifest(manifest_of("me", 2, 1)),))


def test_an_ambiguous_manifest_that_is_ours_counts() -> None:
    machine, actions = walk(ambiguous_manifest(), m.AttemptRead(attempt(2, "me", 1, "sealed")))
    assert machine.phase is Phase.COMMITTING
    assert isinstance(actions[0], m.CreateOutcome)


def test_another_manifest_in_our_attempt_ends_in_abort() -> None:
    other = replace(attempt(2, "me", 1), manifest=manifest_of("other", 2, 1))
    machine, actions = walk(ambiguous_manifest(), m.AttemptRead(other))
    assert machine.phase is Phase.FAILING
    assert isinstance(actions[0], m.CreateOutcome)
    assert actions[0].outcome.decision is Decision.ABORT


def test_an_attempt_that_was_closed_while_sealing_is_lost() -> None:
    machine, actions = walk(ambiguous_manifest(), m.AttemptRead(attempt(2, "me", 1, "abort")))
    assert (machine.phase, machine.reason, actions) == (Phase.LOST, "by z", ())


# ------------------------------------------------------------------------------------------ deciding


def ambiguous_commit() -> Coordinator:
    machine, actions = walk(sealed(), m.NotCreated())
    assert (machine.phase, actions) == (Phase.COMMITTING, READ_2)
    return machine


def test_an_ambiguous_commit_that_is_not_there_is_created_again() -> None:
    machine, actions = walk(ambiguous_commit(), m.AttemptRead(attempt(2, "me", 1, "sealed")))
    assert machine.phase is Phase.COMMITTING
    assert actions == (m.CreateOutcome(commit_of(intent_of("me", 2, 1))[1]),)


def test_an_ambiguous_commit_that_is_ours_counts() -> None:
    assert walk(ambiguous_commit(), m.AttemptRead(attempt(2, "me", 1, "commit")))[0].phase is Phase.COMMITTED


def test_a_stale_commit_after_anothers_abort_is_lost() -> None:
    """F9: a coordinator paused for an hour returns; the register says ABORT."""
    machine, actions = walk(ambiguous_commit(), m.AttemptRead(attempt(2, "me", 1, "abort")))
    assert (machine.phase, machine.reason, actions) == (Phase.LOST, "by z", ())


def test_a_decision_of_another_without_a_reason_is_lost_with_one() -> None:
    silent = replace(attempt(2, "me", 1, "abort"), outcome=replace(abort_of("z", 2, 1), reason=""))
    machine, _ = walk(ambiguous_commit(), m.AttemptRead(silent))
    assert (machine.phase, machine.reason) == (Phase.LOST, "attempt 2 was decided by another publisher")


def test_our_own_abort_in_the_place_of_our_commit_is_a_failure() -> None:
    ours = replace(attempt(2, "me", 1), outcome=abort_of("me", 2, 1))
    assert walk(ambiguous_commit(), m.AttemptRead(ours))[0].phase is Phase.FAILED


# ------------------------------------------------------------------------------------------ events out of place


EVENTS: tuple[m.Event, ...] = (
    m.AttemptRead(m.Attempt(2)), m.Created(), m.NotCreated(), encoded(intent_of("me", 2, 1)), m.EncodeFailed("x"),
    m.HeaderRead(None), m.NoAnchor(), m.ValuesLost(),
)  # fmt: skip
ALLOWED = {
    Phase.TAIL: {0}, Phase.ABORTING: {1, 2}, Phase.OPENING: {0, 1, 2}, Phase.ENCODING: {3, 4}, Phase.SEALING: {0, 1, 2},
    Phase.COMMITTING: {0, 1, 2}, Phase.FAILING: {1, 2},
}  # fmt: skip


@pytest.mark.parametrize("phase", Phase)
def test_what_a_phase_does_not_allow_is_a_protocol_error(phase: Phase) -> None:
    machine = replace(sealed(), phase=phase)
    for number, event in enumerate(EVENTS):
        if number in ALLOWED.get(phase, set()):
            machine.on(event)
        else:
            with pytest.raises(ProtocolError, match=f"in phase {phase.value} met"):
                machine.on(event)


def test_what_is_not_there_yet_cannot_be_created() -> None:
    with pytest.raises(ProtocolError, match="no outcome yet"):
        mine(phase=Phase.COMMITTING).on(m.AttemptRead(m.Attempt(2)))


# ------------------------------------------------------------------------------------------ records that go together


def broken(**fields: Any) -> m.Attempt:
    return replace(attempt(2, "a", 1, "commit"), **fields)


def test_a_whole_attempt_passes() -> None:
    for end in ("", "sealed", "abort", "commit"):
        m.check_attempt(attempt(2, "a", 1, end))
    m.check_attempt(m.Attempt(2))
    m.check_attempt(attempt(1, "a", 0, "commit"))


GOOD = attempt(2, "a", 1, "commit")
assert GOOD.outcome
assert GOOD.manifest


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (broken(intent=None), "no intent"),
        (broken(intent=None, outcome=None), "no intent"),
        (broken(manifest=manifest_of("a", 2, 0)), "manifest base"),
        (broken(manifest=manifest_of("a", 3, 1)), "manifest base"),
        (broken(outcome=replace(GOOD.outcome, base=0)), "outcome base"),
        (broken(manifest=None), "manifest is missing"),
        (broken(manifest=manifest_of("b", 2, 1)), "manifest hash"),
        (broken(outcome=replace(GOOD.outcome, manifests=())), "manifest hash"),
        (broken(outcome=replace(GOOD.outcome, digest=GOOD.outcome.digest + Digest(0, 1))), "telescope"),
        (broken(intent=intent_of("a", 2, 1, D1 + Digest(1, 0))), "telescope"),
    ],
)
def test_records_that_do_not_belong_together_are_refused(wrong: m.Attempt, says: str) -> None:
    with pytest.raises(IntegrityError, match=says):
        m.check_attempt(wrong)
