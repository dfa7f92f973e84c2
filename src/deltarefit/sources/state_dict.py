"""Anything that has named tensors as a source: a model, its state dict, or shards of one that the caller describes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from deltarefit.errors import BaseMismatch, UsageError
from deltarefit.ports import Exchange
from deltarefit.sources.arguments import Files, listed
from deltarefit.sources.building import Dtypes, Holding, canonical_dtypes, catalog_of, parts_of, unconverted
from deltarefit.sources.modules import slots, unwrapped
from deltarefit.sources.placements import Place
from deltarefit.sources.process_group import default_exchange
from deltarefit.sources.residual import Residual
from deltarefit.sources.tensors import TensorSource
from deltarefit.sources.tracing import Conversion, Output, trace

Named = Mapping[str, torch.Tensor]
Placements = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""By name: (global shape, where this rank's part begins in it), both in elements, one number for each dimension."""


class StateDictSource(TensorSource):
    """``ports.Source`` over named tensors: a mapping, a function that gives one (asked once for each hold), or a
    module, whose parameters and persistent buffers it takes.

    ``exchange``: the ranks that publish together; None: all of ``torch.distributed``, or this process alone where it is
    not initialised and the launcher did not say that there are more. On several ranks, a tensor with an entry in
    ``placements`` is this rank's own part of a larger one: its name → (global shape, where this rank's part begins),
    so that ``{"w": ((1024, 64), (256, 0))}`` places rows 256 and on; how many is seen from the tensor. All others are
    replicated, and each is published by one of the ranks. Every rank names every tensor, with empty tensors where it
    has no part.

    ``conversion`` is a function of the caller's from (global) tensors by name to canonical tensors by name: renaming,
    splitting, joining, transposing, casting, merging. It is followed once on tensors without storage (``tracing``).
    What it only copies and casts stays shard-local; everything else is residual: rank 0 runs the conversion on the
    real tensors in each hold, which is refused where they are in parts.

    ``dtype`` casts floating tensors of two bytes and more, but not a module's buffers; or, as a mapping, those of its
    canonical names. ``tied`` gives other names of tensors: names that share their memory exactly are found without it,
    except where a rank's part is empty, and the first of them then counts. They become aliases, unless there is a
    conversion, which sees a tensor under its one name.
    """

    def __init__(
        self,
        tensors: Named | Callable[[], Named] | torch.nn.Module,
        *,
        conversion: Conversion | None = None,
        dtype: Dtypes = None,
        tied: Mapping[str, str] | None = None,
        placements: Placements | None = None,
        files: Files = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._given, exchange = _Given(tensors), exchange or default_exchange()
        ties = _ties(self._given.now, tied or {})
        main = sorted(set(self._given.now) - set(ties))
        holdings = [self._given.holding(name, (placements or {}).get(name), exchange) for name in main]
        outputs = trace(conversion, {h.name: h.kind for h in holdings}) if conversion else unconverted(holdings)
        dtypes = canonical_dtypes(outputs, dtype, self._given.buffers)
        super().__init__(
            parts_of(holdings, outputs, dtypes),
            catalog_of(outputs, dtypes, {} if conversion else _aliases(ties)),
            exchange,
            files=files,
            residuals=_residuals(conversion, outputs, dtypes, holdings, self._given, exchange.rank),
        )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """As ``TensorSource.hold``; the tensors are asked for anew first."""
        self._given.refresh()
        with super().hold():
            yield


def named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a model by state-dict name, wrappers' prefixes off, tied tensors under
    their first name only."""
    return {slot.names[0]: slot.tensor() for slot in slots(unwrapped(model))}


class _Given:
    """The caller's tensors as they were when last asked for."""

    def __init__(self, tensors: Named | Callable[[], Named] | torch.nn.Module) -> None:
        self._ask = _asking(tensors)
        self.buffers = _buffers(tensors) if isinstance(tensors, torch.nn.Module) else frozenset()
        self.refresh()

    def refresh(self) -> None:
        """Ask again. ``BaseMismatch`` names what is there no more."""
        known = set(getattr(self, "now", {}))
        self.now = dict(self._ask())
        if missing := sorted(known - set(self.now)):
            raise BaseMismatch("tensors are gone", found=listed(missing, ", "), next_step="Make a new source.")

    def holding(self, name: str, placed: tuple[Sequence[int], Sequence[int]] | None, exchange: Exchange) -> Holding:
        """One tensor: a part of the caller's placing, or whole on every rank."""
        tensor = self.now[name]
        if isinstance(tensor, DTensor):
            raise UsageError(f"{name} is a DTensor", next_step="Use FsdpSource, which knows where its parts lie.")
        shape = tuple(tensor.shape)
        if placed is not None:
            place = Place(tuple(placed[1]), shape)
            return Holding(name, partial(self._tensor, name), tuple(placed[0]), tensor.dtype, place)
        everywhere = Place((0,) * len(shape), shape, tuple(range(exchange.size)), exchange.rank)
        return Holding(name, partial(self._tensor, name), shape, tensor.dtype, everywhere)

    def _tensor(self, name: str) -> torch.Tensor:
        return self.now[name]


def _asking(tensors: Named | Callable[[], Named] | torch.nn.Module) -> Callable[[], Named]:
    if isinstance(tensors, torch.nn.Module):
        return partial(_all_names, unwrapped(tensors))
    return tensors if callable(tensors) else lambda: tensors


def _all_names(model: torch.nn.Module) -> Named:
    return {name: slot.tensor() for slot in slots(model) for name in slot.names}


def _buffers(model: torch.nn.Module) -> frozenset[str]:
    return frozenset(name for slot in slots(unwrapped(model)) if not slot.is_parameter for name in slot.names)


def _ties(tensors: Named, told: Mapping[str, str]) -> dict[str, str]:
    """Which names are other names of which tensor."""
    if wrong := [f"{name} to {main}" for name, main in told.items() if main not in tensors or main in told]:
        raise UsageError("tied to a tensor that is not there", found=listed(wrong))
    ties = dict(told)
    first: dict[Hashable, str] = {_memory(name, tensors[name]): name for name in told.values()}
    for name, tensor in sorted(tensors.items()):
        main = first.setdefault(_memory(name, tensor), name)
        if told.get(name, main) != main and tensor.numel():
            raise UsageError(f"{name} is not the same memory as {told[name]}", next_step="Tie them, or do not say so.")
        if main != name:
            ties[name] = main
    return ties


def _memory(name: str, tensor: torch.Tensor) -> Hashable:
    if isinstance(tensor, DTensor) or not tensor.numel() or tensor.is_meta or tensor.layout != torch.strided:
        return name
    return str(tensor.device), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _aliases(ties: Mapping[str, str]) -> dict[str, list[str]]:
    return {main: [name for name, other in ties.items() if other == main] for main in ties.values()}


def _residuals(
    conversion: Conversion | None,
    outputs: Mapping[str, Output],
    dtypes: Mapping[str, torch.dtype],
    holdings: Sequence[Holding],
    given: _Given,
    rank: int,
) -> list[Residual]:
    """What the conversion does not only copy, made by the conversion itself on rank 0."""
    opaque = {name: output.reason for name, output in outputs.items() if output.reason}
    if conversion is None or not opaque:
        return []
    if parts := [holding.name for holding in holdings if holding.place.sizes != holding.shape]:
        raise UsageError(
            "a conversion that computes values needs whole tensors",
            expected="copies and casts only",
            found=listed([f"{name} ({why})" for name, why in opaque.items()]) + f"; {parts[0]} is in parts",
        )

    def convert() -> Mapping[str, torch.Tensor]:
        if rank:
            return {}
        made = conversion({holding.name: holding.local() for holding in holdings})
        return {name: made[name].to(dtypes[name]) for name in opaque}

    return [Residual(tuple(sorted(opaque)), convert)]
