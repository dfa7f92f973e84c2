"""Changes and sums at listed positions of one storage, with torch integer operations; runs on any torch device.

A *table* of boxes is an int64 array (n, 2 + 3·D) on the host: canonical offset, storage offset, then (size, canonical
stride, storage stride) of each digit, canonical strides positive, descending and strictly nesting; digits that are not
used have size 1. All buffers are made once: nothing grows while generation stands still (what torch's own scans and
reductions take for a moment comes out of its caching allocator). Positions and offsets are int64 throughout; signed
integers of two's complement carry the unsigned arithmetic of docs/format.md §4-5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from deltarefit.codec import ADD, SET, XOR
from deltarefit.errors import DigestMismatch
from deltarefit.records import Digest

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype by width that stands for elements on a device."""
MAX_DIMS = 6
"""Most digits of one box."""

Table = npt.NDArray[np.int64]
Row = tuple[int, int, tuple[tuple[int, int, int], ...]]
"""(canonical offset, storage offset, digits of more than one element) of one box."""


def signed(number: int) -> int:
    """The signed 64-bit integer with the bits of ``number`` modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN, MIX, MIX0, MIX1 = (
    signed(factor) for factor in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The factors of docs/format.md §5, with the signs that int64 arithmetic modulo 2^64 gives them."""


@dataclass(frozen=True, slots=True)
class Place:
    """One storage: a 1-D tensor of a carrier dtype. Its elements are canonical ones of ``width`` bytes, shifted left
    by ``shift`` bits."""

    storage: torch.Tensor
    width: int
    shift: int

    @property
    def mask(self) -> int:
        """The bits of a canonical element."""
        return signed((1 << 8 * self.width) - 1)

    @property
    def low(self) -> int:
        """The bits of a stored element that must be zero."""
        return (1 << self.shift) - 1


@dataclass(frozen=True, slots=True)
class Spots:
    """Ascending canonical positions (int64, on the device), with values where there are any, and the boxes that they
    may lie in: those of box ``rows[k]`` are among ``positions[begin[k]:end[k]]``, never an empty range."""

    positions: torch.Tensor
    values: torch.Tensor | None
    rows: Table
    begin: Table
    end: Table


class Scatter(Protocol):
    """What is done on a device. Destinations of one call are unique. ``IntegrityError`` if shifted elements that are
    read have low bits; writes do not look at them."""

    def change(self, spots: Spots, place: Place, operation: int) -> int:
        """Carry out the operation at all positions that lie in a box; how many did."""

    def sums(self, spots: Spots, place: Place, key: int) -> Digest:
        """Digest sums of the live elements at these positions."""

    def preview(self, spots: Spots, place: Place, key: int, operation: int) -> tuple[Digest, Digest]:
        """Digest sums now, and as they will be after ``change``."""

    def digest(self, rows: Table, place: Place, key: int) -> Digest:
        """Digest sums of all elements of these boxes."""


class Upload:
    """A buffer of the host (pinned for CUDA) with its twin on the device, of ``nbytes`` each, used again and again."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        self._there = self._here if device.type == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]

    def send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The elements of ``array``, 1-D, on the device as a carrier dtype; theirs until the next call."""
        if self._copied is not None:
            self._copied.synchronize()  # the device may still be reading what the host is about to overwrite
        n, dtype = array.nbytes, CARRIERS[array.dtype.itemsize]
        self._here.numpy()[:n].view(array.dtype)[...] = array
        if self._there is not self._here:
            self._there[:n].copy_(self._here[:n], non_blocking=self._cuda)
        if self._copied is not None:
            self._copied.record()
        return self._there[:n].view(dtype)

    def count_up(self, first: int, n: int) -> torch.Tensor:
        """The positions [first, first + n), made on the device."""
        out = self._there[: 8 * n].view(torch.int64)
        torch.arange(first, first + n, out=out)
        return out


def row_of(table: Table, index: int) -> Row:
    """One box of a table in plain integers."""
    canonical, storage, *rest = table[index].tolist()
    dims = tuple(zip(rest[0::3], rest[1::3], rest[2::3], strict=True))
    return canonical, storage, tuple(dim for dim in dims if dim[0] > 1)


def elements_of(table: Table) -> Table:
    """How many elements each box has."""
    numel: Table = np.prod(table[:, 2::3], axis=1, dtype=np.int64)
    return numel


def refuse_low_bits(low: int, place: Place) -> None:
    """``DigestMismatch`` if any of the low bits of shifted elements was set."""
    if low:
        raise low_bits(place.shift)


def low_bits(shift: int) -> DigestMismatch:
    """Live bits below the ``shift`` that no version has."""
    return DigestMismatch(
        "a weight kept in a wider dtype does not hold canonical bits",
        expected=f"{shift} zero bits below each element",
        found="other bits",
        next_step="Something else has written to the engine's weights; an anchor mends them.",
    )


class TorchScatter:
    """``Scatter`` with torch operations, box by box, ``chunk`` positions at most at a time."""

    def __init__(self, device: torch.device, chunk: int) -> None:
        self._chunk = chunk
        self._numbers = [torch.empty(chunk, dtype=torch.int64, device=device) for _ in range(10)]
        self._flags = [torch.empty(chunk, dtype=torch.bool, device=device) for _ in range(2)]
        self._sum = torch.empty((), dtype=torch.int64, device=device)
        self._total = torch.empty(5, dtype=torch.int64, device=device)

    def change(self, spots: Spots, place: Place, operation: int) -> int:
        values, hits = self._shifted(spots.values, place), 0
        for index in range(len(spots.rows)):
            _, offsets, new = self._hits(spots, index, values)
            hits += len(offsets)
            assert new is not None
            place.storage.scatter_(0, offsets, self._changed(self._live(place, offsets), new, operation))
        return hits

    def sums(self, spots: Spots, place: Place, key: int) -> Digest:
        self._total.zero_()
        for index in range(len(spots.rows)):
            positions, offsets, _ = self._hits(spots, index, None)
            self._add(0, positions, self._live(place, offsets), place, key)
        return self._totals(place)[0]

    def preview(self, spots: Spots, place: Place, key: int, operation: int) -> tuple[Digest, Digest]:
        self._total.zero_()
        values = self._shifted(spots.values, place)
        for index in range(len(spots.rows)):
            positions, offsets, new = self._hits(spots, index, values)
            live = self._live(place, offsets)
            self._add(0, positions, live, place, key)
            assert new is not None
            self._add(2, positions, self._changed(live, new, operation), place, key)
        return self._totals(place)

    def digest(self, rows: Table, place: Place, key: int) -> Digest:
        self._total.zero_()
        for index, numel in enumerate(elements_of(rows).tolist()):
            for start in range(0, numel, self._chunk):
                stop = min(start + self._chunk, numel)
                positions, offsets = self.enumerated(row_of(rows, index), start, stop)
                self._add(0, positions, self._live(place, offsets), place, key)
        return self._totals(place)[0]

    def located(self, positions: torch.Tensor, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """(storage offsets, which are right where the position is an element of the box; whether it is). Positions lie
        between the box's first and last one. Both stay until the next call."""
        canonical, storage, dims = row
        n = len(positions)
        offsets, rest, digit = (buffer[:n] for buffer in self._numbers[:3])
        hits, good = (flags[:n] for flags in self._flags)
        offsets.fill_(storage)
        torch.sub(positions, canonical, out=rest)
        hits.fill_(True)
        for size, stride, step in dims:
            torch.floor_divide(rest, stride, out=digit)
            hits.logical_and_(torch.lt(digit, size, out=good))
            offsets.add_(digit, alpha=step)
            rest.sub_(digit, alpha=stride)
        hits.logical_and_(torch.eq(rest, 0, out=good))
        return offsets, hits

    def enumerated(self, row: Row, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(canonical positions, storage offsets) of elements [start, stop) of a box, row by row."""
        canonical, storage, dims = row
        n = stop - start
        offsets, left, digit, quotient, positions = (buffer[:n] for buffer in self._numbers[:5])
        offsets.fill_(storage)
        positions.fill_(canonical)
        torch.arange(start, stop, out=left)
        for size, stride, step in reversed(dims):
            torch.floor_divide(left, size, out=quotient)
            torch.sub(left, quotient, alpha=size, out=digit)
            positions.add_(digit, alpha=stride)
            offsets.add_(digit, alpha=step)
            left, quotient = quotient, left
        return positions, offsets

    def _hits(
        self, spots: Spots, index: int, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(positions, offsets, values) of those that lie in one box, close together."""
        part = slice(int(spots.begin[index]), int(spots.end[index]))
        positions, mine = spots.positions[part], None if values is None else values[part]
        offsets, hits = self.located(positions, row_of(spots.rows, index))
        goals = self._numbers[1][: len(hits)].copy_(hits).cumsum_(0)
        found = int(goals[-1])
        if found == len(hits):
            return positions, offsets, mine
        n = len(hits)  # what is not in the box goes to the last element, where no hit goes then
        goals.sub_(1).masked_fill_(hits.logical_not_(), n - 1)
        positions = self._numbers[3][:n].scatter_(0, goals, positions)[:found]
        offsets = self._numbers[4][:n].scatter_(0, goals, offsets)[:found]
        if mine is not None:
            mine = self._numbers[5].view(mine.dtype)[:n].scatter_(0, goals, mine)[:found]
        return positions, offsets, mine

    def _shifted(self, values: torch.Tensor | None, place: Place) -> torch.Tensor:
        """Values as the storage holds them."""
        assert values is not None
        if not place.shift:
            return values
        wide = self._numbers[6].view(place.storage.dtype)[: len(values)]
        return wide.copy_(values).bitwise_left_shift_(place.shift)

    def _live(self, place: Place, offsets: torch.Tensor) -> torch.Tensor:
        out = self._numbers[7].view(place.storage.dtype)[: len(offsets)]
        return torch.gather(place.storage, 0, offsets, out=out)

    def _changed(self, live: torch.Tensor, values: torch.Tensor, operation: int) -> torch.Tensor:
        """What takes the place of ``live``, which is used up."""
        if operation == XOR:
            return live.bitwise_xor_(values)
        if operation == ADD:
            return live.add_(values)
        assert operation == SET
        return values

    def _add(self, lane: int, positions: torch.Tensor, stored: torch.Tensor, place: Place, key: int) -> None:
        """Add these elements to lanes ``lane`` and ``lane + 1``, and their low bits to the last total."""
        n = len(stored)
        mixed, other = self._numbers[8][:n], self._numbers[9][:n]
        other.copy_(stored)
        if place.shift:
            self._count(4, torch.bitwise_and(other, place.low, out=mixed))
            other.bitwise_right_shift_(place.shift)
        other.bitwise_and_(place.mask)
        torch.mul(positions, GOLDEN, out=mixed).add_(signed(key + GOLDEN)).bitwise_xor_(other)
        mixed.bitwise_xor_(_shifted_right(mixed, 32, other)).mul_(MIX)
        mixed.bitwise_xor_(_shifted_right(mixed, 29, other))
        product, spare = other, self._numbers[2][:n]
        for number, factor in enumerate((MIX0, MIX1)):
            torch.mul(mixed, factor, out=product)
            self._count(lane + number, product.bitwise_xor_(_shifted_right(product, 32, spare)))

    def _count(self, total: int, numbers: torch.Tensor) -> None:
        self._total[total].add_(torch.sum(numbers, 0, out=self._sum))

    def _totals(self, place: Place) -> tuple[Digest, Digest]:
        a0, a1, b0, b1, low = self._total.tolist()
        refuse_low_bits(low, place)
        return Digest(a0, a1), Digest(b0, b1)


def _shifted_right(numbers: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """A logical shift: signed integers shift their sign in, which the mask takes away."""
    return torch.bitwise_right_shift(numbers, bits, out=out).bitwise_and_((1 << 64 - bits) - 1)
