"""Explicit-state exploration of one trainer's machines on one log: a coordinator, its producers, and whoever disturbs.

Every interleaving of what they do, with answers lost (the record never there, there at once, or there at any later
time), reads that do not show the latest yet, encodings that fail, waits that end at any time, and any of them stopped
for ever. Disturbers: a second coordinator, a second process that takes itself for producer 1, a report of an attempt
long gone, and producers that are wrong: about the base, about what they own, about the step.

Each producer owns one element. What a version holds is kept beside the log (``Made``), so that a COMMIT is judged by
the elements, not by the sums that the machines themselves compare.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

from deltarefit.manifest import Decision, Intent, Mode, Outcome, PayloadRef, ProducerManifest
from deltarefit.protocol import coordinator as c
from deltarefit.protocol import messages as m
from deltarefit.protocol import producer as p
from deltarefit.records import Digest
from tests import explorer as x
from tests.test_coordinator import RUN, abort_of
from tests.test_coordinator_duels import Log, find, place

Machine = c.Coordinator | p.Producer
Bits = tuple[int, ...]
FINAL = c.FINAL | p.FINAL
FIRST, OURS, RIVAL, TWIN, NEXT = "first", "ours", "rival", "twin", "next"
"""Who makes versions; coordinators have these names for nonces."""
VALUES = {FIRST: (0, 0, 0), OURS: (1, 2, 0), RIVAL: (3, 0, 4), TWIN: (1, 5, 0), NEXT: (6, 6, 6)}
"""The elements that each of them publishes. Our producer 2 changes nothing of the first version, the rival not
element 1."""


@dataclass(frozen=True)
class Fate:
    """What may happen in one exploration. ``flaw`` is of our producer 1: its "baseline" is not the base, it owns
    element 0 "twice", with producer 0, or it publishes another "step". ``stale``: its report of attempt 2 is still
    about."""

    producers: int = 2
    losses: int = 1
    failures: int = 0
    flaw: str = ""
    rival: bool = False
    twin: bool = False
    stale: bool = False
    coordinator: type[c.Coordinator] = c.Coordinator
    producer: type[p.Producer] = p.Producer


# ------------------------------------------------------------------------------------------ what is published


@dataclass(frozen=True)
class Made:
    """Elements behind one manifest: what it takes them for in the base (those it changes), and what it makes of them
    (all that it owns)."""

    held: dict[int, int]
    new: dict[int, int]


MADE: dict[str, Made] = {}
"""By the manifest's hash."""


@cache
def name_of(manifest: ProducerManifest) -> str:
    return manifest.content_hash()


@cache
def make(maker: str, rank: int, intent: Intent, base: Bits, flaw: str) -> ProducerManifest:
    """What a producer seals in an attempt on a version that holds ``base``."""
    owned = tuple(range(len(base))) if intent.producers == 1 else (rank,)
    if flaw == "twice":
        owned = (0, *owned)
    if flaw == "baseline":
        base = (*base[:rank], 9, *base[rank + 1 :])
    new, step = VALUES[maker][: len(base)], int(flaw == "step")
    listed = tuple(i for i in owned if intent.base and base[i] != new[i])
    name = hashlib.sha256(repr((maker, rank, intent.attempt, base)).encode()).hexdigest()
    ref = PayloadRef(name, 1, {}, 1, len(listed), 0, 0, x.sums(base, listed), x.sums(new, listed))
    part, layout = x.sums(new, owned), x.SHA.format(rank)
    made = ProducerManifest(RUN, intent.attempt, intent.base, rank, step, part, layout, (ref,) if listed else ())
    MADE[name_of(made)] = Made({i: base[i] for i in listed}, {i: new[i] for i in owned})
    return made


def bits_of(log: Log, version: int, size: int) -> Bits:
    """What a committed version holds; before the first, anything."""
    outcome = find(log, version).outcome if version else None
    if outcome is None:
        return (-1,) * size
    elements = {i: value for name in outcome.manifests for i, value in MADE[name].new.items()}
    return tuple(elements[i] for i in range(size))


# ------------------------------------------------------------------------------------------ the world


def hash_once(self: Any) -> int:
    """``__hash__`` of a frozen dataclass that is looked up often."""
    kept: dict[str, int] = self.__dict__
    if "_hash" not in kept:
        kept["_hash"] = hash(tuple(getattr(self, one.name) for one in fields(self)))
    return kept["_hash"]


class Pages(tuple[m.Attempt, ...]):
    """A log that hashes its attempts once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def with_record(log: Log, action: m.Action) -> Log:
    """The log after a create, whether or not the key was free."""
    after = place(log, action)
    return log if after is None else Pages(after)


@dataclass(frozen=True)
class Seat:
    """One process: ``machine`` is None until its coordinator has told it of the attempt. ``reported``: and it has told
    the coordinator that it sealed."""

    maker: str
    rank: int
    machine: Machine | None = None
    queue: tuple[m.Action, ...] = ()
    reported: bool = False
    __hash__ = hash_once

    @property
    def final(self) -> bool:
        return self.machine is None or self.machine.phase in FINAL

    def begin(self, machine: Machine) -> Seat:
        machine, actions = machine.start()
        return replace(self, machine=machine, queue=actions)

    def on(self, event: m.Event) -> Seat:
        assert self.machine
        machine, actions = self.machine.on(event)
        return replace(self, machine=machine, queue=self.queue[1:] + actions)


@dataclass(frozen=True)
class World:
    """``reports`` are the last words of each rank to the coordinator, ``flying`` creates whose answer was lost and that
    may still arrive. ``lost`` answers and ``failed`` encodings so far; ``broken`` once an attempt may end for that."""

    log: Log
    seats: tuple[Seat, ...]
    reports: tuple[ProducerManifest | None, ...]
    flying: tuple[m.Action, ...] = ()
    lost: int = 0
    failed: int = 0
    broken: bool = False
    __hash__ = hash_once

    def with_seat(self, who: int, seat: Seat) -> World:
        return replace(self, seats=(*self.seats[:who], seat, *self.seats[who + 1 :]))

    def feed(self, who: int, event: m.Event) -> World:
        return self.with_seat(who, self.seats[who].on(event))


def read(log: Log, number: int) -> m.Attempt:
    """As ``RunLog.attempt`` has it: manifests up to the first that is missing."""
    there = find(log, number)
    prefix = tuple(made for at, made in enumerate(there.manifests) if made.producer == at)
    return replace(there, manifests=prefix)


def trainer(maker: str, fate: Fate, log: Log) -> list[Seat]:
    """A coordinator that starts from the head, and its producers, who wait for it."""
    machine = fate.coordinator(RUN, maker, fate.producers)
    if log and (outcome := log[0].outcome) and log[0].committed:
        machine = replace(machine, number=2, base=1, digest=outcome.digest)
    return [Seat(maker, 0).begin(machine), *(Seat(maker, rank) for rank in range(1, fate.producers))]


def start(fate: Fate, log: Log) -> World:
    log = Pages(log)
    seats = trainer(OURS, fate, log)
    if fate.twin:
        seats.append(Seat(TWIN, 1))
    if fate.rival:
        seats += trainer(RIVAL, Fate(producers=1), log)
    old = find(log, 2).manifests[1] if fate.stale else None
    return World(log, tuple(seats), (None, old, None)[: fate.producers])


def written(log: Log, maker: str, producers: int, end: str = "commit", sealed: int = 3) -> Log:
    """``log`` and one more attempt: open, "abort" or "commit"; the first ``sealed`` producers have sealed."""
    base = max((there.number for there in log if there.committed), default=0)
    digest = x.digest(bits_of(log, base, producers)) if base else Digest()
    intent = Intent(RUN, len(log) + 1, base, digest, Mode.STAGE, f"{maker} of old", producers)
    made = [make(maker, rank, intent, bits_of(log, base, producers), "") for rank in range(min(producers, sealed))]
    after = (*log, m.Attempt(intent.attempt, intent, tuple(made)))
    if end == "commit":
        hashes, digest = tuple(map(name_of, made)), x.digest(VALUES[maker][:producers])
        outcome = Outcome(RUN, intent.attempt, Decision.COMMIT, base, digest, hashes, 1, intent.nonce)
        return (*log, replace(after[-1], outcome=outcome))
    return (*log, replace(after[-1], outcome=abort_of("z", intent.attempt, base))) if end else after


# ------------------------------------------------------------------------------------------ steps


def answers(world: World, who: int, fate: Fate) -> Iterator[World]:
    """What comes of the next action of one process if nothing fails; nothing while what it waits for is not there."""
    seat = world.seats[who]
    action = None if seat.final else seat.queue[0]
    if isinstance(action, m.ReadAttempt):
        yield world.feed(who, m.AttemptRead(read(world.log, action.number)))
    elif isinstance(action, m.ReadManifest):
        there = find(world.log, action.number).manifests
        found = next((made for made in there if made.producer == action.producer), None)
        yield world.feed(who, m.ManifestRead(found))
    elif isinstance(action, m.Encode):
        yield encoded(world, who, fate, action.intent)
    elif isinstance(action, m.Gather):
        yield from gather(world, who, action.intent)
    elif isinstance(action, m.AwaitOutcome):
        yield from await_outcome(world, who, action.number)
    elif action is not None:
        after = with_record(world.log, action)
        answer = m.NotCreated() if after is world.log else m.Created()
        yield replace(world.feed(who, answer), log=after)


def faults(world: World, who: int, fate: Fate) -> Iterator[World]:
    """What else may come of it."""
    seat = world.seats[who]
    action = None if seat.final else seat.queue[0]
    if isinstance(action, m.Gather | m.AwaitOutcome):
        yield impatient(world, who)
    elif isinstance(action, m.Encode):
        if world.failed < fate.failures:
            failed = encoded(world, who, fate, action.intent).with_seat(who, seat.on(m.EncodeFailed("x")))
            yield replace(failed, failed=world.failed + 1, broken=True)
    elif action is not None and world.lost < fate.losses:
        yield from (replace(after, lost=world.lost + 1) for after in losses(world, who, action))


def losses(world: World, who: int, action: m.Action) -> Iterator[World]:
    """A read that does not show the latest yet; a create without an answer, which was never done, or is, or will be."""
    if isinstance(action, m.ReadAttempt):
        yield replace(world.feed(who, m.AttemptRead(m.Attempt(action.number))), broken=True)
        yield world.feed(who, m.AttemptRead(replace(read(world.log, action.number), outcome=None)))
    elif isinstance(action, m.ReadManifest):
        yield world.feed(who, m.ManifestRead(None))
    else:
        unknown = world.feed(who, m.NotCreated())
        yield unknown
        yield replace(unknown, log=with_record(world.log, action))
        yield replace(unknown, flying=(*world.flying, action))


def impatient(world: World, who: int) -> World:
    return replace(world.feed(who, m.EncodeFailed("too late")), broken=True)


def encoded(world: World, who: int, fate: Fate, intent: Intent) -> World:
    seat = world.seats[who]
    if seat.rank == 0:
        world = replace(world, seats=tuple(tell(other, seat, intent, fate) for other in world.seats))
    flaw = fate.flaw if (seat.maker, seat.rank) == (OURS, 1) else ""
    base = bits_of(world.log, intent.base, fate.producers)
    return world.feed(who, m.Encoded(make(seat.maker, seat.rank, intent, base, flaw)))


def tell(seat: Seat, coordinator: Seat, intent: Intent, fate: Fate) -> Seat:
    """A producer of this coordinator hears of the attempt; the twin of producer 1 takes it for its own, too."""
    if seat.rank and (seat.maker == coordinator.maker or (seat.maker, coordinator.maker) == (TWIN, OURS)):
        return seat.begin(fate.producer(intent, seat.rank, f"{seat.maker}{seat.rank}"))
    return seat


def gather(world: World, who: int, intent: Intent) -> Iterator[World]:
    own = world.seats[who].machine.manifest  # type: ignore[union-attr]
    heard = [said for said in world.reports[1 : intent.producers] if said]
    if own and len(heard) == intent.producers - 1:
        yield world.feed(who, m.Gathered((own, *heard), 1))
    yield from decided(world, who, intent.attempt)


def await_outcome(world: World, who: int, number: int) -> Iterator[World]:
    """First it tells its coordinator that it has sealed, and what."""
    seat = world.seats[who]
    if seat.reported:
        yield from decided(world, who, number)
        return
    assert seat.machine
    reports = (*world.reports[: seat.rank], seat.machine.manifest, *world.reports[seat.rank + 1 :])
    yield replace(world.with_seat(who, replace(seat, reported=True)), reports=reports)


def decided(world: World, who: int, number: int) -> Iterator[World]:
    if find(world.log, number).outcome:
        yield world.feed(who, m.AttemptRead(read(world.log, number)))


def landings(world: World) -> Iterator[World]:
    """Creates that were given up arrive after all."""
    for at, action in enumerate(world.flying):
        rest = (*world.flying[:at], *world.flying[at + 1 :])
        yield replace(world, log=with_record(world.log, action), flying=rest)


def successors(world: World, fate: Fate) -> Iterator[World]:
    yield from landings(world)
    for who in range(len(world.seats)):
        yield from answers(world, who, fate)
        yield from faults(world, who, fate)


# ------------------------------------------------------------------------------------------ what must hold


def check_log(log: Log) -> None:
    """I4 and rule 1; a COMMIT takes exactly what was sealed for it, and leads from the base's elements to the new."""
    base = 0
    for number, there in enumerate(log, 1):
        assert there.intent is not None
        assert there.intent.base == base, f"attempt {number}: base {there.intent.base}, last commit {base}"
        assert there.outcome is not None or number == len(log), f"attempt {number} was left open"
        if there.committed:
            check_commit(log, number, there, base)
            base = number


def check_commit(log: Log, number: int, there: m.Attempt, base: int) -> None:
    intent, outcome, made = there.intent, there.outcome, there.manifests
    assert intent
    assert outcome
    assert [x.producer for x in made] == list(range(intent.producers)), f"{number}: not all have sealed"
    assert outcome.manifests == tuple(map(name_of, made)), f"{number}: committed what was not sealed"
    assert {(x.attempt, x.base) for x in made} == {(number, base)}, f"{number}: manifests of other attempts"
    assert len({x.step for x in made}) == 1, f"{number}: several steps"
    owned = sorted(i for name in outcome.manifests for i in MADE[name].new)
    assert owned == list(range(len(owned))), f"{number}: elements with two owners or none: {owned}"
    before, after = (bits_of(log, version, len(owned)) for version in (base, number))
    for name in outcome.manifests:
        for i, value in MADE[name].held.items():
            assert value == before[i], f"{number}: takes element {i} of the base for {value}, it is {before[i]}"
    assert outcome.digest == x.digest(after), f"{number}: the digest is not that of the elements"


def check(world: World) -> None:
    """What each says of itself is what the register says, now and for ever."""
    for seat in world.seats:
        if isinstance(seat.machine, c.Coordinator):
            check_coordinator(world.log, seat.machine)
        elif seat.machine is not None:
            check_producer(world.log, seat.machine)


def check_coordinator(log: Log, machine: c.Coordinator) -> None:
    mine = [there for there in log if there.intent and there.intent.nonce == machine.nonce]
    committed = [there.number for there in mine if there.committed]
    if machine.phase in FINAL:
        assert committed == ([machine.number] if machine.phase is c.Phase.COMMITTED else []), machine
    else:
        assert not committed or machine.phase is c.Phase.COMMITTING, "committed before it tried"


def check_producer(log: Log, machine: p.Producer) -> None:
    if machine.phase not in FINAL:
        return
    outcome = find(log, machine.intent.attempt).outcome
    assert outcome is not None, f"says {machine.phase.value}, and nothing is decided"
    in_it = machine.manifest is not None and name_of(machine.manifest) in outcome.manifests
    says = {p.Phase.COMMITTED: (True, True), p.Phase.LOST: (True, False), p.Phase.ABORTED: (False, False)}
    found = (find(log, machine.intent.attempt).committed, in_it)
    assert found == says[machine.phase], f"says {machine.phase.value}; (committed, with its manifest) is {found}"


# ------------------------------------------------------------------------------------------ runs to the end


@dataclass
class Explorer:
    """One exploration. ``fine`` remembers states from which a run without faults is known to end well."""

    fate: Fate
    ends: set[tuple[str, ...]] = field(default_factory=set)
    fine: set[object] = field(default_factory=set)

    def run(self, begin: World) -> int:
        """All reachable states; how many. ``AssertionError`` or a ``RefitError`` says what is wrong with one."""
        seen, queue = {begin}, deque([begin])
        while queue:
            world = queue.popleft()
            self.look(world)
            for after in successors(world, self.fate):
                if after not in seen:
                    seen.add(after)
                    queue.append(after)
        return len(seen)

    def look(self, world: World) -> None:
        self.check(world)
        for who in range(len(world.seats)):
            self.alone(world, who)
        phases = self.together(world, self.fate)
        if phases:
            self.ends.add(phases)
        if world.log not in self.fine:
            self.newcomer(world.log)

    def check(self, world: World) -> None:
        if ("log", world.log) not in self.fine:
            check_log(world.log)
            self.fine.add(("log", world.log))
        check(world)

    def alone(self, world: World, who: int) -> None:
        """All others stopped for ever: it ends all the same, soon, and what it says holds."""
        passed: list[object] = []
        for _ in range(30):
            seat = world.seats[who]
            key = (who, seat, world.log, world.reports)
            if seat.final or key in self.fine:
                self.fine.update(passed)
                return
            passed.append(key)
            world = next(answers(world, who, self.fate), None) or impatient(world, who)
            self.check(world)
        raise AssertionError(f"does not end alone: {world.seats[who]}")

    def together(self, world: World, fate: Fate) -> tuple[str, ...]:
        """Nothing goes wrong any more, and nobody's patience ends unless all wait: all end, in COMMIT unless something
        is wrong already. Their last phases, or () if this run joins one that is known."""
        begin, passed = world, []
        for _ in range(100):
            if world in self.fine:
                self.fine.update(passed)
                return ()
            passed.append(world)
            if all(seat.final for seat in world.seats):
                break
            everyone = range(len(world.seats))
            step = next((after for who in everyone for after in answers(world, who, fate)), None)
            world = step or impatient(world, next(who for who in everyone if not world.seats[who].final))
            self.check(world)
        phases = tuple(seat.machine.phase.value for seat in world.seats if seat.machine)
        assert all(seat.final for seat in world.seats), f"they do not end: {phases}"
        excuse = begin.broken or fate.flaw or fate.rival or fate.twin or fate.stale
        assert excuse or set(phases) == {"committed"}, f"nothing was wrong, and the end is {phases}"
        self.fine.update(passed)
        return phases

    def newcomer(self, log: Log) -> None:
        """All are dead: the next trainer commits on top of whatever they left."""
        fate = Fate(self.fate.producers)
        self.together(World(log, tuple(trainer(NEXT, fate, log)), (None,) * fate.producers), fate)
        self.fine.add(log)
