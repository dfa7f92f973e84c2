"""What the kernel's placed operations shall do, an element at a time, and tables of boxes to try them on.

Nothing here is shared with the C++ code. A *table* is an int64 array of boxes as ``_native.pyi`` describes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from tests import oracle

Array = npt.NDArray[np.unsignedinteger[Any]]
Table = npt.NDArray[np.int64]
Cells = dict[int, int]
Hit = tuple[int, int, int]
Digits = list[tuple[int, int, int]]
Part = tuple[int, int, int]
MOST_OFFSET = (1 << 63) - 1


def _need(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


def digits(row: list[int]) -> list[tuple[int, int, int]]:
    """(size, canonical stride, storage stride) of each digit of a box, outermost first."""
    return [(row[at], row[at + 1], row[at + 2]) for at in range(2, len(row), 3)]


def check(table: Table, room: int = MOST_OFFSET) -> None:
    """Every rule about a table for a storage of ``room`` elements, in integers without limits."""
    _need(table.ndim == 2 and 2 <= table.shape[1] <= 20 and table.shape[1] % 3 == 2, "shape")
    for row in table.tolist():
        _need(all(size >= 1 for size, _, _ in digits(row)), "size")
        wide = [digit for digit in digits(row) if digit[0] > 1]
        reach = 0
        for size, stride, _ in reversed(wide):
            _need(stride > reach, "nesting")
            reach += (size - 1) * stride
        _need(row[0] >= 0 and row[0] + reach < oracle.MOST_ELEMENTS, "canonical range")
        ends = [(size - 1) * storage for size, _, storage in wide]
        _need(row[1] + sum(end for end in ends if end < 0) >= 0, "storage begins")
        _need(row[1] >= 0 and row[1] + sum(end for end in ends if end > 0) < room, "storage ends")


def cells(table: Table) -> Cells:
    """Canonical position to storage offset of all that the boxes hold."""
    found: Cells = {}
    for row in table.tolist():
        sizes, strides, steps = zip(*digits(row), strict=True) if len(row) > 2 else ((), (), ())
        for index in itertools.product(*map(range, sizes)):
            place = row[1] + sum(i * step for i, step in zip(index, steps, strict=True))
            found[row[0] + sum(i * stride for i, stride in zip(index, strides, strict=True))] = place
    return found


def hits(record: oracle.Record, slices: list[bytes], held: Cells) -> list[Hit]:
    """(position in the tensor, storage offset, value) of the listed positions that are held, ascending."""
    positions, values = oracle.decode(record, slices)
    listed = ((oracle.low(record) + p, value) for p, value in zip(positions, values, strict=True))
    return [(position, held[position], value) for position, value in listed if position in held]


def read(storage: Array, place: int, shift: int) -> int:
    """The canonical value at a storage offset."""
    raw = int(storage[place])
    _need(raw % (1 << shift) == 0, "lower half")
    return raw >> shift


def updated(record: oracle.Record, live: int, value: int) -> int:
    """A value after the delta's operation."""
    c = oracle.unpack_code(record[3])
    sum_ = (live + value) % (1 << 8 * c["width"])
    return {oracle.XOR: live ^ value, oracle.ADD: sum_, oracle.SET: value}[c["operation"]]


def after(record: oracle.Record, slices: list[bytes], storage: Array, held: Cells, shift: int = 0) -> Array:
    """The whole storage as it will be."""
    coming = storage.copy()
    for _, place, value in hits(record, slices, held):
        live = 0 if oracle.unpack_code(record[3])["operation"] == oracle.SET else read(storage, place, shift)
        coming[place] = updated(record, live, value) << shift
    return coming


def sums(record: oracle.Record, slices: list[bytes], storage: Array, held: Cells, key: int, shift: int = 0) -> Any:
    """Digest sums of the live values at the hits."""
    listed = hits(record, slices, held)
    return oracle.digest_of([(position, read(storage, place, shift)) for position, place, _ in listed], key)


def digest(storage: Array, held: Cells, key: int, shift: int = 0) -> oracle.Lanes:
    """Digest sums of everything that is held."""
    return oracle.digest_of([(position, read(storage, place, shift)) for position, place in held.items()], key)


# --- tables


def table_of(rows: list[list[int]], digits: int) -> Table:
    """Rows as a table with this many digits; those that are missing get size 1."""
    full = [row + [1, 0, 0] * (digits - (len(row) - 2) // 3) for row in rows]
    return np.array(full, np.int64).reshape(len(rows), 2 + 3 * digits)


# --- random tables


@st.composite
def partitions(draw: st.DrawFn, size: int) -> list[Part]:
    """A digit's values, cut into (first, step, count): intervals, or every second or third one."""
    if draw(st.booleans()) and size > 2:
        step = draw(st.integers(2, min(3, size)))
        return [(first, step, len(range(first, size, step))) for first in range(step)]
    cuts = [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))), size] if size > 1 else [0, 1]
    return [(a, 1, b - a) for a, b in itertools.pairwise(cuts)]


@st.composite
def placements(draw: st.DrawFn, sizes: list[int], room: int) -> tuple[int, list[int], int]:
    """(offset of the first element, a storage stride per digit, end): digits in any order and direction, packed or
    padded, from ``room`` on."""
    strides, step = [0] * len(sizes), draw(st.integers(1, 2))
    for d in draw(st.permutations(range(len(sizes)))):
        strides[d] = step
        step *= sizes[d] + draw(st.integers(0, 1))
    first = room + draw(st.integers(0, 3))
    for d, size in enumerate(sizes):
        if draw(st.booleans()):
            first += (size - 1) * strides[d]
            strides[d] = -strides[d]
    return first, strides, room + 3 + sum((n - 1) * abs(s) for n, s in zip(sizes, strides, strict=True)) + 1


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, int]:
    """(disjoint boxes that hold some parts of a tensor, elements of the storage)."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 7, 9, 16]), max_size=4))
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    offset, room, rows = draw(st.integers(0, 40)), 0, []
    for parts in itertools.product(*(draw(partitions(size)) for size in sizes)):
        if len(rows) == 12 or not draw(st.integers(0, 3)):
            continue
        counts = [count for _, _, count in parts]
        first, steps, room = draw(placements(counts, room))
        row = [offset + sum(part[0] * stride for part, stride in zip(parts, strides, strict=True)), first]
        for (_, step, count), stride, storage in zip(parts, strides, steps, strict=True):
            row += [count, 0 if count == 1 else step * stride, 0 if count == 1 else storage]
        rows.append(row)
    digits = draw(st.integers(len(sizes), 6))
    return table_of(draw(st.permutations(rows)), digits), room + draw(st.integers(0, 2))


# --- layouts that engines have


def column_shard() -> Digits:
    return [(96, 128, 40), (40, 1, 1)]


def transposed() -> Digits:
    return [(96, 128, 1), (128, 1, 96)]


def radix() -> Digits:
    """[E, O, K] kept as [E, O/16, K, 16]."""
    return [(3, 16 * 4 * 48, 16 * 4 * 48), (4, 16 * 48, 16 * 48), (16, 48, 1), (48, 1, 16)]


def expert_slabs() -> Digits:
    return [(5, 2100, 3000), (30, 70, 70), (35, 2, 1)]


def backwards() -> Digits:
    return [(90, 100, -100), (100, 1, -1)]


def corners() -> Digits:
    """A block of a tensor of three dimensions, with others beside it in each."""
    return [(20, 450, 90), (6, 50, 15), (13, 1, 1)]


LAYOUTS: list[Callable[[], Digits]] = [column_shard, transposed, radix, expert_slabs, backwards, corners]
RUN = [(9000, 1, 1)]
EVERY_THIRD = [(3000, 3, 1)]
ONE: Digits = []


def whole_box(digits: Digits, canonical: int, room: int) -> list[int]:
    """A row of these digits whose lowest storage offset is ``room``."""
    first = room + sum((n - 1) * -storage for n, _, storage in digits if storage < 0)
    return [canonical, first, *itertools.chain(*digits)]


def cell_arrays(row: list[int]) -> tuple[Any, Any]:
    """(positions, offsets) of a box, as NumPy sees it."""
    positions, offsets = np.array(row[0]), np.array(row[1])
    for size, stride, storage in digits(row):
        positions = positions[..., None] + np.arange(size) * stride
        offsets = offsets[..., None] + np.arange(size) * storage
    return positions.reshape(-1), offsets.reshape(-1)


# --- tables that break a rule, for a storage of six elements, and one that does not

GOOD = [9, 1, 3, 4, 2, 2, 1, -1]
HUGE = 2**63 - 1
BAD_ROWS = [
    ([9, 1, 0, 4, 2, 2, 1, -1], "without elements"),
    ([9, 1, -1, 4, 2, 2, 1, -1], "without elements"),
    ([9, 1, 3, 0, 2, 2, 1, -1], "not positive"),
    ([9, 1, 3, -4, 2, 2, 1, -1], "not positive"),
    ([9, 1, 3, 4, 2, 2, -1, -1], "not positive"),
    ([9, 1, 3, 1, 2, 2, 1, -1], "do not nest: expected 2, found 1"),
    ([9, 1, 2, 1, -1, 3, 4, 2], "do not nest: expected 9, found 1"),
    ([-1, 1, 3, 4, 2, 2, 1, -1], "largest tensor"),
    ([2**48 - 9, 1, 3, 4, 2, 2, 1, -1], "largest tensor"),
    ([2**48, 1, 1, 0, 0, 1, 0, 0], "largest tensor"),
    ([HUGE, 1, 3, 4, 2, 2, 1, -1], "largest tensor"),
    ([9, 1, HUGE, HUGE, 0, 2, 1, -1], "largest tensor"),
    ([9, 1, 3, HUGE, 0, 2, 1, -1], "largest tensor"),
    ([9, 1, 2**47, 4, 0, 2, 1, -1], "largest tensor"),
    ([9, -1, 3, 4, 2, 2, 1, -1], "before the storage"),
    ([9, -1, 3, 4, 2, 2, 1, 1], "before the storage"),
    ([9, 0, 3, 4, 2, 2, 1, -1], "before the storage"),
    ([9, 2, 3, 4, 2, 2, 1, -1], "beyond the storage: expected 6, found 7"),
    ([9, 1, 3, 4, 3, 2, 1, -1], "beyond the storage: expected 6, found 8"),
    ([9, 6, 1, 0, 0, 1, 0, 0], "beyond the storage: expected 6, found 7"),
    ([9, HUGE, 1, 0, 0, 1, 0, 0], "beyond the storage"),
    ([9, HUGE, 3, 4, 2, 2, 1, -1], "beyond the storage"),
    ([9, 1, 3, 4, HUGE, 2, 1, -1], "beyond the storage"),
    ([9, 1, 3, 4, -HUGE - 1, 2, 1, -1], "beyond the storage"),
    ([9, 1, 3, 4, 2**62, 2, 1, 2**62], "beyond the storage"),
    ([9, 1, 2, 4 * 2**33, 0, 2**33, 2, 2**31], "beyond the storage"),
]
