"""Explicit-state exploration of the product's own receiver machine over a tiny world (protocol §3.9-3.10).

Two payloads of two positions each, a log with an anchor, commits (one of them empty), an abort, and values that return
to the base. Every single write is a step; the agent may die between any two steps, the memory may be lost with it. From
every state a fault-free run must end CLEAN at the head with its exact bits, and without loading an anchor again unless
memory was lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from deltarefit.errors import RefitError
from deltarefit.manifest import Anchor, Decision, Header, Intent, Mode, Outcome, PayloadRef, ProducerManifest, State
from deltarefit.protocol import messages as m
from deltarefit.protocol.follower import Follower, Phase
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
}
ABORTED = 3
LAST = 6
GROUPS = ((0, 1), (2, 3))


def h(position: int, value: int) -> Digest:
    return Digest(hash((position, value, 1)), hash((position, value, 2)))


def digest(bits: Bits) -> Digest:
    return sum((h(i, v) for i, v in enumerate(bits)), Digest())


def sums(bits: Bits, positions: tuple[int, ...]) -> Digest:
    return sum((h(i, bits[i]) for i in positions), Digest())


def changed(base: int, new: int, group: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in group if W[base][i] != W[new][i])


def base_of(number: int) -> int:
    return max((v for v in W if v < number and v != 0), default=0)


def positions_of(number: int) -> list[tuple[int, ...]]:
    """Positions of each payload of an attempt."""
    target = 4 if number == ABORTED else number
    if number == 1:
        return []
    groups = [changed(base_of(number), target, g) for g in GROUPS]
    return [g for g in groups if g]


def attempt(number: int, decided: bool) -> m.Attempt:
    base, new = base_of(number), 4 if number == ABORTED else number
    intent = Intent(RUN, number, base, digest(W[base]) if base else Digest(), Mode.STAGE, f"n{number}")
    refs = tuple(
        PayloadRef(SHA.format(number * 10 + k), 1, {}, 1, len(p), sums(W[base], p), sums(W[new], p))
        for k, p in enumerate(positions_of(number))
    )
    manifest = ProducerManifest(RUN, number, base, 0, 0, refs)
    if not decided:
        return m.Attempt(number, intent, manifest)
    if number == ABORTED:
        return m.Attempt(number, intent, manifest, Outcome(RUN, number, Decision.ABORT, base, Digest(), (), 0, "x"))
    outcome = Outcome(RUN, number, Decision.COMMIT, base, digest(W[new]), (manifest.content_hash(),), 1, f"n{number}")
    return m.Attempt(number, intent, manifest, outcome)


LOG = {(n, d): attempt(n, d) for n in range(1, LAST + 1) for d in (False, True)}
ANCHOR = Anchor(RUN, 1, digest(W[1]), (), ())
Prim = tuple[str, int, int]


@dataclass(frozen=True)
class World:
    """``log`` counts half steps: 2n-1 = attempt n sealed but open, 2n = decided."""

    machine: Follower
    queue: tuple[m.Action, ...]
    bits: Bits = W[0]
    header: Header | None = None
    spool: tuple[int, tuple[tuple[int, int], ...]] | None = None
    paused: bool = False
    prims: tuple[Prim, ...] | None = None
    log: int = 2
    crashes: int = 0
    losses: int = 0
    reloads_allowed: int = 1
    loads: int = 0


def boot(world: World, make: Callable[[], Follower]) -> World:
    machine, actions = make().on(m.HeaderRead(world.header))
    return replace(world, machine=machine, queue=actions, prims=None)


def read(world: World, number: int) -> m.Attempt:
    if world.log >= 2 * number:
        return LOG[number, True]
    return LOG[number, False] if world.log == 2 * number - 1 else m.Attempt(number)


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
    if isinstance(action, m.FinishSeed):
        return replace(world, queue=rest)
    if isinstance(action, m.FindAnchor):
        return feed(world, m.AnchorFound(ANCHOR, digest(W[1])), rest)
    if isinstance(action, m.LoadAnchor):
        return write(world, rest, [("S", i, v) for i, v in enumerate(W[1])], lambda w: m.AnchorLoaded(digest(w.bits)))
    return payload_step(world, action, rest)


def payload_step(world: World, action: m.Action, rest: tuple[m.Action, ...]) -> World:
    number = action.attempt.number  # type: ignore[union-attr]
    groups, masks = positions_of(number), {}
    for group in groups:
        for i in group:
            masks[i] = W[base_of(number)][i] ^ W[4 if number == ABORTED else number][i]
    if isinstance(action, m.Stage):
        after = tuple(v ^ masks.get(i, 0) for i, v in enumerate(world.bits))
        found = tuple(m.Sums(sums(world.bits, g), sums(after, g)) for g in groups)
        kept = (number, tuple((i, after[i]) for g in groups for i in g))
        return feed(replace(world, spool=kept), m.Staged(found), rest)
    if isinstance(action, m.Classify):
        return feed(world, m.Classified(tuple(sums(world.bits, g) for g in groups)), rest)
    assert isinstance(action, m.Write)
    if m.Op.SET in action.ops and (world.spool is None or world.spool[0] != number):
        return feed(world, m.ValuesLost(), rest)
    values = dict(world.spool[1]) if world.spool else {}
    prims: list[Prim] = []
    for group, op in zip(groups, action.ops, strict=True):
        if op is m.Op.APPLY:
            prims += [("X", i, masks[i]) for i in group]
        if op is m.Op.SET:
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
    if world.loads > world.reloads_allowed:
        return "reloaded though memory survived"
    return None


def recover(world: World) -> str | None:
    """A fault-free run from here to the head."""
    world = replace(world, log=2 * LAST)
    for _ in range(200):
        if (bad := violation(world)) is not None:
            return bad
        clean = world.header is not None and world.header.state is State.CLEAN and world.header.version == LAST
        if clean and world.machine.phase is Phase.CLEAN and not world.paused:
            return None if world.bits == W[LAST] else "bits differ at the head"
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
    seen, queue = {start}, deque([start])
    while queue and len(seen) < limit:
        world = queue.popleft()
        try:
            bad = violation(world) or recover(world)
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
    if world.log < 2 * LAST:
        found.append(replace(world, log=world.log + 1))
    if world.crashes < crashes:
        seeding = world.header is None or world.header.state is State.UNKNOWN
        crashed = replace(world, crashes=world.crashes + 1, reloads_allowed=world.reloads_allowed + seeding)
        found.append(boot(on_crash(crashed), make))
    if world.losses < losses:
        lost = replace(world, bits=W[0], header=None, spool=None, paused=False, losses=world.losses + 1)
        found.append(boot(replace(lost, reloads_allowed=lost.reloads_allowed + 1), make))
    return found
