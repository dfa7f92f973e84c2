"""Ten families of transformers models, tiny, from configurations alone: random weights, nothing is downloaded.

``build(name)`` gives the model in float32, the same weights every time. Vocabularies have 101 entries, a prime, so that
no sharding of them is even.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

VOCAB = 101
_COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def build(name: str, seed: int = 0) -> Any:
    """The model ``name``, one of ``MODELS``, in float32. Weights come from ``seed``."""
    torch.manual_seed(seed)
    model = MODELS[name]().float()
    model.train(mode=False)
    return model


def tokens(length: int = 12, seed: int = 0) -> torch.Tensor:
    """A batch of one sequence."""
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, **_ATTENTION, **_TOKENS, tie_word_embeddings=False))


def _qwen2_tied() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {key: value for key, value in _ATTENTION.items() if key != "head_dim"}
    return Qwen2ForCausalLM(Qwen2Config(**_COMMON, **sizes, **_TOKENS, tie_word_embeddings=True))


def _phi3() -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**_COMMON, **_ATTENTION, **_TOKENS, tie_word_embeddings=False))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_COMMON, **_ATTENTION, **_TOKENS, **experts, mlp_only_layers=[0], tie_word_embeddings=False)
    )


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    attention = {
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 48,
    }  # fmt: skip
    experts = {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**_COMMON, **attention, **experts, **_TOKENS, tie_word_embeddings=False)
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {**_ATTENTION, "intermediate_size": 32}
    return GptOssForCausalLM(
        GptOssConfig(**_COMMON, **sizes, **_TOKENS, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    )


def _mamba2() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 1, "conv_kernel": 4}
    common = {key: value for key, value in _COMMON.items() if key != "max_position_embeddings"}
    return Mamba2ForCausalLM(Mamba2Config(**common, **sizes, **_TOKENS, chunk_size=8, tie_word_embeddings=False))


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 1,
    }  # fmt: skip
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(**_COMMON, **_ATTENTION, **linear, **experts, **_TOKENS, tie_word_embeddings=False)
    )


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, **_TOKENS, resid_pdrop=0.0)
    )


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_COMMON, **_ATTENTION, **_TOKENS, sliding_window=8, query_pre_attn_scalar=8)
    )


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0}
    text = {**_COMMON, **_ATTENTION, **_TOKENS, "rope_parameters": rope}
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }  # fmt: skip
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Qwen3VLForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2-tied": _qwen2_tied,
    "phi3": _phi3,
    "qwen3-moe": _qwen3_moe,
    "deepseek-v3": _deepseek_v3,
    "gpt-oss": _gpt_oss,
    "mamba2": _mamba2,
    "qwen3-next": _qwen3_next,
    "gpt2": _gpt2,
    "gemma3": _gemma3,
    "qwen3-vl": _qwen3_vl,
}


def preload() -> None:
    """Import what the families need, where transformers is installed, and make no tensor: for processes that fork."""
    families = "llama qwen2 phi3 qwen3_moe deepseek_v3 gpt_oss mamba2 qwen3_next gpt2 gemma3 qwen3_vl"
    with contextlib.suppress(ImportError):
        for family in families.split():
            importlib.import_module(f"transformers.models.{family}.modeling_{family}")
