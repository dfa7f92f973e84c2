"""Votes before COMMIT: the rule itself, and who is waited for, with real receivers."""

from __future__ import annotations

import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit import Publisher
from deltarefit.attendance import Attendance, member_key, vote_key
from deltarefit.baseline import MemorySpool
from deltarefit.errors import AttemptLostError, StorageFullError, UsageError
from deltarefit.landing import Windows
from deltarefit.manifest import Held, Member, Outcome, Vote
from deltarefit.ports import Store
from deltarefit.protocol.votes import Enough, Policy, TooFew, tally
from deltarefit.publishing import polling
from deltarefit.publishing.polling import policy_of
from deltarefit.runlog import RunLog
from deltarefit.stores.wrappers import Fault, Faulty, Kind
from tests import fleet
from tests import helpers as h
from tests.test_stream import fail

NAMES = ("a", "b", "c", "d")
YES, NO = Held.STAGED, Held.REFUSED
Living = dict[str, bool]
Votes = dict[str, Held]


def count(policy: Policy, living: Living, votes: Votes, *, expired: bool = False) -> Enough | TooFew | None:
    return tally(policy, living, votes, YES, expired=expired)


def test_all_that_live_are_waited_for() -> None:
    living = {"a": True, "b": True, "c": False}
    assert count(Policy(), living, {"a": YES}) is None
    assert count(Policy(), living, {"a": YES, "b": YES}) == Enough(("a", "b"), ("c",))
    assert count(Policy(), living, {"a": YES}, expired=True) == Enough(("a",), ("b", "c"))
    assert count(Policy(), {}, {}) == Enough((), ())


def test_so_many_are_enough() -> None:
    living = dict.fromkeys(NAMES, True)
    assert count(Policy(2), living, {"a": YES}) is None
    assert count(Policy(2), living, {"a": YES, "d": YES}) == Enough(("a", "d"), ("b", "c"))
    assert count(Policy(2), living, {"a": YES}, expired=True) == TooFew("1 of 2 receivers hold it, 4 follow")


def test_a_floor_holds_the_commit_back() -> None:
    assert count(Policy(least=1), {}, {}) is None
    assert count(Policy(least=1), {}, {}, expired=True) == TooFew("0 of 1 receivers hold it, none follows this run")
    assert count(Policy(least=2), {"a": True, "b": False}, {"a": YES}) is None


def test_refusals_are_not_waited_for_and_all_of_them_end_it() -> None:
    living = {"a": True, "b": True}
    assert count(Policy(), living, {"a": NO, "b": YES}) == Enough(("b",), ("a",))
    assert count(Policy(), living, {"a": NO}) is None
    assert count(Policy(), living, {"a": NO, "b": NO}) == TooFew("all receivers refuse it: a, b")
    assert count(Policy(2), living, {"a": NO}) == TooFew("0 of 2 receivers hold it, 2 follow")


def test_other_votes_and_strangers_do_not_count() -> None:
    assert count(Policy(), {"a": True}, {"a": Held.APPLIED, "z": YES}) is None
    assert count(Policy(1), {"a": True}, {"z": YES}) is None


@given(
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(0, 4),
    st.dictionaries(st.sampled_from(NAMES), st.booleans()),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(Held)),
    st.booleans(),
)
def test_any_tally(need: int | None, least: int, living: Living, votes: Votes, expired: bool) -> None:
    """Against the words: who counts, who is named, when it ends."""
    found = count(Policy(need, least), living, votes, expired=expired)
    yes = sorted(name for name in living if votes.get(name) is YES)
    if expired:
        assert found is not None
    if isinstance(found, Enough):
        assert list(found.members) == yes
        assert sorted({*found.members, *found.evicted}) == sorted(living)
        assert len(yes) >= max(need or 0, least)
        missing = [name for name in living if living[name] and votes.get(name) not in (YES, NO)]
        assert not missing or expired or need is not None
    if found is None:
        assert not expired


@pytest.mark.parametrize(("votes", "least"), [("some", 0), (0, 0), (-1, 0), (True, 0), ("all", -1), ("none", 1)])
def test_what_is_no_policy_is_refused(votes: str | int, least: int) -> None:
    with pytest.raises(UsageError):
        policy_of(votes, least)


def test_policies() -> None:
    assert policy_of("none", 0) is None
    assert policy_of("all", 3) == Policy(None, 3)
    assert policy_of(2, 0) == Policy(2, 0)


# ------------------------------------------------------------------------------------------ with receivers


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> tuple[Store, h.ArraySource]:
    monkeypatch.setattr(polling, "SILENCE_S", 1.0)
    monkeypatch.setattr("deltarefit.attendance.BEAT_S", 0.1)
    store, source = h.new_store(), h.ArraySource(h.random_model(np.random.default_rng(7)))
    h.published(store, source)
    return store, source


def outcome_of(store: Store, version: int) -> Outcome:
    outcome = RunLog.open(store).version(version).outcome
    assert outcome is not None
    return outcome


def register(store: Store, name: str) -> None:
    """A receiver that gives one sign of life and no more."""
    log = RunLog.open(store)
    store.put(member_key(name), Member(log.run, name, "0" * 16, 1, 1).to_bytes())


def test_a_commit_names_those_that_hold_it(run: tuple[Store, h.ArraySource]) -> None:
    store, source = run
    with fleet.following(store, 1, 2):
        source.model["a.weight"][0, 0] ^= 1
        assert outcome_of(store, h.published(store, source)).members == ("r1", "r2")
    assert not list(store.list("member")), "receivers that end leave the roll"
    assert outcome_of(store, h.published(store, source)).members == ()


def test_a_silent_receiver_delays_one_commit_and_is_evicted(run: tuple[Store, h.ArraySource]) -> None:
    store, source = run
    register(store, "dead")
    with fleet.following(store, 1):
        started = time.monotonic()
        first = outcome_of(store, h.published(store, source))
        waited = time.monotonic() - started
        assert (first.members, first.evicted) == (("r1",), ("dead",))
        assert waited >= 1.0, "it was not waited for"
        assert outcome_of(store, h.published(store, source)).evicted == ()


def test_who_stages_slowly_gives_signs_of_life(run: tuple[Store, h.ArraySource]) -> None:
    """Each payload takes a while, and all of them longer than silence may last."""
    store, source = run
    slow = Faulty(store, [Fault(Kind.DELAY, "get", "a/0000000002/pl/*", last=None, seconds=0.3)])
    with fleet.following(slow, 1):
        for array in source.model.values():
            array ^= array.dtype.type(1)
        assert outcome_of(store, h.published(store, source, payload_bytes=300)).members == ("r1",)


@pytest.mark.parametrize("step", ["pause", "digest"])
def test_a_long_step_is_no_silence(
    run: tuple[Store, h.ArraySource], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the vote of a stream generation must stand still, and after failed attempts all bits are proven."""
    store, source = run
    with fleet.following(store, 1) as (one,):
        if step == "digest":
            for array in source.model.values():
                array ^= array.dtype.type(1)
            fail(store, source, 2)
            fleet.until(one.dirty)
        of = one.target if step == "pause" else Windows
        real = getattr(of, step)

        def slow(*arguments: object) -> object:
            time.sleep(2.5)
            return real(*arguments)

        monkeypatch.setattr(of, step, slow)
        source.model["a.weight"][0, 0] ^= 2
        assert outcome_of(store, h.published(store, source, mode="stream")).members == ("r1",)


def test_a_step_without_end_is_silence(run: tuple[Store, h.ArraySource], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltarefit.attendance.MOST_BUSY_S", 0.2)
    store, _ = run
    attendance = Attendance(RunLog.open(store), "r1", h.Heard())
    attendance.beat(1)
    key = member_key("r1")
    for seconds, moves in ((0.15, True), (0.3, False)):
        time.sleep(seconds)
        before = store.get(key)
        attendance.beat_beside(1)
        assert (store.get(key) != before) is moves


def test_one_publisher_remembers_who_is_silent(run: tuple[Store, h.ArraySource]) -> None:
    """A store that does not let the roll be cleared: what was silent before the attempt is not waited for again."""
    store, source = run
    register(store, "dead")
    keeping = Faulty(store, [Fault(Kind.BEFORE, "delete", "member/*", last=None)])
    with closing(Publisher(keeping, source, threads=1)) as publisher:
        publisher.publish(1)
        started = time.monotonic()
        version = publisher.publish(2).version
        assert time.monotonic() - started < 0.9
    assert outcome_of(store, version).evicted == ("dead",)


def test_too_few_receivers_commit_nothing(run: tuple[Store, h.ArraySource]) -> None:
    store, source = run
    with fleet.following(store, 1) as (one,), pytest.raises(AttemptLostError, match="1 of 2 receivers hold it"):
        h.published(store, source, votes=2, deadline_s=1.0)
    assert one.clean(1)


def test_nobody_is_asked_if_so_wished(run: tuple[Store, h.ArraySource]) -> None:
    store, source = run
    register(store, "dead")
    started = time.monotonic()
    assert outcome_of(store, h.published(store, source, votes="none")).evicted == ()
    assert time.monotonic() - started < 0.9


def test_a_receiver_without_room_refuses(run: tuple[Store, h.ArraySource], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it ends the attempt; it follows on, and once there is room it holds what comes."""
    store, source = run
    room = MemorySpool.put

    def full(self: object, name: str, data: bytes) -> None:
        raise StorageFullError("no room in the spool")

    with fleet.following(store, 1) as (one,):
        source.model["a.weight"][0, 0] ^= 1
        monkeypatch.setattr(MemorySpool, "put", full)
        with pytest.raises(AttemptLostError, match="all receivers refuse it: r1"):
            h.published(store, source)
        vote = RunLog.open(store).read(Vote, vote_key(2, "r1"))
        assert vote is not None
        assert (vote.held, vote.reason[:20]) == (Held.REFUSED, "no room in the spool")
        monkeypatch.setattr(MemorySpool, "put", room)
        version = h.published(store, source)
        fleet.until(lambda: one.clean(version))
        assert h.bits(one.target) == h.bytes_of(source.model)


@pytest.mark.parametrize("mode", ["stage", "stream"])
def test_a_damaged_payload_ends_the_attempt_and_nothing_else(run: tuple[Store, h.ArraySource], mode: str) -> None:
    """Every receiver finds it, and refuses; none ends, and none loads an anchor."""
    store, source = run
    with fleet.following(store, 1, 2) as followers:
        source.model["a.weight"][0, 0] ^= 1
        with pytest.raises(AttemptLostError, match="all receivers refuse it: r1, r2"):
            h.published(_Damaging(store, []), source, mode=mode)
        version = h.published(store, source, mode=mode)
        for one in followers:
            fleet.until(lambda one=one: one.clean(version))  # type: ignore[misc]
            assert h.bits(one.target) == h.bytes_of(source.model)
            assert one.target.seeds == 1


class _Damaging(Faulty):
    """One bit of each payload is another once it is stored."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, bytes([data[0] ^ 1, *data[1:]]) if "/pl/" in key else data)


def test_a_receiver_that_may_not_write_follows_all_the_same(run: tuple[Store, h.ArraySource]) -> None:
    store, _ = run
    heard = h.Heard()

    class ReadOnly(Faulty):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise UsageError("not allowed")

    log = RunLog.open(ReadOnly(store, []))
    attendance = Attendance(log, "quiet", heard)
    attendance.beat(1)
    attendance.vote(log.attempt(1), Held.STAGED)
    attendance.beat(1)
    attendance.leave()
    assert heard["alone"] == 1
    assert not list(store.list("member"))


def test_names_are_checked(run: tuple[Store, h.ArraySource]) -> None:
    for name in ("", "a/b", "..", "x" * 65, "-a"):
        with pytest.raises(UsageError, match="name of a receiver"):
            Attendance(RunLog.open(run[0]), name, h.Heard())


def test_votes_on_other_manifests_do_not_count(run: tuple[Store, h.ArraySource]) -> None:
    store, _ = run
    log, roll = RunLog.open(store), polling.Roll(RunLog.open(store))
    register(store, "r1")
    store.put(vote_key(2, "r1"), Vote(log.run, 2, "r1", "0" * 16, Held.STAGED, ("a" * 64,)).to_bytes())
    assert polling.Ballot(log, roll, 2, ("b" * 64,), Held.STAGED).count(Policy(), expired=False) is None
    assert polling.Ballot(log, roll, 2, ("a" * 64,), Held.STAGED).count(Policy(), expired=False) == Enough(("r1",), ())
    store.put(member_key("r1"), b"damaged")
    store.put("member/not.a.name", b"")
    assert polling.Ballot(log, roll, 2, ("a" * 64,), Held.STAGED).count(Policy(), expired=False) == Enough(("r1",), ())
