"""Every interleaving of two coordinators on one log, with lost answers, failures, and either stopped for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from deltarefit.errors import IntegrityError, ProtocolError
from deltarefit.manifest import ProducerManifest
from deltarefit.protocol import attempts
from deltarefit.protocol import messages as m
from deltarefit.protocol.coordinator import FINAL, Coordinator, Phase
from deltarefit.records import Digest
from tests.test_coordinator import RUN, attempt, encoded

Log = tuple[m.Attempt, ...]
"""Attempts 1, 2, ... of an abstract store; create-once is kept by ``place``."""


NONE = Digest()


@dataclass(frozen=True)
class Duel:
    """Two coordinators on one log; ``lost`` answers and ``failed`` encodings so far."""

    log: Log
    machines: tuple[Coordinator, Coordinator]
    queues: tuple[tuple[m.Action, ...], tuple[m.Action, ...]]
    lost: int = 0
    failed: int = 0


def start(log: Log, number: int = 1, base: int = 0, digest: Digest = NONE) -> Duel:
    pairs = [Coordinator(RUN, nonce, number=number, base=base, digest=digest).start() for nonce in ("A", "B")]
    return Duel(log, (pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1]))


def find(log: Log, number: int) -> m.Attempt:
    return log[number - 1] if number <= len(log) else m.Attempt(number)


def place(log: Log, action: m.Action) -> Log | None:
    """The log with the record of ``action``, or None if its key is taken."""
    if isinstance(action, m.CreateManifest):
        return place_manifest(log, action.manifest)
    if isinstance(action, m.CreateIntent):
        number, name, record = action.intent.attempt, "intent", action.intent
    else:
        assert isinstance(action, m.CreateOutcome)
        number, name, record = action.outcome.attempt, "outcome", action.outcome  # type: ignore[assignment]
    there = find(log, number)
    fields: dict[str, Any] = {name: record}
    if getattr(there, name) is not None:
        return None
    assert number <= len(log) + 1, "rule 1: a gap in the log"
    return (*log[: number - 1], replace(there, **fields), *log[number:])


def place_manifest(log: Log, manifest: ProducerManifest) -> Log | None:
    """Manifests are kept in the order of their producers; an attempt that was never opened has none."""
    number, there = manifest.attempt, find(log, manifest.attempt)
    assert number <= len(log), "sealed what nobody opened"
    if any(found.producer == manifest.producer for found in there.manifests):
        return None
    manifests = tuple(sorted((*there.manifests, manifest), key=lambda found: found.producer))
    return (*log[: number - 1], replace(there, manifests=manifests), *log[number:])


def put(pair: tuple[Any, Any], who: int, value: Any) -> tuple[Any, Any]:
    return (value, pair[1]) if who == 0 else (pair[0], value)


def feed(duel: Duel, who: int, event: m.Event, **fields: Any) -> Duel:
    machine, actions = duel.machines[who].on(event)
    queue = duel.queues[who][1:] + actions
    machines, queues = put(duel.machines, who, machine), put(duel.queues, who, queue)
    return replace(duel, machines=machines, queues=queues, **fields)


def steps(duel: Duel, who: int, losses: int, failures: int) -> Iterator[Duel]:
    """Everything that can come of the next action of one coordinator; first what comes without a fault."""
    if not duel.queues[who]:
        return
    action = duel.queues[who][0]
    if isinstance(action, m.ReadAttempt):
        yield feed(duel, who, m.AttemptRead(find(duel.log, action.number)))
    elif isinstance(action, m.Encode):
        yield feed(duel, who, encoded(action.intent))
        if duel.failed < failures:
            yield feed(duel, who, m.EncodeFailed("x"), failed=duel.failed + 1)
    elif isinstance(action, m.Gather):
        yield feed(duel, who, m.Gathered(encoded_by(duel.machines[who]), 1))
        yield feed(duel, who, m.AttemptRead(find(duel.log, action.intent.attempt)))
    else:
        after = place(duel.log, action)
        yield feed(duel, who, m.Created() if after else m.NotCreated(), log=after or duel.log)
        if duel.lost < losses:
            yield feed(duel, who, m.NotCreated(), lost=duel.lost + 1)
            yield feed(duel, who, m.NotCreated(), log=after or duel.log, lost=duel.lost + 1)


def encoded_by(machine: Coordinator) -> tuple[ProducerManifest, ...]:
    """The only manifest there is to gather."""
    assert machine.manifest
    return (machine.manifest,)


def check(duel: Duel) -> None:
    """I4, rule 1, and what each coordinator says of itself."""
    base = 0
    for number, there in enumerate(duel.log, 1):
        attempts.check_attempt(there)
        assert there.intent is not None
        assert there.intent.base == base, f"attempt {number}: base {there.intent.base}, last commit {base}"
        assert there.outcome is not None or number == len(duel.log), f"attempt {number} was left open"
        base = number if there.committed else base
    for machine in duel.machines:
        committed = [a.number for a in duel.log if a.committed and a.outcome and a.outcome.nonce == machine.nonce]
        if machine.phase in FINAL:
            assert committed == ([machine.number] if machine.phase is Phase.COMMITTED else []), machine
            continue
        assert not committed or machine.phase is Phase.COMMITTING, "committed before it tried"


def alone(duel: Duel, who: int) -> Duel:
    """The other stopped for ever: run to the end without faults, in a bounded number of steps."""
    for _ in range(20):
        if (after := next(steps(duel, who, 0, 0), None)) is None:
            break
        duel = after
        check(duel)
    assert duel.machines[who].phase in FINAL, "livelock"
    return duel


def newcomer_commits(duel: Duel) -> None:
    """Whatever state two dead coordinators left, a third one commits on top of it."""
    fresh, actions = Coordinator(RUN, "C").start()
    third = alone(Duel(duel.log, (fresh, replace(fresh, nonce="nobody")), (actions, ())), 0)
    assert third.machines[0].phase is Phase.COMMITTED


def explore(begin: Duel, losses: int, failures: int) -> tuple[int, set[tuple[Phase, Phase]]]:
    """(states seen, pairs of final phases)."""
    seen, queue, ends = {begin}, deque([begin]), set()
    while queue:
        duel = queue.popleft()
        check(duel)
        for who in (0, 1):
            alone(duel, who)
        newcomer_commits(duel)
        if not any(duel.queues):
            ends.add((duel.machines[0].phase, duel.machines[1].phase))
        for after in (*steps(duel, 0, losses, failures), *steps(duel, 1, losses, failures)):
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return len(seen), ends


FIRST = attempt(1, "old", 0, "commit")
assert FIRST.outcome
AFTER_FIRST: dict[str, Any] = {"number": 2, "base": 1, "digest": FIRST.outcome.digest}
LEFT_OPEN = attempt(2, "dead", 1, "sealed", FIRST.outcome.digest)


@pytest.mark.parametrize(
    ("begin", "losses", "failures"),
    [
        (start(()), 1, 1),
        (start((FIRST,), **AFTER_FIRST), 1, 1),
        (start((FIRST,)), 1, 0),
        (start((FIRST, LEFT_OPEN), **AFTER_FIRST), 1, 0),
        (start((FIRST,), **AFTER_FIRST), 2, 0),
    ],
    ids=["first version", "next version", "from the start", "one left open", "two lost answers"],
)
def test_two_coordinators_in_every_order(begin: Duel, losses: int, failures: int) -> None:
    states, ends = explore(begin, losses, failures)
    assert states > 300
    assert (Phase.COMMITTED, Phase.LOST) in ends
    assert (Phase.LOST, Phase.COMMITTED) in ends
    assert (Phase.COMMITTED, Phase.COMMITTED) in ends, "one after the other"


class _BelievesNoAnswer(Coordinator):
    """Takes an ambiguous COMMIT for its own."""

    def on(self, event: m.Event) -> tuple[Coordinator, tuple[m.Action, ...]]:
        if self.phase is Phase.COMMITTING and isinstance(event, m.NotCreated):
            return replace(self, phase=Phase.COMMITTED), ()
        return super().on(event)


class _ComparesNothing(Coordinator):
    """Takes whatever records stand in its attempt for its own. (Not to compare the intent alone is harmless: the
    manifests then differ, and one of the two aborts.)"""

    def on(self, event: m.Event) -> tuple[Coordinator, tuple[m.Action, ...]]:
        if self.phase in (Phase.OPENING, Phase.SEALING, Phase.COMMITTING) and isinstance(event, m.AttemptRead):
            event = m.AttemptRead(self._as_ours(event.attempt))
        return super().on(event)

    def _as_ours(self, found: m.Attempt) -> m.Attempt:
        intent = found.intent and replace(found.intent, nonce=self.nonce)
        outcome = found.outcome and replace(found.outcome, nonce=self.nonce)
        mine = (self.manifest,) if self.manifest and found.manifests else ()
        return replace(found, intent=intent, manifests=mine, outcome=outcome)


class _LeavesOpen(Coordinator):
    """Opens the next attempt without closing the one before."""

    def on(self, event: m.Event) -> tuple[Coordinator, tuple[m.Action, ...]]:
        if self.phase is Phase.TAIL and isinstance(event, m.AttemptRead) and event.attempt.open:
            return self, (m.ReadAttempt(event.attempt.number + 1),)
        return super().on(event)


class _ForgetsCommits(Coordinator):
    """Passes a commit without taking it for the new base."""

    def on(self, event: m.Event) -> tuple[Coordinator, tuple[m.Action, ...]]:
        machine, actions = super().on(event)
        if self.phase is Phase.TAIL and machine.base != self.base:
            machine = replace(machine, base=self.base, digest=self.digest)
        return machine, actions


class _SaysLost(Coordinator):
    """Takes its own ambiguous COMMIT for another's."""

    def on(self, event: m.Event) -> tuple[Coordinator, tuple[m.Action, ...]]:
        if self.phase is Phase.COMMITTING and isinstance(event, m.NotCreated):
            return replace(self, phase=Phase.LOST), ()
        return super().on(event)


@pytest.mark.parametrize(
    "mutant", [_BelievesNoAnswer, _ComparesNothing, _LeavesOpen, _ForgetsCommits, _SaysLost], ids=lambda c: c.__name__
)
def test_the_exploration_finds_broken_coordinators(mutant: type[Coordinator]) -> None:
    machines = tuple(mutant(RUN, nonce, **AFTER_FIRST) for nonce in ("A", "B"))
    begin = replace(start((FIRST,), **AFTER_FIRST), machines=machines)  # type: ignore[arg-type]
    with pytest.raises((AssertionError, IntegrityError, ProtocolError)):
        explore(begin, 1, 0)
