"""Deltas on weights of any torch device: positions and values travel, weights stay where they are.

Work and memory follow the size of the change. The host decodes a delta, drops what the storage does not hold and sends
the rest, ``chunk`` positions at a time, through buffers that are made once; the device finds the elements and reads or
changes them in place (``triton_scatter`` on CUDA, else ``scatter``). Of sums and digests only totals come back.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from deltarefit import _kernel
from deltarefit.codec import Delta
from deltarefit.errors import UsageError
from deltarefit.records import Digest
from deltarefit.targets.placing.scatter import CARRIERS, MAX_DIMS, Place, Scatter, Spots, Table, TorchScatter, Upload

MakeScatter = Callable[[torch.device, int], Scatter]


class DeviceBackend:
    """Operations of one delta on one storage; see ``scatter`` for tables of boxes.

    ``storage`` is the whole storage as a 1-D uint8, int16, int32 or int64 tensor, of the delta's width; with ``shift``
    16 it is int32 and holds two-byte elements in its upper halves. Calls come one at a time and are complete on
    return. It keeps about 100 bytes of device memory per position of ``chunk``, 16 with Triton.
    ``UsageError`` if a table, a storage and a delta do not fit, before anything is written.
    """

    def __init__(self, device: torch.device | str, *, chunk: int = 1 << 20, scatter: MakeScatter | None = None) -> None:
        if chunk < 1:
            raise UsageError("no positions at a time", expected="chunk >= 1", found=chunk)
        self.device = torch.empty(0, device=device).device  # "cuda" means the current one, from now on
        self._chunk = chunk
        self._positions, self._values = Upload(8 * chunk, self.device), Upload(8 * chunk, self.device)
        self._scatter = (scatter or scatter_for(self.device))(self.device, chunk)

    @torch.inference_mode()
    def apply(self, delta: Delta, boxes: Table, storage: torch.Tensor, shift: int) -> int:
        """Carry out the delta's operation on the elements that the storage holds; how many they are."""
        place = self._place(storage, shift, boxes, delta.width)
        with _current(storage):
            return sum(self._scatter.change(spots, place, delta.operation) for spots in self._spots(delta, boxes, True))

    @torch.inference_mode()
    def sums(self, delta: Delta, boxes: Table, storage: torch.Tensor, shift: int, key: int) -> Digest:
        """Digest sums of the live elements at the delta's positions, of those that the storage holds.
        ``DigestMismatch`` if shifted elements have low bits."""
        place = self._place(storage, shift, boxes, delta.width)
        with _current(storage):
            parts = (self._scatter.sums(spots, place, key) for spots in self._spots(delta, boxes, False))
            return sum(parts, Digest())

    @torch.inference_mode()
    def preview(self, delta: Delta, boxes: Table, storage: torch.Tensor, shift: int, key: int) -> tuple[Digest, Digest]:
        """(``sums`` now, ``sums`` as they will be after ``apply``), without writing."""
        place = self._place(storage, shift, boxes, delta.width)
        pre, post = Digest(), Digest()
        with _current(storage):
            for spots in self._spots(delta, boxes, True):
                now, then = self._scatter.preview(spots, place, key, delta.operation)
                pre, post = pre + now, post + then
        return pre, post

    @torch.inference_mode()
    def digest(self, boxes: Table, storage: torch.Tensor, shift: int, key: int) -> Digest:
        """Digest sums of all elements of the boxes. ``DigestMismatch`` if shifted elements have low bits."""
        place = self._place(storage, shift, boxes, 2 if shift else storage.element_size())
        with _current(storage):
            return self._scatter.digest(boxes, place, key) if len(boxes) else Digest()

    def _place(self, storage: torch.Tensor, shift: int, boxes: Table, width: int) -> Place:
        """``storage``, if it fits; a device that meets a bad index is lost to the engine for good."""
        found = (storage.dtype, storage.dim(), storage.is_contiguous(), storage.device, shift)
        stored = CARRIERS[4 if shift else width]
        if shift not in (0, 16) or (shift and width != 2) or found[:4] != (stored, 1, True, self.device):
            expected = f"a 1-D contiguous {stored} tensor on {self.device}, shift 0, or 16 for width 2"
            raise UsageError(f"a storage that elements of {width} bytes cannot be in", expected=expected, found=found)
        check_table(boxes, storage.numel())
        return Place(storage, width, shift)

    def _spots(self, delta: Delta, boxes: Table, valued: bool) -> Iterator[Spots]:
        """The delta's positions that may lie in a box, chunk by chunk, on the device."""
        if not len(boxes):
            return
        first, last = boxes[:, 0], last_of(boxes)
        if delta.high <= first.min() or delta.low > last.max():
            return
        decoded, values = _kernel.decode(delta.record, delta.slices)
        positions = decoded.view(np.int64)
        positions += delta.low
        start, stop = np.searchsorted(positions, (first.min(), last.max() + 1)).tolist()
        for at in range(start, stop, self._chunk):
            part = slice(at, min(at + self._chunk, stop))
            here = positions[part]
            begin, end = np.searchsorted(here, first), np.searchsorted(here, last, side="right")
            met = np.flatnonzero(begin < end)
            if len(met):
                sent = self._values.send(values[part]) if valued else None
                yield Spots(self._sent(here), sent, boxes[met], begin[met], end[met])

    def _sent(self, positions: Table) -> torch.Tensor:
        """Positions on the device; those that follow one another, as an anchor's do, need not travel."""
        first, n = int(positions[0]), len(positions)
        if positions[-1] - first == n - 1:
            return self._positions.count_up(first, n)
        return self._positions.send(positions)


def _current(storage: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the storage's device CUDA's current one, where streams, events and launches belong."""
    return torch.cuda.device(storage.device) if storage.is_cuda else nullcontext()


def scatter_for(device: torch.device) -> MakeScatter:
    """Triton kernels on CUDA where Triton is installed, else torch operations."""
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        from deltarefit.targets.placing.triton_scatter import TritonScatter

        return TritonScatter
    return TorchScatter


def last_of(boxes: Table) -> Table:
    """The last canonical position of each box."""
    last: Table = boxes[:, 0] + ((boxes[:, 2::3] - 1) * boxes[:, 3::3]).sum(axis=1)
    return last


def check_table(boxes: Table, numel: int) -> None:
    """``UsageError`` unless all boxes are in the form of ``scatter`` and within a storage of ``numel`` elements."""
    dims = (boxes.shape[1] - 2) // 3 if boxes.ndim == 2 else -1
    if boxes.dtype != np.int64 or not 0 <= dims <= MAX_DIMS or boxes.shape[1] != 2 + 3 * dims:
        expected, found = f"int64 (n, 2 + 3·D), D <= {MAX_DIMS}", (boxes.dtype, boxes.shape)
        raise UsageError("not a table of boxes", expected=expected, found=found)
    sizes, strides, steps = (boxes[:, 2 + k :: 3] for k in range(3))
    reach = (sizes - 1) * strides
    inner = reach[:, ::-1].cumsum(axis=1)[:, ::-1] - reach
    good = (sizes == 1) | (sizes > 1) & (strides > inner)
    far = (sizes - 1) * steps
    low, high = boxes[:, 1] + np.minimum(far, 0).sum(axis=1), boxes[:, 1] + np.maximum(far, 0).sum(axis=1)
    bad = ~good.all(axis=1) | (boxes[:, 0] < 0) | (low < 0) | (high >= numel)
    if bad.any():
        expected = f"canonical strides that nest, storage offsets within [0, {numel})"
        raise UsageError("a box that cannot be", expected=expected, found=boxes[bad][0].tolist())
