"""What maps say, element by element, to be compared with the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deltarefit.affine import AffineMap, check_coverage, rows_of
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import Piece
from tests.megatron_oracle import PADDING, Ids

Shapes = Mapping[str, tuple[int, ...]]


def positions(found: AffineMap, first: Mapping[str, int]) -> Ids:
    """What number each local element gets, by the boxes; padding where it goes nowhere."""
    numbers = np.full(found.numel, PADDING)
    for name, box in found.boxes:
        grid = np.indices(box.sizes).reshape(len(box.sizes), -1) if box.sizes else np.zeros((0, 1), int)
        local = box.local + np.array(box.local_strides, int) @ grid
        assert (numbers[local] == PADDING).all(), "an element goes to two places"
        numbers[local] = first[name] + box.canonical + np.array(box.strides, int) @ grid
    return numbers


def catalog_of(shapes: Shapes) -> Catalog:
    return Catalog(tuple(TensorEntry(name, "BF16", shape) for name, shape in sorted(shapes.items())))


def check_once(shapes: Shapes, by_rank: Sequence[Sequence[AffineMap]]) -> None:
    """The maps of all ranks cover every canonical element exactly once."""
    catalog = catalog_of(shapes)
    check_coverage(catalog, [[piece for part in parts for piece in _pieces(part, catalog)] for parts in by_rank])


def _pieces(part: AffineMap, catalog: Catalog) -> list[Piece]:
    return [Piece(catalog.index[name], *span) for name, box in part.boxes for span, _ in rows_of(box)]
