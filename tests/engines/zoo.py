"""Tiny checkpoints of the model families that real engines load on a CPU: random bf16 weights, nothing is downloaded.

``save(name, directory)`` writes one as ``save_pretrained`` does, so its names are those of published checkpoints. The
same name and seed give the same bytes. Sizes are those that CPU kernels take: heads of 32, experts of a multiple of 32
on each rank at TP 2. Weights are large (0.2) so that a changed weight changes what the model says, and the vocabulary
is a prime, so that every engine has to pad it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB = 131
SPREAD = 0.2
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048, **_TOKENS}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_DENSE = {**_COMMON, **_HEADS, "intermediate_size": 96, "initializer_range": SPREAD, "tie_word_embeddings": False}
# Families whose heads are hidden size / heads.
_WIDE = {**{key: value for key, value in _DENSE.items() if key != "head_dim"}, "hidden_size": 128}
_MLA = {
    **{key: value for key, value in _DENSE.items() if key != "head_dim"}, "num_key_value_heads": 4,
    # vLLM's CPU kernel for latent attention takes 512 + 64 only.
    "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    # SGLang reads this, and on a CPU it knows rotary embeddings of these families with yarn only.
    "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 1024,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def save(name: str, directory: Path, seed: int = 0) -> Path:
    """Write the model ``name``, one of ``MODELS``, with the weights of ``seed`` into ``directory``; returns that."""
    build(name, seed).save_pretrained(directory)
    _amend(directory / "config.json")
    return directory


def build(name: str, seed: int = 0) -> Any:
    """The transformers model ``name``, one of ``MODELS``, in bf16. Weights come from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]()
        _spread_everything(model)
    model.train(mode=False)
    return model.to(torch.bfloat16)


def _spread_everything(model: torch.nn.Module) -> None:
    """Norms, biases and router corrections start as ones or zeros: equal elements would hide a misplaced one."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and (tensor.dim() < 2 or bool((tensor == tensor.flatten()[0]).all())):
            tensor.add_(torch.randn(tensor.shape) * 0.05)


def _amend(config: Path) -> None:
    """No end token of ``generation_config.json`` may stop a run early, so there is none; engines ask for a dtype."""
    fields = json.loads(config.read_text())
    fields["dtype"] = "bfloat16"
    config.write_text(json.dumps(fields, indent=2))
    (config.parent / "generation_config.json").unlink(missing_ok=True)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DENSE))


def _qwen2_tied() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**{**_WIDE, "tie_word_embeddings": True}))


def _phi3() -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**_WIDE))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    # One key and value head: both ranks hold it at TP 2.
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**_DENSE, **experts}, decoder_sparse_step=1, norm_topk_prob=True))


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**{**_WIDE, "intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2)
    )


def _deepseek_v2_lite() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(DeepseekV2Config(**_MLA, q_lora_rank=None, topk_method="greedy"))


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**_MLA, q_lora_rank=32, topk_method="noaux_tc", scoring_func="sigmoid")
    )


def _glm4_moe() -> Any:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    experts = {
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True,
    }  # fmt: skip
    return Glm4MoeForCausalLM(Glm4MoeConfig(**_DENSE, **experts))


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    # Hidden and intermediate size are equal: no shape tells a transposed expert from a straight one.
    sizes = {**_DENSE, "intermediate_size": 64}
    return GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=32))


def _mamba2() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    common = {key: value for key, value in _COMMON.items() if key != "max_position_embeddings"}
    sizes = {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 1, "conv_kernel": 4}
    return Mamba2ForCausalLM(
        Mamba2Config(**common, **sizes, chunk_size=8, initializer_range=SPREAD, tie_word_embeddings=False)
    )


def _nemotron_h() -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    mamba = {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4,
        "chunk_size": 8, "expand": 2,
    }  # fmt: skip
    sizes = {key: value for key, value in _DENSE.items() if key != "num_hidden_layers"}
    return NemotronHForCausalLM(NemotronHConfig(**sizes, **mamba, layers_block_type=["mamba", "attention", "mlp"]))


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear = {
        # vLLM's CPU kernel for gated delta rules takes heads of 128 only.
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
    }  # fmt: skip
    return Qwen3NextForCausalLM(Qwen3NextConfig(**_DENSE, **linear, **experts))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_positions": 2048, "n_embd": 128, "n_layer": 2, "n_head": 4}
    # A CPU engine has no kernel for gelu_new, the default.
    model = GPT2LMHeadModel(GPT2Config(**sizes, **_TOKENS, initializer_range=SPREAD, activation_function="gelu"))
    # The head is this embedding: at full size every token is followed by itself, whatever the layers say.
    model.transformer.wte.weight.data.mul_(0.1)
    return model


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**_DENSE, sliding_window=32, query_pre_attn_scalar=32))


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "initializer_range": SPREAD,
    }  # fmt: skip
    special = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
    text = {**_DENSE, "rope_parameters": rope}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, **special, tie_word_embeddings=False)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2-tied": _qwen2_tied,
    "phi3": _phi3,
    "qwen3-moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek-v2-lite": _deepseek_v2_lite,
    "deepseek-v3": _deepseek_v3,
    "glm4-moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "mamba2": _mamba2,
    "nemotron-h": _nemotron_h,
    "qwen3-next": _qwen3_next,
    "gpt2": _gpt2,
    "gemma3": _gemma3,
    "qwen3-vl": _qwen3_vl,
}

# Keyword arguments that vLLM needs for a model besides those for all. Without images it makes no vision tower: the
# processor of images needs a tokenizer and packages that an environment for CPUs has not.
VLLM_OPTIONS: dict[str, dict[str, Any]] = {"qwen3-vl": {"limit_mm_per_prompt": {"image": 0, "video": 0}}}
