"""Rules of the machines that the explorers reach by search, here one by one: what must happen, and why. With the unit
tests of each machine they run every branch of ``deltarefit.protocol`` (``make coverage``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import Header, Held, Mode, State
from deltarefit.protocol import attempts
from deltarefit.protocol import messages as m
from deltarefit.protocol.attempts import Attempt
from deltarefit.protocol.coordinator import Coordinator
from deltarefit.protocol.coordinator import Phase as Opener
from deltarefit.protocol.follower import Follower, Phase
from deltarefit.records import Digest
from tests import stream_log as s
from tests import test_coordinator as coordinator
from tests.explorer import CATALOG, RUN, digest
from tests.stream_log import ABORT, BASE, COMMIT, OTHER, OWN, STAGE, STREAM, Entry

NEW, TORN = (1, 2, 3), Digest(7, 7)
BOTH = (True, True)


def read(number: int = 2, mode: Mode = STREAM, held: s.Bits = BASE, **fields: Any) -> Attempt:
    """Attempt ``number`` on version 1, from ``BASE`` to ``NEW``: one payload of each producer. Open, nothing said."""
    return s.records(Entry(number, mode, 1, held, NEW, **fields), BASE)


def whole(number: int = 2, mode: Mode = STREAM, end: str = "", **fields: Any) -> Attempt:
    """The same with all payloads announced, all lists ended and all manifests sealed."""
    return read(number, mode, listed=(1, 1), ended=(OWN, OWN), sealed=BOTH, end=end, **fields)


PART = read(listed=(1, 0))
"""One payload of attempt 2 is announced."""
OPEN, DONE, FAILED = whole(), whole(end=COMMIT), whole(end=ABORT)


def follower(phase: Phase, **fields: Any) -> Follower:
    """A receiver of version 1."""
    return replace(Follower(RUN, CATALOG, "i", True, phase, 1, digest(BASE)), **fields)


def dirty(phase: Phase, attempt: Attempt = OPEN, **fields: Any) -> Follower:
    refs = fields.pop("refs", attempt.announced)
    return follower(phase, attempt=attempt, target=attempt.number, refs=refs, **fields)


def names(attempt: Attempt) -> frozenset[str]:
    return frozenset(ref.sha256 for ref in attempt.payloads)


def header(state: State, version: int = 1, target: int = 0) -> Header:
    return Header(RUN, CATALOG, state, version, target, digest(BASE), 0, "i")


def fitting(attempt: Attempt) -> m.Staged:
    return m.Staged(tuple(m.Sums(ref.pre, ref.post) for ref in attempt.announced))


def kinds(actions: tuple[m.Action, ...]) -> list[type[m.Action]]:
    return [type(action) for action in actions]


def is_lost(step: tuple[Follower, tuple[m.Action, ...]]) -> bool:
    """No version is claimed any more, not even by the header, users are stopped, and an anchor is looked for."""
    after, actions = step
    unknown = Header(RUN, CATALOG, State.UNKNOWN, 0, 0, Digest(), 0, "i")
    wanted = (m.Pause(), m.WriteHeader(unknown), m.DropStage(), m.FindAnchor())
    return (after.phase, after.mixed, actions) == (Phase.LOST, False, wanted)


# ------------------------------------------------------------------------------------------ what the log says


def test_a_stream_announces_what_its_batches_list_until_it_is_committed() -> None:
    """A manifest alone may be followed by more: what could be written must be known from lists that end."""
    sealed = read(sealed=BOTH)
    assert (sealed.announced, len(sealed.payloads)) == ((), 2)
    assert PART.announced == OPEN.payloads[:1]
    assert replace(DONE, batches=()).announced == DONE.payloads
    assert (PART.ended, OPEN.ended) == (False, True)


@pytest.mark.parametrize(
    "said",
    [
        read(listed=(1, 1), ended=(OWN, 0), sealed=BOTH),
        read(listed=(0, 1), ended=(OTHER, OWN), sealed=BOTH),
        replace(whole(), batches=whole().batches[:1]),
        replace(whole(), batches=()),
    ],
    ids=["not ended", "cut short", "no list of a producer", "no lists"],
)
def test_a_manifest_holds_just_what_was_announced(said: Attempt) -> None:
    """Receivers have written what was announced, so a COMMIT of anything else would not be what they hold."""
    intent = said.intent
    assert intent is not None
    with pytest.raises(IntegrityError, match="announced other payloads than it sealed"):
        attempts.check_lists(intent, said.manifests, said.batches)
    assert (attempts.adds_up(said), attempts.adds_up(OPEN)) == (False, True)
    attempts.check_lists(replace(intent, mode=STAGE), said.manifests, ())


# ------------------------------------------------------------------------------------------ the coordinator


def test_lists_of_aborted_streams_are_ended_before_the_next_attempt_opens() -> None:
    machine = Coordinator(RUN, "me", mode=STREAM, number=2, base=1, digest=digest(BASE))
    for number in (2, 3):
        machine, actions = machine.on(m.AttemptRead(whole(number, end=ABORT)))
        assert actions == (m.ReadAttempt(number + 1),)
    machine, actions = machine.on(m.AttemptRead(whole(4, STAGE, ABORT)))  # nothing of it was ever written
    machine, actions = machine.on(m.AttemptRead(Attempt(5)))
    assert (machine.phase, actions) == (Opener.ENDING, (m.EndLists((2, 3)),))
    machine, (create,) = machine.on(m.Created())
    assert isinstance(create, m.CreateIntent)
    assert (machine.phase, create.intent.attempt, create.intent.mode) == (Opener.OPENING, 5, STREAM)


def test_a_commit_covers_what_streams_before_it_left() -> None:
    machine = Coordinator(RUN, "me", mode=STREAM, number=2, base=1, digest=digest(BASE))
    for seen in (FAILED, whole(3, end=COMMIT), Attempt(4)):
        machine, actions = machine.on(m.AttemptRead(seen))
    assert (machine.loose, kinds(actions)) == ((), [m.CreateIntent])


def test_receivers_are_asked_before_a_commit_but_not_for_a_first_version() -> None:
    machine = coordinator.sealed()
    gathered = coordinator.gathered(coordinator.intent_of("me", 2, 1))
    polling, (poll,) = replace(machine, polls=True).on(gathered)
    assert (polling.phase, type(poll)) == (Opener.POLLING, m.Poll)
    assert polling.on(m.AttemptRead(coordinator.attempt(2, "me", 1, "sealed"))) == (polling, (poll,))
    committing, (create,) = polling.on(m.Polled(("a",), ("b",)))
    assert isinstance(create, m.CreateOutcome)
    assert (create.outcome.members, create.outcome.evicted) == (("a",), ("b",))
    assert committing.phase is Opener.COMMITTING
    failed = coordinator.walk(polling, m.EncodeFailed("too few"), m.Created())[0]
    assert (failed.phase, failed.reason) == (Opener.FAILED, "too few")
    first, _ = coordinator.walk(Coordinator(RUN, "me", polls=True), m.AttemptRead(Attempt(1)), m.Created())
    intent = coordinator.intent_of("me", 1, 0)
    _, actions = coordinator.walk(first, coordinator.encoded(intent), m.Created(), coordinator.gathered(intent))
    assert kinds(actions) == [m.CreateOutcome]


# ------------------------------------------------------------------------------------------ a receiver starts


@pytest.mark.parametrize(
    "found",
    [
        None,
        header(State.UNKNOWN),
        replace(header(State.CLEAN), run="cd" * 16),
        replace(header(State.DIRTY), catalog=""),
    ],
    ids=["none", "unknown", "another run", "another model"],
)
def test_a_header_that_names_no_version_of_ours_leads_to_an_anchor(found: Header | None) -> None:
    assert is_lost(follower(Phase.BOOT).on(m.HeaderRead(found)))


@pytest.mark.parametrize(("target", "mixed"), [(2, False), (3, True)])
def test_a_dirty_header_is_redone_in_a_pause(target: int, mixed: bool) -> None:
    """Attempts between version and target may have left something, too: nobody remembers, so all bits are proven."""
    after, actions = Follower(RUN, CATALOG, "i").on(m.HeaderRead(header(State.DIRTY, target=target)))
    assert (after.phase, after.target, after.mixed) == (Phase.REDO, target, mixed)
    assert (after.version, after.digest) == (1, digest(BASE))
    assert actions == (m.Pause(), m.ReadAttempt(target))


def test_without_an_anchor_the_first_version_is_waited_for() -> None:
    lost = follower(Phase.LOST)
    assert lost.on(m.NoAnchor()) == (lost, (m.AwaitAttempt(1), m.FindAnchor()))


def test_what_an_anchor_left_in_the_weights_is_read_back() -> None:
    """Only the bits that are there make a receiver CLEAN: users see files, header and generation, in this order."""
    lost = follower(Phase.LOST, version=0, digest=Digest())
    seeding, actions = lost.on(m.AnchorFound(s.ANCHOR, s.ANCHOR.digest))
    assert (seeding.phase, actions) == (Phase.SEEDING, (m.LoadAnchor(s.ANCHOR),))
    clean, actions = seeding.on(m.AnchorLoaded(digest(BASE)))
    wanted = (m.FinishSeed(), m.WriteHeader(header(State.CLEAN)), m.Resume(), m.ReadAttempt(2))
    assert (clean.phase, clean.version, clean.anchor, actions) == (Phase.CLEAN, 1, None, wanted)
    with pytest.raises(IntegrityError, match="seeded weights are wrong"):
        seeding.on(m.AnchorLoaded(digest(NEW)))


PRUNED = replace(whole(2, STAGE, COMMIT), manifests=())


@pytest.mark.parametrize("phase", [Phase.CLEAN, Phase.ADRIFT, Phase.STAGED, Phase.REDO, Phase.STREAMING])
def test_only_an_anchor_leads_past_what_was_pruned(phase: Phase) -> None:
    assert is_lost(dirty(phase, PART).on(m.AttemptRead(PRUNED)))


def test_what_was_pruned_behind_a_receiver_is_no_loss() -> None:
    ahead = follower(Phase.CLEAN, version=2)
    assert ahead.on(m.AttemptRead(PRUNED)) == (ahead, ())
    lost = follower(Phase.LOST, version=0)
    assert lost.on(m.AttemptRead(PRUNED)) == (lost, ())  # it looks for an anchor already


# ------------------------------------------------------------------------------------------ mode stage


@pytest.mark.parametrize("phase", [Phase.CLEAN, Phase.ADRIFT])
def test_an_aborted_attempt_is_passed(phase: Phase) -> None:
    machine = follower(phase)
    assert machine.on(m.AttemptRead(FAILED)) == (machine, (m.ReadAttempt(3),))


def test_a_committed_version_is_written_once_it_is_staged() -> None:
    """Users are stopped and the header says DIRTY before the first byte."""
    done = whole(mode=STAGE, end=COMMIT)
    staging, _ = follower(Phase.CLEAN).on(m.AttemptRead(done))
    writing, actions = staging.on(fitting(done))
    assert kinds(actions) == [m.Pause, m.WriteHeader, m.Write]
    assert (writing.phase, actions[1]) == (Phase.WRITING, m.WriteHeader(header(State.DIRTY, target=2)))


def test_a_receiver_adrift_does_not_refuse_what_adds_up() -> None:
    """What failed streams left is in its bits, so that their sum says nothing. But an attempt that adds up sets all of
    that, and is made for the rest: whoever it does not fit has other bits, and alone would refuse all that follows."""
    attempt = whole(3, STAGE)
    staging, _ = follower(Phase.ADRIFT, target=2).on(m.AttemptRead(attempt))
    assert is_lost(staging.on(m.Staged(tuple(m.Sums(TORN, ref.post) for ref in attempt.payloads))))
    assert staging.on(fitting(attempt))[0].phase is Phase.STAGED


def test_an_attempt_that_is_staged_before_it_is_decided_is_read_again() -> None:
    """It may have been decided meanwhile; only then is it time to vote."""
    sealed = whole(mode=STAGE)
    staging, _ = follower(Phase.CLEAN).on(m.AttemptRead(sealed))
    staged, actions = staging.on(fitting(sealed))
    assert (staged.phase, actions) == (Phase.STAGED, (m.ReadAttempt(2),))
    assert staged.on(m.AttemptRead(sealed))[1] == (m.CastVote(sealed, Held.STAGED), m.AwaitAttempt(2))


def test_what_was_refused_is_staged_once_more_when_it_is_committed() -> None:
    done = whole(mode=STAGE, end=COMMIT)
    sealed = replace(done, outcome=None)
    refused = follower(Phase.STAGED, attempt=sealed, refused=True)
    staging, actions = refused.on(m.AttemptRead(done))
    assert actions == (m.Stage(done, done.payloads),)
    writing, actions = staging.on(fitting(done))
    assert (writing.phase, kinds(actions)) == (Phase.WRITING, [m.Pause, m.WriteHeader, m.Write])


@pytest.mark.parametrize("phase", [Phase.STAGING, Phase.FILLING, Phase.SEEDING])
def test_a_version_that_cannot_be_had_leads_to_an_anchor(phase: Phase) -> None:
    assert is_lost(dirty(phase, DONE).on(m.NotStaged()))


@pytest.mark.parametrize(("phase", "then"), [(Phase.STAGING, Phase.STAGED), (Phase.FILLING, Phase.STREAMING)])
def test_what_cannot_be_had_of_an_open_attempt_is_refused(phase: Phase, then: Phase) -> None:
    """It may never be a version, and what is lost or has no room now may be there once it is."""
    refused, actions = dirty(phase).on(m.NotStaged())
    assert (refused.phase, refused.refs, actions) == (then, (), (m.DropStage(), m.ReadAttempt(2)))
    assert refused.on(m.AttemptRead(OPEN))[1][0] == m.CastVote(OPEN, Held.REFUSED)


def test_manifests_that_a_store_shows_no_more_are_waited_for() -> None:
    """F13: a receiver votes for what it staged only while it sees it."""
    sealed = whole(mode=STAGE)
    staged = follower(Phase.STAGED, attempt=sealed, refs=sealed.payloads)
    half = replace(sealed, manifests=sealed.manifests[:1])
    assert staged.on(m.AttemptRead(half)) == (staged, (m.AwaitAttempt(2),))


@pytest.mark.parametrize("attempt", [whole(3, STAGE), whole(mode=STAGE, held=(5, 0, 0))], ids=["number", "manifests"])
def test_what_is_staged_must_stay_what_it_was(attempt: Attempt) -> None:
    sealed = whole(mode=STAGE)
    for seen in (attempt, replace(attempt, manifests=attempt.manifests[: attempt.number == 2])):
        with pytest.raises(IntegrityError, match="changed its manifest"):
            follower(Phase.STAGED, attempt=sealed, refs=sealed.payloads).on(m.AttemptRead(seen))


def test_an_abort_counts_whatever_else_a_store_shows() -> None:
    sealed, failed = whole(mode=STAGE), whole(mode=STAGE, end=ABORT)
    staged = follower(Phase.STAGED, attempt=sealed, refs=sealed.payloads)
    assert staged.on(m.AttemptRead(replace(failed, manifests=())))[0].phase is Phase.CLEAN


# ------------------------------------------------------------------------------------------ mode stream


def test_a_stream_that_is_committed_already_is_staged_like_any_version() -> None:
    """Nothing is to be gained by a pause before it is here."""
    staging, actions = follower(Phase.CLEAN).on(m.AttemptRead(DONE))
    assert (staging.phase, actions) == (Phase.STAGING, (m.Stage(DONE, DONE.payloads),))


def test_generation_goes_on_until_a_stream_has_something_to_write() -> None:
    clean = follower(Phase.CLEAN)
    waits = (clean, (m.AwaitAttempt(2),))
    assert clean.on(m.AttemptRead(read())) == waits
    filling, actions = clean.on(m.AttemptRead(PART))
    assert kinds(actions) == [m.Pause, m.WriteHeader, m.Stage]
    assert (filling.phase, filling.target, filling.mixed) == (Phase.FILLING, 2, False)
    assert actions[2] == m.Stage(PART, PART.announced)


def test_a_stream_without_changes_is_a_version_too() -> None:
    """Nothing is announced, and all is said: there is a vote to cast, and a version to hold."""
    same = s.records(Entry(2, STREAM, 1, BASE, BASE, ended=(OWN, OWN), sealed=BOTH), BASE)
    after, actions = follower(Phase.CLEAN).on(m.AttemptRead(same))
    assert (after.phase, kinds(actions)[2:]) == (Phase.STREAMING, [m.CastVote, m.AwaitAttempt])


def test_who_does_not_take_part_or_has_another_base_stays_out_of_a_stream() -> None:
    for machine in (follower(Phase.CLEAN, streams=False), follower(Phase.CLEAN, digest=TORN)):
        assert machine.on(m.AttemptRead(PART)) == (machine, (m.AwaitAttempt(2),))


def test_a_second_stream_makes_the_bits_a_mixture() -> None:
    filling, _ = follower(Phase.ADRIFT, target=2).on(m.AttemptRead(read(3, listed=(1, 0))))
    assert (filling.target, filling.mixed) == (3, True)


def test_what_fits_is_written_and_what_does_not_is_refused_unwritten() -> None:
    filling = dirty(Phase.FILLING, PART)
    writing, (write,) = filling.on(fitting(PART))
    assert (writing.phase, write) == (Phase.WRITING, m.Write(PART, PART.announced, (m.Op.APPLY,)))
    refused, actions = filling.on(m.Staged((m.Sums(TORN, PART.announced[0].post),)))
    assert actions == (m.DropStage(), m.ReadAttempt(2))
    after, actions = refused.on(m.AttemptRead(PART))
    assert (after.phase, actions) == (Phase.STREAMING, (m.CastVote(PART, Held.REFUSED), m.AwaitAttempt(2)))


def test_a_payload_of_an_open_attempt_that_leads_elsewhere_is_refused() -> None:
    """Of a version that is an error; an open attempt may be anybody's mistake, and end in ABORT."""
    wrong = m.Staged(tuple(m.Sums(ref.pre, TORN) for ref in OPEN.announced))
    assert dirty(Phase.FILLING).on(wrong)[0].refused
    with pytest.raises(IntegrityError, match="does not lead where"):
        dirty(Phase.FILLING, DONE).on(wrong)


def test_refusing_what_is_then_committed_means_that_ours_are_the_wrong_bits() -> None:
    refused = dirty(Phase.STREAMING, refused=True)
    filling, actions = refused.on(m.AttemptRead(DONE))
    assert actions == (m.Stage(DONE, DONE.payloads),)
    assert is_lost(filling.on(m.Staged(tuple(m.Sums(TORN, ref.post) for ref in DONE.payloads))))


def test_a_refusal_ends_with_its_attempt() -> None:
    adrift, _ = dirty(Phase.STREAMING, refused=True).on(m.AttemptRead(FAILED))
    after, actions = adrift.on(m.AttemptRead(read(3, listed=(1, 0))))
    assert (after.phase, after.refused, kinds(actions)[-1]) == (Phase.FILLING, False, m.Stage)


def test_after_each_write_more_is_looked_for() -> None:
    written = m.Written(tuple(ref.post for ref in PART.announced))
    reading, actions = dirty(Phase.WRITING, PART).on(written)
    assert (reading.phase, actions) == (Phase.STREAMING, (m.DropStage(), m.ReadAttempt(2)))
    filling, actions = reading.on(m.AttemptRead(OPEN))
    assert (filling.phase, actions) == (Phase.FILLING, (m.Stage(OPEN, OPEN.announced[1:]),))
    assert reading.on(m.AttemptRead(PART))[1] == (m.AwaitAttempt(2),)  # not sealed: more may come


def test_what_was_written_and_is_not_visible_is_waited_for_or_lost() -> None:
    """F13. A COMMIT without a payload that was written is of other bits than ours."""
    held = dirty(Phase.STREAMING, written=frozenset({"f" * 64}))
    assert held.on(m.AttemptRead(PART))[1] == (m.AwaitAttempt(2),)
    assert held.on(m.AttemptRead(Attempt(2)))[1] == (m.AwaitAttempt(2),)
    assert is_lost(held.on(m.AttemptRead(DONE)))


def test_an_answer_about_another_attempt_is_a_bug() -> None:
    with pytest.raises(ProtocolError, match="attempt 3 was read in place of 2"):
        dirty(Phase.STREAMING).on(m.AttemptRead(read(3)))


def test_a_vote_says_applied_once_all_is_written_and_adds_up() -> None:
    held = dirty(Phase.STREAMING, written=names(OPEN))
    after, actions = held.on(m.AttemptRead(OPEN))
    assert actions == (m.CastVote(OPEN, Held.APPLIED), m.AwaitAttempt(2))
    clean, actions = after.on(m.AttemptRead(DONE))
    assert kinds(actions) == [m.WriteHeader, m.DropStage, m.Resume, m.ReadAttempt]
    assert (clean.phase, clean.version, clean.digest, clean.target) == (Phase.CLEAN, 2, digest(NEW), 0)


def test_out_of_aborted_streams_only_a_proof_of_all_bits_leads() -> None:
    """A publisher that forgot the union is found, not believed: before the vote, and before CLEAN."""
    mixed = dirty(Phase.STREAMING, written=names(OPEN), mixed=True)
    for seen, vote, phase in ((OPEN, m.CastVote, Phase.STREAMING), (DONE, m.WriteHeader, Phase.CLEAN)):
        proving, actions = mixed.on(m.AttemptRead(seen))
        assert (proving.phase, actions) == (Phase.PROVING, (m.Prove(),))
        assert is_lost(proving.on(m.Proven(digest(BASE))))
        proven, actions = proving.on(m.Proven(digest(NEW)))
        assert isinstance(actions[0], vote)
        assert proven.phase is phase
    assert (proven.phase, proven.mixed, proven.proven) == (Phase.CLEAN, False, False)


def test_after_an_abort_the_engine_stays_paused_and_dirty() -> None:
    adrift, actions = dirty(Phase.STREAMING, written=names(OPEN)).on(m.AttemptRead(FAILED))
    assert actions == (m.DropStage(), m.ReadAttempt(3))
    assert (adrift.phase, adrift.target, adrift.version, adrift.written) == (Phase.ADRIFT, 2, 1, frozenset())


def test_a_staged_attempt_that_aborts_leaves_an_engine_as_it_was() -> None:
    """CLEAN or adrift: an attempt of mode stage wrote nothing."""
    failed = whole(3, STAGE, ABORT)
    sealed = replace(failed, outcome=None)
    for target, phase in ((0, Phase.CLEAN), (2, Phase.ADRIFT)):
        staged = follower(Phase.STAGED, attempt=sealed, refs=sealed.payloads, target=target)
        after, actions = staged.on(m.AttemptRead(failed))
        assert (after.phase, after.target, actions) == (phase, target, (m.DropStage(), m.ReadAttempt(4)))


# ------------------------------------------------------------------------------------------ after a crash


def test_redo_compares_what_is_live_with_what_was_announced() -> None:
    redo = follower(Phase.REDO, target=2)
    for seen in (PART, DONE):
        after, actions = redo.on(m.AttemptRead(seen))
        assert (after.phase, actions) == (Phase.CLASSIFYING, (m.Classify(seen, seen.announced),))
        posts = tuple(ref.post for ref in seen.announced)
        _, actions = after.on(m.Classified(posts, (True,) * len(posts)))
        assert actions == (m.Write(seen, seen.announced, (m.Op.SKIP,) * len(posts)),)


def test_redo_of_an_aborted_stream_waits_for_the_next_attempt() -> None:
    after, actions = follower(Phase.REDO, target=2).on(m.AttemptRead(FAILED))
    assert (after.phase, after.target, actions) == (Phase.ADRIFT, 2, (m.DropStage(), m.ReadAttempt(3)))


def test_redo_on_another_base_is_lost() -> None:
    assert is_lost(follower(Phase.REDO, digest=TORN, target=2).on(m.AttemptRead(DONE)))


def classified(*live: Digest, kept: bool = True, attempt: Attempt = DONE) -> tuple[Follower, tuple[m.Action, ...]]:
    return dirty(Phase.CLASSIFYING, attempt).on(m.Classified(live, (kept,) * len(live)))


def test_guarded_xor_skips_applies_and_sets() -> None:
    """F23-F25: a payload is applied only where the live sums prove that it was not; a torn one is set."""
    first, second = DONE.payloads
    writing, actions = classified(first.post, TORN)
    assert actions == (m.Write(DONE, (first, second), (m.Op.SKIP, m.Op.SET)),)
    assert (writing.written, writing.sets) == (frozenset({first.sha256}), True)
    writing, actions = classified(first.pre, second.pre)
    assert actions == (m.Write(DONE, (first, second), (m.Op.APPLY, m.Op.APPLY)),)
    assert (writing.written, writing.sets) == (frozenset(), False)


def test_a_torn_payload_without_absolute_values_is_not_guessed() -> None:
    """Committed: an anchor. Open: refused, for the next attempt overwrites it."""
    first = DONE.payloads[0]
    assert is_lost(classified(first.post, TORN, kept=False))
    refused, actions = classified(first.post, TORN, kept=False, attempt=OPEN)
    assert (refused.phase, refused.refused) == (Phase.STREAMING, True)
    assert actions == (m.DropStage(), m.ReadAttempt(2))
    assert is_lost(dirty(Phase.WRITING, DONE).on(m.ValuesLost()))


def test_untouched_payloads_that_are_not_kept_are_staged_anew() -> None:
    first, second = DONE.payloads
    writing, actions = classified(first.post, second.pre, kept=False)
    assert actions == (m.Write(DONE, (), ()),)
    filling, actions = writing.on(m.Written(()))
    assert (filling.phase, actions) == (Phase.FILLING, (m.Stage(DONE, (second,)),))


def test_overwrites_take_any_bits() -> None:
    """What failed streams left there is neither the base's nor the version's: it is set all the same."""
    done = whole(3, end=COMMIT, touched=(0, 1, 2))
    assert all(ref.overwrites for ref in done.payloads)
    _, actions = classified(TORN, TORN, attempt=done)
    assert actions == (m.Write(done, done.payloads, (m.Op.APPLY, m.Op.APPLY)),)
    _, actions = classified(TORN, TORN, kept=False, attempt=done)
    assert actions == (m.Write(done, (), ()),)  # staged anew
    filling = dirty(Phase.FILLING, done)
    _, actions = filling.on(m.Staged(tuple(m.Sums(TORN, ref.post) for ref in done.payloads)))
    assert kinds(actions) == [m.Write]


def test_a_write_that_is_not_read_back_is_tried_once_more_with_absolute_values() -> None:
    first, second = DONE.payloads
    again, actions = dirty(Phase.WRITING, DONE).on(m.Written((first.post, TORN)))
    assert actions == (m.Write(DONE, (first, second), (m.Op.SKIP, m.Op.SET)),)
    assert is_lost(again.on(m.Written((first.post, TORN))))
    clean, _ = again.on(m.Written((first.post, second.post)))
    assert (clean.phase, clean.version) == (Phase.CLEAN, 2)


# ------------------------------------------------------------------------------------------ what cannot be asked yet


def test_nothing_is_clean_at_what_is_not_decided() -> None:
    """The last guard before CLEAN, whatever leads there."""
    with pytest.raises(ProtocolError, match="without an outcome"):
        dirty(Phase.STREAMING)._committed()


def test_a_receiver_without_an_attempt_says_so() -> None:
    with pytest.raises(ProtocolError, match="phase writing has no attempt"):
        follower(Phase.WRITING).on(m.Written((TORN,) * 0))
