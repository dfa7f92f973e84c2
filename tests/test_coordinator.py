"""The coordinator machine: each row of protocol §3.6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import Decision, Intent, Mode, Outcome, PayloadRef, ProducerManifest
from deltarefit.protocol import attempts
from deltarefit.protocol import messages as m
from deltarefit.protocol.coordinator import Coordinator, Phase
from deltarefit.records import Digest

RUN, SHA, D1 = "ab" * 16, "{:064x}", Digest(10, 20)
OTHERS = Digest(4, 5)
"""What every producer but the first owns, in the base."""


def manifest_of(
    nonce: str, attempt: int, base: int, before: Digest = D1, producer: int = 0, **fields: Any
) -> ProducerManifest:
    """Deltas whose content depends on who encodes them; ``before`` is what the producer owns, in the base."""
    mark = sum(nonce.encode()) + attempt + 1000 * producer
    refs = (PayloadRef(SHA.format(mark), 1, {}, 1, 1, 0, 0, Digest(1, 1), Digest(1 + mark, 7)),) if base else ()
    part = sum((ref.post - ref.pre for ref in refs), before) if base else Digest(sum(nonce.encode()), 1)
    manifest = ProducerManifest(RUN, attempt, base, producer, 0, part, SHA.format(producer), refs)
    return replace(manifest, **fields)


def manifests_of(intent: Intent) -> tuple[ProducerManifest, ...]:
    """What all producers of an attempt make; it adds up."""
    first = sum([OTHERS] * (intent.producers - 1), Digest())
    owned = [intent.base_digest - first, *[OTHERS] * (intent.producers - 1)]
    return tuple(
        manifest_of(intent.nonce, intent.attempt, intent.base, before, producer)
        for producer, before in enumerate(owned)
    )


def encoded(intent: Intent) -> m.Encoded:
    return m.Encoded(manifests_of(intent)[0])


def gathered(intent: Intent) -> m.Gathered:
    return m.Gathered(manifests_of(intent), 1)


def intent_of(nonce: str, number: int, base: int, digest: Digest = D1, producers: int = 1) -> Intent:
    return Intent(RUN, number, base, digest if base else Digest(), Mode.STAGE, nonce, producers)


def abort_of(nonce: str, number: int, base: int) -> Outcome:
    return Outcome(RUN, number, Decision.ABORT, base, Digest(), (), 0, nonce, f"by {nonce}")


def commit_of(intent: Intent) -> tuple[tuple[ProducerManifest, ...], Outcome]:
    made = manifests_of(intent)
    hashes, digest = tuple(manifest.content_hash() for manifest in made), sum((x.part for x in made), Digest())
    return made, Outcome(RUN, intent.attempt, Decision.COMMIT, intent.base, digest, hashes, 1, intent.nonce)


def attempt(number: int, nonce: str, base: int, end: str = "", digest: Digest = D1, producers: int = 1) -> m.Attempt:
    """Attempt ``number`` of ``nonce``: open, "sealed", "abort" or "commit"."""
    intent = intent_of(nonce, number, base, digest, producers)
    manifests, commit = commit_of(intent)
    outcome = {"abort": abort_of("z", number, base), "commit": commit}.get(end)
    return m.Attempt(number, intent, manifests if end in ("sealed", "commit") else (), outcome)


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


def committing() -> Coordinator:
    return walk(sealed(), gathered(intent_of("me", 2, 1)))[0]


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
    wrong = manifest_of("me", 2, 1, D1 + Digest(1, 0))
    machine, actions = walk(opened(), m.Encoded(wrong), m.Created(), m.Gathered((wrong,), 1))
    (create,) = actions
    assert isinstance(create, m.CreateOutcome)
    assert create.outcome.decision is Decision.ABORT
    assert machine.phase is Phase.FAILING
    assert "do not telescope" in machine.reason


@pytest.mark.parametrize(
    "wrong", [manifest_of("me", 3, 1), manifest_of("me", 2, 0), manifest_of("me", 2, 1, producer=1)]
)
def test_a_manifest_of_another_attempt_or_producer_is_a_bug(wrong: ProducerManifest) -> None:
    with pytest.raises(ProtocolError, match="came back for 2"):
        walk(opened(), m.Encoded(wrong))


def test_the_first_version_needs_no_telescoping() -> None:
    intent = intent_of("me", 1, 0)
    first = walk(Coordinator(RUN, "me"), m.AttemptRead(m.Attempt(1)), m.Created())[0]
    machine, actions = walk(first, encoded(intent))
    assert machine.phase is Phase.SEALING
    assert isinstance(actions[0], m.CreateManifest)
    machine, actions = walk(machine, m.Created(), gathered(intent))
    assert machine.phase is Phase.COMMITTING
    assert actions == (m.CreateOutcome(commit_of(intent)[1]),)


def test_the_commit_names_the_manifest_by_hash() -> None:
    made = encoded(intent_of("me", 2, 1))
    sealing, actions = walk(opened(), made)
    assert actions == (m.CreateManifest(made.manifest),)
    gathering, actions = walk(sealing, m.Created())
    assert (gathering.phase, actions) == (Phase.GATHERING, (m.Gather(intent_of("me", 2, 1)),))
    committing, actions = walk(gathering, gathered(intent_of("me", 2, 1)))
    (create,) = actions
    assert isinstance(create, m.CreateOutcome)
    outcome = create.outcome
    assert (outcome.manifests, outcome.digest, outcome.anchor) == (
        (made.manifest.content_hash(),), made.manifest.part, 1,
    )  # fmt: skip
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
    assert (machine.phase, actions) == (Phase.GATHERING, (m.Gather(intent_of("me", 2, 1)),))


def test_another_manifest_in_our_attempt_ends_in_abort() -> None:
    other = replace(attempt(2, "me", 1), manifests=(manifest_of("other", 2, 1),))
    machine, actions = walk(ambiguous_manifest(), m.AttemptRead(other))
    assert machine.phase is Phase.FAILING
    assert isinstance(actions[0], m.CreateOutcome)
    assert actions[0].outcome.decision is Decision.ABORT


def test_an_attempt_that_was_closed_while_sealing_is_lost() -> None:
    machine, actions = walk(ambiguous_manifest(), m.AttemptRead(attempt(2, "me", 1, "abort")))
    assert (machine.phase, machine.reason, actions) == (Phase.LOST, "by z", ())


# ------------------------------------------------------------------------------------------ gathering

THREE = intent_of("me", 2, 1, producers=3)


def gathering() -> Coordinator:
    """One of three producers; it has sealed its own manifest."""
    machine, actions = walk(mine(producers=3), m.AttemptRead(m.Attempt(2)))
    assert actions == (m.CreateIntent(THREE),)
    machine, actions = walk(machine, m.Created(), encoded(THREE), m.Created())
    assert (machine.phase, actions) == (Phase.GATHERING, (m.Gather(THREE),))
    return machine


def test_a_commit_names_all_manifests_in_order_and_the_sum_of_their_parts() -> None:
    machine, actions = walk(gathering(), gathered(THREE))
    assert (machine.phase, actions) == (Phase.COMMITTING, (m.CreateOutcome(commit_of(THREE)[1]),))
    assert machine.outcome
    assert machine.outcome.manifests == tuple(x.content_hash() for x in manifests_of(THREE))
    assert machine.outcome.digest == D1 + sum((x.shift for x in manifests_of(THREE)), Digest())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attempt": 1, "base": 0}, "another attempt"),
        ({"run": "cd" * 16}, "another attempt"),
        ({"base": 0}, "manifest base"),
        ({"producer": 2}, "manifest of producer"),
        ({"step": 7}, "different steps"),
        ({"part": OTHERS}, "do not telescope"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_add_up_ends_in_abort(changes: dict[str, Any], says: str) -> None:
    first, second, third = manifests_of(THREE)
    machine, actions = walk(gathering(), m.Gathered((first, replace(second, **changes), third), 1))
    (create,) = actions
    assert isinstance(create, m.CreateOutcome)
    assert (machine.phase, create.outcome.decision) == (Phase.FAILING, Decision.ABORT)
    assert says in create.outcome.reason


def test_an_element_with_two_owners_and_one_with_none_do_not_add_up() -> None:
    first, second, third = manifests_of(THREE)
    wrong = (
        first,
        replace(second, part=second.part + Digest(11, 12)),
        replace(third, part=third.part - Digest(13, 14)),
    )
    machine, _ = walk(gathering(), m.Gathered(wrong, 1))
    assert machine.phase is Phase.FAILING


def test_manifests_that_are_not_all_or_not_ours_are_a_bug() -> None:
    first, second, third = manifests_of(THREE)
    for wrong in ((first, second), (second, first, third), (first, second, third, third), ()):
        with pytest.raises(ProtocolError, match="were gathered for 3 producers"):
            walk(gathering(), m.Gathered(wrong, 1))


def test_a_producer_that_stays_away_ends_the_attempt() -> None:
    machine, actions = walk(gathering(), m.EncodeFailed("rank 2 is silent"))
    (create,) = actions
    assert isinstance(create, m.CreateOutcome)
    assert (create.outcome.decision, create.outcome.reason) == (Decision.ABORT, "rank 2 is silent")
    assert walk(machine, m.NotCreated())[0].phase is Phase.FAILED


def test_an_attempt_that_a_producer_closed_is_lost() -> None:
    machine, actions = walk(gathering(), m.AttemptRead(attempt(2, "me", 1, "abort", producers=3)))
    assert (machine.phase, machine.reason, actions) == (Phase.LOST, "by z", ())


def test_an_attempt_that_is_still_open_is_gathered_on() -> None:
    machine, actions = walk(gathering(), m.AttemptRead(attempt(2, "me", 1, producers=3)))
    assert (machine, actions) == (gathering(), (m.Gather(THREE),))


def test_a_manifest_that_cannot_be_sealed_ends_in_abort() -> None:
    sealing, _ = walk(opened(), encoded(intent_of("me", 2, 1)))
    machine, actions = walk(sealing, m.EncodeFailed("no space left"))
    (create,) = actions
    assert isinstance(create, m.CreateOutcome)
    assert (machine.phase, create.outcome.decision) == (Phase.FAILING, Decision.ABORT)


# ------------------------------------------------------------------------------------------ deciding


def ambiguous_commit() -> Coordinator:
    machine, actions = walk(committing(), m.NotCreated())
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
    m.HeaderRead(None), m.NoAnchor(), m.ValuesLost(), gathered(intent_of("me", 2, 1)), m.ManifestRead(None),
    m.Polled((), ()),
)  # fmt: skip
ALLOWED = {
    Phase.TAIL: {0}, Phase.ABORTING: {1, 2}, Phase.OPENING: {0, 1, 2}, Phase.ENCODING: {3, 4},
    Phase.SEALING: {0, 1, 2, 4}, Phase.GATHERING: {0, 4, 8}, Phase.COMMITTING: {0, 1, 2}, Phase.FAILING: {1, 2},
    Phase.ENDING: {1}, Phase.POLLING: {0, 4, 10},
}  # fmt: skip


@pytest.mark.parametrize("phase", Phase)
def test_what_a_phase_does_not_allow_is_a_protocol_error(phase: Phase) -> None:
    machine = replace(committing(), phase=phase)
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
        attempts.check_attempt(attempt(2, "a", 1, end))
        attempts.check_attempt(attempt(2, "a", 1, end, producers=3))
    attempts.check_attempt(m.Attempt(2))
    attempts.check_attempt(attempt(1, "a", 0, "commit"))
    attempts.check_attempt(attempt(1, "a", 0, "commit", producers=2))


GOOD = attempt(2, "a", 1, "commit")
PAIR = attempt(2, "a", 1, "commit", producers=2)
assert GOOD.outcome
assert PAIR.intent
A, B = PAIR.manifests


def committed_wrongly(*manifests: ProducerManifest) -> m.Attempt:
    """``PAIR`` as somebody would commit it who takes whatever was sealed."""
    assert PAIR.outcome
    hashes, digest = tuple(x.content_hash() for x in manifests), sum((x.part for x in manifests), Digest())
    return replace(PAIR, manifests=manifests, outcome=replace(PAIR.outcome, manifests=hashes, digest=digest))


WRONG_PART = replace(B, part=B.part + Digest(1, 0))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (broken(intent=None), "no intent"),
        (broken(intent=None, outcome=None), "no intent"),
        (broken(manifests=(manifest_of("a", 2, 0),)), "manifest base"),
        (broken(manifests=(manifest_of("a", 3, 1),)), "another attempt"),
        (broken(manifests=(manifest_of("a", 2, 1, run="cd" * 16),)), "another attempt"),
        (broken(outcome=replace(GOOD.outcome, base=0)), "outcome base"),
        (broken(manifests=()), "manifest is missing"),
        (broken(manifests=(manifest_of("b", 2, 1),)), "manifest hash"),
        (broken(manifests=(A, B)), "manifest of producer"),
        (replace(PAIR, manifests=(A,)), "manifest is missing"),
        (replace(PAIR, manifests=(B, A)), "manifest of producer"),
        (replace(PAIR, manifests=(A, A)), "manifest of producer"),
        (replace(PAIR, manifests=(A, replace(B, step=1))), "different steps"),
        (replace(PAIR, manifests=(A, WRONG_PART)), "manifest hash"),
        (committed_wrongly(A, WRONG_PART), "telescope"),
        (committed_wrongly(A, replace(B, step=1)), "different steps"),
        (replace(PAIR, intent=replace(PAIR.intent, producers=1)), "manifest of producer"),
        (replace(PAIR, intent=replace(PAIR.intent, producers=3)), "manifest is missing"),
        (broken(outcome=replace(GOOD.outcome, manifests=())), "manifest hash"),
        (broken(outcome=replace(GOOD.outcome, digest=GOOD.outcome.digest + Digest(0, 1))), "telescope"),
        (broken(intent=intent_of("a", 2, 1, D1 + Digest(1, 0))), "telescope"),
    ],
)
def test_records_that_do_not_belong_together_are_refused(wrong: m.Attempt, says: str) -> None:
    with pytest.raises(IntegrityError, match=says):
        attempts.check_attempt(wrong)


@pytest.mark.parametrize("end", ["", "abort"])
@pytest.mark.parametrize(
    "sealed",
    [(A, WRONG_PART), (A, replace(B, step=1)), (manifest_of("a", 2, 0), B), (A,), (B,)],
    ids=["part", "step", "base", "one missing", "first missing"],
)
def test_what_was_sealed_wrongly_and_not_committed_stands_in_nobodys_way(
    end: str, sealed: tuple[ProducerManifest, ...]
) -> None:
    """A producer seals before anybody has compared it with the others: who closes or passes that attempt must be able
    to read it, and nobody stages it."""
    wrong = replace(PAIR, manifests=sealed, outcome=abort_of("z", 2, 1) if end else None)
    attempts.check_attempt(wrong)
    assert not attempts.adds_up(wrong)
    _, (action,) = walk(mine(), m.AttemptRead(wrong))
    assert isinstance(action, m.ReadAttempt if end else m.CreateOutcome)


def test_what_is_sealed_and_adds_up_may_be_staged() -> None:
    for producers in (1, 2, 3):
        assert attempts.adds_up(attempt(2, "a", 1, "sealed", producers=producers))
        assert not attempts.adds_up(attempt(2, "a", 1, "", producers=producers))
    first = attempt(1, "a", 0, "sealed", producers=2)
    assert attempts.adds_up(first)
    assert not attempts.adds_up(
        replace(first, manifests=first.manifests[:1])
    )  # nothing to add up to in the first version
    assert not attempts.adds_up(m.Attempt(2))


def test_anyone_may_close_an_attempt() -> None:
    abort = attempts.abort(RUN, 3, 1, "other", "why " * 500)
    assert (abort.decision, abort.attempt, abort.base, abort.nonce) == (Decision.ABORT, 3, 1, "other")
    assert len(abort.reason) == 1000
