"""From what a rank holds, and what a conversion does to it, to a catalog and parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from deltarefit import affine
from deltarefit.affine import AffineMap, Box
from deltarefit.errors import UsageError
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.sources.arguments import check_dtypes, listed
from deltarefit.sources.dtypes import DTYPES
from deltarefit.sources.local import Fetch
from deltarefit.sources.ownership import owned
from deltarefit.sources.placements import Place
from deltarefit.sources.tensors import Function, Part
from deltarefit.sources.tracing import Casts, Kind, Origin, Output

Dtypes = torch.dtype | Mapping[str, torch.dtype] | None
"""Which dtypes tensors have in canonical form: all floating ones one, some by canonical name, or what they have."""


@dataclass(frozen=True)
class Holding:
    """One tensor of a trainer: its global shape and dtype, and which part of it ``local`` gives here."""

    name: str
    local: Fetch
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place

    @property
    def kind(self) -> Kind:
        """What a conversion sees of it."""
        return self.shape, self.dtype


def unconverted(holdings: Sequence[Holding]) -> dict[str, Output]:
    """The outputs of no conversion: every tensor as it is, under its own name."""
    return {h.name: Output(h.shape, h.dtype, _identity(h.name, math.prod(h.shape))) for h in holdings}


def _identity(name: str, numel: int) -> tuple[Origin, ...]:
    return (Origin(name, (), (Box((numel,), 0, (1,), 0, (1,)),)),) if numel else ()


def canonical_dtypes(outputs: Mapping[str, Output], wanted: Dtypes, keep: frozenset[str]) -> dict[str, torch.dtype]:
    """The canonical dtype of every output.

    One dtype for all is for floating tensors of two bytes and more that come from no tensor in ``keep`` (buffers);
    a mapping is for the names in it. ``UsageError`` names those that it has and no output has, and what is no dtype.
    """
    check_dtypes(wanted)
    if isinstance(wanted, Mapping):
        if unknown := sorted(set(wanted) - set(outputs)):
            raise UsageError("dtypes are given for tensors that are not there", found=listed(unknown, ", "))
        return {name: wanted.get(name, output.dtype) for name, output in outputs.items()}
    return {name: _cast_to(output, wanted, keep) for name, output in outputs.items()}


def _cast_to(output: Output, wanted: torch.dtype | None, keep: frozenset[str]) -> torch.dtype:
    floating = output.dtype.is_floating_point and output.dtype.itemsize >= 2
    kept = any(origin.source in keep for origin in output.origins)
    return output.dtype if wanted is None or kept or not floating else wanted


def catalog_of(
    outputs: Mapping[str, Output], dtypes: Mapping[str, torch.dtype], aliases: Mapping[str, Sequence[str]]
) -> Catalog:
    """The canonical tensors. ``UsageError`` names those whose dtype safetensors does not have."""
    if wrong := [f"{name} has dtype {dtype}" for name, dtype in dtypes.items() if dtype not in DTYPES]:
        raise UsageError("tensors that cannot be published", found=listed(wrong))
    entries = (
        TensorEntry(name, DTYPES[dtypes[name]], output.shape, tuple(sorted(aliases.get(name, ()))))
        for name, output in outputs.items()
    )
    return Catalog(tuple(sorted(entries, key=lambda entry: entry.name)))


def parts_of(
    holdings: Sequence[Holding], outputs: Mapping[str, Output], dtypes: Mapping[str, torch.dtype]
) -> list[Part]:
    """What this rank owns of every output: its share of each local tensor, through shard and conversion."""
    routes = _routes(outputs, dtypes)
    return [part for holding in holdings for part in _parts(holding, routes.get(holding.name, {}))]


_Routes = dict[str, dict[Casts, list[tuple[str, Box]]]]


def _routes(outputs: Mapping[str, Output], dtypes: Mapping[str, torch.dtype]) -> _Routes:
    """By source, and by the casts on the way: where its elements go."""
    routes: _Routes = {}
    for name, output in outputs.items():
        for origin in output.origins:
            casts = origin.casts if dtypes[name] == output.dtype else (*origin.casts, dtypes[name])
            boxes = routes.setdefault(origin.source, {}).setdefault(casts, [])
            boxes += [(name, box) for box in origin.boxes]
    return routes


def _parts(holding: Holding, routes: Mapping[Casts, Sequence[tuple[str, Box]]]) -> Iterator[Part]:
    place = holding.place
    shard = affine.shard(holding.name, holding.shape, place.starts, place.sizes)
    mine = owned(shard, holding.name, holding.dtype.itemsize, place.replica, len(place.group))
    if not mine.boxes:
        return
    for casts, boxes in routes.items():
        onward = AffineMap(holding.shape, tuple(boxes))
        yield Part(holding.name, holding.local, affine.compose(mine, {holding.name: onward}), _cast(casts))


def _cast(casts: Casts) -> Function | None:
    return partial(_through, casts) if casts else None


def _through(casts: Casts, tensor: torch.Tensor) -> torch.Tensor:
    for dtype in casts:
        tensor = tensor.to(dtype)
    return tensor
