"""The memory of a live model: every storage once, as integers, whatever tensors share it.

A storage is what placement speaks of: tied tensors, views and fused parameters are all places in one.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from deltarefit.affine import Box
from deltarefit.errors import UsageError

MAX_VISITED = 100_000
"""Most objects that are searched for tensors besides modules."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by bytes of an element; signed where torch has no full support of the unsigned one."""
_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has: tables of tensors and modules, which are looked at as such, and hooks."""
_CLOSED: tuple[type, ...] = (
    str, bytes, bytearray, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, torch.Generator,
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType,
    types.FrameType, FakeTensor, *weakref.ProxyTypes,
)  # fmt: skip
_ELSEWHERE = frozenset(
    {"distributed", "_distributed_c10d", "compilation", "_dynamo", "_inductor", "_functorch", "fx", "threading"}
    | {"concurrent", "logging"}
)
"""Packages whose objects keep tensors in transit (messages, graphs that were captured), or lead to other models."""


@dataclass(frozen=True)
class Seen:
    """One region of a storage that tensors of a model show. ``box.canonical`` and strides count the storage's elements,
    as the region's flat positions run; ``names`` are those of the tensors."""

    names: tuple[str, ...]
    box: Box


@dataclass(frozen=True)
class Storage:
    """One storage of a model. ``names`` are the tensors that lie in it, parameters and buffers by state-dict name,
    plain attributes too, and ``seen`` is where. ``loaded``: one of them is a parameter or a persistent buffer, which
    loaders fill."""

    pointer: int
    names: tuple[str, ...]
    tensor: torch.Tensor
    """One of the tensors; keeps the storage alive."""
    dtypes: frozenset[torch.dtype]
    loaded: bool
    seen: tuple[Seen, ...]

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.tensor.element_size()

    @property
    def numel(self) -> int:
        """Elements of the whole storage."""
        return self.tensor.untyped_storage().nbytes() // self.width

    def integers(self, width: int = 0) -> torch.Tensor:
        """All of it as one row of integers of ``width`` bytes (0: its own), shape (numel,); shares the memory."""
        storage, size = self.tensor.untyped_storage(), width or self.width
        whole = torch.empty(0, dtype=INTEGERS[size], device=self.tensor.device)
        return whole.set_(storage, 0, (storage.nbytes() // size,), (1,))


@dataclass(frozen=True)
class Found:
    """A tensor of a model and what it is there."""

    name: str
    tensor: torch.Tensor
    kind: str
    """parameter, buffer (persistent), scratch (a buffer that is no part of checkpoints) or attribute."""


def tensors_of(model: torch.nn.Module) -> Iterator[Found]:
    """Every parameter and buffer of a model, under every one of its names. ``UsageError`` if a parameter has no memory
    yet."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        yield from _own(f"{prefix}." if prefix else "", module)


def _own(dot: str, module: torch.nn.Module) -> Iterator[Found]:
    for leaf, parameter in module._parameters.items():
        if parameter is None:
            continue
        if is_lazy(parameter):
            raise UsageError(f"parameter {dot + leaf} has no memory yet", next_step="Load the engine's weights first.")
        yield Found(dot + leaf, parameter, "parameter")
    for leaf, tensor in module._buffers.items():
        if tensor is not None:
            kind = "scratch" if leaf in module._non_persistent_buffers_set else "buffer"
            yield Found(dot + leaf, tensor, kind)


def attributes_of(model: torch.nn.Module) -> Iterator[Found]:
    """Every tensor that the modules of a model keep otherwise: as attributes, in containers and in objects of any
    kind, however deep, named by the way there. Modules that are hidden there are looked at as well. Nothing is called:
    properties, functions and what they close over stay closed. Ends after ``MAX_VISITED`` objects."""
    modules = list(model.named_modules(remove_duplicate=False))
    visited = {id(module) for _, module in modules}
    waiting: deque[tuple[str, Any]] = deque()
    for prefix, module in modules:
        waiting.extend(_attributes(f"{prefix}." if prefix else "", module))
    kept: list[object] = []  # ids are of objects that are alive
    while waiting and len(kept) < MAX_VISITED:
        name, value = waiting.popleft()
        if isinstance(value, torch.Tensor):
            yield Found(name, value, "attribute")
        elif id(value) not in visited:
            visited.add(id(value))
            kept.append(value)
            if isinstance(value, torch.nn.Module):
                yield from _own(f"{name}.", value)
            waiting.extend(_inside(f"{name}.", value))


@dataclass(frozen=True)
class _Kind:
    """Of a type: whether its objects may be tensors of the model, or lead to some, and the slots that they have."""

    opens: bool
    slots: tuple[tuple[str, types.MemberDescriptorType], ...] = ()


_kinds: dict[type, _Kind] = {}
"""What was found out about types: there are few of them, and many objects."""


def _kind(value: object) -> _Kind:
    kind = type(value)
    if kind not in _kinds:
        _kinds[kind] = _look(kind)
    return _kinds[kind]


def _look(kind: type) -> _Kind:
    away = not _ELSEWHERE.isdisjoint(str(kind.__module__).split("."))
    if issubclass(kind, _CLOSED) or (away and not issubclass(kind, torch.Tensor | torch.nn.Module)):
        return _Kind(False)
    slots = (one for base in kind.__mro__ if "__slots__" in vars(base) for one in vars(base).items())
    return _Kind(True, tuple((name, one) for name, one in slots if isinstance(one, types.MemberDescriptorType)))


def _attributes(dot: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for leaf, value in list(vars(module).items()):
        if leaf not in _OF_MODULES and _kind(value).opens:
            yield dot + leaf, value


def _inside(dot: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an object is bound to, without asking it."""
    if isinstance(value, torch.nn.Module):
        yield from _attributes(dot, value)
        yield from ((dot + leaf, one) for leaf, one in value._modules.items() if one is not None)
        return
    if isinstance(value, dict):
        yield from ((f"{dot}{key}", one) for key, one in list(dict.items(value)) if _kind(one).opens)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"{dot}{n}", one) for n, one in enumerate(list(value)) if _kind(one).opens)
    yield from ((dot + leaf, one) for leaf, one in _variables(value) if _kind(one).opens)


def _variables(value: Any) -> list[tuple[str, Any]]:
    try:
        found = list(object.__getattribute__(value, "__dict__").items())
    except Exception:  # noqa: BLE001 - whatever an object raises, it does not show its variables
        found = []
    return found + [(leaf, _slot(member, value)) for leaf, member in _kind(value).slots]


def _slot(member: types.MemberDescriptorType, value: object) -> object:
    try:
        return member.__get__(value)
    except AttributeError:  # not set
        return None


def storages_of(model: torch.nn.Module) -> list[Storage]:
    """Every storage of a model that has memory, once, by first name."""
    groups: dict[int, list[Found]] = {}
    for found in (*tensors_of(model), *attributes_of(model)):
        if found.tensor.layout == torch.strided and not found.tensor.is_meta and found.tensor.numel():
            groups.setdefault(found.tensor.untyped_storage().data_ptr(), []).append(found)
    return [_storage(pointer, group) for pointer, group in groups.items()]


def _storage(pointer: int, group: list[Found]) -> Storage:
    loaded = [found for found in group if found.kind in ("parameter", "buffer")]
    first = (loaded or group)[0].tensor
    names = tuple(dict.fromkeys(found.name for found in group))
    seen: dict[Box, dict[str, None]] = {}
    for found in group:
        seen.setdefault(box_in(found.tensor, first.element_size()), {})[found.name] = None
    regions = tuple(Seen(tuple(of), box) for box, of in seen.items())
    dtypes = frozenset(found.tensor.dtype for found in loaded or group)
    return Storage(pointer, names, first, dtypes, bool(loaded), regions)


def box_in(tensor: torch.Tensor, width: int) -> Box:
    """The elements of a tensor in its storage of elements of ``width`` bytes, row by row, once where it is expanded; if
    it sees them as others, all that lies between its first byte and its last."""
    dims = [(n, int(s)) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s]
    first, size = int(tensor.storage_offset()), tensor.element_size()
    if size != width:
        last = first + sum((n - 1) * s for n, s in dims)
        first, end = first * size // width, -(-(last + 1) * size // width)
        dims = [(end - first, 1)]
    sizes, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    return Box(sizes, 0, (0,) * len(dims), first, strides)


def places_of(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
    """Where parameters and buffers lie, by name: changes when one is rebound, moved or reshaped."""
    return {
        found.name: (found.tensor.data_ptr(), tuple(found.tensor.shape), found.tensor.stride(), found.tensor.dtype)
        for found in tensors_of(model)
        if found.tensor.layout == torch.strided and not found.tensor.is_meta
    }
