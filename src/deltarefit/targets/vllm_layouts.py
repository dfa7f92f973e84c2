"""Which of vLLM's layers keep weights as the loader leaves them, and what the post-load steps of the others do."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from deltarefit.targets.placing import permutations
from deltarefit.targets.placing.plan import Layout
from deltarefit.targets.placing.storages import Storage

UNCHANGED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType")
"""Methods (``quant_method``) whose post-load step leaves storage as it is."""
EXPERTS = "UnquantizedFusedMoEMethod"


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
    """What became of each storage of experts after loading (``placing.permutations``)."""
    return permutations.layouts_of(expert_layers(model), storages, _after_loading, _backend)


def _method(layer: torch.nn.Module) -> Any:
    return layer.quant_method


def _experts(layer: torch.nn.Module) -> Any:
    return getattr(getattr(_method(layer), "moe_kernel", None), "fused_experts", None)


def _backend(layer: torch.nn.Module) -> Hashable:
    return getattr(_method(layer), "unquantized_backend", None), type(_experts(layer)).__name__


def _after_loading(layer: torch.nn.Module, stand_in: torch.nn.Module) -> None:
    """The method itself would not do it again: it skips what it has set up."""
    _convert(stand_in)
    experts = _experts(layer)
    if experts is not None:
        experts.process_weights_after_loading(stand_in)


def _convert(layer: torch.nn.Module) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import convert_to_unquantized_kernel_format

    weights = {name: layer._parameters[name] for name in ("w13_weight", "w2_weight")}
    made = convert_to_unquantized_kernel_format(
        _method(layer).unquantized_backend, moe_config=layer.moe_config, layer=layer, **weights
    )
    for name, tensor in zip(weights, made, strict=True):
        layer._parameters[name] = torch.nn.Parameter(tensor.data, requires_grad=False)
