"""Which part of a DTensor a rank holds, and who holds the same: from mesh coordinates alone, no rank asks another.

Chunks follow ``torch.chunk``: of n elements over k ranks, rank i holds [i·c, (i+1)·c) with c = ceil(n / k), cut at n;
the last ranks may hold none. Where several mesh dimensions shard one tensor dimension they do so one after the other,
each what the one before left: from left to right, but a ``_StridedShard`` with split factor f comes after those
dimensions to its right that make f shards (FSDP2 over tensor parallelism: tensor parallelism first). torch's own
``compute_local_shape_and_global_offset`` gives other offsets where such a dimension does not divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from deltarefit.errors import UsageError


@dataclass(frozen=True)
class Place:
    """An interval of a global tensor in each dimension. All ranks of ``group`` (of the exchange) hold it, this one as
    number ``replica`` of them."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    group: tuple[int, ...] = (0,)
    replica: int = 0


@dataclass(frozen=True)
class Axis:
    """One mesh dimension as a tensor sees it: how many ranks, which of them is this one, what it does."""

    size: int
    coordinate: int
    placement: Placement


def place_of(name: str, tensor: DTensor, ranks: Sequence[int]) -> Place:
    """Where this rank's ``to_local()`` lies in the global tensor, and which of ``ranks`` (global ranks: all that
    publish together) hold the same.

    Ranks outside of the tensor's mesh are taken to hold it too, in meshes of the same form: FSDP2 leaves a parameter
    that tensor parallelism does not know on the data-parallel dimension alone. ``UsageError`` by name for partial sums,
    shardings whose order cannot be told, meshes whose copies do not fill ``ranks``, and local shapes that follow other
    rules.
    """
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinates is None:
        raise UsageError(f"{name}: this rank is not in the tensor's mesh", found=str(mesh))
    axes = [Axis(*axis) for axis in zip(tuple(mesh.shape), coordinates, tensor.placements, strict=True)]
    place = place_in(name, tuple(tensor.shape), axes)
    local: tuple[int, ...] = tuple(tensor.to_local().shape)
    if local != place.sizes and (0 not in local or 0 not in place.sizes):
        raise UsageError(
            f"{name} is sharded by rules that are not known here",
            expected=f"a local shape {place.sizes}",
            found=f"{local} of {tuple(tensor.shape)} under {tensor.placements}",
        )
    everywhere = (slice(None) if isinstance(axis.placement, Replicate) else axis.coordinate for axis in axes)
    holders = mesh.mesh[tuple(everywhere)].flatten().tolist()
    group = _with_copies(name, holders, mesh.mesh.flatten().tolist(), ranks)
    return replace(place, group=group, replica=group.index(list(ranks).index(mesh.get_rank())))


def place_in(name: str, shape: tuple[int, ...], axes: Sequence[Axis]) -> Place:
    """The interval by the rules above; no group yet."""
    starts, sizes = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        for axis in _order(name, [axis for axis in axes if _dim(name, axis.placement, len(shape)) == dim]):
            start, sizes[dim] = _chunk(sizes[dim], axis)
            starts[dim] += start
    return Place(tuple(starts), tuple(sizes))


def _dim(name: str, placement: Placement, dims: int) -> int | None:
    """The tensor dimension that a placement shards."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard | Shard):
        return int(placement.dim) % dims
    raise UsageError(f"{name} cannot be published", expected="Shard or Replicate", found=str(placement))


def _order(name: str, axes: Sequence[Axis]) -> list[Axis]:
    """The order in which mesh dimensions cut one tensor dimension."""
    order: list[Axis] = []
    for axis in reversed(axes):
        factor = int(axis.placement.split_factor) if isinstance(axis.placement, _StridedShard) else 1
        made = [math.prod(other.size for other in order[:count]) for count in range(len(order) + 1)]
        if factor not in made:
            found = f"split factor {factor} beside {[str(other.placement) for other in order]}"
            raise UsageError(
                f"{name} is sharded in an order that cannot be told", expected=f"one of {made}", found=found
            )
        order.insert(made.index(factor), axis)
    return order


def _chunk(size: int, axis: Axis) -> tuple[int, int]:
    """(start, length) of one chunk."""
    chunk = -(-size // axis.size)
    start = min(axis.coordinate * chunk, size)
    return start, min(chunk, size - start)


def _with_copies(name: str, holders: Sequence[int], mesh: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """``holders`` in a mesh, and in all copies of it: the shifts of it that fill ``ranks``, lowest first. As numbers in
    ``ranks``."""
    numbers = {rank: number for number, rank in enumerate(ranks)}
    if not all(rank in numbers for rank in mesh):
        raise UsageError(f"{name}: its mesh reaches beyond the ranks that publish", expected=list(ranks), found=mesh)
    own = sorted(numbers[rank] for rank in mesh)
    shifts = _shifts([number - own[0] for number in own], len(ranks))
    if shifts is None or own[0] not in shifts:
        found = f"{list(mesh)} of {len(ranks)} ranks"
        raise UsageError(f"{name}: copies of its mesh do not fill the ranks that publish", found=found)
    return tuple(numbers[rank] - own[0] + shift for shift in shifts for rank in holders)


def _shifts(pattern: Sequence[int], count: int) -> list[int] | None:
    """Where copies of ``pattern`` (from 0 on) must start to cover 0 .. count - 1 once; None if they cannot."""
    free, shifts = set(range(count)), []
    while free:
        shift = min(free)
        copy = {shift + number for number in pattern}
        if not copy <= free:
            return None
        free -= copy
        shifts.append(shift)
    return shifts
