"""Inside SGLang's workers: a loader that loads nothing, but starts the agent of the rank whose model it is handed.

    python -m sglang.launch_server --model-path CKPT --custom-weight-loader deltarefit.targets.sglang.load

``sglang_control`` has it called once on every rank. Nothing of SGLang is patched. Whatever goes wrong here is written
down for the follower instead of being raised: an exception would end the server.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltarefit.localfiles import write_durably
from deltarefit.targets.agent import Agent, private_directory, run_directory
from deltarefit.targets.placing import permutations
from deltarefit.targets.placing.plan import Layout
from deltarefit.targets.placing.rank import RankWeights
from deltarefit.targets.placing.storages import Storage

EXPERTS = "UnquantizedFusedMoEMethod"
METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType", EXPERTS)
"""Methods (``quant_method``) whose post-load step is known: it leaves storage alone, or is asked what it does."""
_UNFILLED = re.compile(
    r"(^|\.)(cos_sin_cache|cos_cached|sin_cached|(original_)?inv_freq|(k|v)_scale(_float)?|w_kc|w_vc|w_scale(_k|_v)?|expert_map"
    r"|axis_map|expert_location|topk_indices|_indexer_scale)$"
)
"""Tensors that SGLang keeps and no checkpoint of unquantized weights fills: rotary tables, unit scales, maps; and
``w_kc``, ``w_vc``, which ``post_load_weights`` derives."""
_agents: dict[int, Agent] = {}
"""By rank; one in each worker process."""


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Start this rank's agent, unless it runs already, and write down where it listens, or why it cannot."""
    from sglang.srt.runtime_context import get_parallel, get_server_args

    arguments, parallel = get_server_args(), get_parallel()
    rank, size = place_of(arguments, parallel)
    told: dict[str, Any] = {"pid": os.getpid(), "rank": rank, "size": size, "objections": []}
    try:
        told["objections"] = objections(arguments, model)
        if rank not in _agents and not told["objections"]:
            _agents[rank] = _agent(model, arguments.model_path, rank, size)
        told["socket"] = _agents[rank].path if rank in _agents else ""
    except Exception as error:  # noqa: BLE001 - an exception here would end the server
        told["error"] = f"{type(error).__name__}: {error}"
    directory = private_directory(run_directory())
    write_durably(file_of(directory, int(arguments.port), rank), json.dumps(told).encode())


def file_of(directory: Path, port: int, rank: int) -> Path:
    """Where a rank of the server at ``port`` writes down what ``load`` came to."""
    return directory / f"sglang-{port}-{rank}.json"


def place_of(arguments: Any, parallel: Any) -> tuple[int, int]:
    """Rank and number of ranks: stages of a pipeline one after another, tensor-parallel ranks in each."""
    return int(parallel.pp_rank) * int(arguments.tp_size) + int(parallel.tp_rank), int(
        arguments.tp_size * arguments.pp_size
    )


def _agent(model: torch.nn.Module, checkpoint: str, rank: int, size: int) -> Agent:
    weights = RankWeights(
        model,
        partial(_load, model),
        layouts=partial(layouts_of, model),
        checkpoint=checkpoint,
        after=partial(_derive, model),
        unfilled=lambda name: bool(_UNFILLED.search(name)),
    )
    agent = Agent(weights, rank, size)
    agent.start()
    return agent


def _load(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    with torch.no_grad():
        return model.load_weights(weights)


def _derive(model: Any) -> None:
    """What SGLang computes from weights and keeps beside them, such as the halves of latent attention's ``kv_b_proj``,
    into the same memory as before."""
    if hasattr(model, "post_load_weights"):
        with torch.no_grad():
            model.post_load_weights()


# ------------------------------------------------------------------------------------------ what speaks against it


def objections(arguments: Any, model: torch.nn.Module) -> list[str]:
    """What speaks against refits of this engine as it was started, each with what to do."""

    def option(name: str) -> Any:
        return getattr(arguments, name, None)

    checks = (
        (option("quantization"), "it is quantized: serve the unquantized checkpoint"),
        (option("enable_lora") or option("lora_paths"), "LoRA adapters are enabled: start it without --enable-lora"),
        (option("enable_eplb"), "experts move between slots: start it without --enable-eplb"),
        (option("load_format") == "dummy", "it was started with dummy weights: give it a checkpoint"),
        (option("cpu_offload_gb"), "weights are offloaded: start it without --cpu-offload-gb"),
        (
            option("enable_memory_saver"),
            "its weights may be released while they are followed: start it without --enable-memory-saver",
        ),
        (
            option("weight_cache_mode") not in (None, "off"),
            "it shares its weights with other engines: start it with --weight-cache-mode off",
        ),
    )
    return [text for found, text in checks if found] + _unknown(model)


def _unknown(model: torch.nn.Module) -> list[str]:
    """Layers that keep weights in a form that no refit reaches."""
    found = []
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in METHODS:
            found.append(f"{name} ({method})")
        elif getattr(module, "use_intel_amx_backend", False):
            found.append(f"{name} (packed for AMX)")
    what = "layers are kept in a form that refits in place do not support yet, serve the unquantized checkpoint or"
    return [f"{what} follow --into: {', '.join(found[:4])}"] if found else []


# ------------------------------------------------------------------------------------------ experts


def layouts_of(model: torch.nn.Module, storages: Sequence[Storage]) -> Mapping[int, Layout]:
    """What became of each storage of experts after loading (``placing.permutations``)."""
    layers = (m for m in model.modules() if type(getattr(m, "quant_method", None)).__name__ == EXPERTS)
    return permutations.layouts_of(layers, storages, _after_loading, lambda layer: None)


def _after_loading(layer: torch.nn.Module, stand_in: torch.nn.Module) -> None:
    layer.quant_method.process_weights_after_loading(stand_in)  # type: ignore[union-attr, operator]
