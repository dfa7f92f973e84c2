"""Pruning: what goes, what stays, in which order, and that it may die anywhere (I14, F50)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, Receiver, runtime
from deltarefit.anchoring import write_anchor
from deltarefit.asof import AsOf
from deltarefit.errors import IntegrityError, NotFoundError, UsageError
from deltarefit.manifest import Decision, Header, Hint, Intent, Member, Mode, Outcome, State
from deltarefit.ports import Store
from deltarefit.protocol import messages as m
from deltarefit.protocol.follower import Follower, Phase
from deltarefit.pruning import Pruned, prune
from deltarefit.records import Digest
from deltarefit.retention import PINS, Doomed, Pin, Tombstone, pin_key, tomb_key, version_of
from deltarefit.runlog import RunLog, anchor_prefix, attempt_key, payload_prefix
from tests import helpers as h
from tests.test_anchors import HARMS, ReadOnly, anchored_chain

FLOOR = 3
"""The second newest anchor of ``chain``."""


@pytest.fixture(scope="module")
def made() -> h.Chain:
    """Six versions; 1, 3 and 5 are anchors."""
    return anchored_chain(np.random.default_rng(20261201))


@pytest.fixture
def chain(made: h.Chain, monkeypatch: pytest.MonkeyPatch) -> h.Chain:
    """A copy of it."""
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.0)
    return h.Chain(h.copy_store(made.store), made.source, made.history, made.models)


class Grace(runtime.SystemRuntime):
    """Passes the time at once; ``during`` happens in every wait."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self.during, self.waited, self.clock = during, 0.0, 1000.0

    def now(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.waited += seconds
        self.clock += seconds
        self.during()


def pruned(store: Store, during: Callable[[], object] = lambda: None, **options: object) -> Pruned:
    with runtime.using(Grace(during)):
        return prune(store, **{"threads": 1, **options})  # type: ignore[arg-type]


def keys(store: Store) -> set[str]:
    return {key for key, _ in store.list() if not key.startswith("tomb/")}


def gone(store: Store, made: h.Chain) -> set[str]:
    return keys(made.store) - keys(store)


def keys_of(made: h.Chain, floor: int) -> set[str]:
    """All keys that a prune with this floor deletes."""
    found = set()
    for key in keys(made.store):
        parts = key.split("/")
        if parts[0] in ("a", "anchor") and int(parts[1]) < floor and parts[2] not in ("intent", "outcome"):
            found.add(key)
    return found


def put_pin(chain: h.Chain, version: int, beat: int = 1, name: str = "x") -> str:
    key = pin_key(name, "0123")
    chain.store.put(key, Pin(RunLog.open(chain.store).run, name, version, beat).to_bytes())
    return key


def joins(chain: h.Chain, store: Store | None = None) -> h.Heard:
    """A new receiver ends at the head, with its bits."""
    heard, target = h.Heard(), h.strict_target(chain.store)
    assert h.followed(store or chain.store, target, emit=heard) == chain.head
    assert h.bits(target) == chain.history[chain.head]
    return heard


# ------------------------------------------------------------------------------------------ what goes


def test_everything_below_the_second_newest_anchor_goes_and_nothing_else(chain: h.Chain, made: h.Chain) -> None:
    done = pruned(chain.store)
    assert gone(chain.store, made) == keys_of(made, FLOOR)
    assert (done.head, done.floor, done.anchors, done.held_by) == (6, FLOOR, (5, 3), "")
    assert (done.attempts, done.old_anchors) == (2, 1)
    sizes = dict(made.store.list())
    assert done.objects == len(keys_of(made, FLOOR))
    assert done.size == sum(sizes[key] for key in keys_of(made, FLOOR))
    joins(chain)
    for version in (3, 4, 5):
        target = h.strict_target(chain.store)
        assert h.followed(AsOf(RunLog.open(chain.store), version), target) == version
        assert h.followed(chain.store, target) == chain.head
        assert h.bits(target) == chain.history[chain.head]
    again = pruned(chain.store)
    assert (again.objects, again.floor, again.attempts) == (0, FLOOR, 0)
    h.check_linear(chain.store)


@pytest.mark.parametrize(("keep", "floor"), [(1, 5), (2, 3), (3, 1), (4, 0)])
def test_as_many_anchors_are_kept_as_asked_for(chain: h.Chain, made: h.Chain, keep: int, floor: int) -> None:
    assert pruned(chain.store, keep_anchors=keep).floor == floor
    assert gone(chain.store, made) == keys_of(made, floor)
    joins(chain)


def test_an_anchor_that_only_the_hint_names_is_not_the_last_one_kept(chain: h.Chain, made: h.Chain) -> None:
    """Anybody may overwrite the hint."""
    write_anchor(chain.store, MemoryBaseline())
    assert pruned(chain.store, keep_anchors=1).floor == 5
    chain.store.delete("head")
    joins(chain)


def test_a_dry_run_says_what_would_go_and_touches_nothing(chain: h.Chain, made: h.Chain) -> None:
    put_pin(chain, 2)
    before = {key: chain.store.get(key) for key, _ in chain.store.list()}
    with runtime.using(clock := Grace()):
        said = prune(ReadOnly(chain.store), dry_run=True)  # type: ignore[arg-type]
    assert clock.waited == 0
    assert {key: chain.store.get(key) for key, _ in chain.store.list()} == before
    assert (said.floor, said.held_by, said.dry_run) == (2, "pin/x-0123 at version 2", True)
    done = pruned(chain.store, grace_s=0)
    assert (done.floor, done.objects, done.size) == (said.floor, said.objects, said.size)
    assert gone(chain.store, made) == keys_of(made, 2)


def test_nothing_goes_before_the_grace_is_over(chain: h.Chain, made: h.Chain) -> None:
    seen: list[set[str]] = []
    with runtime.using(clock := Grace(lambda: seen.append(gone(chain.store, made)))):
        prune(chain.store, grace_s=77)
    assert (seen, clock.waited) == ([set()], 77)
    assert gone(chain.store, made)


def test_the_order_is_tombstones_payloads_records_anchors(chain: h.Chain) -> None:
    order: list[str] = []

    class Noting(ReadOnly):
        def create(self, key: str, data: bytes) -> None:  # type: ignore[override]
            order.append("tomb")
            assert key.startswith("tomb/")
            self.store.create(key, data)  # type: ignore[attr-defined]

        def delete(self, key: str) -> None:  # type: ignore[override]
            kind, _, *rest = key.split("/")
            order.append("payload" if (kind, rest[0]) == ("a", "pl") else f"{kind} {rest[0]}")
            self.store.delete(key)  # type: ignore[attr-defined]

    pruned(Noting(chain.store))  # type: ignore[arg-type]
    runs = [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name]
    assert runs == ["tomb", "payload", "a p", "anchor anchor", "anchor file", "anchor pl"]


# ------------------------------------------------------------------------------------------ what stays


def test_a_damaged_anchor_does_not_count(chain: h.Chain, made: h.Chain) -> None:
    for name in (
        "payload missing",
        "payload short",
        "record corrupt",
        "file missing",
        "another digest",
        "record empty",
    ):
        store = h.copy_store(made.store)
        HARMS[name](h.Chain(store, made.source, made.history), 5)
        done = pruned(store)
        assert (done.floor, done.anchors) == (1, (3, 1)), name


def test_bytes_are_only_read_if_asked_for(chain: h.Chain) -> None:
    HARMS["payload corrupt"](chain, 5)
    assert pruned(chain.store, dry_run=True).anchors == (5, 3)
    assert pruned(chain.store, dry_run=True, deep=True).anchors == (3, 1)


def test_an_anchor_that_breaks_during_the_grace_keeps_everything(chain: h.Chain, made: h.Chain) -> None:
    done = pruned(chain.store, lambda: HARMS["payload missing"](chain, 3))
    assert (done.floor, done.objects) == (0, 0)
    assert not gone(chain.store, made) & keys_of(made, FLOOR)


def test_too_few_anchors_keep_everything(made: h.Chain) -> None:
    plain = anchored_chain(np.random.default_rng(1), 3, anchors=())
    done = pruned(plain.store)
    assert (done.floor, done.anchors, done.objects) == (0, (1,), 0)
    with pytest.raises(UsageError):
        prune(plain.store, keep_anchors=0)
    with pytest.raises(UsageError):
        prune(plain.store, grace_s=-1)
    with pytest.raises(NotFoundError):
        prune(h.new_store())


def test_a_run_without_a_version_is_left_alone(made: h.Chain) -> None:
    store = h.new_store()
    for key, _ in made.store.list():
        if key.startswith(("run", "catalog")):
            store.put(key, made.store.get(key))
    assert pruned(store).head == 0


@pytest.mark.parametrize("version", [0, 1, 2, 3, 6])
def test_what_a_living_pin_holds_stays(chain: h.Chain, made: h.Chain, version: int) -> None:
    put_pin(chain, version)
    done = pruned(chain.store, lambda: put_pin(chain, version, beat=2))
    assert done.floor == min(version, FLOOR)
    assert (done.held_by != "") is (version < FLOOR)
    assert gone(chain.store, made) == keys_of(made, min(version, FLOOR))
    assert done.stale_pins == ()


def test_a_pin_that_comes_during_the_grace_counts(chain: h.Chain, made: h.Chain) -> None:
    pruned(chain.store, lambda: put_pin(chain, 2))
    assert gone(chain.store, made) == keys_of(made, 2)


def test_a_pin_without_a_beat_is_dead_and_goes(chain: h.Chain, made: h.Chain) -> None:
    key = put_pin(chain, 1)
    chain.store.put(pin_key("broken", "1"), b"no record")
    done = pruned(chain.store)
    assert done.stale_pins == (pin_key("broken", "1"), key)
    assert (done.floor, gone(chain.store, made)) == (FLOOR, keys_of(made, FLOOR))
    assert list(chain.store.list(PINS)) == []


def test_without_a_grace_no_pin_is_dead(chain: h.Chain, made: h.Chain) -> None:
    key = put_pin(chain, 1)
    done = pruned(chain.store, grace_s=0)
    assert (done.floor, done.stale_pins, gone(chain.store, made)) == (1, (), set())
    assert chain.store.get(key)


def test_members_hold_what_follows_their_version_while_they_live(chain: h.Chain, made: h.Chain) -> None:
    log = RunLog.open(chain.store)

    def beat(number: int = 7) -> None:
        chain.store.put("member/r1", Member(log.run, "r1", "00", number, 2).to_bytes())

    beat(6)
    done = pruned(chain.store, beat)
    assert (done.floor, done.held_by) == (2, "member/r1 at version 2")
    assert gone(chain.store, made) == keys_of(made, 2)
    assert pruned(chain.store).floor == FLOOR  # it is dead, and its record is not ours to delete
    assert chain.store.get("member/r1")


def test_a_member_that_holds_nothing_keeps_nothing_and_one_that_cannot_be_read_everything(
    chain: h.Chain, made: h.Chain
) -> None:
    log = RunLog.open(chain.store)
    member = Member(log.run, "r1", "00", 1, 0)
    chain.store.put("member/r1", member.to_bytes())
    assert pruned(h.copy_store(chain.store), grace_s=0).floor == FLOOR
    chain.store.put("member/r2", b"of a newer format")
    done = pruned(chain.store, grace_s=0)
    assert (done.floor, done.held_by) == (0, "member/r2 at version unknown")


def test_what_states_no_version_is_seen() -> None:
    assert version_of(b'{"version":7}\nhash') == 7
    for text in (
        b"",
        b"\xff",
        b"[]",
        b"7",
        b"{}",
        b'{"version":"7"}',
        b'{"version":-7}',
        b'{"version":true}',
        b"[" * 9999,
    ):
        assert version_of(text) is None


def test_attempts_that_came_to_nothing_are_cleared_and_open_ones_are_not(chain: h.Chain, made: h.Chain) -> None:
    log = RunLog.open(chain.store)
    for left in ("pl/ab", "b/0/0", "b/1/12", "v/r1", "v/intent", "p/7"):
        chain.store.put(attempt_key(2, left), b"left by a publisher that died, or by voters")
    commit = log.version(6)
    assert commit.outcome is not None
    intent = Intent(log.run, 7, 6, commit.outcome.digest, Mode.STAGE, "open")
    chain.store.create(attempt_key(7, "intent"), intent.to_bytes())
    chain.store.put(payload_prefix(7) + "cd", b"on its way")
    pruned(chain.store)
    assert gone(chain.store, made) == keys_of(made, FLOOR)
    assert {key for key in keys(chain.store) if key.startswith("a/0000000007")} == {
        attempt_key(7, "intent"),
        payload_prefix(7) + "cd",
    }
    assert {key for key in keys(chain.store) if key.startswith("a/0000000002")} == {
        attempt_key(2, "intent"),
        attempt_key(2, "outcome"),
    }


def test_an_attempt_without_outcome_stays_wherever_it_is(chain: h.Chain) -> None:
    chain.store.delete(attempt_key(2, "outcome"))  # cannot be: and is not made worse
    before = {key for key in keys(chain.store) if key.startswith("a/0000000002/")}
    pruned(chain.store)
    assert before <= keys(chain.store)


def test_what_dead_anchor_writers_left_is_collected(chain: h.Chain) -> None:
    for version in (2, 4):
        chain.store.put(anchor_prefix(version) + "pl/ab", b"no record follows")
    pruned(chain.store)
    assert anchor_prefix(2) + "pl/ab" not in keys(chain.store)
    assert anchor_prefix(4) + "pl/ab" in keys(chain.store)  # a writer may still be at it


# ------------------------------------------------------------------------------------------ readers


def at(chain: h.Chain, made: h.Chain, version: int) -> h.StrictTarget:
    """A receiver's target that holds an old version."""
    target = h.strict_target(chain.store)
    assert h.followed(AsOf(RunLog.open(made.store), version), target) == version
    return target


@pytest.mark.parametrize("version", [1, 2])
def test_a_receiver_whose_chain_was_pruned_goes_to_an_anchor_at_once(
    chain: h.Chain, made: h.Chain, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, heard = at(chain, made, version), h.Heard()
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 600.0)
    pruned(chain.store)
    with runtime.using(clock := Grace()):
        assert h.followed(chain.store, target, emit=heard) == chain.head
    assert h.bits(target) == chain.history[chain.head]
    assert (heard["pruned"], heard["diverged"], heard.phases("seed")) == (int(version == 1), 0, int(version == 1))
    assert clock.waited == 0


def test_a_receiver_of_the_oldest_kept_version_needs_no_anchor(chain: h.Chain, made: h.Chain) -> None:
    target, heard = at(chain, made, FLOOR), h.Heard()
    pruned(chain.store)
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert (heard.phases("seed"), h.bits(target)) == (0, chain.history[chain.head])


def test_without_an_anchor_that_leads_past_it_the_weights_stay_what_they_are(chain: h.Chain, made: h.Chain) -> None:
    target = at(chain, made, 1)
    pruned(chain.store)
    for version in (3, 5):
        HARMS["payload missing"](chain, version)
    with pytest.raises((IntegrityError, NotFoundError)):
        h.followed(chain.store, target)
    for version in (3, 5):
        chain.store.delete(anchor_prefix(version) + "anchor")
    with pytest.raises(NotFoundError, match="nothing to start from"):
        h.followed(chain.store, h.strict_target(chain.store))


def test_no_anchor_is_loaded_twice_to_meet_the_same_gap(chain: h.Chain, made: h.Chain) -> None:
    """A gap that no prune would leave: an old anchor is there, what follows it is not."""
    target, heard = at(chain, made, 1), h.Heard()
    pruned(chain.store)
    for key in keys(made.store):
        if key.startswith("anchor/0000000001/"):
            chain.store.put(key, made.store.get(key))
    chain.store.delete(tomb_key(Doomed.ANCHOR, 1))
    for version in (3, 5):
        HARMS["payload missing"](chain, version)
    with pytest.raises((IntegrityError, NotFoundError)):
        h.followed(chain.store, target, emit=heard)
    assert heard.phases("seed") == 0


def test_dirty_weights_whose_target_was_pruned_go_to_an_anchor(chain: h.Chain, made: h.Chain) -> None:
    target, heard = at(chain, made, 1), h.Heard()
    header = target.read_header()
    assert header is not None
    target.paused = True
    target.write_header(Header(header.run, header.catalog, State.DIRTY, 1, 2, header.digest, 0, header.incarnation))
    pruned(chain.store)
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert (h.bits(target), heard["pruned"], heard["diverged"]) == (chain.history[chain.head], 1, 0)


def test_a_receiver_that_waits_in_an_old_attempt_goes_to_an_anchor(chain: h.Chain, made: h.Chain) -> None:
    """It staged version 2 while that was open, and slept until all of it was gone."""
    pruned(chain.store)
    log, old = RunLog.open(chain.store), RunLog.open(made.store)
    before, gone_now = old.attempt(2), log.attempt(2)
    assert (gone_now.committed, gone_now.pruned, gone_now.manifests) == (True, True, ())
    first = old.version(1).outcome
    assert first is not None
    for phase in (Phase.CLEAN, Phase.STAGED, Phase.REDO, Phase.STREAMING, Phase.ADRIFT):
        waiting = Follower(
            log.run, log.catalog.identity, "0", phase=phase, version=1, digest=first.digest, attempt=before
        )
        lost, actions = waiting.on(m.AttemptRead(gone_now))
        assert (lost.phase, lost.version, actions[-1]) == (Phase.LOST, 0, m.FindAnchor()), phase
    lost, actions = lost.on(m.AttemptRead(gone_now))
    assert (lost.phase, actions) == (Phase.LOST, ())


def test_a_missing_manifest_without_a_tombstone_is_still_an_error(chain: h.Chain) -> None:
    chain.store.delete(attempt_key(4, "p/0"))
    with pytest.raises(IntegrityError, match="manifest is missing"):
        RunLog.open(chain.store).attempt(4)
    tomb = Tombstone(RunLog.open(chain.store).run, Doomed.ATTEMPT, 4, 1, 1, 5)
    chain.store.create(tomb_key(Doomed.ATTEMPT, 4), tomb.to_bytes())
    assert RunLog.open(chain.store).attempt(4).pruned


def test_a_tombstone_alone_changes_nothing_for_readers(chain: h.Chain, made: h.Chain) -> None:
    """The prune died before it deleted anything: the chain is as good as before."""
    target, heard = at(chain, made, 1), h.Heard()
    for number in (1, 2):
        tomb = Tombstone(RunLog.open(chain.store).run, Doomed.ATTEMPT, number, 1, 1, 3)
        chain.store.create(tomb_key(Doomed.ATTEMPT, number), tomb.to_bytes())
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert (heard.phases("seed"), h.bits(target)) == (0, chain.history[chain.head])


def test_publishing_goes_on_and_the_head_is_found_without_the_hint(chain: h.Chain) -> None:
    pruned(chain.store, keep_anchors=1)
    chain.store.put("head", Hint(0, 0).to_bytes())
    source = h.ArraySource(h.copy_of(chain.models[chain.head]), h.SMALL)
    source.model["a.weight"][3] ^= 1
    assert h.published(chain.store, source) == chain.head + 1
    assert h.received(chain.store) == h.bytes_of(source.model)
    assert h.check_linear(chain.store) == list(range(1, chain.head + 2))


def test_a_trainer_whose_baseline_fell_behind_is_rebuilt_from_what_is_left(chain: h.Chain, made: h.Chain) -> None:
    """Receiver zero: its chain is gone, and the newest anchor is damaged."""
    heard, store = h.Heard(), h.new_store()
    for key, _ in made.store.list():
        if key.split("/")[0] not in ("a", "anchor") or int(key.split("/")[1]) <= 2:
            store.put(key, made.store.get(key))
    store.put("head", Hint(2, 1).to_bytes())
    source = h.ArraySource(h.copy_of(made.models[2]), h.SMALL)
    with contextlib.closing(Publisher(store, source, threads=1, emit=heard)) as publisher:
        source.model["a.weight"][1] ^= 1
        assert publisher.publish().version == 3
        other = h.ArraySource(h.copy_of(made.models[2]), h.SMALL)
        for number in range(4, 7):
            other.model["a.weight"][number] ^= 1
            assert h.published(store, other) == number
            if number > 4:
                write_anchor(store, MemoryBaseline())
        assert pruned(store).floor == 5
        HARMS["payload corrupt"](h.Chain(store, source), 6)
        assert publisher.publish().version == 7
    assert {event.version for event in heard.events if event.type == "skipped"} == {6}
    assert list(store.list(PINS)) == []
    store.delete(anchor_prefix(6) + "anchor")
    assert h.received(store) == h.bytes_of(source.model)


# ------------------------------------------------------------------------------------------ death


class Dies(Grace):
    """Stops the process at the n-th point of a prune."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.left = last

    def point(self, name: str) -> None:
        if name.startswith("prune"):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt


def test_a_prune_that_dies_anywhere_is_run_again_and_readers_do_not_mind(
    made: h.Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they wait: what is missing and condemned is not late."""
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 600.0)
    whole = h.copy_store(made.store)
    pruned(whole)
    for last in range(1000):
        store = h.copy_store(made.store)
        here = h.Chain(store, made.source, made.history)
        try:
            with runtime.using(Dies(last)):
                prune(store, threads=1)
            break
        except KeyboardInterrupt:
            pass
        lagging = at(here, made, 1)
        with runtime.using(clock := Grace()):
            joins(here)
            assert h.followed(store, lagging) == here.head
        assert (h.bits(lagging), clock.waited) == (here.history[here.head], 0)
        pruned(store)
        assert dict(store.list()) == dict(whole.list())
    assert last > 10


def test_two_prunes_side_by_side(chain: h.Chain, made: h.Chain) -> None:
    """What another one condemned meanwhile does not count as kept."""

    def other() -> None:
        prune(chain.store, keep_anchors=1, grace_s=0, threads=1)

    done = pruned(chain.store, other)
    assert (done.floor, gone(chain.store, made)) == (0, keys_of(made, 5))
    joins(chain)


def test_an_aborted_attempt_keeps_its_outcome(chain: h.Chain, made: h.Chain) -> None:
    log = RunLog.open(chain.store)
    with contextlib.closing(Receiver(chain.store, at(chain, made, 6), threads=1)) as receiver:
        intent = Intent(log.run, 7, 6, log.version(6).outcome.digest, Mode.STAGE, "x")  # type: ignore[union-attr]
        chain.store.create(attempt_key(7, "intent"), intent.to_bytes())
        abort = Outcome(log.run, 7, Decision.ABORT, 6, Digest(), (), 0, "x", "a test")
        chain.store.create(attempt_key(7, "outcome"), abort.to_bytes())
        assert receiver.follow(once=True) == 6
        chain.source.model = h.copy_of(chain.models[6])
        assert h.published(chain.store, chain.source) == 8
        for _ in range(2):
            chain.source.model["a.weight"][0] ^= 1
            h.published(chain.store, chain.source)
            write_anchor(chain.store, MemoryBaseline())
        assert pruned(chain.store).floor == 9
        assert h.check_linear(chain.store)[-3:] == [8, 9, 10]
        assert receiver.follow(once=True) == 10
