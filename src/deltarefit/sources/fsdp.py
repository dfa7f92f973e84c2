"""A model sharded with FSDP2 (``fully_shard``) or by any DTensor placements, as a source: nothing is gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from deltarefit.errors import BaseMismatch, UsageError
from deltarefit.ports import Exchange
from deltarefit.sources.arguments import Files, listed
from deltarefit.sources.building import Dtypes, Holding, canonical_dtypes, catalog_of, parts_of
from deltarefit.sources.config_file import config_files
from deltarefit.sources.conversions import is_saved, reversal, saved, saved_name
from deltarefit.sources.modules import Slot, slots, unwrapped
from deltarefit.sources.placements import Place, place_of
from deltarefit.sources.process_group import default_exchange
from deltarefit.sources.replicas import Replicated
from deltarefit.sources.replicated import ReplicatedSource
from deltarefit.sources.residual import Residual
from deltarefit.sources.tracing import Conversion, Output


class FsdpSource(ReplicatedSource):
    """``ports.Source`` over a model whose parameters are DTensors, plain tensors, or both; made on every rank alike.

    Shards on any dimension, uneven and empty ones, replicated mesh dimensions (HSDP) and tensor parallelism beneath
    FSDP2 are understood; which rank owns what is computed on each rank alone (``placements``, ``ownership``). Plain
    tensors, and ranks that a parameter's mesh leaves out, are taken to be replicated. Wrappers of torch.compile,
    activation checkpointing and DistributedDataParallel are looked through.

    The canonical checkpoint is the one that the model's library would save: for transformers 5 with its names and
    layouts (``conversions="auto"``; None: as they are in memory; or a function from tensors to tensors by name, see
    ``tracing``). ``dtype`` is that of its floating parameters, so that float32 shards go as bfloat16, cast on the
    shard; buffers, integers and eight-bit floats keep theirs. None keeps all; a mapping sets some by canonical name.
    What a conversion does not merely copy must come from ``residuals`` under the same names.

    ``files`` are side files that receivers put beside the tensors, bytes by name, or a function that gives them. None:
    of a transformers model its ``config.json`` with the canonical dtype, so that a followed directory opens with
    ``from_pretrained``; tokenizer and generation settings are for the caller to add. ``{}`` leaves it out.

    With ``check_every`` n, every n-th hold begins with ``check_replicas``. ``ranks`` are the global ranks that publish
    together, in the order of ``exchange``: all by default.

    Raises ``UsageError`` that names what cannot be published: partial sums, unknown shardings, FSDP1, conversions that
    are more than copies, and everything that ``TensorSource`` refuses.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype: Dtypes = torch.bfloat16,
        files: Files = None,
        exchange: Exchange | None = None,
        conversions: str | Conversion | None = "auto",
        residuals: Sequence[Residual] = (),
        ranks: Sequence[int] | None = None,
        check_every: int = 0,
    ) -> None:
        self._model = model
        exchange = exchange or default_exchange()
        members = _members(exchange, ranks)
        _reshard(model)
        clean = unwrapped(model)
        held = [_held(clean, slot, members) for slot in _saved_slots(clean)]
        plan = _plan(clean, held, conversions, dtype, residuals)
        super().__init__(
            parts_of(plan.holdings, plan.outputs, plan.dtypes),
            catalog_of(plan.outputs, plan.dtypes, plan.aliases),
            exchange,
            replicated=_replicated(plan.holdings),
            check_every=check_every,
            files=config_files(clean, dtype) if files is None else files,
            residuals=residuals,
        )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """As ``ReplicatedSource.hold``. Parameters that a forward pass left gathered are resharded first."""
        _reshard(self._model)
        with super().hold():
            yield


@dataclass(frozen=True)
class _Held:
    slot: Slot
    holding: Holding


@dataclass(frozen=True)
class _Plan:
    holdings: list[Holding]
    outputs: Mapping[str, Output]
    dtypes: Mapping[str, torch.dtype]
    aliases: Mapping[str, tuple[str, ...]]


def _plan(
    model: torch.nn.Module,
    held: Sequence[_Held],
    conversions: str | Conversion | None,
    dtype: Dtypes,
    residuals: Sequence[Residual],
) -> _Plan:
    holdings = [one.holding for one in held]
    ties = {one.holding.name: _others(one) for one in held if len(one.slot.names) > 1}
    if callable(conversions):
        found = saved(conversions, holdings, {})
    else:
        found = saved(_automatic(model, conversions), holdings, ties)
    _refuse_opaque(found.outputs, residuals)
    keep = frozenset(one.holding.name for one in held if not one.slot.is_parameter)
    return _Plan(holdings, found.outputs, canonical_dtypes(found.outputs, dtype, keep), found.aliases)


def _others(one: _Held) -> tuple[str, ...]:
    return tuple(name for name in one.slot.names if name != one.holding.name)


def _automatic(model: torch.nn.Module, conversions: object) -> Conversion | None:
    if conversions not in ("auto", None):
        raise UsageError("unknown conversions", expected="'auto', None or a function", found=repr(conversions)[:80])
    return reversal(model) if conversions else None


def _refuse_opaque(outputs: Mapping[str, Output], residuals: Sequence[Residual]) -> None:
    covered = {name for residual in residuals for name in residual.names}
    wrong = [f"{name} ({found.reason})" for name, found in outputs.items() if found.reason and name not in covered]
    if wrong:
        raise UsageError(
            "tensors that the conversion does not merely copy",
            expected="copies and casts, or a residual for each",
            found=listed(wrong),
            next_step="Pass residuals=[Residual(names, convert, owner)] that makes them.",
        )


def _saved_slots(model: torch.nn.Module) -> list[Slot]:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UsageError(
            "the model is sharded with FSDP1, which flattens parameters",
            expected="torch.distributed.fsdp.fully_shard",
            found="FullyShardedDataParallel",
        )
    return [slot for slot in slots(model) if is_saved(model, saved_name(model, slot))]


def _held(model: torch.nn.Module, slot: Slot, ranks: Sequence[int]) -> _Held:
    tensor, name = slot.tensor(), saved_name(model, slot)
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        place = place_of(name, tensor, ranks)
    else:
        number = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        place = Place((0,) * len(shape), shape, tuple(range(len(ranks))), number)
    return _Held(slot, Holding(name, partial(_local, slot, _spread(tensor)), shape, tensor.dtype, place))


def _local(slot: Slot, spread: tuple[object, ...]) -> torch.Tensor:
    """This rank's part, if it is spread over the ranks as it was when the source was made."""
    tensor = slot.tensor()
    if (found := _spread(tensor)) != spread:
        raise BaseMismatch(
            f"{slot.names[0]} is sharded differently now",
            expected=_described(spread),
            found=_described(found),
            next_step="Make a new source and a new Publisher on every rank.",
        )
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread(tensor: torch.Tensor) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        return tuple(tensor.shape), tensor.placements, tensor.device_mesh
    return (tuple(tensor.shape),)


def _described(spread: tuple[object, ...]) -> str:
    """With words for what each is; a plain tensor has only a shape."""
    return ", ".join(f"{what} {one}" for what, one in zip(("shape", "placements", "mesh"), spread, strict=False))


def _replicated(holdings: Sequence[Holding]) -> list[Replicated]:
    return [Replicated(h.name, h.local, h.place.group) for h in holdings if len(h.place.group) > 1]


def _reshard(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _members(exchange: Exchange, ranks: Sequence[int] | None) -> list[int]:
    """The global rank of every rank of the exchange."""
    started = dist.is_available() and dist.is_initialized()
    members = list(ranks) if ranks is not None else list(range(dist.get_world_size() if started else 1))
    own = dist.get_rank() if started else 0
    if len(members) != exchange.size or own not in members or members.index(own) != exchange.rank:
        raise UsageError(
            "the exchange is not one of the ranks that publish",
            expected=f"rank {own} of {members}",
            found=f"rank {exchange.rank} of {exchange.size}",
            next_step="Pass ranks=, the global rank of each rank of the exchange, in its order.",
        )
    return members
