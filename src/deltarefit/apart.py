"""No element stands twice in one payload (docs/format.md §4.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from deltarefit.affine.coverage import cut, disjoint
from deltarefit.errors import FormatError
from deltarefit.pieces import FLAT, Piece, Rows, piece_with

if TYPE_CHECKING:
    from deltarefit.codec import Delta

MAX_MEETINGS = 1 << 16
"""Most pairs of pieces of one tensor that interleave in one payload: each pair takes its own proof."""


def check_apart(deltas: Sequence[Delta], where: str) -> None:
    """No element is in two of these deltas, which are in order, nor in two pieces; of a piece counts all that lies from
    its first delta to its last."""
    for one, two in pairwise(deltas):
        if one.order[:-1] == two.order[:-1] and two.start < one.stop:
            raise FormatError(f"{where}: deltas of tensor {one.tensor} overlap", found=(one.stop, two.start))
    for number, (a, b) in enumerate(_meetings(_stretches(deltas))):
        if number == MAX_MEETINGS:
            raise FormatError(f"{where}: too many pieces interleave", expected=f"<= {MAX_MEETINGS} pairs")
        if not all(disjoint(one, two) for one in a.parts for two in b.parts):
            raise FormatError(f"{where}: pieces of tensor {a.tensor} overlap", found=(a.rows, b.rows))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements [start, stop) of a piece, which lie within [low, high) of the tensor."""

    tensor: int
    rows: Rows
    start: int
    stop: int
    low: int
    high: int

    @property
    def parts(self) -> list[Piece]:
        return list(cut(piece_with(self.tensor, self.rows, self.stop), self.start, self.stop))


def _stretches(deltas: Sequence[Delta]) -> Iterator[_Stretch]:
    """Flat deltas as they are, all deltas of one piece as one; of tensors that have pieces."""
    for _, of_tensor in groupby(deltas, key=lambda delta: delta.tensor):
        mine = list(of_tensor)
        if mine[-1].rows == FLAT:
            continue
        for rows, of_piece in groupby(mine, key=lambda delta: delta.rows):
            listed = list(of_piece)
            for several in [[delta] for delta in listed] if rows == FLAT else [listed]:
                first, last = several[0], several[-1]
                yield _Stretch(first.tensor, rows, first.start, last.stop, first.low, last.high)


def _meetings(stretches: Iterable[_Stretch]) -> Iterator[tuple[_Stretch, _Stretch]]:
    """Pairs that may share an element, as one begins before the other ends."""
    near: list[_Stretch] = []
    for stretch in sorted(stretches, key=lambda stretch: (stretch.tensor, stretch.low)):
        near = [other for other in near if other.tensor == stretch.tensor and other.high > stretch.low]
        for other in near:
            yield other, stretch
        near.append(stretch)
