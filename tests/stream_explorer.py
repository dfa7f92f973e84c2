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

import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from deltarefit.manifest import State
from deltarefit.protocol import messages as m
from deltarefit.protocol.follower import Phase
from tests.stream_log import BASE, COMMIT, FIRST, OPEN, STAGE, STREAM, Bits, Broken, Entry, Fate, Logs
from tests.stream_receiver import Own, boot, crashed, lost, read_on, slipped, step, too_early

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
            return tuple(self.id(new) for new in step(own, self.fate))
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
        first = self.id(boot(Own(self.fate.make(), (), may_load=self.fate.loads), self.fate.make))
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
