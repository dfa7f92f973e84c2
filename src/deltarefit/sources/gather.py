"""Any range of a strided box out of a flat local tensor, touching only what it needs; and buffers to put it in."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltarefit.affine.boxes import Box

KEPT_BUFFERS = 16
KEPT_BYTES = 16 << 20
"""Buffers above this size are not kept: who reads more than a segment at once does so seldom."""

_Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, sizes and strides, in elements of the local tensor."""


def contiguous(box: Box) -> bool:
    """Its elements lie one behind the other in the local tensor, in the order of the piece."""
    expected = 1
    for size, stride in zip(reversed(box.sizes), reversed(box.local_strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def gather(flat: torch.Tensor, box: Box, start: int, stop: int, out: torch.Tensor) -> None:
    """Copy elements [start, stop) of ``box``, in row-major order of its sizes, from the 1-D ``flat`` into the
    contiguous 1-D ``out`` of the same dtype and device."""
    done = 0
    for offset, sizes, strides in _ranges(box.sizes, box.local_strides, start, stop):
        count = math.prod(sizes)
        out[done : done + count].view(sizes).copy_(_view(flat, box.local + offset, sizes, strides))
        done += count


def _view(flat: torch.Tensor, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Torch has no negative strides: such dimensions are viewed from their lowest element and turned around."""
    turned = [dim for dim, stride in enumerate(strides) if stride < 0]
    lowest = offset + sum((sizes[dim] - 1) * strides[dim] for dim in turned)
    view = flat.as_strided(sizes, tuple(abs(stride) for stride in strides), flat.storage_offset() + lowest)
    return view.flip(turned) if turned else view


def _ranges(sizes: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int) -> Iterator[_Strided]:
    """A row-major range of a box as whole boxes: the end of a first row, whole rows, the start of a last row; so at
    most 2 * dimensions - 1 of them."""
    if start >= stop:
        return
    if not sizes:
        yield 0, (), ()
        return
    row = math.prod(sizes[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(first, sizes, strides, head, tail)
        return
    if head:
        yield from _in_row(first, sizes, strides, head, row)
        first += 1
    if first < last:
        yield first * strides[0], (last - first, *sizes[1:]), strides
    yield from _in_row(last, sizes, strides, 0, tail)


def _in_row(row: int, sizes: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int) -> Iterator[_Strided]:
    for offset, inner_sizes, inner_strides in _ranges(sizes[1:], strides[1:], start, stop):
        yield row * strides[0] + offset, inner_sizes, inner_strides


class Buffers:
    """Host memory that is used again and again by the threads that read; pinned where a device copies into it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    @contextmanager
    def take(self, count: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """A contiguous 1-D tensor of ``count`` elements; its content is undefined."""
        nbytes = count * dtype.itemsize
        buffer = self._pop(nbytes)
        try:
            yield buffer[:nbytes].view(dtype)
        finally:
            with self._lock:
                if buffer.numel() <= KEPT_BYTES and len(self._free) < KEPT_BUFFERS:
                    self._free.append(buffer)

    def _pop(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            fitting = [number for number, buffer in enumerate(self._free) if buffer.numel() >= nbytes]
            if fitting:
                return self._free.pop(fitting[0])
        return torch.empty(max(1 << 16, nbytes), dtype=torch.uint8, pin_memory=self._pinned)
