"""Do ranks that should hold the same bits hold the same bits? Digests are compared, no tensor is sent.

Splitting a replicated tensor among its holders is sound only if they agree. Tensors that every rank updates for itself
(norms and routers beside tensor parallelism) can drift apart without anyone noticing.

The first holder of a tensor leads. The others ask it, each with a number drawn for this one check; it answers all at
once when all have asked, and names their numbers, so that nobody compares with an answer to an earlier question.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from deltarefit.digest import array_digest
from deltarefit.errors import IntegrityError, UnavailableError
from deltarefit.ports import Exchange
from deltarefit.records import Digest
from deltarefit.sources.arguments import listed
from deltarefit.sources.dtypes import carried, elements
from deltarefit.sources.local import Fetch

STEP = 8 << 20
"""Elements that are brought to the CPU at a time."""
PER_MESSAGE = 32
"""Digests in one message."""
PAUSE = 0.02
"""Seconds between two looks for a message."""

T = TypeVar("T")


@dataclass(frozen=True)
class Replicated:
    """A local tensor that all ranks of ``group`` (in the exchange) hold; the first one's bits count as the right
    ones."""

    name: str
    local: Fetch
    group: tuple[int, ...]

    @property
    def leader(self) -> int:
        return self.group[0]


class Replicas:
    """Everything of a rank that others hold too."""

    def __init__(self, every: Sequence[Replicated], exchange: Exchange) -> None:
        self._every, self._exchange = tuple(every), exchange
        self._led = [one for one in every if one.leader == exchange.rank]
        self._leaders = sorted({one.leader for one in every} - {exchange.rank})
        self._followers = sorted({rank for one in self._led for rank in one.group} - {exchange.rank})
        self._answered: dict[int, bytes] = {}

    def check(self, timeout: float) -> None:
        """Compare every tensor with its leader's. All ranks call this at the same step of training.

        ``IntegrityError`` names the tensors that differ, on the ranks where they differ from the leader's;
        ``UnavailableError`` if a rank says nothing for ``timeout`` seconds.
        """
        exchange, nonce = self._exchange, secrets.token_hex(8)
        digests = {one.name: str(_digest(one)) for one in self._every}
        for leader in self._leaders:
            exchange.put(_ask(leader, exchange.rank), nonce.encode())
        try:
            self._answer(digests, timeout)
            theirs = {leader: _answered(exchange, leader, nonce, timeout) for leader in self._leaders}
        finally:
            for leader in self._leaders:
                exchange.delete(_ask(leader, exchange.rank))
        others = (one for one in self._every if one.leader != exchange.rank)
        _refuse(exchange.rank, [one for one in others if theirs[one.leader].get(one.name) != digests[one.name]])

    def _answer(self, digests: dict[str, str], timeout: float) -> None:
        """Wait for all that this rank leads, then say all digests; the part with the numbers they asked with, last."""
        if not self._followers:
            return
        nonces = [_heard(partial(self._asked, rank), rank, timeout) for rank in self._followers]
        self._answered = dict(zip(self._followers, nonces, strict=True))
        lines = [f"{digests[one.name]} {one.name}" for one in self._led]
        parts = [lines[start : start + PER_MESSAGE] for start in range(0, len(lines), PER_MESSAGE)]
        put, own = self._exchange.put, self._exchange.rank
        for number in reversed(range(1, len(parts))):
            put(_reply(own, number), "\n".join(parts[number]).encode())
        put(_reply(own, 0), b"\n".join([b" ".join(nonces), str(len(parts)).encode(), *map(str.encode, parts[0])]))

    def _asked(self, rank: int) -> bytes | None:
        """The number that a rank asks with, if it is not the one of an earlier check, which it may not have taken
        back yet."""
        said = self._exchange.get(_ask(self._exchange.rank, rank))
        return None if said == self._answered.get(rank) else said


def _refuse(rank: int, drifted: Sequence[Replicated]) -> None:
    if drifted:
        raise IntegrityError(
            f"rank {rank} holds other bits than a rank that should hold the same",
            expected="equal bits wherever a tensor is replicated",
            found=listed([f"{one.name} (rank {one.leader})" for one in drifted], ", "),
            next_step="Broadcast them from one rank, and find out why they are updated differently.",
        )


def _digest(one: Replicated) -> Digest:
    flat = carried(one.local().detach().reshape(-1))
    return sum((array_digest(elements(chunk.cpu()), start, 0) for start, chunk in _chunks(flat)), Digest())


def _chunks(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    return ((start, flat[start : start + STEP]) for start in range(0, flat.numel(), STEP))


def _ask(leader: int, rank: int) -> str:
    return f"replicas/ask/{leader}/{rank}"


def _reply(leader: int, part: int) -> str:
    return f"replicas/answer/{leader}/{part}"


def _answered(exchange: Exchange, leader: int, nonce: str, timeout: float) -> dict[str, str]:
    """What a leader says, by tensor."""

    def mine() -> list[str] | None:
        said = (exchange.get(_reply(leader, 0)) or b"").decode().split("\n")
        return said if nonce in said[0].split() else None

    _, count, *lines = _heard(mine, leader, timeout)
    for number in range(1, int(count)):
        lines += _heard(partial(exchange.get, _reply(leader, number)), leader, timeout).decode().split("\n")
    return {name: digest for digest, _, name in (line.partition(" ") for line in lines)}


def _heard(listen: Callable[[], T | None], rank: int, timeout: float) -> T:
    deadline = time.monotonic() + timeout
    while (said := listen()) is None:
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"rank {rank} did not take part in comparing replicas",
                expected=f"a word within {timeout:g} seconds",
                next_step="Publish again when all ranks are alive.",
            )
        time.sleep(PAUSE)
    return said
