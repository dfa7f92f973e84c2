"""Typed face of the C++ kernel: functions on integer views, no policy (docs/format.md §4-5).

Element arrays are NumPy arrays of uint8, uint16, uint32 or uint64 with any strides; an array of more than one
dimension is enumerated row by row. ``Array`` arguments that are only read may be read-only. All functions release
the GIL. Nothing is written before everything about the call has been checked; ``ValueError`` says what is wrong
(``TypeError`` for objects that are no buffers at all, ``MemoryError`` when memory runs out). Slices and arrays must
stay as they are during a call; where another thread changes them all the same, results are wrong but memory is safe.

A *record* is the tuple (start, length, count, code, runs, gap_chain, run_chain, value_chain, escapes, offset, run,
step, pitch): columns 1-13 of a payload's table. Its last four, *rows*, say how the piece's own elements, which
``start`` and ``length`` count, lie in the tensor; all zero: one behind the other, and ``start`` is a position in the
tensor. *Slices* are that delta's arrays, in this order: gap planes, run planes, then value planes, or two-bit codes
and escape planes; each plane list is low planes first, chain last; arrays that do not apply are left out (``pieces``
names them). ``first`` is the row-major index in ``array`` of the first position that the delta covers; with ``low``
that position in the tensor, position g lies at index first + (g - low).

*Boxes* say which canonical positions of one tensor a *storage* (contiguous, of one dimension) holds, and where: an
int64 array of shape (n, 2 + 3 * D), D <= 6, C-contiguous, whose row (canonical offset, storage offset, size_0,
canonical stride_0, storage stride_0, ...) carries the element (i_0, i_1, ...) with 0 <= i_k < size_k from canonical
position canonical offset + sum of i_k * canonical stride_k to storage offset + sum of i_k * storage stride_k; all in
elements. Canonical strides are positive, descend and nest strictly (each is larger than the reach of all digits after
it), storage strides are of any sign; strides of a digit of size 1 do not matter. Boxes of one table must be disjoint
on both sides, which is not checked: where they overlap, results are wrong but memory is safe. With ``shift`` 16 (else
0) the tensor's elements of two bytes lie in the upper halves of a uint32 storage; that the lower halves are zero is
checked wherever they are read. Listed positions outside all boxes are skipped.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.unsignedinteger[Any]]
Record = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]
Rows = tuple[int, int, int, int]
Lanes = tuple[int, int]
Boxes = npt.NDArray[np.int64]
Slices = Sequence[bytes | memoryview | npt.NDArray[np.uint8]]

def levels() -> list[str]:
    """Instruction levels this CPU runs, worst first: "portable", then "avx2", "avx512" or "neon"."""

def level() -> str:
    """The one in use; the best unless ``use_level`` was called."""

def use_level(name: str) -> None:
    """Switch all later calls to a level of ``levels()``."""

def count_changed(old: Array, new: Array) -> int:
    """Number of positions that differ: a plain compare scan."""

def extract(old: Array, new: Array) -> tuple[npt.NDArray[np.uint64], Array, Array]:
    """Positions that differ, ascending, with their old and new values."""

def encode(
    old: Array,
    new: Array,
    start: int,
    key: int,
    kind: int = -1,
    gap_planes: int = -1,
    operation: int = -1,
    packing: int = -1,
    rows: Rows = (0, 0, 0, 0),
) -> tuple[Record, list[tuple[str, bytes]], Lanes, Lanes] | None:
    """The delta of two arrays of one shape whose element 0 is element ``start`` of the piece that ``rows`` enumerates,
    of a tensor with digest key ``key``.

    Returns (record, [(stream name, bytes)] in slice order, pre sums, post sums), or None if nothing changed. The
    choices left at -1 are taken by estimated compressed size, the same on every CPU. SET is only used when asked for;
    with SET and kind 2 (all) ``old`` only goes into the pre sums, and only an empty array gives None. ``gap_planes``
    is not used where kind 2 is chosen. ValueError if a forced ``gap_planes`` would need a chain above 2^30 bytes.
    """

def pieces(record: Record) -> list[tuple[str, int]]:
    """(stream name, bytes) of each slice of a record. ValueError if the record itself breaks format §4.1."""

def validate(record: Record, slices: Slices) -> None:
    """Every check of format §4.6 on one delta. The functions below run it too before they touch anything."""

def decode(record: Record, slices: Slices) -> tuple[npt.NDArray[np.uint64], Array]:
    """(positions in the tensor less the first one covered, values: XOR mask, modular difference or new value)."""

def apply(record: Record, slices: Slices, array: Array, first: int = 0) -> None:
    """Write the delta's operation into ``array``, once per listed position."""

def apply_values(record: Record, slices: Slices, array: Array, values: Array, first: int = 0) -> None:
    """Set the listed positions to ``values`` (count elements): the absolute form of the same delta."""

def gather(record: Record, slices: Slices, array: Array, first: int = 0) -> Array:
    """Live values at the listed positions."""

def sums(record: Record, slices: Slices, array: Array, key: int, first: int = 0) -> Lanes:
    """Digest sums of the live values at the listed positions."""

def preview(record: Record, slices: Slices, array: Array, key: int, first: int = 0) -> tuple[Lanes, Lanes, Array]:
    """(sums now, sums as they will be after ``apply``, values as they will be), without writing."""

def digest(array: Array, start: int, key: int, rows: Rows = (0, 0, 0, 0)) -> Lanes:
    """Digest sums of a whole array whose element 0 is element ``start`` of the piece that ``rows`` enumerates."""

def place_apply(record: Record, slices: Slices, storage: Array, boxes: Boxes, shift: int = 0) -> int:
    """Write the delta's operation into ``storage``, once per listed position that the boxes hold; how many those are.
    SET does not read the storage."""

def place_sums(record: Record, slices: Slices, storage: Array, boxes: Boxes, key: int, shift: int = 0) -> Lanes:
    """Digest sums, by canonical position and value, of the live values at the listed positions that the boxes hold."""

def place_preview(
    record: Record, slices: Slices, storage: Array, boxes: Boxes, key: int, shift: int = 0
) -> tuple[Lanes, Lanes]:
    """(``place_sums`` now, the same as they will be after ``place_apply``), without writing."""

def place_digest(storage: Array, boxes: Boxes, key: int, shift: int = 0) -> Lanes:
    """Digest sums, by canonical position and value, of every element that the boxes hold."""

def place_decode(
    record: Record, slices: Slices, boxes: Boxes
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], Array]:
    """(positions in the tensor, storage offsets, values as of ``decode``) of the listed positions that the boxes hold,
    by ascending position. ValueError if the slices change meanwhile."""
