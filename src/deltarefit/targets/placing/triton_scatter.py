"""``scatter.Scatter`` as one Triton kernel: a program takes one block of positions against one box.

The host cuts what may be hit into tasks (box, begin, end), so that no program is without work, and sends them with the
boxes they need. Destinations are unique, so nothing is atomic; each task leaves its totals in a row of its own.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from deltarefit.codec import ADD, XOR
from deltarefit.records import Digest
from deltarefit.targets.placing.scatter import (
    GOLDEN,
    MAX_DIMS,
    MIX,
    MIX0,
    MIX1,
    Place,
    Spots,
    Table,
    Upload,
    elements_of,
    refuse_low_bits,
)

_XOR, _ADD = tl.constexpr(XOR), tl.constexpr(ADD)
_GOLDEN, _MIX, _MIX0, _MIX1 = tl.constexpr(GOLDEN), tl.constexpr(MIX), tl.constexpr(MIX0), tl.constexpr(MIX1)
_TOTALS = tl.constexpr(6)
"""Totals of a task: hits, low bits found, both lanes now, both as they will be. Only hits where it writes."""


class TritonScatter:
    """Runs on CUDA, and on the CPU in Triton's interpreter. ``block`` positions a program, at most ``tasks`` programs
    a launch."""

    def __init__(self, device: torch.device, chunk: int, *, block: int = 1024, tasks: int = 1 << 14) -> None:
        self._block, self._most = block, tasks
        self._tasks = Upload(8 * 3 * tasks, device)
        self._rows = Upload(8 * (3 + 3 * MAX_DIMS) * tasks, device)
        self._parts = torch.empty((tasks, _TOTALS.value), dtype=torch.int64, device=device)
        self._sum, self._total = (torch.empty(_TOTALS.value, dtype=torch.int64, device=device) for _ in range(2))

    def change(self, spots: Spots, place: Place, operation: int) -> int:
        return self._run(spots, place, 0, operation, write=True)[0]

    def sums(self, spots: Spots, place: Place, key: int) -> Digest:
        _, low, *lanes = self._run(spots, place, key, XOR, write=False)
        refuse_low_bits(low, place)
        return Digest(*lanes[:2])

    def preview(self, spots: Spots, place: Place, key: int, operation: int) -> tuple[Digest, Digest]:
        _, low, *lanes = self._run(spots, place, key, operation, write=False)
        refuse_low_bits(low, place)
        return Digest(*lanes[:2]), Digest(*lanes[2:])

    def digest(self, rows: Table, place: Place, key: int) -> Digest:
        empty = self._sum[:0]  # positions are the elements' own, and there are no values
        spots = Spots(empty, None, rows, np.zeros(len(rows), np.int64), elements_of(rows))
        _, low, *lanes = self._run(spots, place, key, XOR, write=False, every=True)
        refuse_low_bits(low, place)
        return Digest(*lanes[:2])

    def _run(
        self, spots: Spots, place: Place, key: int, operation: int, *, write: bool, every: bool = False
    ) -> list[int]:
        """The totals of all tasks."""
        self._total.zero_()
        rows = np.insert(spots.rows, 2, first_terms(spots.rows, key), axis=1)
        dims = int((spots.rows[:, 2::3] > 1).any(axis=0).nonzero()[0].max(initial=-1)) + 1
        for some, first, last in self._cut(spots):
            sent = self._rows.send(rows[first:last].reshape(-1))
            todo, n = self._tasks.send(some.reshape(-1)), len(some)
            _touch[(n,)](
                todo, sent, spots.positions, self._sum if spots.values is None else spots.values, place.storage,
                self._parts, rows.shape[1], operation, int(write), dims=dims, shift=place.shift, mask=place.mask,
                low=place.low, valued=spots.values is not None, every=every, block=self._block,
            )  # fmt: skip
            self._total.add_(torch.sum(self._parts[:n], 0, out=self._sum))
        return self._total.tolist()

    def _cut(self, spots: Spots) -> Iterator[tuple[Table, int, int]]:
        """((box less the first, begin, end) of tasks for one launch, first box, last box plus one)."""
        counts = -(-(spots.end - spots.begin) // self._block)
        stops = counts.cumsum()
        for start in range(0, int(stops[-1]), self._most):
            number = np.arange(start, min(start + self._most, int(stops[-1])))
            box = np.searchsorted(stops, number, side="right")
            begin = spots.begin[box] + (number - (stops - counts)[box]) * self._block
            first, last = int(box[0]), int(box[-1]) + 1
            yield np.stack([box - first, begin, np.minimum(begin + self._block, spots.end[box])], 1), first, last


def first_terms(rows: Table, key: int) -> Table:
    """What docs/format.md §5 adds to the value of each box's first element: key + (position + 1) · golden."""
    terms = (rows[:, 0].astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN % 2**64) + np.uint64(key)
    signed: Table = terms.view(np.int64)
    return signed


@triton.jit(do_not_specialize=["columns", "operation", "write"])
def _touch(
    tasks, rows, positions, values, storage, parts, columns, operation, write, dims: tl.constexpr, shift: tl.constexpr,
    mask: tl.constexpr, low: tl.constexpr, valued: tl.constexpr, every: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One task. Stored elements are computed on as 64-bit integers and cut back when they are written. Whether it
    writes is no constant: what a preview has compiled and loaded is what will write."""
    task = tl.program_id(0).to(tl.int64)
    row = rows + tl.load(tasks + 3 * task) * columns
    at = tl.load(tasks + 3 * task + 1) + tl.arange(0, block)
    live = at < tl.load(tasks + 3 * task + 2)
    if every:
        rank, offsets = enumerated(row, at, dims)
    else:
        rank = tl.load(positions + at, mask=live, other=0) - tl.load(row)
        offsets, good = located(row, rank, dims)
        live = live & good
    now = tl.load(storage + offsets, mask=live, other=0).to(tl.int64)
    then = now
    if valued:
        new = tl.load(values + at, mask=live, other=0).to(tl.int64) << shift
        then = tl.where(operation == _XOR, now ^ new, tl.where(operation == _ADD, now + new, new))
    out = parts + task * _TOTALS
    tl.store(out, tl.sum(live.to(tl.int64)))
    if write != 0:
        tl.store(storage + offsets, then.to(storage.dtype.element_ty), mask=live)
    else:
        tl.store(out + 1, tl.sum(tl.where(live, now & low, 0)))
        term = tl.load(row + 2) + rank * _GOLDEN
        _add(out + 2, term, (now >> shift) & mask, live)
        _add(out + 4, term, (then >> shift) & mask, live)


@triton.jit
def located(row, rank, dims: tl.constexpr):
    """(storage offsets, whether they are elements of the box) of positions, ``rank`` above the box's first one."""
    offsets = tl.zeros_like(rank) + tl.load(row + 1)
    rest = rank
    good = rank >= 0
    for digit in tl.static_range(dims):
        size = tl.load(row + 3 + 3 * digit)
        stride = tl.load(row + 4 + 3 * digit)
        index = tl.where(size > 1, rest // tl.maximum(stride, 1), 0)
        good = good & (index < size)
        offsets += index * tl.load(row + 5 + 3 * digit)
        rest -= index * stride
    return offsets, good & (rest == 0)


@triton.jit
def enumerated(row, numbers, dims: tl.constexpr):
    """(positions above the box's first one, storage offsets) of its elements by row-major number."""
    rank = tl.zeros_like(numbers)
    offsets = rank + tl.load(row + 1)
    left = numbers
    for back in tl.static_range(dims):
        size = tl.load(row + 3 * (dims - back))
        index = left % size
        rank += index * tl.load(row + 1 + 3 * (dims - back))
        offsets += index * tl.load(row + 2 + 3 * (dims - back))
        left = left // size
    return rank, offsets


@triton.jit
def _add(out, term, elements, live):
    """Both lanes of docs/format.md §5, summed. Shifts are arithmetic, so what they shift in is masked away."""
    mixed = term ^ elements
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _MIX
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    one = mixed * _MIX0
    two = mixed * _MIX1
    tl.store(out, tl.sum(tl.where(live, one ^ ((one >> 32) & 0xFFFFFFFF), 0)))
    tl.store(out + 1, tl.sum(tl.where(live, two ^ ((two >> 32) & 0xFFFFFFFF), 0)))
