"""Do ranks that should hold the same bits hold the same bits? Digests are compared, no tensor is sent.

Splitting a replicated tensor among its holders is sound only if they agree. Tensors that every rank updates for itself
(norms and routers beside tensor parallelism) can drift apart without anyone noticing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deltarefit.digest import array_digest
from deltarefit.errors import IntegrityError, UnavailableError
from deltarefit.ports import Exchange
from deltarefit.records import Digest
from deltarefit.sources.dtypes import carried, elements
from deltarefit.sources.local import Fetch

STEP = 8 << 20
"""Elements that are brought to the CPU at a time."""
PER_MESSAGE = 64
"""Digests in one message."""
PAUSE = 0.02
"""Seconds between two looks for a message."""


@dataclass(frozen=True)
class Replicated:
    """A local tensor that others hold too; ``leader`` is the rank (in the exchange) whose bits count as the right
    ones."""

    name: str
    local: Fetch
    leader: int


def check_replicas(every: Sequence[Replicated], exchange: Exchange, number: int, timeout: float) -> None:
    """Compare with each leader. Every rank calls this, with the same ``number``, which is used once.

    ``IntegrityError`` names the tensors that differ, on the ranks where they differ from the leader's;
    ``UnavailableError`` if a leader says nothing for ``timeout`` seconds.
    """
    digests = {one.name: _digest(one) for one in every}
    own = {one.name: digests[one.name] for one in every if one.leader == exchange.rank}
    _say(exchange, number, own)
    drifted = []
    for leader in sorted({one.leader for one in every} - {exchange.rank}):
        theirs = _heard(exchange, number, leader, timeout)
        names = [one.name for one in every if one.leader == leader]
        drifted += [f"{name} (rank {leader})" for name in names if theirs.get(name) != digests[name]]
    if drifted:
        raise IntegrityError(
            f"rank {exchange.rank} holds other bits than a rank that should hold the same",
            expected="equal bits wherever a tensor is replicated",
            found=", ".join(drifted[:8]) + (f" and {len(drifted) - 8} more" if len(drifted) > 8 else ""),
            next_step="Broadcast them from one rank, and find out why they are updated differently.",
        )


def forget(exchange: Exchange, number: int, every: Sequence[Replicated]) -> None:
    """Take back what this rank said in check ``number``, once a later check shows that all have heard it."""
    count = sum(one.leader == exchange.rank for one in every)
    for part in range(_messages(count)):
        exchange.delete(_key(number, exchange.rank, part))


def _digest(one: Replicated) -> Digest:
    flat = carried(one.local().detach().reshape(-1))
    return sum((array_digest(elements(chunk.cpu()), start, 0) for start, chunk in _chunks(flat)), Digest())


def _chunks(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    return ((start, flat[start : start + STEP]) for start in range(0, flat.numel(), STEP))


def _messages(count: int) -> int:
    return -(-count // PER_MESSAGE) or 1


def _key(number: int, rank: int, part: int) -> str:
    return f"replicas/{number}/{rank}/{part}"


def _say(exchange: Exchange, number: int, digests: dict[str, Digest]) -> None:
    """One line for each tensor, in several messages; the first line of each says how many there are."""
    lines = [f"{digest} {name}" for name, digest in digests.items()]
    count = _messages(len(lines))
    for part in range(count):
        some = lines[part * PER_MESSAGE : (part + 1) * PER_MESSAGE]
        exchange.put(_key(number, exchange.rank, part), "\n".join([str(count), *some]).encode())


def _heard(exchange: Exchange, number: int, rank: int, timeout: float) -> dict[str, Digest]:
    found: dict[str, Digest] = {}
    part, count, deadline = 0, 1, time.monotonic() + timeout
    while part < count:
        said = exchange.get(_key(number, rank, part))
        if said is not None:
            first, *lines = said.decode().split("\n")
            count, part = int(first), part + 1
            found.update((name, _parsed(digest)) for digest, _, name in (line.partition(" ") for line in lines))
        elif time.monotonic() > deadline:
            raise UnavailableError(f"rank {rank} did not say what it holds", expected=f"within {timeout:g} seconds")
        else:
            time.sleep(PAUSE)
    return found
