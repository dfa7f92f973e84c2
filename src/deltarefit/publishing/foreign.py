"""What a delta, of whichever piece, means for another piece of the same tensor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from deltarefit import _kernel
from deltarefit.codec import ADD, XOR, Delta
from deltarefit.elements import Elements
from deltarefit.pieces import Piece

_POSITIONS = 1 << 18
"""Positions of a foreign piece that are looked up at a time."""


def write_into(piece: Piece, array: Elements, delta: Delta) -> None:
    """Carry out what a delta says of the elements of ``piece``, which ``array`` holds in order."""
    if (start := _within(piece, delta)) is not None:
        local = delta.local(start)
        _kernel.apply(local.record, local.slices, array, start)
        return
    for index, chosen in _shared(piece, delta):
        if delta.operation == XOR:
            array[index] ^= chosen
        elif delta.operation == ADD:
            array[index] += chosen
        else:
            array[index] = chosen


def indices_of(piece: Piece, delta: Delta) -> npt.NDArray[np.int64]:
    """Elements of ``piece`` that a delta lists, ascending, as indices into it."""
    parts = [index for index, _ in _shared(piece, delta)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _shared(piece: Piece, delta: Delta) -> Iterator[tuple[npt.NDArray[np.int64], Elements]]:
    """Elements of ``piece`` that a delta lists, with its values, some at a time."""
    first, last = piece.offset, piece.position(piece.length - 1)
    if delta.high <= first or delta.low > last:
        return
    positions, values = _kernel.decode(delta.record, delta.slices)
    for at in range(0, positions.size, _POSITIONS):
        some = slice(at, at + _POSITIONS)
        yield _inside(piece, positions[some], values[some], delta.low)


def _within(piece: Piece, delta: Delta) -> int | None:
    """Where in the piece's own order the delta begins, if it lies in it whole."""
    if delta.rows != piece.rows:
        return None
    start = delta.start - piece.origin
    return start if start >= 0 and start + delta.length <= piece.length else None


def _inside(
    piece: Piece, positions: npt.NDArray[np.uint64], values: Elements, low: int
) -> tuple[npt.NDArray[np.int64], Elements]:
    """Those of ascending canonical ``positions`` (from ``low``) that the piece holds, as indices into it."""
    first, last = piece.offset - low, piece.position(piece.length - 1) - low
    a = int(np.searchsorted(positions, np.uint64(max(first, 0))))
    b = int(np.searchsorted(positions, np.uint64(last), side="right"))
    at = positions[a:b].astype(np.int64) - first
    if piece.flat:
        return at, values[a:b]
    pitch = piece.pitch if piece.length > piece.run else last - first + 1  # of a single row it says nothing
    row, rest = at // pitch, at % pitch
    column, off = rest // piece.step, rest % piece.step
    good = (off == 0) & (column < piece.run)
    return (row * piece.run + column)[good], values[a:b][good]
