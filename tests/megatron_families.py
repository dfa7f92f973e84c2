"""Models of each family as one rank of a Megatron trainer has them, by import code: the checkpoint's tensors in, local
tensors out under Megatron's names. Optional tensors are there where the checkpoint has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests import megatron_oracle as oracle
from tests.megatron_oracle import Grid, Ids, chunks, gated_ranks, parts_ranks

FFN, EXPERT_FFN, SHARED_FFN, HEADS, GROUPS, DIM, VOCAB, PADDED = 48, 24, 40, 4, 2, 6, 50, 64
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 10, 6
MIXER_HEADS, MIXER_DIM, MIXER_GROUPS, MIXER_STATE = 8, 6, 2, 5
Q_LORA, KV_LORA = 16, 24
EXPERTS = 4
Local = dict[str, Ids]

_MOE = {"num_experts": EXPERTS, "moe_intermediate_size": EXPERT_FFN}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": KEY_DIM, "linear_value_head_dim": VALUE_DIM,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
    "head_dim": DIM, "vocab_size": VOCAB, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {"hidden_size": HEADS * DIM}, "qwen3": {}, "qwen3_moe": _MOE,
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": EXPERT_FFN},
    "qwen2_moe": {**_MOE, "hidden_size": HEADS * DIM, "shared_expert_intermediate_size": SHARED_FFN},
    "glm4_moe": {
        "n_routed_experts": EXPERTS, "moe_intermediate_size": EXPERT_FFN, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "use_qk_norm": True, "attention_bias": True,
    },
    "deepseek_v3": {
        "moe_intermediate_size": EXPERT_FFN, "n_routed_experts": EXPERTS, "q_lora_rank": Q_LORA, "kv_lora_rank": 20,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "num_key_value_heads": HEADS,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": EXPERT_FFN},
    "qwen3_next": {**_MOE, **_DELTA, "shared_expert_intermediate_size": SHARED_FFN},
    "qwen3_5_text": _DELTA,
    "nemotron_h": {
        "num_hidden_layers": 3, "hybrid_override_pattern": "M*-", "mamba_num_heads": MIXER_HEADS,
        "mamba_head_dim": MIXER_DIM, "n_groups": MIXER_GROUPS, "ssm_state_size": MIXER_STATE, "conv_kernel": 4,
    },
}  # fmt: skip
"""What transformers is asked for; small, and no two sizes alike where it matters."""


def local_tensors(family: str, grid: Grid, rank: int, hf: Local, experts: str) -> Local:
    """All of one rank, whose stage is the whole model. ``experts``: "grouped" as Transformer Engine has them, with its
    names for norms; "sequential" with local layers; "old" for the older grouped layer."""
    one = _Rank(family, grid, grid.place(rank), hf, experts)
    edges = {
        "embedding.word_embeddings.weight": next(t for n, t in hf.items() if "embed" in n),
        "output_layer.weight": hf["lm_head.weight"],
    }
    tensors = {name: chunks(oracle.pad_rows(tensor, PADDED), grid.tp)[one.at["tp"]] for name, tensor in edges.items()}
    tensors["decoder.final_layernorm.weight"] = next(t for n, t in hf.items() if n in _FINAL)
    layers = 1 + max(int(name.split(".")[2]) for name in hf if ".layers." in name)
    for number in range(layers):
        tensors |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in one.layer(number).items()}
    return tensors


_FINAL = ("model.norm.weight", "backbone.norm_f.weight")


@dataclass(frozen=True)
class _Rank:
    family: str
    grid: Grid
    at: dict[str, int]
    hf: Local
    experts: str

    def layer(self, number: int) -> Local:
        prefix = f"{'backbone' if self.family == 'nemotron_h' else 'model'}.layers.{number}."
        hf = {name.removeprefix(prefix): tensor for name, tensor in self.hf.items() if name.startswith(prefix)}
        if self.family == "nemotron_h":
            return self._hybrid(hf)
        attention = self._latent if "self_attn.kv_b_proj.weight" in hf else self._attention
        mixer = self._delta_net if "linear_attn.A_log" in hf else attention
        return {**mixer(hf), **self._mlp_or_experts(hf)}

    @property
    def fused_norms(self) -> bool:
        return self.experts == "grouped"

    def _columns(self, tensor: Ids) -> Ids:
        return chunks(tensor, self.grid.tp)[self.at["tp"]]

    def _rows(self, tensor: Ids) -> Ids:
        return chunks(tensor, self.grid.tp, 1)[self.at["tp"]]

    def _attention(self, hf: Local, prefix: str = "self_attn.") -> Local:
        gate = self.family in ("qwen3_next", "qwen3_5_text")
        found = {"linear_proj.weight": self._rows(hf[prefix + "o_proj.weight"])}
        for part in ("weight", "bias"):
            if f"{prefix}q_proj.{part}" in hf:
                q, k, v = (hf[f"{prefix}{side}_proj.{part}"] for side in "qkv")
                found[f"linear_qkv.{part}"] = self._columns(oracle.fuse_qkv(q, k, v, HEADS, GROUPS, DIM, gate))
        optional = {
            "linear_proj.bias": "o_proj.bias",
            "q_layernorm.weight": "q_norm.weight",
            "k_layernorm.weight": "k_norm.weight",
        }
        found |= {memory: hf[prefix + name] for memory, name in optional.items() if prefix + name in hf}
        if prefix + "sinks" in hf:
            found["core_attention.softmax_offset"] = self._columns(hf[prefix + "sinks"])
        return {**_below("self_attention.", found), **self._input_norm(hf, "linear_qkv")}

    def _input_norm(self, hf: Local, behind: str) -> Local:
        norm = hf.get("input_layernorm.weight", hf.get("norm.weight"))
        assert norm is not None
        return {f"self_attention.{behind}.layer_norm_weight" if self.fused_norms else "input_layernorm.weight": norm}

    def _latent(self, hf: Local) -> Local:
        """Down projections are whole on every rank with Transformer Engine, and column-parallel without."""
        down = (lambda tensor: tensor) if self.fused_norms else self._columns
        q_norm, kv_norm = (
            ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight")
            if self.fused_norms
            else ("q_layernorm.weight", "kv_layernorm.weight")
        )
        found = {
            "linear_q_down_proj.weight": down(hf["self_attn.q_a_proj.weight"]),
            q_norm: hf["self_attn.q_a_layernorm.weight"],
            "linear_q_up_proj.weight": self._columns(hf["self_attn.q_b_proj.weight"]),
            "linear_kv_down_proj.weight": down(hf["self_attn.kv_a_proj_with_mqa.weight"]),
            kv_norm: hf["self_attn.kv_a_layernorm.weight"],
            "linear_kv_up_proj.weight": self._columns(hf["self_attn.kv_b_proj.weight"]),
            "linear_proj.weight": self._rows(hf["self_attn.o_proj.weight"]),
        }
        return {**_below("self_attention.", found), "input_layernorm.weight": hf["input_layernorm.weight"]}

    def _delta_net(self, hf: Local) -> Local:
        here = {n.removeprefix("linear_attn."): t for n, t in hf.items() if n.startswith("linear_attn.")}
        keys, tp = KEY_HEADS * KEY_DIM, self.grid.tp
        if "in_proj_qkvz.weight" in here:
            numbers = (KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
            parts = oracle.grouped_delta_net(here["in_proj_qkvz.weight"], here["in_proj_ba.weight"], *numbers)
        else:
            qkv = np.split(here["in_proj_qkv.weight"], [keys, 2 * keys])
            parts = [*qkv, *(here[f"in_proj_{part}.weight"] for part in "zba")]
        conv = np.split(here["conv1d.weight"], [keys, 2 * keys])
        found = {
            "in_proj.weight": parts_ranks(parts, tp)[self.at["tp"]],
            "conv1d.weight": parts_ranks(conv, tp)[self.at["tp"]],
            "A_log": self._columns(here["A_log"]),
            "dt_bias": self._columns(here["dt_bias"]),
            "out_norm.weight": here["norm.weight"],
            "out_proj.weight": self._rows(here["out_proj.weight"]),
        }
        return {**_below("self_attention.", found), **self._input_norm(hf, "in_proj")}

    def _hybrid(self, hf: Local) -> Local:
        if "mixer.q_proj.weight" in hf:
            return self._attention(hf, "mixer.")
        if "mixer.up_proj.weight" in hf:
            fc1, fc2 = self._columns(hf["mixer.up_proj.weight"]), self._rows(hf["mixer.down_proj.weight"])
            norm = {"linear_fc1.layer_norm_weight": hf["norm.weight"]}
            return _below("mlp.", {"linear_fc1.weight": fc1, "linear_fc2.weight": fc2, **norm})
        inner, shared = MIXER_HEADS * MIXER_DIM, MIXER_GROUPS * MIXER_STATE
        cuts = np.cumsum([inner, shared])
        conv = {f"conv1d.{part}": np.split(hf[f"mixer.conv1d.{part}"], cuts) for part in ("weight", "bias")}
        in_proj = np.split(hf["mixer.in_proj.weight"], np.cumsum([inner, inner, shared, shared]))
        fused = {"in_proj.weight": in_proj, **conv}
        found = {name: parts_ranks(parts, self.grid.tp)[self.at["tp"]] for name, parts in fused.items()}
        found |= {name: self._columns(hf[f"mixer.{name}"]) for name in ("A_log", "D", "dt_bias", "norm.weight")}
        found |= {
            "out_proj.weight": self._rows(hf["mixer.out_proj.weight"]),
            "in_proj.layer_norm_weight": hf["norm.weight"],
        }
        return _below("mixer.", found)

    def _mlp_or_experts(self, hf: Local) -> Local:
        norm = hf["post_attention_layernorm.weight"]
        if "mlp.gate_proj.weight" in hf:
            name = "mlp.linear_fc1.layer_norm_weight" if self.fused_norms else "pre_mlp_layernorm.weight"
            return {**self._gated(hf, "mlp.", "mlp."), name: norm}
        routers = {"mlp.gate.weight": "weight", "mlp.router.weight": "weight", "block_sparse_moe.gate.weight": "weight",
                   "mlp.router.bias": "bias", "mlp.gate.e_score_correction_bias": "expert_bias",
                   "mlp.shared_expert_gate.weight": "../shared_experts.gate_weight"}  # fmt: skip
        found = {f"mlp.router.{m}".replace("router.../", ""): hf[name] for name, m in routers.items() if name in hf}
        for shared in ("mlp.shared_expert.", "mlp.shared_experts."):
            found |= self._gated(hf, "mlp.shared_experts.", shared) if shared + "up_proj.weight" in hf else {}
        return {**found, **self._experts(hf), "pre_mlp_layernorm.weight": norm}

    def _gated(self, hf: Local, memory: str, prefix: str) -> Local:
        gate, up = hf[prefix + "gate_proj.weight"], hf[prefix + "up_proj.weight"]
        fc1 = gated_ranks(gate, up, self.grid.tp)[self.at["tp"]]
        return _below(
            memory, {"linear_fc1.weight": fc1, "linear_fc2.weight": self._rows(hf[prefix + "down_proj.weight"])}
        )

    def _experts(self, hf: Local) -> Local:
        each, etp, found = EXPERTS // self.grid.ep, self.grid.etp, {}
        mine = [self._one_expert(hf, self.at["ep"] * each + number) for number in range(each)]
        if self.experts == "old":
            weights = [[one["weight"][side] for one in mine] for side in range(3)]
            first, second = oracle.old_grouped(*weights, etp)[self.at["etp"]]
            return {"mlp.experts.weight1": first, "mlp.experts.weight2": second}
        for number, one in enumerate(mine):
            for part, (gate, up, down) in one.items():
                for layer, tensor in (
                    ("linear_fc1", gated_ranks(gate, up, etp)[self.at["etp"]]),
                    ("linear_fc2", chunks(down, etp, 1)[self.at["etp"]] if part == "weight" else down),
                ):
                    grouped, own = f"{layer}.{part}{number}", f"local_experts.{number}.{layer}.{part}"
                    found["mlp.experts." + (grouped if self.experts == "grouped" else own)] = tensor
        return found

    def _one_expert(self, hf: Local, expert: int) -> dict[str, tuple[Ids, Ids, Ids]]:
        """(gate, up, down) of one expert: weights, and biases where there are any."""
        if "mlp.experts.gate_up_proj" in hf:
            weight, bias = hf["mlp.experts.gate_up_proj"][expert].T, hf["mlp.experts.gate_up_proj_bias"][expert]
            down, down_bias = hf["mlp.experts.down_proj"][expert].T, hf["mlp.experts.down_proj_bias"][expert]
            return {"weight": (weight[::2], weight[1::2], down), "bias": (bias[::2], bias[1::2], down_bias)}
        for prefix, names in (("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))):
            if f"{prefix}.experts.{expert}.{names[0]}.weight" in hf:
                gate, up, down = (hf[f"{prefix}.experts.{expert}.{name}.weight"] for name in names)
                return {"weight": (gate, up, down)}
        raise AssertionError(sorted(hf))


def _below(prefix: str, tensors: Local) -> Local:
    return {prefix + name: tensor for name, tensor in tensors.items()}
