"""Explicit-state exploration of the receiver machine in both modes; in mode stream it writes before the outcome.

Two producers of three positions; attempts that stream or stage, with targets that return to the base's values or leave
everything as it is. A producer announces one payload after the other, ends its list and seals, and may go on announcing
after ABORT until somebody has ended its list; ABORT comes at any time, COMMIT once everything is sealed and adds up.
Receivers read an attempt piece by piece (outcome, then batches, then manifests) while it goes on. Keeping one payload
and writing one position are steps, in any order within one write; agents die between any two steps, memory may be lost.

Receivers touch the log by votes alone, so the state is a few small numbers: of the log, and of each receiver's own
state. What a receiver does next is computed once per own state (and per piece of the log that it reads). From every
state a run without faults must end CLEAN at the head, after a vote, without an anchor unless memory was lost.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from deltarefit.errors import RefitError
from deltarefit.manifest import (
    Anchor,
    Batch,
    Decision,
    Header,
    Held,
    Intent,
    Mode,
    Outcome,
    PayloadRef,
    ProducerManifest,
    State,
)
from deltarefit.protocol import attempts
from deltarefit.protocol import messages as m
from deltarefit.protocol.follower import Follower, Phase
from deltarefit.records import Digest
from tests.explorer import CATALOG, RUN, SHA, digest, h

Bits = tuple[int, ...]
Pair = tuple[int, int]
BASE: Bits = (0, 0, 0)
LOST: Bits = (9, 9, 9)
WRONG = 7
"""What no version holds."""
OWNED = ((0, 1), (2,))
"""Positions of each producer."""
STAGE, STREAM = Mode.STAGE, Mode.STREAM
OPEN, COMMIT, ABORT = "", "COMMIT", "ABORT"
NO, OWN, OTHER, LAST = 0, 1, 2, 3
"""Who has ended a producer's list: itself, with an empty batch or with its last payload, or whoever came after."""
Option = tuple[Mode, Bits]


class Broken(Exception):
    """A state that must not be."""


@dataclass(frozen=True)
class Fate:
    """What may happen in one exploration. ``script`` has, attempt by attempt, the modes and targets that its opener
    may choose. ``slips``: so many writes do nothing. ``evictions``: how many votes COMMITs may lack; None: any number.
    ``streams``: receivers write before COMMIT; ``switches``: a new agent may think otherwise. ``forgets``: a crash may
    take the spool with it. ``late``: the last of a list may not be visible yet, even if it was before; these two may
    cost an anchor. ``flawed``: attempts in which producer 1 is wrong about the base (F4). ``orders``: positions of one
    write are written in any order. ``tight``: a list's end comes with its last payload. ``last``: the mode of the
    attempt by which a run without faults ends.

    The last four are rules of the opener and of memory, to be broken: what it overwrites ("whole" union, only what
    "changed", or "none"), whether it ends lists, whether it takes only what is committed for the base, and whether
    the header's weights outlive an agent."""

    script: tuple[tuple[Option, ...], ...]
    receivers: int = 1
    crashes: int = 1
    losses: int = 0
    slips: int = 0
    evictions: int | None = None
    streams: bool = True
    switches: bool = False
    forgets: bool = False
    late: bool = False
    flawed: tuple[int, ...] = ()
    orders: bool = True
    tight: bool = False
    last: Mode = STREAM
    machine: type[Follower] = Follower
    union: str = "whole"
    ends: bool = True
    committed_base: bool = True
    keeps: bool = True

    def make(self) -> Follower:
        return self.machine(RUN, CATALOG, "i", self.streams)


# ------------------------------------------------------------------------------------------ what is published


class Payload(NamedTuple):
    """Positions with what they hold in the base, and what it makes of them. Names come from what is shipped: attempts
    that ship the same have payloads of one name, on whatever base."""

    positions: tuple[int, ...]
    old: Bits
    new: Bits


PAYLOADS: dict[PayloadRef, Payload] = {}


def part(bits: Bits, positions: tuple[int, ...]) -> Digest:
    return sum((h(i, bits[i]) for i in positions), Digest())


@cache
def payload(base: Bits, new: Bits, positions: tuple[int, ...], overwrites: bool) -> PayloadRef:
    pairs = [(i, new[i] if overwrites else base[i] ^ new[i]) for i in positions]
    name = hashlib.sha256(repr((overwrites, pairs)).encode()).hexdigest()
    pre, post = part(base, positions), part(new, positions)
    ref = PayloadRef(name, 1, {}, 1, len(positions), 0, 0, pre, post, overwrites)
    PAYLOADS[ref] = Payload(positions, tuple(base[i] for i in positions), tuple(new[i] for i in positions))
    return ref


class Entry(NamedTuple):
    """One attempt in the log. ``held`` is what the producers take for the base's bits, ``listed`` how many payloads
    each has announced."""

    number: int
    mode: Mode
    base: int
    held: Bits
    new: Bits
    touched: tuple[int, ...] = ()
    listed: Pair = (0, 0)
    ended: Pair = (NO, NO)
    sealed: tuple[bool, bool] = (False, False)
    end: str = OPEN


Log = tuple[Entry, ...]
FIRST = Entry(1, STAGE, 0, BASE, BASE, sealed=(True, True), end=COMMIT)
ANCHOR = Anchor(RUN, 1, digest(BASE), (), ())


@cache
def refs_of(held: Bits, new: Bits, touched: tuple[int, ...], producer: int) -> tuple[PayloadRef, ...]:
    """All payloads of one producer: what must be overwritten, then what else has changed."""
    over = tuple(i for i in OWNED[producer] if i in touched)
    rest = tuple(i for i in OWNED[producer] if i not in touched and held[i] != new[i])
    return tuple(payload(held, new, which, which is over) for which in (over, rest) if which)


def all_refs(entry: Entry, producer: int) -> tuple[PayloadRef, ...]:
    return () if entry.base == 0 else refs_of(entry.held, entry.new, entry.touched, producer)


def announced(entry: Entry) -> frozenset[int]:
    """Positions that somebody may have written."""
    if entry.end == COMMIT:
        counts = tuple(len(all_refs(entry, p)) for p in (0, 1))
    else:
        counts = entry.listed if entry.mode is STREAM else (0, 0)
    refs = (ref for p in (0, 1) for ref in all_refs(entry, p)[: counts[p]])
    return frozenset(i for ref in refs for i in PAYLOADS[ref].positions)


class Seen(attempts.Attempt):
    """An attempt that is hashed once."""

    def __hash__(self) -> int:
        kept: dict[str, int] = self.__dict__
        if "_hash" not in kept:
            kept["_hash"] = hash((self.number, self.intent, self.manifests, self.outcome, self.batches))
        return kept["_hash"]


@cache
def manifest(
    number: int, base: int, held: Bits, new: Bits, touched: tuple[int, ...], producer: int
) -> ProducerManifest:
    refs = refs_of(held, new, touched, producer) if base else ()
    return ProducerManifest(RUN, number, base, producer, 0, part(new, OWNED[producer]), SHA.format(producer), refs)


def listed(entry: Entry, producer: int) -> tuple[Batch, ...]:
    refs = all_refs(entry, producer)[: entry.listed[producer]]
    ended = entry.ended[producer]
    ends = [ended == LAST and k == len(refs) - 1 for k in range(len(refs))]
    batches = [Batch(RUN, entry.number, producer, k, (ref,), ends[k], "p") for k, ref in enumerate(refs)]
    if ended in (OWN, OTHER):
        batches.append(Batch(RUN, entry.number, producer, len(refs), (), True, "p" if ended == OWN else "o"))
    return tuple(batches)


@cache
def records(entry: Entry, base: Bits) -> Seen:
    """What the log says of an attempt on a version that holds ``base``."""
    number, mode = entry.number, entry.mode
    nonce = "flawed" if entry.base and entry.held != base else f"n{number}"
    intent = Intent(RUN, number, entry.base, digest(base) if entry.base else Digest(), mode, nonce, 2)
    count = next((p for p in (0, 1) if not entry.sealed[p]), 2)
    fields = (number, entry.base, entry.held, entry.new, entry.touched)
    made = tuple(manifest(*fields, p) for p in range(count))
    batches = (listed(entry, 0), listed(entry, 1)) if mode is STREAM else ()
    if entry.end == COMMIT:
        hashes = tuple(one.content_hash() for one in made)
        outcome = Outcome(RUN, number, Decision.COMMIT, entry.base, digest(entry.new), hashes, 1, f"n{number}")
        seen = Seen(number, intent, made, outcome, batches)
        attempts.check_attempt(seen)
        return seen
    outcome_now = Outcome(RUN, number, Decision.ABORT, entry.base, Digest(), (), 0, "x") if entry.end else None
    return Seen(number, intent, made, outcome_now, batches)


def is_flawed(seen: attempts.Attempt) -> bool:
    """A producer has taken other bits for the base's."""
    return seen.intent is not None and seen.intent.nonce == "flawed"


def put(pair: Pair, at: int, value: int) -> Pair:
    return (value, pair[1]) if at == 0 else (pair[0], value)


def settled(entry: Entry) -> Entry:
    """An attempt that another follows. Who ended a stream's lists, and whether they were sealed, tells apart only what
    was read before, and that might as well have been read before the next was opened."""
    gone = entry.mode is STREAM and entry.end == ABORT
    return entry._replace(ended=(OTHER, OTHER), sealed=(False, False)) if gone else entry


class Logs:
    """All logs that can be, by small numbers."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        self.all: list[Log] = []
        self.ids: dict[Log, int] = {}
        self._next: dict[int, list[tuple[str, int]]] = {}
        self._complete: dict[int, int] = {}
        self._unions: dict[tuple[int, int, int], frozenset[int]] = {}

    def id(self, log: Log) -> int:
        if log not in self.ids:
            self.ids[log] = len(self.all)
            self.all.append(log)
        return self.ids[log]

    def base(self, log: Log) -> Entry:
        return next(entry for entry in reversed(log) if entry.end == COMMIT)

    def read(self, log: Log, entry: Entry) -> Seen:
        return records(entry, log[entry.base - 1].new if entry.base else BASE)

    def union(self, number: int, version: int, target: int) -> frozenset[int]:
        """Positions that attempts after ``version``, up to ``target``, may have written."""
        key = (number, version, target)
        if key not in self._unions:
            parts = [announced(entry) for entry in self.all[number][version:target]]
            self._unions[key] = frozenset[int]().union(*parts)
        return self._unions[key]

    def next(self, number: int) -> list[tuple[str, int]]:
        """What may happen to a log, and what it is then."""
        if number not in self._next:
            log = self.all[number]
            self._next[number] = [(name, self.id(after)) for name, after in self._steps(log)]
        return self._next[number]

    def _steps(self, log: Log) -> Iterator[tuple[str, Log]]:
        last = log[-1]
        for at in range(self.base(log).number, len(log)):
            entry = log[at]
            for name, after in self._announce(entry, entry is last):
                yield f"{name} {entry.number}", (*log[:at], after, *log[at + 1 :])
        if last.end == OPEN:
            yield f"abort {last.number}", self.aborted(log)
            if self.complete_now(log):
                yield f"commit {last.number}", self.committed(log)
        elif len(log) <= len(self.fate.script):
            for option in self.fate.script[len(log) - 1]:
                yield from self._open(log, option)

    def _announce(self, entry: Entry, last: bool) -> Iterator[tuple[str, Entry]]:
        """Steps of the producers of one attempt. Sealing after the next attempt is there is as good as before."""
        for p in (0, 1):
            if entry.mode is STREAM and entry.end != COMMIT and not entry.ended[p]:
                count, most = entry.listed[p], len(all_refs(entry, p))
                if count < most:
                    ended = put(entry.ended, p, LAST if self.fate.tight and count == most - 1 else NO)
                    after = entry._replace(listed=put(entry.listed, p, count + 1), ended=ended)
                    yield f"announce {p}.{count} of", after
                else:
                    yield f"end list {p} of", entry._replace(ended=put(entry.ended, p, OWN))
            may = entry.mode is STAGE or entry.ended[p] in (OWN, LAST)
            if last and may and entry.end != COMMIT and not entry.sealed[p]:
                yield f"seal {p} of", entry._replace(sealed=put(entry.sealed, p, True))  # type: ignore[arg-type]

    def _open(self, log: Log, option: Option) -> Iterator[tuple[str, Log]]:
        """The opener first ends every list of every aborted stream since the base, one by one."""
        for at in range(self.base(log).number, len(log)) if self.fate.ends else ():
            entry = log[at]
            for p in (0, 1):
                if entry.mode is STREAM and not entry.ended[p]:
                    ended = entry._replace(ended=put(entry.ended, p, OTHER))
                    yield f"opener ends list {p} of {entry.number}", (*log[:at], ended, *log[at + 1 :])
                    return
        before = tuple(map(settled, log)) if self.fate.ends else log
        yield f"open {len(log) + 1} {option[0].value} {option[1]}", (*before, self.opened(log, *option))

    def opened(self, log: Log, mode: Mode, new: Bits) -> Entry:
        base = self.base(log)
        held = base.new if self.fate.committed_base else log[-1].new
        if len(log) + 1 in self.fate.flawed:
            held = (*held[:2], WRONG)
        touched = frozenset[int]().union(*(announced(entry) for entry in log[base.number :]))
        if self.fate.union == "none":
            touched = frozenset()
        if self.fate.union == "changed":
            touched = frozenset(i for i in touched if held[i] != new[i])
        return Entry(len(log) + 1, mode, base.number, held, new, tuple(sorted(touched)))

    def complete_now(self, log: Log) -> bool:
        return log[-1].end == OPEN and all(log[-1].sealed) and attempts.adds_up(self.read(log, log[-1]))

    def committed(self, log: Log) -> Log:
        return (*log[:-1], log[-1]._replace(end=COMMIT))

    def complete(self, number: int) -> int:
        """The log once nothing goes wrong any more: its last attempt is committed, or open, sealed and adding up."""
        if number not in self._complete:
            log = self.all[number]
            for _ in range(100):
                last = log[-1]
                if last.end == ABORT:
                    _, log = next(self._open(log, (self.fate.last, last.new)))
                elif last.end == OPEN and (more := list(self._announce(last, True))):
                    log = (*log[:-1], more[0][1])
                elif last.end == OPEN and not self.complete_now(log):
                    log = self.aborted(log)
            self._complete[number] = self.id(log)
        return self._complete[number]

    def aborted(self, log: Log) -> Log:
        return (*log[:-1], log[-1]._replace(end=ABORT))


# ------------------------------------------------------------------------------------------ receivers


Prim = tuple[str, int, int, int, int]
"""(kind, position, value, what must be there, attempt): "X" changes, "S" sets; ("K", n, ...) keeps payload n."""
Kept = tuple[int, str, Bits]
"""(attempt, payload, absolute values) in the spool."""


class Own(NamedTuple):
    """The state of one receiver. ``reading`` is what it has read of an attempt so far; ``voted`` the attempt that it
    has voted for (below 0: with weights that are gone since). ``may_load``: memory was lost, and an anchor
    may be loaded. ``refused`` is the attempt that it has refused last."""

    machine: Follower
    queue: tuple[m.Action, ...]
    bits: Bits = BASE
    header: Header | None = Header(RUN, CATALOG, State.CLEAN, 1, 0, digest(BASE), 0, "i")
    spool: tuple[Kept, ...] = ()
    paused: bool = False
    prims: tuple[Prim, ...] | None = None
    reading: tuple[Pair, Pair] | tuple[()] | None = None
    voted: int = 0
    may_load: bool = False
    refused: int = 0

    def feed(self, event: m.Event) -> Own:
        try:
            machine, actions = self.machine.on(event)
        except RefitError as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        return self._replace(machine=machine, queue=self.queue[1:] + actions, prims=None, reading=None)


def boot(own: Own, make: Callable[[], Follower]) -> Own:
    fresh = own._replace(machine=make(), queue=(m.ReadAttempt(0),))
    return fresh.feed(m.HeaderRead(own.header))


def crashed(own: Own, fate: Fate) -> tuple[Own, ...]:
    """What a new agent may be."""
    found = [own if fate.keeps else own._replace(bits=LOST, spool=())]
    if fate.forgets and own.spool:
        found.append(own._replace(spool=(), may_load=True))
    makers = [fate.make, *([replace(fate, streams=not fate.streams).make] if fate.switches else [])]
    return tuple(boot(one, make) for one in found for make in makers)


def lost(own: Own, fate: Fate) -> Own:
    gone = own._replace(bits=LOST, header=None, spool=(), paused=False, voted=-abs(own.voted), may_load=True)
    return boot(gone, fate.make)


def step(own: Own, orders: bool) -> list[Own]:
    """What the next action, or one part of it, may lead to; not for those that read the log."""
    action, done = own.queue[0], own._replace(queue=own.queue[1:])
    if isinstance(action, m.WriteHeader):
        state = action.header.state
        voted = -abs(own.voted) if state is State.UNKNOWN else own.voted
        may_load = own.may_load and state is not State.CLEAN
        return [done._replace(header=action.header, voted=voted, may_load=may_load)]
    if isinstance(action, m.DropStage):
        return [done._replace(spool=())]
    if isinstance(action, m.Pause | m.Resume):
        return [done._replace(paused=isinstance(action, m.Pause))]
    if isinstance(action, m.FinishSeed):
        return [done]
    if isinstance(action, m.CastVote):
        return [cast(done, action)]
    if isinstance(action, m.FindAnchor):
        return [own.feed(m.AnchorFound(ANCHOR, digest(BASE)))]
    if isinstance(action, m.Prove):
        return [own.feed(m.Proven(digest(own.bits)))]
    if isinstance(action, m.Classify):
        kept = {name for _, name, _ in own.spool}
        return [own.feed(m.Classified(live(own, action.refs), tuple(ref.sha256 in kept for ref in action.refs)))]
    return parts(own, action, orders)


def cast(own: Own, action: m.CastVote) -> Own:
    """I3; and it refuses only what is wrong, unless its own bits may be."""
    seen = action.attempt
    if action.held is Held.REFUSED:
        if not (own.may_load or is_flawed(seen)):
            raise Broken(f"refuses {seen.number}, with which nothing is wrong")
        return own._replace(refused=seen.number)
    if not attempts.adds_up(seen):
        raise Broken("I3: votes for what does not add up")
    if action.held is Held.APPLIED:
        new = sum((one.part for one in seen.manifests), Digest())
        if digest(own.bits) != new:
            raise Broken(f"I3: votes APPLIED for {seen.number} and holds {own.bits}")
    elif {ref.sha256 for ref in seen.payloads} != {name for _, name, _ in own.spool}:
        raise Broken(f"I3: votes STAGED for {seen.number} and does not keep it")
    return own._replace(voted=seen.number)


def live(own: Own, refs: tuple[PayloadRef, ...]) -> tuple[Digest, ...]:
    return tuple(part(own.bits, PAYLOADS[ref].positions) for ref in refs)


def parts(own: Own, action: m.Action, orders: bool) -> list[Own]:
    """Actions of several steps: keep payloads, write them, load an anchor."""
    own = begun(own, action)
    if own.prims is None:
        return [own.feed(m.ValuesLost())]
    if not own.prims:
        return [own.feed(answer(own, action))]
    if isinstance(action, m.Stage):
        return [keep(own, action)]
    count = len(own.prims) if orders and isinstance(action, m.Write) else 1
    return [written(own, at) for at in range(count)]


def begun(own: Own, action: m.Action) -> Own:
    return own if own.prims is not None else own._replace(prims=prims_of(own, action))


def slipped(own: Own) -> tuple[Own, ...]:
    """One write that nobody sees fail. If it is one of absolute values, there is nothing left but an anchor."""
    action = own.queue[0] if own.queue else None
    if not isinstance(action, m.Write):
        return ()
    own = begun(own, action)._replace(may_load=own.may_load or own.machine.sets)
    prims = own.prims or ()
    return tuple(own._replace(prims=prims[:at] + prims[at + 1 :]) for at in range(len(prims)))


def prims_of(own: Own, action: m.Action) -> tuple[Prim, ...] | None:
    if isinstance(action, m.Stage):
        if any(number != action.attempt.number for number, _, _ in own.spool):
            raise Broken("staged beside what an earlier attempt left: equal payloads would be taken for its own")
        return tuple(("K", n, 0, 0, 0) for n in range(len(action.refs)))
    if isinstance(action, m.LoadAnchor):
        if not own.may_load:
            raise Broken("an anchor is loaded though memory survived")
        return tuple(("S", i, value, 0, 0) for i, value in enumerate(BASE))
    assert isinstance(action, m.Write)
    kept = {name: values for _, name, values in own.spool}
    prims: list[Prim] = []
    for ref, op in zip(action.refs, action.ops, strict=True):
        made, number = PAYLOADS[ref], action.attempt.number
        if op is m.Op.APPLY:
            kind = "S" if ref.overwrites else "X"
            values = made.new if ref.overwrites else tuple(a ^ b for a, b in zip(made.old, made.new, strict=True))
            prims += [(kind, i, v, old, number) for i, v, old in zip(made.positions, values, made.old, strict=True)]
        if op is m.Op.SET:
            if ref.sha256 not in kept:
                return None
            prims += [("S", i, v, 0, number) for i, v in zip(made.positions, kept[ref.sha256], strict=True)]
    return tuple(prims)


def keep(own: Own, action: m.Stage) -> Own:
    assert own.prims
    ref = action.refs[own.prims[0][1]]
    values = after(own, ref)
    others = [one for one in own.spool if one[1] != ref.sha256]
    spool = tuple(sorted([*others, (action.attempt.number, ref.sha256, values)]))
    return own._replace(spool=spool, prims=own.prims[1:])


def after(own: Own, ref: PayloadRef) -> Bits:
    """What its positions would hold after a payload."""
    made = PAYLOADS[ref]
    if ref.overwrites:
        return made.new
    return tuple(own.bits[i] ^ a ^ b for i, a, b in zip(made.positions, made.old, made.new, strict=True))


def written(own: Own, at: int) -> Own:
    """One position; I9, I10 and I11."""
    assert own.prims
    kind, i, value, old, number = own.prims[at]
    header = own.header
    if number and not (header and header.state is State.DIRTY and header.target == number):
        raise Broken(f"I10: writes of attempt {number} under header {header and (header.state.value, header.target)}")
    if kind == "X" and own.bits[i] != old:
        raise Broken(f"I9: changes position {i}, which holds {own.bits[i]}, not the base's {old}")
    bits = (*own.bits[:i], own.bits[i] ^ value if kind == "X" else value, *own.bits[i + 1 :])
    return own._replace(bits=bits, prims=own.prims[:at] + own.prims[at + 1 :])


def answer(own: Own, action: m.Action) -> m.Event:
    if isinstance(action, m.LoadAnchor):
        return m.AnchorLoaded(digest(own.bits))
    if isinstance(action, m.Write):
        return m.Written(live(own, action.refs))
    assert isinstance(action, m.Stage)
    sums = []
    for ref, now in zip(action.refs, live(own, action.refs), strict=True):
        then = zip(PAYLOADS[ref].positions, after(own, ref), strict=True)
        sums.append(m.Sums(now, sum((h(i, v) for i, v in then), Digest())))
    return m.Staged(tuple(sums))


def read_on(own: Own, number: int, entry: Entry | None, base: Bits) -> Own:
    """One piece more of an attempt: what is decided is read at once, for nothing of it changes any more that counts."""
    if entry is None:
        return own.feed(m.AttemptRead(Seen(number)))
    if own.reading is None and entry.end == OPEN:
        return own._replace(reading=())
    if own.reading is None:
        return own.feed(m.AttemptRead(records(entry, base)))
    if own.reading == () and entry.mode is STREAM:
        return own._replace(reading=(entry.listed, entry.ended))
    listed, ended = own.reading or (entry.listed, entry.ended)
    return own.feed(m.AttemptRead(records(entry._replace(listed=listed, ended=ended, end=OPEN), base)))


def too_early(own: Own) -> Iterator[Own]:
    """What has just been read of batches, without the last of one list."""
    for p in (0, 1) if own.reading else ():
        listed, ended = own.reading  # type: ignore[misc]
        if ended[p] in (OWN, OTHER):
            yield own._replace(reading=(listed, put(ended, p, NO)), may_load=True)
        elif listed[p]:
            yield own._replace(reading=(put(listed, p, listed[p] - 1), put(ended, p, NO)), may_load=True)


# ------------------------------------------------------------------------------------------ exploration


World = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Log, receivers (in order: they are alike), and so far: crashes, losses, slips, evictions."""


class Result(NamedTuple):
    """``bad`` is the first violation; ``complete``: there are no more states."""

    states: int
    bad: str | None
    complete: bool = False
    trace: tuple[str, ...] = ()


WALK = 50
"""Steps of a walk in depth, about."""


class Explorer:
    """One exploration. Receivers' own states go by small numbers, too."""

    def __init__(self, fate: Fate) -> None:
        self.fate, self.logs = fate, Logs(fate)
        self.all: list[Own] = []
        self.ids: dict[Own, int] = {}
        self._next: dict[tuple[int, int], tuple[int, ...] | Broken] = {}
        self._entries: dict[tuple[Entry | None, Bits], int] = {}
        self._reads: dict[tuple[int, int], int] = {}
        self.most = (("crash", fate.crashes), ("memory lost", fate.losses), ("slip", fate.slips))
        self._faults: dict[tuple[str, int], tuple[int, ...]] = {}
        self._judged: set[tuple[int, int]] = set()
        self._fine: set[tuple[int, int]] = set()

    def id(self, own: Own) -> int:
        if own not in self.ids:
            self.ids[own] = len(self.all)
            self.all.append(own)
        return self.ids[own]

    # -------------------------------------------------------------------------------- one receiver

    def next(self, who: int, log: int) -> tuple[int, ...]:
        """What one receiver may do next. Raises ``Broken``."""
        own = self.all[who]
        action = own.queue[0] if own.queue else None
        if action is None:
            return ()
        number = action.number if isinstance(action, m.ReadAttempt | m.AwaitAttempt) else 0
        key = (who, self._entry(log, number) if number else -1)
        found = self._next.get(key)
        if found is None:
            found = self._next[key] = self._computed(own, log, number)
        if isinstance(found, Broken):
            raise found
        return found

    def _entry(self, log: int, number: int) -> int:
        if (log, number) not in self._reads:
            key = self._piece(log, number)
            self._reads[log, number] = self._entries.setdefault(key, len(self._entries))
        return self._reads[log, number]

    def _piece(self, log: int, number: int) -> tuple[Entry | None, Bits]:
        entries = self.logs.all[log]
        entry = entries[number - 1] if number <= len(entries) else None
        return entry, entries[entry.base - 1].new if entry and entry.base else BASE

    def _computed(self, own: Own, log: int, number: int) -> tuple[int, ...] | Broken:
        try:
            if number:
                read = [read_on(own, number, *self._piece(log, number))]
                return tuple(self.id(new) for new in (*read, *(too_early(read[0]) if self.fate.late else ())))
            return tuple(self.id(new) for new in step(own, self.fate.orders))
        except Broken as broken:
            return broken

    def faults(self, name: str, who: int) -> tuple[int, ...]:
        """What a receiver is after one fault."""
        if (name, who) not in self._faults:
            own = self.all[who]
            if name == "crash":
                after = crashed(own, self.fate)
            else:
                after = (lost(own, self.fate),) if name == "memory lost" else slipped(own)
            self._faults[name, who] = tuple(self.id(new) for new in after)
        return self._faults[name, who]

    # -------------------------------------------------------------------------------- what must hold

    def judge(self, who: int, log: int) -> None:
        """Raises ``Broken`` unless a receiver's state is right beside a log, and recovers."""
        if (who, log) not in self._judged:
            self.check(who, log)
            complete = self.logs.complete(log)
            if (who, complete) not in self._fine:
                self.recover(who, complete)
            self._judged.add((who, log))

    def check(self, who: int, log: int) -> None:
        own, entries = self.all[who], self.logs.all[log]
        header, bits = own.header, own.bits
        if header is None:
            return
        if header.state is not State.CLEAN and not own.paused:
            raise Broken(f"I7: {header.state.value} while generation runs")
        if header.state is State.UNKNOWN:
            return
        version = entries[header.version - 1]
        if version.end != COMMIT:
            raise Broken(f"I1: {header.state.value}({header.version}), which is not committed")
        if header.state is State.CLEAN:
            if bits != version.new:
                raise Broken(f"I1: CLEAN({header.version}) holds {bits}, must be {version.new}")
            return
        union = self.logs.union(log, header.version, header.target)
        for i, value in enumerate(bits):
            if value != version.new[i] and i not in union:
                raise Broken(f"I2: DIRTY({header.version} to {header.target}), position {i} holds {value}")
        target = entries[header.target - 1]
        if own.voted == header.target and target.mode is STREAM and target.end == OPEN and bits != target.new:
            raise Broken(f"I3: has voted for {header.target} and holds {bits}")

    def recover(self, who: int, log: int) -> None:
        """Beside a complete log it votes for what is sealed, and ends CLEAN at the head. What it refuses is aborted,
        for it is alone."""
        passed = set[tuple[int, int]]()
        for _ in range(500):
            if (who, log) in self._fine:
                break
            self.check(who, log)
            entries, own = self.logs.all[log], self.all[who]
            waits = (who, log) in passed
            if entries[-1].end == COMMIT:
                if self._at_head(own, len(entries)):
                    passed.add((who, log))
                    break
                if waits:
                    raise Broken(f"I6: stays in phase {own.machine.phase.value}")
            elif abs(own.voted) == len(entries) or (waits and not own.machine.streams):
                passed.add((who, log))
                log = self.logs.id(self.logs.committed(entries))
                continue
            elif own.refused == len(entries):
                passed.add((who, log))
                log = self.logs.complete(self.logs.id(self.logs.aborted(entries)))
                continue
            elif waits:
                raise Broken(f"I6: does not vote, in phase {own.machine.phase.value}")
            passed.add((who, log))
            after = self.next(who, log)
            if not after:
                raise Broken("I6: nothing to do")
            who = after[0]
        else:
            raise Broken("I6: does not converge")
        self._fine |= passed

    def _at_head(self, own: Own, head: int) -> bool:
        header = own.header
        clean = header is not None and header.state is State.CLEAN and header.version == head
        return clean and own.machine.phase is Phase.CLEAN and not own.paused

    # -------------------------------------------------------------------------------- all of them

    def start(self) -> World:
        first = self.id(boot(Own(self.fate.make(), ()), self.fate.make))
        return self.logs.id((FIRST,)), (first,) * self.fate.receivers, (0, 0, 0, 0)

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        log, receivers, spent = world
        for name, then in self.logs.next(log):
            if (after := self._commits(name, world)) is not None:
                yield name, (then, receivers, after)
        for at, who in enumerate(receivers):
            if at and receivers[at - 1] == who:
                continue
            for new in self.next(who, log):
                yield "step", (log, swapped(receivers, at, new), spent)
            for kind, (name, most) in enumerate(self.most):
                for new in self.faults(name, who) if spent[kind] < most else ():
                    yield name, (log, swapped(receivers, at, new), spend(spent, kind, 1))

    def _commits(self, name: str, world: World) -> tuple[int, ...] | None:
        """What is spent after a step of the log; None if a COMMIT must wait for votes."""
        log, receivers, spent = world
        if self.fate.evictions is None or not name.startswith("commit"):
            return spent
        number = len(self.logs.all[log])
        after = spend(spent, 3, sum(abs(self.all[who].voted) != number for who in receivers))
        return after if after[3] <= self.fate.evictions else None

    def run(self, limit: int, seed: int | None = None) -> Result:
        """All states, up to ``limit``: breadth first, so that the first that is wrong has a shortest trace; or, with a
        ``seed``, by walks in depth from states of chance, which get further before the limit."""
        start, chance = self.start(), random.Random(seed)
        before: dict[World, World | None] = {start: None}
        queue = deque([start])
        while queue and len(before) < limit:
            if seed is not None and chance.random() < 1 / WALK:
                queue.rotate(chance.randrange(len(queue)))
            world = queue.popleft() if seed is None else queue.pop()
            try:
                for who in world[1]:
                    self.judge(who, world[0])
                fresh = [new for _, new in self.successors(world) if new not in before]
            except Broken as broken:
                return Result(len(before), str(broken), False, self._trace(world, before))
            if seed is not None:
                chance.shuffle(fresh)
            before.update(dict.fromkeys(fresh, world))
            queue.extend(fresh)
        return Result(len(before), None, not queue)

    def _trace(self, world: World, before: dict[World, World | None]) -> tuple[str, ...]:
        trace: list[str] = []
        while (last := before[world]) is not None:
            name = next(name for name, new in self.successors(last) if new == world)
            trace.append(self._said(last, world) if name == "step" else name)
            world = last
        return tuple(reversed(trace))

    def _said(self, last: World, world: World) -> str:
        gone = [who for who in last[1] if who not in world[1]]
        own = self.all[gone[0] if gone else last[1][0]]
        return f"  {type(own.queue[0]).__name__}; {own.bits}, {own.machine.phase.value}"


def spend(spent: tuple[int, ...], kind: int, count: int) -> tuple[int, ...]:
    return (*spent[:kind], spent[kind] + count, *spent[kind + 1 :]) if count else spent


def swapped(receivers: tuple[int, ...], at: int, new: int) -> tuple[int, ...]:
    return tuple(sorted((*receivers[:at], new, *receivers[at + 1 :])))


def explore(fate: Fate, limit: int = 1_000_000, seed: int | None = None) -> Result:
    return Explorer(fate).run(limit, seed)


# ------------------------------------------------------------------------------------------ configurations

A: Bits = (1, 2, 0)
"""Changes both positions of producer 0."""
B: Bits = (1, 0, 3)
"""Returns position 1 to the base's value, changes that of producer 1."""
C: Bits = (1, 0, 0)
D: Bits = (0, 0, 3)
EACH_CHANGE: dict[str, Fate] = {
    "one stream, crashes": Fate((((STREAM, A), (STREAM, BASE)),), crashes=2, losses=1),
    "one stream, two receivers, one crash": Fate((((STREAM, A),),), receivers=2, evictions=1, orders=False, tight=True),
    "one of either, slips": Fate((((STREAM, B), (STAGE, B)),), crashes=1, slips=2),
    "stream, stream, one crash": Fate((((STREAM, A),), ((STREAM, B), (STREAM, BASE))), tight=True),
    "stream, stream, memory lost": Fate((((STREAM, A),), ((STREAM, B),)), crashes=0, losses=1, tight=True),
    "stream, stage": Fate((((STREAM, A),), ((STAGE, BASE), (STAGE, A))), last=STAGE),
    "stage, stream": Fate((((STAGE, A),), ((STREAM, A), (STREAM, BASE))), tight=True),
    "stream, nobody streams": Fate((((STREAM, A),), ((STREAM, B),)), streams=False),
    "stream, agents switch": Fate((((STREAM, A),), ((STREAM, BASE),)), switches=True, orders=False, tight=True),
    "stream, stream, spool lost": Fate((((STREAM, C),), ((STREAM, B),)), forgets=True, orders=False, tight=True),
    "stream, stage, late": Fate((((STREAM, A),), ((STAGE, B),)), late=True, orders=False, tight=True),
    "a flawed stream, stream": Fate((((STREAM, B),), ((STREAM, D),)), flawed=(2,), orders=False, tight=True),
    "a flawed stage, stream": Fate((((STAGE, B),), ((STREAM, D),)), flawed=(2,), orders=False, tight=True),
    "stream, a flawed stage": Fate((((STREAM, A),), ((STAGE, D),)), flawed=(3,), orders=False, tight=True),
    "three streams": Fate((((STREAM, C),), ((STREAM, C),), ((STREAM, D),)), crashes=0, orders=False, tight=True),
    "stream, stage, stream": Fate((((STREAM, C),), ((STAGE, BASE),), ((STREAM, B),)), crashes=0, tight=True),
}
"""All states of each are looked at."""
EITHER = ((STREAM, A), (STREAM, B), (STREAM, BASE), (STAGE, B))
RELEASE: dict[str, Fate] = {
    "one stream, two receivers": Fate((((STREAM, A),),), receivers=2, crashes=1, losses=1, evictions=1),
    "two, crashes": Fate((EITHER, EITHER), crashes=2),
    "two, memory lost": Fate((EITHER, EITHER), crashes=1, losses=1),
    "two, slips": Fate((EITHER, EITHER), crashes=1, slips=1),
    "two, two receivers": Fate((((STREAM, A),), ((STREAM, B),)), 2, crashes=1, evictions=1, orders=False, tight=True),
    "three": Fate((EITHER[:2], EITHER, EITHER), crashes=0),
    "three, one crash": Fate((((STREAM, A),), ((STREAM, B),), ((STREAM, BASE),)), tight=True),
    "two, agents switch": Fate((EITHER, EITHER), switches=True),
    "two, spool lost": Fate((EITHER, EITHER), forgets=True),
    "two, late": Fate((EITHER, EITHER), late=True),
    "two, the first flawed": Fate((EITHER, EITHER), flawed=(2,)),
    "three, the second flawed": Fate((((STREAM, A),), EITHER, ((STREAM, B),)), flawed=(3,), crashes=0, tight=True),
}
"""For a release: as many states of each as there is time for."""


def main(limit: int = 1_500_000, seed: int | None = None) -> int:
    """Explore ``RELEASE``, up to ``limit`` states each; a line of JSON for each, and one with what they add up to."""
    found = []
    for name, fate in RELEASE.items():
        started = time.monotonic()
        found.append(explore(fate, limit, seed))
        say(name=name, seed=seed, seconds=round(time.monotonic() - started, 1), **found[-1]._asdict())
    bad = sum(one.bad is not None for one in found)
    say(states=sum(one.states for one in found), violations=bad)
    return bad


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
