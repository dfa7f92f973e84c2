"""Strided boxes: one rule that carries local positions to canonical positions, and exact arithmetic on them.

All arithmetic is on digits (mixed radix): a box is never enumerated, so 2^40 elements cost no more than four. Positions
are Python integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from deltarefit.errors import UsageError

MAX_PIECES = 1 << 16
"""Most wire pieces that one box may be cut into."""

Span = tuple[int, int, int, int, int]
"""(offset, length, run, step, pitch) of a ``pieces.Piece``: ``Piece(tensor, *span)``."""
Dim = tuple[int, int, int]
"""(size, local stride, canonical stride) of one digit."""


class NotAffineError(UsageError):
    """Positions do not form a few strided boxes; the tensor needs the residual path or another map."""


@dataclass(frozen=True, slots=True)
class Box:
    """One strided rule: element (i0, i1, ...) with 0 <= ik < sizes[k] lies at ``local + Σ ik·local_strides[k]`` of the
    local tensor and at ``canonical + Σ ik·strides[k]`` of the canonical tensor.

    Both positions are row-major flat indices of the (logical) tensors, in elements.
    """

    sizes: tuple[int, ...]
    local: int
    local_strides: tuple[int, ...]
    canonical: int
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.local_strides) == len(self.strides):
            raise UsageError("a box has one local and one canonical stride for each size", found=self)
        if self.sizes and min(self.sizes) < 1:
            raise UsageError("a box has no elements", expected="sizes >= 1", found=self.sizes)

    @property
    def numel(self) -> int:
        """How many elements it carries."""
        return math.prod(self.sizes)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """(size, local stride, canonical stride) of each digit."""
        return tuple(zip(self.sizes, self.local_strides, self.strides, strict=True))


def box_of(dims: Iterable[Dim], local: int, canonical: int) -> Box:
    """The box of these digits, in their order."""
    listed = [(int(n), int(step), int(stride)) for n, step, stride in dims]
    sizes, local_strides, strides = (tuple(d[k] for d in listed) for k in range(3))
    return Box(sizes, int(local), local_strides, int(canonical), strides)


def ordered(box: Box) -> Box:
    """The same rule with canonical strides positive and descending, and with digits joined that continue each other
    on both sides. Digits of size 1 are left out."""
    local, canonical, dims = box.local, box.canonical, []
    for n, step, stride in box.dims:
        if stride < 0:
            local, canonical = local + (n - 1) * step, canonical + (n - 1) * stride
            step, stride = -step, -stride
        if n > 1:
            dims.append((n, step, stride))
    dims.sort(key=lambda d: (-d[2], -abs(d[1]), -d[0]))
    joined: list[Dim] = []
    for n, step, stride in dims:
        if joined and joined[-1][1:] == (n * step, n * stride):
            joined[-1] = (joined[-1][0] * n, step, stride)
        else:
            joined.append((n, step, stride))
    return box_of(joined, local, canonical)


def flipped(box: Box) -> Box:
    """The same rule read the other way: local and canonical side change places."""
    return Box(box.sizes, box.canonical, box.strides, box.local, box.local_strides)


def ascends(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Row-major enumeration of these digits gives strictly ascending positions."""
    reach = 0
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if n > 1 and stride <= reach:
            return False
        reach += (n - 1) * stride
    return True


def rows_of(box: Box) -> tuple[tuple[Span, Box], ...]:
    """The box as wire pieces (``pieces.Piece``) in ascending order, each with the box of just its elements.

    The row-major enumeration of that box, over all its digits, is the order of the piece; its digits may be more than
    two where the local strides need them. Two canonical levels fit in one piece (rows of elements with a step); a box
    of more is cut along its outermost digits. Raises ``NotAffineError`` if canonical positions do not ascend strictly
    or the box would be cut into more than ``MAX_PIECES``.
    """
    whole = ordered(box)
    if not ascends(whole.sizes, whole.strides):
        raise NotAffineError("the canonical positions of a box meet or overlap", found=box)
    outer, levels = _wire_levels(whole)
    count = math.prod(whole.sizes[:outer])
    if count > MAX_PIECES:
        raise NotAffineError("a box falls into too many wire pieces", expected=f"<= {MAX_PIECES}", found=count)
    inner = whole.dims[outer:]
    cuts = []
    for index in product(*(range(n) for n in whole.sizes[:outer])):
        local = whole.local + sum(i * s for i, s in zip(index, whole.local_strides, strict=False))
        canonical = whole.canonical + sum(i * s for i, s in zip(index, whole.strides, strict=False))
        part = box_of(inner, local, canonical)
        cuts.append(((canonical, part.numel, *_row(levels)), part))
    return tuple(cuts)


def _wire_levels(box: Box) -> tuple[int, list[tuple[int, int]]]:
    """How many digits must be cut away, and the (size, stride) levels, at most two, that the others form."""
    levels: list[tuple[int, int]] = []
    for outer in range(len(box.sizes), 0, -1):
        n, stride = box.sizes[outer - 1], box.strides[outer - 1]
        if levels and stride == levels[0][0] * levels[0][1]:
            levels[0] = (n * levels[0][0], levels[0][1])
        elif len(levels) < 2:
            levels.insert(0, (n, stride))
        else:
            return outer, levels
    return 0, levels


def _row(levels: list[tuple[int, int]]) -> tuple[int, int, int]:
    """(run, step, pitch). Elements at one distance other than 1 are rows of one, as the wire has it."""
    if not levels:
        return 1, 1, 0
    run, step = levels[-1]
    if len(levels) == 2:
        return run, step, levels[0][1]
    return (run, 1, 0) if step == 1 else (1, 1, step)


def glued(boxes: Iterable[Box]) -> list[Box]:
    """Boxes that continue each other along one digit made one; sorted by first canonical position.

    Of more than 128, only near neighbours are compared.
    """
    left = sorted(boxes, key=lambda box: box.canonical)
    reach = len(left) if len(left) <= 128 else 4
    while True:
        before, at = len(left), 0
        while at < len(left):
            for other in range(at + 1, min(len(left), at + 1 + reach)):
                if (one := _continued(left[at], left[other])) is not None:
                    left[at] = one
                    del left[other]
                    break
            else:
                at += 1
        if len(left) == before:
            return left


def _continued(a: Box, b: Box) -> Box | None:
    """One box for both, if b goes on where a ends along one digit, which either may lack."""
    longer = a if len(a.sizes) >= len(b.sizes) else b
    for k, (_, local_stride, stride) in enumerate(longer.dims):
        size_a, size_b = (_size_along(box, longer, k) for box in (a, b))
        if not size_a or not size_b:
            continue
        if (b.local - a.local, b.canonical - a.canonical) == (size_a * local_stride, size_a * stride):
            dims = (*longer.dims[:k], (size_a + size_b, local_stride, stride), *longer.dims[k + 1 :])
            return ordered(box_of(dims, a.local, a.canonical))
    return None


def _size_along(box: Box, like: Box, k: int) -> int:
    """Size of the box's digit ``k`` if it otherwise equals ``like``; 0 if it does not."""
    rest = like.dims[:k] + like.dims[k + 1 :]
    if box.dims == rest:
        return 1
    same = len(box.sizes) == len(like.sizes) and box.dims[:k] + box.dims[k + 1 :] == rest
    return box.sizes[k] if same and box.dims[k][1:] == like.dims[k][1:] else 0
