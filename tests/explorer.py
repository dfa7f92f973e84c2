"""Explicit-state exploration of the product's own receiver machine over a tiny world (protocol §3.9-3.10).

Two producers of two positions each, a log with an anchor, commits (one of them empty), an abort, an attempt that was
sealed against a wrong baseline before it was aborted, and values that return to the base. Producers seal one after the
other. Every single write is a step; the agent may die between any two steps, the memory may be lost with it. From every
state a fault-free run must end CLEAN at the head with its exact bits, and without loading an anchor again unless memory
was lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from deltarefit.errors import RefitError
from deltarefit.manifest import Anchor, Decision, Header, Intent, Mode, Outcome, PayloadRef, ProducerManifest, State
from deltarefit.protocol import attempts
from deltarefit.protocol import messages as m
from deltarefit.protocol.attempts import Attempt
from deltarefit.protocol.follower import _HANDLERS, Follower, Phase, Step
from deltarefit.records import Digest

RUN, CATALOG, SHA = "ab" * 16, "cd" * 32, "{:064x}"
Bits = tuple[int, ...]
W: dict[int, Bits] = {
    0: (9, 9, 9, 9),
    1: (0, 0, 0, 0),
    2: (1, 2, 0, 5),
    4: (0, 2, 3, 5),
    5: (0, 2, 3, 5),
    6: (1, 0, 3, 6),
    8: (1, 1, 3, 7),
}
WRONG, ABORTED = 3, 7
NEVER = {WRONG: W[4], ABORTED: W[8]}
"""What the attempts that end in ABORT would have made."""
LAST = 8
GROUPS = ((0, 1), (2, 3))
"""Positions that each producer owns."""


class Mutant(Follower):
    """Follower whose handlers are looked up by name, so that a subclass can break one of them."""

    def on(self, event: m.Event) -> Step:
        handler = _HANDLERS[self.phase, type(event)]
        mutated = getattr(self, getattr(handler, "__name__", ""), None)
        return mutated(event) if mutated else handler(self, event)


def h(position: int, value: int) -> Digest:
    return Digest(hash((position, value, 1)), hash((position, value, 2)))


def digest(bits: Bits) -> Digest:
    return sum((h(i, v) for i, v in enumerate(bits)), Digest())


def sums(bits: Bits, positions: tuple[int, ...]) -> Digest:
    return sum((h(i, bits[i]) for i in positions), Digest())


def base_of(number: int) -> int:
    return max((v for v in W if v < number and v != 0), default=0)


def bits_of(number: int) -> tuple[Bits, Bits]:
    """(what the producers took for the base, what they made). In ``WRONG`` producer 1 has missed a version."""
    old, new = W[base_of(number)], NEVER[number] if number in NEVER else W[number]
    return (old[:2] + W[1][2:], new) if number == WRONG else (old, new)


def positions_of(number: int, sealed: int = len(GROUPS)) -> list[tuple[int, ...]]:
    """Positions of each payload of an attempt; each producer has one, or none if nothing changed."""
    if number == 1:
        return []
    old, new = bits_of(number)
    return [g for group in GROUPS[:sealed] if (g := tuple(i for i in group if old[i] != new[i]))]


def manifest(number: int, producer: int) -> ProducerManifest:
    old, new = bits_of(number)
    refs = tuple(
        PayloadRef(SHA.format(number * 10 + producer), 1, {}, 1, len(p), 0, 0, sums(old, p), sums(new, p))
        for p in positions_of(number)
        if p[0] in GROUPS[producer]
    )
    part, layout = sums(new, GROUPS[producer]), SHA.format(producer)
    return ProducerManifest(RUN, number, base_of(number), producer, 0, part, layout, refs)


def attempt(number: int, sealed: int, decided: bool) -> Attempt:
    base = base_of(number)
    intent = Intent(RUN, number, base, digest(W[base]) if base else Digest(), Mode.STAGE, f"n{number}", len(GROUPS))
    manifests = tuple(manifest(number, producer) for producer in range(sealed))
    if not decided:
        return Attempt(number, intent, manifests)
    if number in NEVER:
        return Attempt(number, intent, manifests, Outcome(RUN, number, Decision.ABORT, base, Digest(), (), 0, "x"))
    hashes = tuple(made.content_hash() for made in manifests)
    outcome = Outcome(RUN, number, Decision.COMMIT, base, digest(W[number]), hashes, 1, f"n{number}")
    return Attempt(number, intent, manifests, outcome)


STEPS = ((1, False), (2, False), (2, True))
"""How far an attempt may be: (manifests sealed, decided)."""
LOG = {(n, d): attempt(n, *step) for n in range(1, LAST + 1) for d, step in enumerate(STEPS, 1)}
for written in LOG.values():
    attempts.check_attempt(written)
OWNED = {
    ref.sha256: group
    for n in range(2, LAST + 1)
    for ref, group in zip(LOG[n, 2].payloads, positions_of(n), strict=True)
}
"""Positions of each payload."""
ANCHOR = Anchor(RUN, 1, digest(W[1]), (), ())
Prim = tuple[str, int, int]


@dataclass(frozen=True)
class World:
    """``log`` counts ``STEPS`` of the attempts, one after the other."""

    machine: Follower
    queue: tuple[m.Action, ...]
    bits: Bits = W[0]
    header: Header | None = None
    spool: tuple[int, tuple[tuple[int, int], ...]] | None = None
    paused: bool = False
    prims: tuple[Prim, ...] | None = None
    log: int = len(STEPS)
    crashes: int = 0
    losses: int = 0
    reloads_allowed: int = 1
    loads: int = 0


def boot(world: World, make: Callable[[], Follower]) -> World:
    machine, actions = make().on(m.HeaderRead(world.header))
    return replace(world, machine=machine, queue=actions, prims=None)


def read(world: World, number: int) -> Attempt:
    done = min(world.log - len(STEPS) * (number - 1), len(STEPS))
    return LOG[number, done] if done > 0 else Attempt(number)


def feed(world: World, event: m.Event, queue: tuple[m.Action, ...]) -> World:
    machine, actions = world.machine.on(event)
    return replace(world, machine=machine, queue=queue + actions, prims=None)


def step(world: World) -> World | None:
    """Carry out the next action or single write; None if there is nothing new to do."""
    if not world.queue:
        return None
    action, rest = world.queue[0], world.queue[1:]
    if isinstance(action, m.ReadAttempt | m.AwaitAttempt):
        return feed(world, m.AttemptRead(read(world, action.number)), rest)
    if isinstance(action, m.WriteHeader):
        return replace(world, header=action.header, queue=rest)
    if isinstance(action, m.DropStage):
        return replace(world, spool=None, queue=rest)
    if isinstance(action, m.Pause | m.Resume):
        return replace(world, paused=isinstance(action, m.Pause), queue=rest)
    if isinstance(action, m.FinishSeed | m.CastVote):
        return replace(world, queue=rest)
    if isinstance(action, m.FindAnchor):
        return feed(world, m.AnchorFound(ANCHOR, digest(W[1])), rest)
    if isinstance(action, m.LoadAnchor):
        return write(world, rest, [("S", i, v) for i, v in enumerate(W[1])], lambda w: m.AnchorLoaded(digest(w.bits)))
    if isinstance(action, m.Prove):
        return feed(world, m.Proven(digest(world.bits)), rest)
    return payload_step(world, action, rest)


def payload_step(world: World, action: m.Action, rest: tuple[m.Action, ...]) -> World:
    attempt: Attempt = action.attempt  # type: ignore[union-attr]
    groups = [OWNED[ref.sha256] for ref in action.refs]  # type: ignore[union-attr]
    number, (old, new) = attempt.number, bits_of(attempt.number)
    masks = {i: old[i] ^ new[i] for group in groups for i in group}
    if isinstance(action, m.Stage):
        after = tuple(v ^ masks.get(i, 0) for i, v in enumerate(world.bits))
        found = tuple(m.Sums(sums(world.bits, g), sums(after, g)) for g in groups)
        kept = (number, tuple((i, after[i]) for g in groups for i in g))
        return feed(replace(world, spool=kept), m.Staged(found), rest)
    values = dict(world.spool[1]) if world.spool and world.spool[0] == number else {}
    if isinstance(action, m.Classify):
        kept_now = tuple(all(i in values for i in g) for g in groups)
        return feed(world, m.Classified(tuple(sums(world.bits, g) for g in groups), kept_now), rest)
    assert isinstance(action, m.Write)
    prims: list[Prim] = []
    for group, op in zip(groups, action.ops, strict=True):
        if op is m.Op.APPLY:
            prims += [("X", i, masks[i]) for i in group]
        if op is m.Op.SET:
            if not all(i in values for i in group):
                return feed(world, m.ValuesLost(), rest)
            prims += [("S", i, values[i]) for i in group]
    return write(world, rest, prims, lambda w: m.Written(tuple(sums(w.bits, g) for g in groups)))


def write(world: World, rest: tuple[m.Action, ...], prims: list[Prim], answer: Callable[[World], m.Event]) -> World:
    if world.prims is None:
        loads = world.loads + isinstance(world.queue[0], m.LoadAnchor)
        world = replace(world, prims=tuple(prims), loads=loads)
    if not world.prims:
        return feed(world, answer(world), rest)
    kind, i, value = world.prims[0]
    bits = list(world.bits)
    bits[i] = value if kind == "S" else bits[i] ^ value
    return replace(world, bits=tuple(bits), prims=world.prims[1:])


def violation(world: World) -> str | None:
    header = world.header
    if header is None:
        return None
    if header.state is State.CLEAN and world.bits != W.get(header.version):
        return f"I1: CLEAN({header.version}) holds {world.bits}, must be {W.get(header.version)}"
    if header.state is not State.CLEAN and not world.paused:
        return f"I7: {header.state.value} while generation runs"
    if world.queue and isinstance(world.queue[0], m.Stage) and world.spool is not None:
        return "staged beside what an earlier attempt left: an equal payload would be taken for written already"
    if world.loads > world.reloads_allowed:
        return "reloaded though memory survived"
    return None


def recover(world: World, fine: set[World]) -> str | None:
    """A fault-free run from here to the head. ``fine`` remembers states from which that run is known to end well."""
    passed: list[World] = []
    world = replace(world, log=len(STEPS) * LAST)
    for _ in range(200):
        if world in fine:
            fine.update(passed)
            return None
        if (bad := violation(world)) is not None:
            return bad
        passed.append(world)
        clean = world.header is not None and world.header.state is State.CLEAN and world.header.version == LAST
        if clean and world.machine.phase is Phase.CLEAN and not world.paused:
            if world.bits != W[LAST]:
                return "bits differ at the head"
            fine.update(passed)
            return None
        after = step(world)
        if after is None:
            return "stuck"
        world = after
    return "does not converge"


def explore(
    make: Callable[[], Follower] = lambda: Follower(RUN, CATALOG, "i"),
    crashes: int = 2,
    losses: int = 1,
    limit: int = 300_000,
    on_crash: Callable[[World], World] = lambda world: world,
) -> tuple[int, str | None]:
    """(states seen, first violation or None)."""
    start = boot(World(make(), ()), make)
    seen, queue, fine = {start}, deque([start]), set[World]()
    while queue and len(seen) < limit:
        world = queue.popleft()
        try:
            bad = violation(world) or recover(world, fine)
            after = successors(world, make, crashes, losses, on_crash) if bad is None else []
        except RefitError as error:
            return len(seen), f"{type(error).__name__}: {error}"
        if bad is not None:
            return len(seen), bad
        for new in after:
            if new not in seen:
                seen.add(new)
                queue.append(new)
    return len(seen), None


def successors(
    world: World, make: Callable[[], Follower], crashes: int, losses: int, on_crash: Callable[[World], World]
) -> list[World]:
    found = [after] if (after := step(world)) is not None and after != world else []
    if world.log < len(STEPS) * LAST:
        found.append(replace(world, log=world.log + 1))
    if world.crashes < crashes:
        seeding = world.header is None or world.header.state is State.UNKNOWN
        crashed = replace(world, crashes=world.crashes + 1, reloads_allowed=world.reloads_allowed + seeding)
        found.append(boot(on_crash(crashed), make))
    if world.losses < losses:
        lost = replace(world, bits=W[0], header=None, spool=None, paused=False, losses=world.losses + 1)
        found.append(boot(replace(lost, reloads_allowed=lost.reloads_allowed + 1), make))
    return found
