"""What tests of sources share: reading all pieces of a source, and putting them where they say they belong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from deltarefit.elements import Elements
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece
from deltarefit.ports import Source
from deltarefit.sources.dtypes import carried
from tests.ranks import positions

Read = tuple[Piece, Elements]


def read_pieces(source: Source, step: int | None = None) -> list[Read]:
    """All pieces under one hold, whole or ``step`` elements at a time."""
    with source.hold():
        return [(piece, _read(source, number, step or piece.length)) for number, piece in enumerate(source.pieces)]


def _read(source: Source, number: int, step: int) -> Elements:
    length = source.pieces[number].length
    found = []
    for start in range(0, length, step):
        with source.read(number, start, min(start + step, length)) as array:
            assert array.ndim == 1
            assert array.flags.c_contiguous
            assert array.dtype.kind == "u"
            found.append(array.copy())
    return np.concatenate(found)


def put_together(catalog: Catalog, read: Iterable[Read]) -> dict[str, Elements]:
    """Flat canonical tensors out of the pieces of all ranks; fails unless every element came exactly once."""
    tensors = [np.zeros(entry.numel, f"u{entry.width}") for entry in catalog.tensors]
    times = [np.zeros(entry.numel, "u1") for entry in catalog.tensors]
    for piece, array in read:
        places = positions(piece)
        assert array.dtype == tensors[piece.tensor].dtype
        assert (np.diff(places) > 0).all()
        tensors[piece.tensor][places] = array
        times[piece.tensor][places] += 1
    for entry, count in zip(catalog.tensors, times, strict=True):
        assert (count == 1).all(), f"{entry.name}: elements came {sorted(set(count.tolist()))} times"
    return {entry.name: tensor for entry, tensor in zip(catalog.tensors, tensors, strict=True)}


def bits_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Elements]:
    """Flat unsigned integers of dense tensors."""
    return {name: flat_bits(tensor) for name, tensor in tensors.items()}


def flat_bits(tensor: torch.Tensor) -> Elements:
    carrier = carried(tensor.detach().contiguous().reshape(-1))
    return carrier.numpy().view(f"u{carrier.element_size()}").copy()


def assert_same(found: Mapping[str, Elements], expected: Mapping[str, Elements]) -> None:
    """Names and bits."""
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert np.array_equal(found[name], array), name
