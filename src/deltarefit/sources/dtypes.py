"""Torch tensors as canonical elements: dtype names, and unsigned integer views."""

from __future__ import annotations

import torch

from deltarefit.elements import Elements
from deltarefit.manifest import TORCH_NAMES, WIDTHS

DTYPES = {getattr(torch, name): ours for ours, name in TORCH_NAMES.items() if hasattr(torch, name)}
"""Catalog dtype by torch dtype, as far as this torch has it."""
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype by width that carries elements through torch: every torch can copy and index these, and a copy of
them cannot touch a bit, whatever it does to floats."""


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width. The dtype must be one of ``DTYPES``."""
    return tensor.detach().view(CARRIERS[WIDTHS[DTYPES[tensor.dtype]]])


def elements(carrier: torch.Tensor) -> Elements:
    """A contiguous tensor of a carrier dtype on the CPU as unsigned elements, without a copy."""
    array: Elements = carrier.numpy().view(f"u{carrier.element_size()}")
    return array
