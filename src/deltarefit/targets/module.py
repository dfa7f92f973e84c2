"""A live torch model in this process as a target: its own tensors are the canonical ones, written where
they lie.

Writes go through NumPy views of the parameters' memory. Autograd does not see them: version counters stay
as they are, so a backward pass over values that were saved before a refit gives gradients for the old bits.
Refit between steps, and drop what was derived from the weights (compiled constants, packed copies, caches)
in ``on_resume``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from deltarefit.baseline import MemorySpool
from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch, UsageError
from deltarefit.manifest import TORCH_NAMES, WIDTHS, Catalog, Header, TensorEntry
from deltarefit.targets.placing.storages import INTEGERS

DTYPES = {getattr(torch, name): ours for ours, name in TORCH_NAMES.items() if hasattr(torch, name)}
"""Catalog dtype by torch dtype, as far as this torch has it."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class _Slot:
    """Where a model keeps a tensor: the module that owns it, and its name there. Looked up anew at every
    use."""

    name: str
    owner: torch.nn.Module
    leaf: str

    def tensor(self) -> torch.Tensor | None:
        kept = self.owner._parameters.get(self.leaf)
        return self.owner._buffers.get(self.leaf) if kept is None else kept


@dataclass(frozen=True)
class _Held:
    """One canonical tensor of a model: its tied slots (first name first), and the memory they all had."""

    slots: tuple[_Slot, ...]
    memory: Hashable
    dtype: str
    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)


def catalog_of(model: torch.nn.Module) -> Catalog:
    """The model's own catalog: parameters and persistent buffers by state-dict name, tied ones once.

    Tied tensors (same memory, shape, strides and dtype) stand under the first of their names, the others
    are aliases. Non-persistent buffers are left out, as in ``state_dict``. Raises ``UsageError`` that names
    every tensor that cannot be written in place.
    """
    return _catalog(_held(model))


def _catalog(held: Sequence[_Held]) -> Catalog:
    return Catalog(tuple(TensorEntry(h.names[0], h.dtype, h.shape, h.names[1:]) for h in held))


class ModuleTarget:
    """``ports.Target`` over a model on the CPU. Header and spool live in this process, as the weights do.

    ``catalog`` is the model's own until ``seed``, then the one seeded with, which decides under which of
    its tied names a tensor goes. Tensors must stay where they are: after ``model.to()``, ``param.data =
    ...`` or a replaced submodule, ``window`` and ``pause`` raise ``UsageError``. ``on_pause`` and
    ``on_resume`` stop and start whoever runs the model; both may be called twice. Tensors on other devices
    are refused for now.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        on_pause: Callable[[], None] | None = None,
        on_resume: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._on_pause, self._on_resume = on_pause, on_resume
        self._held = _held(model)
        self._own = {slot.name: held for held in self._held for slot in held.slots}
        self._catalog = _catalog(self._held)
        self._header: Header | None = None
        self._spool = MemorySpool()

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def spool(self) -> MemorySpool:
        return self._spool

    def read_header(self) -> Header | None:
        return self._header

    def write_header(self, header: Header) -> None:
        self._header = header

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        """Take ``catalog`` if it is this model's: ``BaseMismatch`` names every tensor that differs. Writes
        no bit; side files are not needed."""
        matched = [_matched(entry, self._own) for entry in catalog.tensors]
        wrong = [found for found in matched if isinstance(found, str)]
        held = [found for found in matched if isinstance(found, _Held)]
        wrong += _uncovered(catalog, held, self._own)
        if wrong:
            raise BaseMismatch(
                "the catalog is not that of this model",
                found="; ".join(wrong),
                next_step="Make the model from the checkpoint's own config, and pass it unwrapped.",
            )
        self._catalog, self._held = catalog, held

    def finish_seed(self) -> None:
        """Nothing to show: the model has held the bits all along."""

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        """The whole tensor as unsigned integers, without a copy, with its own shape and strides (0-dim: as
        1-dim); element ``start`` lies at row-major index ``start``."""
        entry, held = self._catalog.tensors[tensor], self._held[tensor]
        if not 0 <= start <= stop <= entry.numel:
            what, found = f"no range of {entry.name}", f"[{start}, {stop})"
            raise UsageError(what, expected=f"within [0, {entry.numel})", found=found)
        yield _integers(_still_there(held)), start

    def flush(self) -> None:
        """Memory is as durable as the header."""

    def pause(self) -> None:
        """Check that all tensors are where they were, then ``on_pause``."""
        now = {slot.name: _memory(slot, tensor) for slot, tensor in _tensors(self._model)}
        before = {name: held.memory for name, held in self._own.items()}
        if moved := sorted(name for name in {*now, *before} if now.get(name) != before.get(name)):
            raise _moved(", ".join(moved[:8]))
        if self._on_pause:
            self._on_pause()

    def resume(self) -> None:
        if self._on_resume:
            self._on_resume()


def _held(model: torch.nn.Module) -> list[_Held]:
    """All canonical tensors of a model by first name. ``UsageError`` names all that cannot be written in
    place."""
    tensors = sorted(_tensors(model), key=lambda item: item[0].name)
    _refuse(f"{slot.name} {why}" for slot, tensor in tensors for why in _objections(tensor))
    tied: dict[Hashable, list[tuple[_Slot, torch.Tensor]]] = {}
    for slot, tensor in tensors:
        tied.setdefault(_memory(slot, tensor), []).append((slot, tensor))
    held = []
    for memory, group in tied.items():
        tensor = group[0][1]
        held.append(_Held(tuple(slot for slot, _ in group), memory, DTYPES[tensor.dtype], tuple(tensor.shape)))
    _refuse(_overlaps(held))
    return held


def _tensors(model: torch.nn.Module) -> Iterator[tuple[_Slot, torch.Tensor]]:
    """Every parameter and persistent buffer under every one of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = (name for name in module._buffers if name not in module._non_persistent_buffers_set)
        for leaf in (*module._parameters, *persistent):
            slot = _Slot(f"{prefix}.{leaf}" if prefix else leaf, module, leaf)
            if (tensor := slot.tensor()) is not None:
                yield slot, tensor


def _objections(tensor: torch.Tensor) -> Iterator[str]:
    """At most one reason why a tensor cannot be written in place, with what to do."""
    if type(tensor) not in _PLAIN:
        yield f"is a {type(tensor).__name__}: pass a model with plain tensors"
    elif tensor.is_quantized or tensor.layout != torch.strided:
        yield "is quantized or not strided: dequantize it or make it dense"
    elif tensor.is_meta:
        yield "is on the meta device: load the weights first"
    elif tensor.device.type != "cpu":
        yield f"is on {tensor.device}: keep the model on the CPU for now, other devices come later"
    elif tensor.dtype not in DTYPES:
        yield f"has dtype {tensor.dtype}, which safetensors cannot hold: convert it"
    elif tensor.is_conj() or tensor.is_neg():
        yield "is a lazy conjugate or negative: resolve it (resolve_conj, resolve_neg)"
    elif not _disjoint(tensor):
        yield "is expanded: several elements share memory; call contiguous() on it"


def _disjoint(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, as far as sorted strides can tell (all layouts torch makes
    itself)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def _memory(slot: _Slot, tensor: torch.Tensor) -> Hashable:
    """Equal for tied tensors, and changed when one was moved or rebound. Empty tensors have no memory to
    tie."""
    if tensor.layout != torch.strided:
        return None
    place: object = tensor.data_ptr() if tensor.numel() else slot.name
    return (type(tensor) in _PLAIN, str(tensor.device), place, tensor.shape, tensor.stride(), tensor.dtype)


def _overlaps(held: Sequence[_Held]) -> list[str]:
    """Pairs that share some memory without being tied exactly."""
    spans = sorted((_span(h), h.names[0], h) for h in held if 0 not in h.shape)
    found: list[str] = []
    reach: list[tuple[int, _Held]] = []
    for (begin, end), _, one in spans:
        reach = [(stop, other) for stop, other in reach if stop > begin]
        found += [f"{one.names[0]} overlaps {o.names[0]}: clone one of them" for _, o in reach if _share(one, o)]
        reach.append((end, one))
    return found


def _span(held: _Held) -> tuple[int, int]:
    tensor = _still_there(held)
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()


def _share(one: _Held, other: _Held) -> bool:
    return np.shares_memory(_integers(_still_there(one)), _integers(_still_there(other)))


def _refuse(objections: Iterable[str]) -> None:
    if found := list(objections):
        raise UsageError("tensors that cannot be written in place", found="; ".join(found))


def _integers(tensor: torch.Tensor) -> Elements:
    width = WIDTHS[DTYPES[tensor.dtype]]
    view: Elements = tensor.detach().view(INTEGERS[width]).numpy().view(f"u{width}")
    return view.reshape(1) if view.ndim == 0 else view


def _still_there(held: _Held) -> torch.Tensor:
    """The tensor, if all its tied slots still hold the memory that was there. Raises ``UsageError``."""
    found = [(slot, slot.tensor()) for slot in held.slots]
    for slot, tensor in found:
        if tensor is None or _memory(held.slots[0], tensor) != held.memory:
            raise _moved(slot.name)
    return next(tensor for _, tensor in found if tensor is not None)


def _moved(what: str) -> UsageError:
    return UsageError(
        f"{what} moved or changed since the target was made",
        expected="the same memory, shape and dtype",
        next_step="Build a new ModuleTarget after model.to(), loading or tying; it starts without a version.",
    )


def _matched(entry: TensorEntry, own: Mapping[str, _Held]) -> _Held | str:
    """The model's tensor for a catalog entry, or what is wrong."""
    found = {own[name].memory: own[name] for name in (entry.name, *entry.aliases) if name in own}
    if not found:
        return f"{entry.name} is not in the model"
    if len(found) > 1:
        return f"{entry.name} is tied to {', '.join(entry.aliases)} in the catalog but not in the model"
    held = next(iter(found.values()))
    if (held.dtype, held.shape) != (entry.dtype, entry.shape):
        here, there = f"{held.dtype} {held.shape}", f"{entry.dtype} {entry.shape}"
        return f"{entry.name} is {here} in the model but {there} in the catalog"
    return held


def _uncovered(catalog: Catalog, held: Sequence[_Held], own: Mapping[str, _Held]) -> Iterator[str]:
    """Tensors of the model that a catalog gives bits twice, or never."""
    times = Counter(one.memory for one in held)
    for one in {one.memory: one for one in own.values()}.values():
        if times[one.memory] > 1:
            yield f"{', '.join(one.names)} are tied in the model but separate in the catalog"
        if not any(name in catalog.index for name in one.names):
            yield f"{one.names[0]} is not in the catalog"
