"""Inside vLLM's workers: an extension that gives a follower access to each rank's live weights.

    vllm serve CKPT --worker-extension-cls deltarefit.targets.vllm.RefitWorker

Nothing of vLLM is patched, but for one case: on machines without an accelerator its CPU back end packs linear weights
away where no refit reaches them, and is told not to when this module is imported, before weights are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from deltarefit.errors import UsageError
from deltarefit.targets.agent import Agent
from deltarefit.targets.engine import read_note
from deltarefit.targets.placing.rank import RankWeights
from deltarefit.targets.vllm_layouts import layouts_of, unknown_methods

_UNFILLED = re.compile(
    r"(^|\.)(cos_sin_cache|cos_cached|sin_cached|(original_)?inv_freq|axis_map|kv_cache(\.\d+)*|_?[qkv]_scale(_float)?|_?prob_scale"
    r"|_?o_scale|_[qkv]_scale_cpu|expert_map|_expert_map|expert_load_view|q_range|k_range|v_range|slot_mapping"
    r"|normalizer|_?workspace(_buf|_buffer)?|sort_workspace|topk_indices_buffer|_arange_cache|_cu_2(_[qk])?|_kv_scratch"
    r"|expert_first_token_offset|token_expert_indices|(inv_)?permuted_idx|permuted_experts_id|sorted_row_idx"
    r"|topk_ids_(int32|for_sort))$"
)
"""Tensors that vLLM keeps and no checkpoint of unquantized weights fills: rotary tables, caches, unit scales, maps,
Gemma's root of the hidden size; and what attention and experts use as room while they compute."""


def _keep_cpu_weights_plain() -> None:
    """vLLM's CPU back end replaces weights by packed copies (oneDNN, AMX); plain ones are as right, and stay live."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.model_executor.layers.utils as utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def plain(layer: Any, remove_weight: bool = False) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
    cpu_moe.X86CPUUnquantizedExperts._supports_current_device = staticmethod(lambda: False)


_keep_cpu_weights_plain()


class RefitWorker:
    """Mixed into each worker (``--worker-extension-cls``). Its methods are called through ``collective_rpc``."""

    def deltarefit_agent(self) -> dict[str, Any]:
        """Start this rank's agent, if it does not run yet: where it listens, and what speaks against a refit."""
        if not hasattr(self, "_deltarefit"):
            self._deltarefit = _agent(self)
        return {"socket": self._deltarefit.path, "rank": self.rank, "size": _size(self), "objections": objections(self)}

    def deltarefit_state(self) -> dict[str, Any] | None:
        """Run, version, state and digest of the live weights as they were noted last; rank 0 knows, others say None."""
        text = self._deltarefit.header if hasattr(self, "_deltarefit") else None
        if text is None:
            return None
        _, header = read_note(text)
        return {"run": header.run, "version": header.version, "state": header.state.value, "digest": str(header.digest)}

    rank: int


def _size(worker: Any) -> int:
    return int(worker.vllm_config.parallel_config.world_size)


def _agent(worker: Any) -> Agent:
    config, model = worker.vllm_config, worker.get_model()
    if unknown := unknown_methods(model):
        raise UsageError(
            "layers are kept in a form that refits in place do not support yet",
            found=", ".join(unknown[:4]),
            next_step="Serve the unquantized checkpoint, or refit from a directory (follow --into).",
        )
    weights = RankWeights(
        model,
        partial(_load, model, config),
        layouts=partial(layouts_of, model),
        checkpoint=config.model_config.model,
        unfilled=lambda name: bool(_UNFILLED.search(name)),
    )
    agent = Agent(weights, worker.rank, _size(worker))
    agent.start()
    return agent


def _load(model: Any, config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config), torch.inference_mode():
        return model.load_weights(weights)


def objections(worker: Any) -> list[str]:
    """What speaks against refits of this engine as it was started, each with what to do."""
    config = worker.vllm_config
    checks = (
        (config.model_config.quantization, "it is quantized: serve the unquantized checkpoint"),
        (config.lora_config, "LoRA adapters are enabled: start it without --enable-lora"),
        (getattr(config.parallel_config, "enable_eplb", False), "experts move between slots: start it without EPLB"),
        (
            config.parallel_config.data_parallel_size > 1,
            "it serves data-parallel replicas: start each as a server of its own, with a follower of its own",
        ),
        (config.load_config.load_format == "dummy", "it was started with dummy weights: give it a checkpoint"),
        (
            getattr(getattr(config, "offload_config", None), "cpu_offload_gb", 0),
            "weights are offloaded: start it without --cpu-offload-gb",
        ),
    )
    return [text for found, text in checks if found]
