"""Torch tensors as canonical elements: dtype names, and unsigned integer views."""

from __future__ import annotations

import torch

from deltarefit.elements import Elements
from deltarefit.manifest import WIDTHS

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2", "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16",
    "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip
DTYPES = {getattr(torch, name): ours for ours, name in _TORCH_NAMES.items() if hasattr(torch, name)}
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
