"""The log of the stream model: what producers and openers do to it, and what it says of an attempt.

Two producers of three positions, attempts that stream or stage. ``tests.stream_explorer`` explores receivers beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from deltarefit.manifest import Anchor, Batch, Decision, Intent, Mode, Outcome, PayloadRef, ProducerManifest
from deltarefit.protocol import attempts
from deltarefit.protocol.follower import Follower
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
    attempt by which a run without faults ends. ``loads``: anchors may be loaded at any time.

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
    loads: bool = False
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
