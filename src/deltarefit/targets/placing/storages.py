"""The memory of a live model: every storage once, as integers, whatever tensors share it.

A storage is what placement speaks of: tied tensors, views and fused parameters are all places in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from deltarefit.errors import UsageError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Storage:
    """One storage of a model. ``names`` are the tensors that lie in it, parameters and buffers by state-dict name,
    plain attributes too. ``loaded``: one of them is a parameter or a persistent buffer, which loaders fill."""

    pointer: int
    names: tuple[str, ...]
    tensor: torch.Tensor
    """One of the tensors; keeps the storage alive."""
    dtypes: frozenset[torch.dtype]
    loaded: bool

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
        whole = torch.empty(0, dtype=_INTEGERS[size], device=self.tensor.device)
        return whole.set_(storage, 0, (storage.nbytes() // size,), (1,))


@dataclass(frozen=True)
class Found:
    """A tensor of a model and what it is there."""

    name: str
    tensor: torch.Tensor
    kind: str
    """parameter, buffer (persistent), scratch (a buffer that is no part of checkpoints) or attribute."""


def tensors_of(model: torch.nn.Module) -> Iterator[Found]:
    """Every tensor that a model keeps, under every one of its names; plain attributes of modules too, one level of
    lists and dicts deep. ``UsageError`` if a parameter has no memory yet."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for leaf, tensor in module._parameters.items():
            if is_lazy(tensor):
                raise UsageError(
                    f"parameter {dot + leaf} has no memory yet", next_step="Load the engine's weights first."
                )
            if tensor is not None:
                yield Found(dot + leaf, tensor, "parameter")
        for leaf, tensor in module._buffers.items():
            if tensor is not None:
                kind = "scratch" if leaf in module._non_persistent_buffers_set else "buffer"
                yield Found(dot + leaf, tensor, kind)
        for leaf, value in vars(module).items():
            if not leaf.startswith(("_parameters", "_buffers", "_modules")):
                yield from (Found(dot + name, tensor, "attribute") for name, tensor in _held(leaf, value))


def _held(leaf: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield leaf, value
    elif isinstance(value, list | tuple):
        yield from ((f"{leaf}.{n}", one) for n, one in enumerate(value) if isinstance(one, torch.Tensor))
    elif isinstance(value, dict):
        yield from ((f"{leaf}.{key}", one) for key, one in value.items() if isinstance(one, torch.Tensor))


def storages_of(model: torch.nn.Module) -> list[Storage]:
    """Every storage of a model that has memory, once, by first name."""
    groups: dict[int, list[Found]] = {}
    for found in tensors_of(model):
        if found.tensor.layout == torch.strided and not found.tensor.is_meta and found.tensor.numel():
            groups.setdefault(found.tensor.untyped_storage().data_ptr(), []).append(found)
    return [_storage(pointer, group) for pointer, group in groups.items()]


def _storage(pointer: int, group: list[Found]) -> Storage:
    loaded = [found for found in group if found.kind in ("parameter", "buffer")]
    first = (loaded or group)[0]
    names = tuple(dict.fromkeys(found.name for found in group))
    return Storage(pointer, names, first.tensor, frozenset(f.tensor.dtype for f in loaded or group), bool(loaded))


def places_of(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
    """Where parameters and buffers lie, by name: changes when one is rebound, moved or reshaped."""
    return {
        found.name: (found.tensor.data_ptr(), tuple(found.tensor.shape), found.tensor.stride(), found.tensor.dtype)
        for found in tensors_of(model)
        if found.kind != "attribute" and found.tensor.layout == torch.strided and not found.tensor.is_meta
    }
