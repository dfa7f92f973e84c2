"""Which Megatron-Core parameter is which tensor of a Hugging Face checkpoint: one table of rules per model family.

Names on the left are those of ``GPTModel`` and ``MambaModel``, with global numbers, for the layers of Transformer
Engine (norms fused into the linear layer behind them) and the local ones (norms of their own). Names on the right are
those of the family's released checkpoints, which ``transformers`` writes as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deltarefit.errors import UsageError
from deltarefit.sources import megatron_kinds as kinds
from deltarefit.sources.megatron_kinds import Kind, Rule

Table = Sequence[Rule]
_LAYER = "decoder.layers.{layer}."


def _rules(prefix: str, rows: Iterable[tuple[str, Kind, str]], *, transposed: bool = False) -> tuple[Rule, ...]:
    """Rules of one layer: (memory name, kind, canonical names separated by spaces), below ``prefix``."""
    return tuple(
        Rule(_LAYER + memory, kind, tuple(prefix + name for name in names.split()), transposed)
        for memory, kind, names in rows
    )


def _edges(embedding: str, final: str, norm: Kind = kinds.norm) -> tuple[Rule, ...]:
    return (
        Rule("embedding.word_embeddings.weight", kinds.embedding, (embedding,)),
        Rule("output_layer.weight", kinds.head, ("lm_head.weight",)),
        Rule("decoder.final_layernorm.weight", norm, (final,)),
        Rule("decoder.final_norm.weight", norm, (final,)),
    )


_HF = "model.layers.{layer}."
_EDGES = _edges("model.embed_tokens.weight", "model.norm.weight")


def _norms(norm: Kind) -> tuple[Rule, ...]:
    rows = [
        ("input_layernorm.weight", norm, "input_layernorm.weight"),
        ("self_attention.linear_qkv.layer_norm_weight", norm, "input_layernorm.weight"),
        ("pre_mlp_layernorm.weight", norm, "post_attention_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", norm, "post_attention_layernorm.weight"),
    ]
    return _rules(_HF, rows)


def _attention(prefix: str) -> tuple[Rule, ...]:
    rows = [
        ("self_attention.linear_qkv.weight", kinds.qkv, "q_proj.weight k_proj.weight v_proj.weight"),
        ("self_attention.linear_qkv.bias", kinds.qkv, "q_proj.bias k_proj.bias v_proj.bias"),
        ("self_attention.linear_proj.weight", kinds.row, "o_proj.weight"),
        ("self_attention.linear_proj.bias", kinds.replicated, "o_proj.bias"),
        ("self_attention.core_attention.softmax_offset", kinds.column, "sinks"),
    ]
    return _rules(prefix, rows)


def _qk_norms(norm: Kind) -> tuple[Rule, ...]:
    sides = [(f"self_attention.{side}_layernorm.weight", norm, f"self_attn.{side}_norm.weight") for side in "qk"]
    return _rules(_HF, sides)


def _mlp(memory: str, prefix: str) -> tuple[Rule, ...]:
    rows = [
        (f"{memory}linear_fc1.weight", kinds.fc1, "gate_proj.weight up_proj.weight"),
        (f"{memory}linear_fc1.bias", kinds.fc1, "gate_proj.bias up_proj.bias"),
        (f"{memory}linear_fc2.weight", kinds.row, "down_proj.weight"),
        (f"{memory}linear_fc2.bias", kinds.replicated, "down_proj.bias"),
    ]
    return _rules(prefix, rows)


def _experts(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Experts as modules of their own, as numbered weights of a grouped layer, and all in one tensor."""
    fc1, fc2 = f"{gate}.weight {up}.weight", f"{down}.weight"
    rows = [
        ("mlp.experts.local_experts.{expert}.linear_fc1.weight", kinds.fc1, fc1),
        ("mlp.experts.local_experts.{expert}.linear_fc2.weight", kinds.row, fc2),
        ("mlp.experts.linear_fc1.weight{expert}", kinds.fc1, fc1),
        ("mlp.experts.linear_fc2.weight{expert}", kinds.row, fc2),
        ("mlp.experts.weight1", kinds.experts_in, fc1),
        ("mlp.experts.weight2", kinds.experts_out, fc2),
    ]
    return _rules(prefix + "{expert}.", rows)


def _router(prefix: str) -> tuple[Rule, ...]:
    rows = [
        ("mlp.router.weight", kinds.replicated, "weight"),
        ("mlp.router.bias", kinds.replicated, "bias"),
        ("mlp.router.expert_bias", kinds.replicated, "e_score_correction_bias"),
    ]
    return _rules(prefix, rows)


_DENSE = (
    *_EDGES,
    *_norms(kinds.norm),
    *_attention(_HF + "self_attn."),
    *_qk_norms(kinds.norm),
    *_mlp("mlp.", _HF + "mlp."),
)
_MOE = (*_router(_HF + "mlp.gate."), *_experts(_HF + "mlp.experts.", "gate_proj", "up_proj", "down_proj"))
_SHARED_EXPERT = (
    *_mlp("mlp.shared_experts.", _HF + "mlp.shared_expert."),
    *_rules(_HF, [("mlp.shared_experts.gate_weight", kinds.replicated, "mlp.shared_expert_gate.weight")]),
)
_SHARED_EXPERTS = _mlp("mlp.shared_experts.", _HF + "mlp.shared_experts.")
_MIXTRAL = (
    *_router(_HF + "block_sparse_moe.gate."),
    *_experts(_HF + "block_sparse_moe.experts.", "w1", "w3", "w2"),
)
_LATENT = _rules(_HF + "self_attn.", [
    ("self_attention.linear_q_proj.weight", kinds.column, "q_proj.weight"),
    ("self_attention.linear_q_down_proj.weight", kinds.down, "q_a_proj.weight"),
    ("self_attention.q_layernorm.weight", kinds.norm, "q_a_layernorm.weight"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", kinds.norm, "q_a_layernorm.weight"),
    ("self_attention.linear_q_up_proj.weight", kinds.column, "q_b_proj.weight"),
    ("self_attention.linear_kv_down_proj.weight", kinds.down, "kv_a_proj_with_mqa.weight"),
    ("self_attention.kv_layernorm.weight", kinds.norm, "kv_a_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", kinds.norm, "kv_a_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.weight", kinds.column, "kv_b_proj.weight"),
    ("self_attention.linear_proj.weight", kinds.row, "o_proj.weight"),
])  # fmt: skip
_DEEPSEEK = (*_EDGES, *_norms(kinds.norm), *_LATENT, *_mlp("mlp.", _HF + "mlp."), *_MOE, *_SHARED_EXPERTS)
_GPT_OSS_EXPERTS = _rules(_HF + "mlp.experts.", [
    (memory.format(part), kind, name + ("" if part == "weight" else "_bias"))
    for memory, kinds_of, name in (
        ("mlp.experts.local_experts.{{expert}}.linear_fc1.{}", (kinds.fc1_alternating,) * 2, "gate_up_proj"),
        ("mlp.experts.linear_fc1.{}{{expert}}", (kinds.fc1_alternating,) * 2, "gate_up_proj"),
        ("mlp.experts.local_experts.{{expert}}.linear_fc2.{}", (kinds.row, kinds.replicated), "down_proj"),
        ("mlp.experts.linear_fc2.{}{{expert}}", (kinds.row, kinds.replicated), "down_proj"),
    )
    for part, kind in zip(("weight", "bias"), kinds_of, strict=True)
], transposed=True)  # fmt: skip
_GPT_OSS = (
    *_EDGES, *_norms(kinds.norm), *_attention(_HF + "self_attn."), *_router(_HF + "mlp.router."), *_GPT_OSS_EXPERTS
)  # fmt: skip


def _delta_net(in_proj: Kind, names: str) -> tuple[Rule, ...]:
    rows = [
        ("self_attention.in_proj.weight", in_proj, names),
        ("self_attention.conv1d.weight", kinds.delta_net_conv, "conv1d.weight"),
        ("self_attention.A_log", kinds.column, "A_log"),
        ("self_attention.dt_bias", kinds.column, "dt_bias"),
        ("self_attention.out_norm.weight", kinds.norm, "norm.weight"),
        ("self_attention.out_proj.weight", kinds.row, "out_proj.weight"),
    ]
    fused = [("self_attention.in_proj.layer_norm_weight", kinds.centred_norm, "input_layernorm.weight")]
    return _rules(_HF + "linear_attn.", rows) + _rules(_HF, fused)


_QWEN_HYBRID = (
    *_edges("model.embed_tokens.weight", "model.norm.weight", kinds.centred_norm), *_norms(kinds.centred_norm),
    *_attention(_HF + "self_attn."), *_qk_norms(kinds.centred_norm),
    *_mlp("mlp.", _HF + "mlp."), *_MOE, *_SHARED_EXPERT,
)  # fmt: skip
_GROUPED = _delta_net(kinds.delta_net_grouped, "in_proj_qkvz.weight in_proj_ba.weight")
_SEPARATE = _delta_net(
    kinds.delta_net_separate, "in_proj_qkv.weight in_proj_z.weight in_proj_b.weight in_proj_a.weight"
)
STACKED_EXPERTS = _rules(_HF + "mlp.experts.", [
    ("mlp.experts.local_experts.{expert}.linear_fc1.weight", kinds.fc1_joined, "gate_up_proj"),
    ("mlp.experts.local_experts.{expert}.linear_fc2.weight", kinds.row, "down_proj"),
    ("mlp.experts.linear_fc1.weight{expert}", kinds.fc1_joined, "gate_up_proj"),
    ("mlp.experts.linear_fc2.weight{expert}", kinds.row, "down_proj"),
])  # fmt: skip
"""For checkpoints that keep all experts of a layer in [E, 2·ffn, hidden] and [E, hidden, ffn]: put these rules before
those of the family."""

_BACKBONE = "backbone.layers.{layer}."
_NEMOTRON_H = (
    *_edges("backbone.embeddings.weight", "backbone.norm_f.weight"),
    *_rules(_BACKBONE, [
        (memory, kinds.norm, "norm.weight")
        for memory in (
            "norm.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight", "mixer.in_proj.layer_norm_weight",
            "mlp.linear_fc1.layer_norm_weight", "self_attention.linear_qkv.layer_norm_weight",
        )
    ]),
    *_attention(_BACKBONE + "mixer."),
    *_rules(_BACKBONE + "mixer.", [
        ("mlp.linear_fc1.weight", kinds.column, "up_proj.weight"),
        ("mlp.linear_fc2.weight", kinds.row, "down_proj.weight"),
        ("mixer.in_proj.weight", kinds.mamba_in_proj, "in_proj.weight"),
        ("mixer.conv1d.weight", kinds.mamba_conv, "conv1d.weight"),
        ("mixer.conv1d.bias", kinds.mamba_conv, "conv1d.bias"),
        ("mixer.A_log", kinds.column, "A_log"),
        ("mixer.D", kinds.column, "D"),
        ("mixer.dt_bias", kinds.column, "dt_bias"),
        ("mixer.norm.weight", kinds.column, "norm.weight"),
        ("mixer.out_proj.weight", kinds.row, "out_proj.weight"),
    ]),
)  # fmt: skip


def _predictors(table: Table, canonical: str) -> tuple[Rule, ...]:
    """The layers of a table once more, below multi-token prediction layers, whose canonical layers are ``canonical``
    (``{mtp}``: their own number, ``{beyond}``: counted on from the last layer)."""
    return tuple(
        Rule(rule.memory.replace(_LAYER, f"mtp.layers.{{mtp}}.{inner}."), rule.kind,
             tuple(name.replace(_HF, canonical) for name in rule.canonical), rule.transposed)
        for inner in ("transformer_layer", "mtp_model_layer")
        for rule in table
        if rule.memory.startswith(_LAYER)
    )  # fmt: skip


def _predictor_edges(norm: Kind, eh: str, embedding: str, hidden: str, final: str) -> tuple[Rule, ...]:
    rows = [("eh_proj", kinds.column, eh), ("enorm", norm, embedding), ("hnorm", norm, hidden)]
    rows.append(("final_layernorm", norm, final))
    return tuple(Rule(f"mtp.layers.{{mtp}}.{memory}.weight", kind, (name,)) for memory, kind, name in rows)


_BEYOND = "model.layers.{beyond}."
_DEEPSEEK_MTP = _predictors(_DEEPSEEK, _BEYOND) + _predictor_edges(
    kinds.norm,
    *(_BEYOND + name for name in ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")),
)
_QWEN_MTP = _predictors(_QWEN_HYBRID, "mtp.layers.{mtp}.") + _predictor_edges(
    kinds.centred_norm, "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight",
)  # fmt: skip

FAMILIES: dict[str, Table] = {
    "llama": _DENSE, "mistral": _DENSE, "qwen2": _DENSE, "qwen3": _DENSE,
    "qwen3_moe": (*_DENSE, *_MOE),
    "qwen2_moe": (*_DENSE, *_MOE, *_SHARED_EXPERT),
    "glm4_moe": (*_DENSE, *_MOE, *_SHARED_EXPERTS),
    "mixtral": (*_DENSE, *_MIXTRAL),
    "deepseek_v2": _DEEPSEEK, "deepseek_v3": (*_DEEPSEEK, *_DEEPSEEK_MTP),
    "gpt_oss": _GPT_OSS,
    "qwen3_next": (*_QWEN_HYBRID, *_GROUPED, *_QWEN_MTP),
    "qwen3_5_text": (*_QWEN_HYBRID, *_SEPARATE, *_QWEN_MTP),
    "nemotron_h": _NEMOTRON_H,
}  # fmt: skip
"""Rules by ``model_type`` of the Hugging Face configuration."""


def table(names: str | Table, model_type: str | None) -> Table:
    """The rules that ``names`` asks for: a family's, the caller's own, or with "auto" those of ``model_type``."""
    family = model_type if names == "auto" else names
    if not isinstance(family, str | None):
        return family
    if family not in FAMILIES:
        raise UsageError(
            f"no names are known for the model family {family!r}",
            expected=f"one of {', '.join(sorted(FAMILIES))}",
            next_step='Pass names=[...] with rules of your own, or names="qwen3" for a model that is named alike.',
        )
    return FAMILIES[family]
