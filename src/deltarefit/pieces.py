"""Pieces: the part of one canonical tensor that one producer owns, enumerated row by row (docs/format.md §4.1).

A piece is the wire's view of a shard: ``length`` elements in rows of ``run``, ``step`` apart within a row and ``pitch``
from row to row. A column shard, an interleaved half or a range of rows is one piece; positions count only its own
elements, so a shard does not pay for what it skips.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Rows = tuple[int, int, int, int]
"""(offset, run, step, pitch) as the wire and the kernel have it; ``FLAT``: elements lie one behind the other."""
FLAT: Rows = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Element ``p`` of it, 0 <= p < ``length``, is element ``position(p)`` of catalog tensor ``tensor``.

    ``length`` is a multiple of ``run``; positions ascend strictly: ``step`` >= 1 and ``pitch`` > (run - 1) * step
    where there is more than one row.
    ``overwrite``: deltas carry new values, not differences (residual tensors, design §5).
    """

    tensor: int
    offset: int
    length: int
    run: int
    step: int = 1
    pitch: int = 0
    overwrite: bool = False

    @property
    def flat(self) -> bool:
        """Its elements lie one behind the other."""
        return self.length <= 1 or self._progression == 1

    @property
    def rows(self) -> Rows:
        """What a delta of this piece carries: the one form that the wire has for it (docs/format.md §4.1)."""
        if self.flat:
            return FLAT
        even = self._progression
        return (self.offset, 1, 1, even) if even else (self.offset, self.run, self.step, self.pitch)

    @property
    def origin(self) -> int:
        """What a delta's ``start`` counts from: the tensor's first element where the piece is flat, else its own."""
        return self.offset if self.flat else 0

    @property
    def _progression(self) -> int:
        """The one distance of all neighbours; 0 if rows lie apart."""
        if self.run == self.length or self.run * self.step == self.pitch:
            return self.step
        return self.pitch if self.run == 1 else 0

    def position(self, p: int) -> int:
        """Canonical position of its element ``p``."""
        return self.offset + p // self.run * self.pitch + p % self.run * self.step


def whole(tensor: int, numel: int) -> Piece:
    """All elements of a tensor."""
    return Piece(tensor, 0, numel, numel)


def piece_with(tensor: int, rows: Rows, stop: int) -> Piece:
    """The shortest piece that ``rows`` enumerate and that has ``stop`` elements at least."""
    offset, run, step, pitch = rows
    if not run:
        return whole(tensor, stop)
    return Piece(tensor, offset, -(-stop // run) * run, run, step, pitch)


def layout_of(pieces: Sequence[Piece]) -> str:
    """SHA-256 of what a producer owns: equal for producers that own the same pieces of the same catalog."""
    table = np.array([(p.tensor, p.length, *p.rows, p.offset) for p in pieces], "<u8")
    return hashlib.sha256(table.tobytes()).hexdigest()
