"""Slow truths about strided boxes: everything enumerated, element by element."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from deltarefit.affine import AffineMap, Box
from deltarefit.pieces import Piece

Positions = npt.NDArray[np.int64]


def places(box: Box) -> tuple[Positions, Positions]:
    """(local, canonical) positions of every element, row-major over the box's digits."""
    index = list(product(*(range(n) for n in box.sizes)))
    local = [box.local + sum(i * s for i, s in zip(at, box.local_strides, strict=True)) for at in index]
    canonical = [box.canonical + sum(i * s for i, s in zip(at, box.strides, strict=True)) for at in index]
    return np.array(local, np.int64), np.array(canonical, np.int64)


def both(box: Box) -> list[tuple[int, int]]:
    """``places`` as pairs."""
    local, canonical = places(box)
    return list(zip(local.tolist(), canonical.tolist(), strict=True))


def pairs(m: AffineMap) -> set[tuple[str, int, int]]:
    """(name, local, canonical) of every element of a map; each must be there once."""
    found = [(name, *pair) for name, box in m.boxes for pair in both(box)]
    assert len(set(found)) == len(found), "an element is mapped twice by two boxes"
    return set(found)


def painted(m: AffineMap, name: str, shape: tuple[int, ...]) -> Positions:
    """What ``derive`` was given: canonical-shaped local positions, -1 for none."""
    out = np.full(int(np.prod(shape)), -1, np.int64)
    for box in m.of(name):
        local, canonical = places(box)
        assert (out[canonical] == -1).all(), "boxes overlap"
        out[canonical] = local
    return out.reshape(shape)


def elements(piece: Piece) -> list[int]:
    return [piece.position(p) for p in range(piece.length)]


@st.composite
def boxes(draw: st.DrawFn, most: int = 4, odd: bool = True, signs: bool = True) -> Box:
    """Boxes whose positions are distinct on both sides, digits in any order on either, strides aligned or (``odd``)
    not, and (``signs``) falling."""
    sizes = draw(st.lists(st.integers(1, most), max_size=3))
    sides = []
    for _ in range(2):
        strides, reach = [0] * len(sizes), draw(st.sampled_from([1, 1, 1, 2, 3]))
        for digit in draw(st.permutations(range(len(sizes)))):
            strides[digit] = reach
            reach = reach * sizes[digit] * draw(st.sampled_from([1, 1, 1, 2])) + draw(st.sampled_from([0, 0, odd]))
        start = draw(st.integers(0, 24))
        if signs:
            for digit, size in enumerate(sizes):
                if draw(st.integers(0, 4)) == 0:
                    start, strides[digit] = start + (size - 1) * strides[digit], -strides[digit]
        sides.append((start, tuple(strides)))
    (local, local_strides), (canonical, strides) = sides
    return Box(tuple(sizes), local, local_strides, canonical, strides)


ROOM = 4096
"""More elements than any of ``boxes`` reaches."""
