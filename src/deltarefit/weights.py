"""Payload operations on a target: sum, preview, apply, set, digest; many deltas at once on a pool of threads.

What may be done when is the protocol's business; this room only does it. Nothing is written by ``sums``, ``preview``
and ``digest``. Kernel calls check their whole delta before their first write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np

from deltarefit import _kernel
from deltarefit.codec import Delta
from deltarefit.digest import array_digest, catalog_keys
from deltarefit.elements import Elements
from deltarefit.errors import IntegrityError
from deltarefit.manifest import Catalog
from deltarefit.pool import side_by_side
from deltarefit.ports import Target
from deltarefit.records import Digest

T = TypeVar("T")
SEGMENT_BYTES = 4 << 20
"""Canonical bytes handled at a time: bounds memory, and gives threads something to share."""

_Write = tuple[Delta, memoryview | None]
"""A delta to carry out, or the values to set its positions to."""
Segment = tuple[int, int, int]
"""(index, start, stop): elements [start, stop) of one tensor of a catalog, or of one piece of a source."""


def segments(catalog: Catalog) -> Iterator[Segment]:
    """(tensor, start, stop) pieces of at most ``SEGMENT_BYTES`` that cover the catalog in order, once."""
    return cut((entry.numel, entry.width) for entry in catalog.tensors)


def cut(extents: Iterable[tuple[int, int]]) -> Iterator[Segment]:
    """(index, start, stop) of at most ``SEGMENT_BYTES`` that cover arrays of (elements, width) in order, once."""
    for number, (numel, width) in enumerate(extents):
        step = SEGMENT_BYTES // width
        for start in range(0, numel, step):
            yield number, start, min(start + step, numel)


class Weights:
    """One target, seen as the canonical tensors of one run."""

    def __init__(self, target: Target, run: str, catalog: Catalog, pool: Executor) -> None:
        self.target = target
        self.catalog = catalog
        self._keys = catalog_keys(run, catalog)
        self._pool = pool

    def sums(self, deltas: Sequence[Delta]) -> Digest:
        """Digest sums of the live bits at all positions of ``deltas``."""
        return sum(self._each(self._sum, deltas), Digest())

    def preview(self, deltas: Sequence[Delta]) -> tuple[Digest, Digest, bytes]:
        """Sums now, sums as they will be after ``apply``, and the values as they will be, delta after delta."""
        parts = self._each(self._preview, deltas)
        pre = sum((p[0] for p in parts), Digest())
        post = sum((p[1] for p in parts), Digest())
        return pre, post, b"".join(p[2] for p in parts)

    def apply(self, deltas: Sequence[Delta]) -> None:
        """Carry out each delta's operation, once per position."""
        self._each(self._write, _apart([(delta, None) for delta in deltas]))

    def set(self, deltas: Sequence[Delta], values: bytes) -> None:
        """Set all positions to ``values`` as ``preview`` gave them: the absolute form of the same deltas."""
        expected = sum(delta.count * delta.width for delta in deltas)
        if len(values) != expected:
            raise IntegrityError("absolute values have the wrong length", expected=expected, found=len(values))
        ends = np.cumsum([delta.count * delta.width for delta in deltas]).tolist()
        view = memoryview(values)
        writes: list[_Write] = [(d, view[end - d.count * d.width : end]) for d, end in zip(deltas, ends, strict=True)]
        self._each(self._write, _apart(writes))

    def digest(self) -> Digest:
        """Digest of all live bits."""
        return sum(self._each(self._segment_digest, list(segments(self.catalog))), Digest())

    def _each(self, work: Callable[..., T], items: Sequence[object]) -> list[T]:
        return side_by_side(self._pool, work, items)

    def _sum(self, delta: Delta) -> Digest:
        with self.target.window(delta.tensor, delta.low, delta.high) as (array, first):
            return Digest(*_kernel.sums(delta.record, delta.slices, array, self._keys[delta.tensor], first))

    def _preview(self, delta: Delta) -> tuple[Digest, Digest, bytes]:
        with self.target.window(delta.tensor, delta.low, delta.high) as (array, first):
            key = self._keys[delta.tensor]
            pre, post, values = _kernel.preview(delta.record, delta.slices, array, key, first)
        return Digest(*pre), Digest(*post), values.tobytes()

    def _write(self, writes: Sequence[_Write]) -> None:
        for delta, values in writes:
            with self.target.window(delta.tensor, delta.low, delta.high) as (array, first):
                if values is None:
                    _kernel.apply(delta.record, delta.slices, array, first)
                else:
                    news = np.frombuffer(values, f"<u{delta.width}")
                    _kernel.apply_values(delta.record, delta.slices, array, news, first)

    def _segment_digest(self, segment: Segment) -> Digest:
        tensor, start, stop = segment
        with self.target.window(tensor, start, stop) as (array, first):
            return array_digest(flat(array, first, stop - start), start, self._keys[tensor])


def _apart(writes: Sequence[_Write]) -> list[list[_Write]]:
    """Groups whose windows share no element. Windows of interleaved pieces do, though no element is listed twice, and a
    target may give a copy that is written back whole: they go one after the other."""
    groups: list[list[_Write]] = []
    end = (-1, 0)
    for write in sorted(writes, key=lambda write: (write[0].tensor, write[0].low)):
        delta = write[0]
        if (delta.tensor, delta.low) < end:
            groups[-1].append(write)
        else:
            groups.append([write])
        end = max(end, (delta.tensor, delta.high))
    return groups


def flat(array: Elements, first: int, length: int) -> Elements:
    """Elements [first, first + length) in row-major order; a copy only where strides demand one."""
    if array.ndim == 1:
        return array[first : first + length]
    if array.flags.c_contiguous:
        return array.reshape(-1)[first : first + length]
    return np.asarray(array.flat[first : first + length])
