"""Affine maps: where the elements of one local tensor go, as strided boxes by canonical tensor name.

Maps are derived, not hand-written, wherever code already knows them: run the framework's own conversion on ``probe``
tensors whose values are their own positions, and ``derive`` the boxes from what comes out; every position is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from deltarefit.affine.boxes import Box, Dim, NotAffineError, ascends, box_of, flipped, glued, ordered
from deltarefit.affine.crossing import Meeting, Side, meet
from deltarefit.affine.fitting import fit, fit_pairs
from deltarefit.errors import UsageError

MAX_ENUMERATED = 1 << 24
"""Most elements of a box that ``compose`` looks at one by one where strides do not divide each other."""
MAX_PARTS = 1024
"""Most boxes that two such boxes may meet in."""


@dataclass(frozen=True)
class AffineMap:
    """Where the elements of one local tensor of ``shape`` go: boxes by canonical tensor name.

    Boxes of one name are disjoint on the canonical side; on the local side an element may go to several names
    (fan-out) or to none (padding).
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[str, Box], ...]

    @property
    def numel(self) -> int:
        """Elements of the local tensor, mapped or not."""
        return math.prod(self.shape)

    def of(self, name: str) -> tuple[Box, ...]:
        """The boxes that go to canonical tensor ``name``."""
        return tuple(box for other, box in self.boxes if other == name)

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, each once, in order of first use."""
        return tuple(dict.fromkeys(name for name, _ in self.boxes))


def probe(shape: Sequence[int], offset: int = 0) -> npt.NDArray[np.int64]:
    """An int64 tensor whose values are its own flat positions, plus ``offset``."""
    return np.arange(offset, offset + math.prod(shape), dtype=np.int64).reshape(tuple(shape))


def derive(shape: Sequence[int], outputs: Mapping[str, npt.NDArray[np.int64]]) -> AffineMap:
    """The map of a local tensor of ``shape`` whose ``probe`` a conversion has turned into ``outputs``: canonical-shaped
    arrays of local flat positions, -1 where an element comes from elsewhere.

    Raises ``NotAffineError`` naming the tensor if one is no union of a few boxes.
    """
    boxes: list[tuple[str, Box]] = []
    for name, positions in outputs.items():
        if positions.size and int(positions.max()) >= math.prod(shape):
            raise UsageError(
                f"{name}: a position is outside the local tensor",
                expected=f"< {math.prod(shape)}",
                found=positions.max(),
            )
        try:
            boxes += [(name, box) for box in fit(positions)]
        except NotAffineError as error:
            raise NotAffineError(f"{name}: {error.what}", next_step=error.next_step) from error
    return AffineMap(tuple(shape), tuple(boxes))


def shard(name: str, global_shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> AffineMap:
    """The map of a contiguous local tensor of ``sizes`` that is the block at ``starts`` of tensor ``name``."""
    for whole, start, size in zip(global_shape, starts, sizes, strict=True):
        if start < 0 or size < 0 or start + size > whole:
            raise UsageError(
                f"{name}: a shard reaches outside", expected=tuple(global_shape), found=(tuple(starts), tuple(sizes))
            )
    if not math.prod(sizes):
        return AffineMap(tuple(sizes), ())
    strides = _row_major(global_shape)
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return AffineMap(tuple(sizes), ((name, ordered(Box(tuple(sizes), 0, _row_major(sizes), first, strides))),))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def invert(m: AffineMap, name: str, shape: Sequence[int]) -> AffineMap:
    """The map of canonical tensor ``name`` of ``shape`` back to the local tensor; its boxes go by ``name`` too.

    Raises ``NotAffineError`` where a local element goes to several places of the tensor: there is no one way back.
    """
    boxes = m.of(name)
    sides = [side for box in boxes for side, copies in _sides(box) if not copies]
    shared = (box for a, b in combinations(sides, 2) for box in meet(a, b, _enumerated))
    if len(sides) < len(boxes) or next(shared, None) is not None:
        raise NotAffineError(f"{name}: a local element goes to several places", next_step="Map each place by a name.")
    return AffineMap(tuple(shape), tuple((name, flipped(box)) for box in boxes))


def restrict(m: AffineMap, start: int, stop: int) -> AffineMap:
    """Only what lies at local flat positions in [start, stop); positions stay those of the whole local tensor.

    A box of d digits becomes at most 2d - 1.
    """
    window = AffineMap((m.numel,), (("", Box((stop - start,), start, (1,), start, (1,))),) if stop > start else ())
    return AffineMap(m.shape, compose(window, {"": m}).boxes)


def compose(inner: AffineMap, outer: Mapping[str, AffineMap]) -> AffineMap:
    """``inner`` (local to tensors in memory) and then ``outer`` (each of those to canonical tensors), exactly.

    Works on digits. Where the strides of two boxes do not divide each other, the elements they share are enumerated if
    one has at most ``MAX_ENUMERATED``; otherwise ``NotAffineError``. ``UsageError`` names a tensor not in ``outer``.
    """
    boxes: list[tuple[str, Box]] = []
    for middle in inner.names:
        if middle not in outer:
            raise UsageError("a tensor has no map", expected=f"one of {sorted(outer)[:4]} ...", found=middle)
        for name in outer[middle].names:
            boxes += [(name, box) for box in _composed(inner.of(middle), outer[middle].of(name))]
    return AffineMap(inner.shape, tuple(boxes))


def _composed(inner: Iterable[Box], outer: Iterable[Box]) -> list[Box]:
    sides = [[part for box in boxes for part in _sides(box)] for boxes in (map(flipped, inner), outer)]
    found = []
    for a, _ in sides[0]:
        for b, copies in sides[1]:
            for digits, local, canonical in meet(a, b, _enumerated):
                found.append(ordered(box_of((*digits, *copies), local, canonical)))
    return glued(found)


def _sides(box: Box) -> Iterator[tuple[Side, tuple[Dim, ...]]]:
    """``box`` seen from its local side, in parts whose positions there ascend; and the digits that stay in place
    there: copies of the same local elements."""
    local, canonical, dims = box.local, box.canonical, []
    for n, step, stride in box.dims:
        if step < 0:
            local, canonical = local + (n - 1) * step, canonical + (n - 1) * stride
            step, stride = -step, -stride
        dims.append((n, step, stride))
    copies = tuple(dim for dim in dims if dim[0] > 1 and dim[1] == 0)
    digits = tuple(sorted((dim for dim in dims if dim[0] > 1 and dim[1] > 0), key=lambda dim: -dim[1]))
    for part in _ascending(Side(local, canonical, digits)):
        yield part, copies


def _ascending(side: Side) -> Iterator[Side]:
    """``side`` cut along its shortest digits until positions ascend."""
    if ascends(tuple(n for n, _, _ in side.digits), tuple(s for _, s, _ in side.digits)):
        yield side
        return
    shortest = min(range(len(side.digits)), key=lambda k: side.digits[k][0])
    n, stride, own = side.digits[shortest]
    rest = side.digits[:shortest] + side.digits[shortest + 1 :]
    for index in range(n):
        yield from _ascending(Side(side.start + index * stride, side.own + index * own, rest))


def _enumerated(a: Side, b: Side) -> Iterator[Meeting]:
    """The elements that a and b share, found one by one."""
    small, large = (a, b) if a.numel <= b.numel else (b, a)
    if small.numel > MAX_ENUMERATED:
        raise NotAffineError(
            "two maps do not align and are too large to compare element by element",
            expected=f"one stride a multiple of the other, or <= {MAX_ENUMERATED} elements",
            found=f"strides {[s for _, s, _ in a.digits]} and {[s for _, s, _ in b.digits]}",
        )
    place, own = small.positions()
    other, known = large.looked_up(place)
    local, canonical = (own[known], other[known]) if small is a else (other[known], own[known])
    order = np.argsort(canonical)
    for box in fit_pairs(canonical[order], local[order], MAX_PARTS):
        yield box.dims, box.local, box.canonical
