"""The tensors of a model by their state-dict names: parameters and persistent buffers, tied ones once, wrappers off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from deltarefit.errors import BaseMismatch

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where torch.compile and activation checkpointing keep the module that they wrap."""


@dataclass(frozen=True)
class Slot:
    """Where a model keeps a tensor, looked up anew at every use. ``names`` are those it goes by, more than one if it
    is tied, sorted."""

    names: tuple[str, ...]
    owner: torch.nn.Module
    leaf: str
    is_parameter: bool

    def tensor(self) -> torch.Tensor:
        """The parameter or buffer as it is now; ``BaseMismatch`` if there is none any more."""
        tensor = (self.owner._parameters if self.is_parameter else self.owner._buffers).get(self.leaf)
        if tensor is None:
            raise BaseMismatch(f"{self.names[0]} is gone from the model", next_step="Make a new source.")
        return tensor


def slots(model: torch.nn.Module) -> list[Slot]:
    """Every parameter and persistent buffer once, by first name. Tensors are tied if the model holds one object under
    several names."""
    found: dict[int, tuple[list[str], torch.nn.Module, str, bool]] = {}
    for name, owner, leaf, is_parameter, tensor in _every(model):
        found.setdefault(id(tensor), ([], owner, leaf, is_parameter))[0].append(name)
    every = [Slot(tuple(sorted(names)), owner, leaf, kind) for names, owner, leaf, kind in found.values()]
    return sorted(every, key=lambda slot: slot.names)


def _every(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, bool, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        hidden = module._non_persistent_buffers_set
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and leaf not in hidden:
                name = f"{prefix}.{leaf}" if prefix else leaf
                yield name, module, leaf, leaf in module._parameters, tensor


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model as it was before DistributedDataParallel, torch.compile, activation checkpointing and ``fully_shard``:
    their prefixes are gone from its names and their classes from its modules.

    It is a view: its modules share their parameter and buffer tables with the model's own, and are not called. Who
    replaces a module of the model later makes a new view.
    """
    return _view(model, {})


def _view(module: torch.nn.Module, seen: dict[int, torch.nn.Module]) -> torch.nn.Module:
    if id(module) in seen:
        return seen[id(module)]
    if (inner := _inside(module)) is not None:
        return _view(inner, seen)
    view = object.__new__(_original_class(module))
    seen[id(module)] = view
    view.__dict__.update(module.__dict__)
    view.__dict__["_modules"] = {
        name: None if child is None else _view(child, seen) for name, child in module._modules.items()
    }
    return view


def _inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that this one wraps."""
    if isinstance(module, DistributedDataParallel):
        inner: torch.nn.Module = module.module
        return inner
    return next((module._modules[name] for name in _WRAPPERS if name in module._modules), None)


def _original_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """``fully_shard`` gives a module a class made on the fly, whose first other base that is a module is its own."""
    if not isinstance(module, FSDPModule):
        return type(module)
    return next(base for base in type(module).__mro__[1:] if issubclass(base, torch.nn.Module))
