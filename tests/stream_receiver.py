"""One receiver of the stream model: the product's machine, and what carries out its actions step by step.

Keeping one payload and writing one position are steps. What must never happen in one is checked where it happens: I3,
I9 to I11, and what else raises ``Broken``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from deltarefit.errors import RefitError
from deltarefit.manifest import Header, Held, PayloadRef, State
from deltarefit.protocol import attempts
from deltarefit.protocol import messages as m
from deltarefit.protocol.follower import Follower
from deltarefit.records import Digest
from tests.explorer import CATALOG, RUN, digest, h
from tests.stream_log import (
    ANCHOR,
    BASE,
    LOST,
    NO,
    OPEN,
    OTHER,
    OWN,
    PAYLOADS,
    STREAM,
    Bits,
    Broken,
    Entry,
    Fate,
    Pair,
    Seen,
    is_flawed,
    part,
    put,
    records,
)

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


def step(own: Own, fate: Fate) -> list[Own]:
    """What the next action, or one part of it, may lead to; not for those that read the log."""
    action, done = own.queue[0], own._replace(queue=own.queue[1:])
    if isinstance(action, m.WriteHeader):
        state = action.header.state
        voted = -abs(own.voted) if state is State.UNKNOWN else own.voted
        may_load = fate.loads or (own.may_load and state is not State.CLEAN)
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
    return parts(own, action, fate.orders)


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
