"""What parts of a miniature engine have in common: parameters of one rank, and a loader that takes them by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import nn

Weights = Iterable[tuple[str, torch.Tensor]]
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""Safetensors dtype and shape by checkpoint name."""
BF16 = torch.bfloat16


class Mini(nn.Module):
    """A part of an engine. ``kinds`` is its checkpoint; ``modes`` says how tensors reach it that do not go element for
    element; ``aliases`` are other names of tied tensors; ``scratch`` are tensors that no checkpoint fills."""

    kinds: ClassVar[Kinds]
    modes: ClassVar[Mapping[str, str]] = {}
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    scratch: ClassVar[tuple[str, ...]] = ()
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.build()

    def build(self) -> None:
        """Make the parameters of this rank."""
        raise NotImplementedError

    def room(self, name: str, *shape: int, dtype: torch.dtype = BF16) -> nn.Parameter:
        """A parameter that is full of rubbish, as fresh memory is."""
        parameter = nn.Parameter(rubbish(shape, dtype), requires_grad=False)
        self.register_parameter(name, parameter)
        return parameter

    def load_weights(self, weights: Weights) -> set[str]:
        taken = set()
        for name, tensor in weights:
            self.take(name, tensor)
            taken.add(name)
        return taken

    def take(self, name: str, w: torch.Tensor) -> None:
        """Load one tensor: as it is."""
        default(self.own(name), w)

    def own(self, name: str) -> torch.Tensor:
        """A parameter or buffer by its name."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}[name]

    def mine(self, w: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share of a dimension."""
        return w.narrow(dim, self.rank * (w.shape[dim] // self.size), w.shape[dim] // self.size)


def rubbish(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory before anything was loaded."""
    nbytes = math.prod(shape) * dtype.itemsize
    fill = 1 if dtype is torch.bool else 0xA5
    return torch.full((nbytes,), fill, dtype=torch.uint8).view(dtype).reshape(shape)


def default(param: torch.Tensor, w: torch.Tensor) -> None:
    """``default_weight_loader``."""
    if param.numel() == 1 and w.numel() == 1:
        param.data.copy_(w.view(param.shape))
    else:
        assert param.size() == w.size(), f"expected {param.size()}, found {w.size()}"
        param.data.copy_(w)
