"""What vLLM's post-load steps did to weights, found out by running them once more on index planes.

Some expert back ends keep the checkpoint's shape but permute elements in place (CPU prepacking, FlashInfer's TRT-LLM
and CUTLASS kernels): a write through the loader's own coordinates would land on the wrong elements, silently. Here each
step is run on stand-in tensors whose bits count elements; what comes out says where each one went.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltarefit.affine import NotAffineError, fit
from deltarefit.targets.placing.plan import Layout
from deltarefit.targets.placing.storages import Storage

UNCHANGED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType")
"""Methods (``quant_method``) whose post-load step leaves storage as it is."""
EXPERTS = "UnquantizedFusedMoEMethod"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def expert_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Layers of experts whose method is the unquantized one."""
    for module in model.modules():
        if type(getattr(module, "quant_method", None)).__name__ == EXPERTS and "w13_weight" in module._parameters:
            yield module


def unknown_methods(model: torch.nn.Module) -> list[str]:
    """Layers whose post-load step is not known to leave their weights where the loader puts them."""
    known = {*UNCHANGED, EXPERTS}
    methods = ((name, type(getattr(module, "quant_method", None)).__name__) for name, module in model.named_modules())
    return [f"{name} ({method})" for name, method in methods if method not in known]


def layouts_of(model: torch.nn.Module, storages: Sequence[Storage]) -> Mapping[int, Layout]:
    """What became of each storage of experts, by number; storages that are as the loader left them are not in it."""
    numbers = {storage.pointer: number for number, storage in enumerate(storages)}
    known: dict[object, Layout | None] = {}
    layouts: dict[int, Layout] = {}
    for layer in expert_layers(model):
        for leaf, parameter in layer._parameters.items():
            if parameter is None or not leaf.startswith(("w13_", "w2_")):
                continue
            kind = (leaf, tuple(parameter.shape), parameter.dtype, _backend(layer))
            if kind not in known:
                known[kind] = _layout(layer, leaf)
            number = numbers.get(parameter.untyped_storage().data_ptr())
            if (layout := known[kind]) is not None and number is not None:
                layouts[number] = layout
    return layouts


def _backend(layer: torch.nn.Module) -> object:
    return getattr(_method(layer), "unquantized_backend", None), type(_experts(layer)).__name__


def _method(layer: torch.nn.Module) -> Any:
    return layer.quant_method


def _experts(layer: torch.nn.Module) -> Any:
    return getattr(getattr(_method(layer), "moe_kernel", None), "fused_experts", None)


def _layout(layer: torch.nn.Module, leaf: str) -> Layout | None:
    """Where the elements of one parameter went; None if they stayed."""
    try:
        positions = permutation(layer._parameters[leaf], lambda plane: _run(layer, leaf, plane))
    except (NotAffineError, RuntimeError, ValueError, AttributeError, AssertionError) as error:
        return f"its layout after loading cannot be found out: {error}"
    if np.array_equal(positions, np.arange(positions.size)):
        return None
    try:
        return fit(positions)
    except NotAffineError as error:
        return f"its layout after loading is no union of a few boxes: {error.what}"


def _run(layer: torch.nn.Module, leaf: str, plane: torch.Tensor) -> torch.Tensor:
    """The post-load steps of a layer on a stand-in that shares nothing but read-only settings with it."""
    stand_in = copy.copy(layer)
    stand_in._parameters = {
        name: None if p is None else torch.nn.Parameter(torch.zeros_like(p), requires_grad=False)
        for name, p in layer._parameters.items()
    }
    stand_in._parameters[leaf] = torch.nn.Parameter(plane, requires_grad=False)
    _convert(stand_in)
    experts = _experts(layer)
    if experts is not None:
        experts.process_weights_after_loading(stand_in)
    return stand_in._parameters[leaf]  # type: ignore[return-value]


def _convert(layer: torch.nn.Module) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import convert_to_unquantized_kernel_format

    weights = {name: layer._parameters[name] for name in ("w13_weight", "w2_weight")}
    made = convert_to_unquantized_kernel_format(
        _method(layer).unquantized_backend, moe_config=layer.moe_config, layer=layer, **weights
    )
    for name, tensor in zip(weights, made, strict=True):
        layer._parameters[name] = torch.nn.Parameter(tensor.data, requires_grad=False)


def permutation(like: torch.Tensor | None, run: Callable[[torch.Tensor], torch.Tensor]) -> npt.NDArray[np.int64]:
    """Which element of a tensor like ``like`` stands at each place of what ``run`` makes of it, shape (numel,).

    Positions are pushed through as bits, as many at a time as an element has. ``ValueError`` if what comes out are not
    all elements, each once.
    """
    if like is None:
        raise ValueError("no such parameter")
    bits, numel = 8 * like.element_size(), like.numel()
    found = np.zeros(numel, np.int64)
    for low in range(0, max(1, (numel - 1).bit_length()), bits):
        plane = torch.arange(numel, device=like.device) >> low & ((1 << bits) - 1)
        half = 1 << (bits - 1)
        signed = torch.where(plane >= half, plane - 2 * half, plane) if bits > 8 else plane
        typed = signed.to(_INTEGERS[bits // 8]).view(like.dtype).reshape(like.shape)
        made = run(typed)
        if made.numel() != numel or made.dtype != like.dtype or not made.is_contiguous():
            raise ValueError("the post-load step pads, casts or restrides the tensor")
        codes = made.detach().reshape(-1).view(_INTEGERS[bits // 8]).cpu().numpy().view(f"u{bits // 8}")
        found |= codes.astype(np.int64) << low
    if not np.array_equal(np.sort(found), np.arange(numel)):
        raise ValueError("the post-load step changes values, or repeats or drops elements")
    return found
