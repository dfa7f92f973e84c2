"""What each rank publishes, for many parallel layouts, from names and shapes alone; and the name tables against the
checkpoints that transformers writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit.errors import UsageError
from deltarefit.sources import megatron_kinds as kinds
from deltarefit.sources import ownership
from deltarefit.sources.megatron_kinds import Layout, Numbers, Rule
from deltarefit.sources.megatron_layouts import Cut, DeltaNet, Heads, Mamba
from deltarefit.sources.megatron_names import FAMILIES, STACKED_EXPERTS, table
from deltarefit.sources.megatron_plan import Chunk, Planned, canonical_shapes, plan
from tests import megatron_oracle as oracle
from tests.megatron_checks import Shapes, check_once, positions
from tests.megatron_oracle import Grid, Model


def numbers_of(model: Model) -> Numbers:
    heads = Heads(model.heads, model.groups, model.dim)
    return Numbers(model.vocab, model.layers, heads, tied=model.tied, experts=model.experts)


def layout_of(numbers: Numbers, grid: Grid, rank: int) -> Layout:
    at = grid.place(rank)
    return Layout(numbers, **{key: Cut(at[key], getattr(grid, key)) for key in ("tp", "pp", "dp", "ep", "etp", "edp")})


DENSE = [
    Grid(),
    Grid(tp=2, dp=2),
    Grid(tp=4, pp=2),
    Grid(tp=8),
    Grid(tp=8, dp=3),
    Grid(tp=2, pp=2, vpp=2, dp=2),
    Grid(pp=4),
    Grid(dp=5),
]
EXPERTS = [
    Grid(),
    Grid(tp=2, ep=2),
    Grid(dp=4, ep=4),
    Grid(tp=2, dp=2, pp=2, ep=4),
    Grid(tp=4, dp=2, ep=2, etp=2),
    Grid(tp=2, pp=2, vpp=2, dp=4, ep=2, etp=2),
    Grid(tp=1, dp=4, ep=2, etp=2),
    Grid(tp=8, dp=2, ep=4),
]
CASES = [
    *((Model(tied=tied, bias=bias), grid) for grid in DENSE for tied, bias in ((False, True), (True, False))),
    *((Model(experts=8, sequential=sequential), grid) for grid in EXPERTS for sequential in (True, False)),
    *((Model(hidden=32, ffn=32, vocab=32, heads=8, groups=8), grid) for grid in DENSE),
]


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize(("model", "grid"), CASES, ids=str)
def test_every_element_has_one_owner_and_the_right_place(
    model: Model, grid: Grid, split_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parallelism of every kind, more ranks than query groups, square weights, padding, tied output layer; ownership
    by rows and by name."""
    monkeypatch.setattr(ownership, "SPLIT_BYTES", split_bytes)
    shapes = model.canonical()
    hf, first = oracle.numbered(shapes)
    by_rank = []
    for rank in range(grid.world):
        layout, maps = layout_of(numbers_of(model), grid, rank), []
        for layers, tensors in oracle.local_tensors(model, grid, rank, hf):
            chunk = Chunk({name: tensor.shape for name, tensor in tensors.items()}, layers)
            for one in plan(layout, chunk, FAMILIES["qwen3_moe"]):
                assert {name: shapes[name] for name in one.shapes} == dict(one.shapes)
                found = positions(one.map, first)
                owned = found != oracle.PADDING
                assert np.array_equal(found[owned], tensors[one.name].reshape(-1)[owned])
                maps.append(one.map)
        by_rank.append(maps)
    check_once(shapes, by_rank)


def test_work_is_shared_among_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are split by rows over all that hold them, small ones are spread by name."""
    grid = Grid(tp=2, dp=4)
    for split_bytes, most in ((1, 1.05), (1 << 30, 2.0)):
        monkeypatch.setattr(ownership, "SPLIT_BYTES", split_bytes)
        model = Model(layers=8, vocab=32)
        hf, _ = oracle.numbered(model.canonical())
        loads = []
        for rank in range(grid.world):
            (layers, tensors), *_ = oracle.local_tensors(model, grid, rank, hf)
            chunk = Chunk({name: tensor.shape for name, tensor in tensors.items()}, layers)
            planned = plan(layout_of(numbers_of(model), grid, rank), chunk, FAMILIES["qwen3"])
            loads.append(sum(box.numel for one in planned for _, box in one.map.boxes))
        assert max(loads) <= most * sum(loads) / grid.world


# ------------------------------------------------------------------------------------ refusals


def _plan(
    tensors: dict[str, tuple[int, ...]], rules: Any = FAMILIES["qwen3"], tp: int = 1, **more: Any
) -> list[Planned]:
    layout = Layout(numbers_of(Model()), tp=Cut(0, tp))
    return plan(layout, Chunk(tensors, [0], **more), rules)


def test_unknown_tensors_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"2 tensors.*decoder\.layers\.0\.strange\.weight \(3, 4\).*no rule.*names="):
        _plan({"decoder.layers.0.strange.weight": (3, 4), "odd": (2,), "decoder.final_layernorm.weight": (16,)})


def test_a_shape_that_the_rule_does_not_give_is_refused() -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    with pytest.raises(UsageError, match=rf"{name}.*another shape; expected \(48, 16\); found \(40, 16\)"):
        _plan({name: (40, 16)})


def test_a_split_tensor_is_not_taken_for_a_replica() -> None:
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert _plan({name: (4,)}, tp=2)
    assert _plan({name: (4,)}, parallel=frozenset([name]))
    with pytest.raises(UsageError, match=r"q_layernorm.*all ranks have the same; found marked as split"):
        _plan({name: (4,)}, tp=2, parallel=frozenset([name]))


def test_tensors_that_meet_in_one_name_with_two_shapes_are_refused() -> None:
    planned = _plan({"decoder.layers.0.input_layernorm.weight": (16,),
                     "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (8,)})  # fmt: skip
    with pytest.raises(UsageError, match=r"model\.layers\.0\.input_layernorm\.weight has two shapes"):
        canonical_shapes(planned)


def test_tables_by_name() -> None:
    own = [Rule("w", kinds.column, ("x",)), *FAMILIES["qwen3"]]
    assert table("auto", "qwen3") is table("qwen3", None) is FAMILIES["qwen3"]
    assert table(own, "qwen3") is own
    assert _plan({"w": (4, 3)}, own)[0].shapes == {"x": (4, 3)}
    for names, family in (("auto", "vicuna"), ("auto", None), ("vicuna", "qwen3")):
        with pytest.raises(UsageError, match=r"no names are known for the model family.*one of deepseek_v2"):
            table(names, family)


def test_norms_stored_minus_one() -> None:
    """Canonical norms may be stored as they are or minus one, the trainer's as well: all four ways."""
    name = "decoder.layers.0.input_layernorm.weight"
    for family, centred, add in (
        ("qwen3", False, 0), ("qwen3", True, 1), ("qwen3_next", False, -1), ("qwen3_next", True, 0)
    ):  # fmt: skip
        layout = Layout(replace(numbers_of(Model()), centred=centred))
        (one,) = plan(layout, Chunk({name: (16,)}, [0]), FAMILIES[family])
        assert one.add == add
        assert one.map.boxes


# ------------------------------------------------------------------------------------ tables against transformers

HIDDEN, FFN, EXPERT_FFN, SHARED_FFN, HEADS, GROUPS, DIM, VOCAB = 32, 48, 24, 40, 4, 2, 6, 50
COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
    "head_dim": DIM, "vocab_size": VOCAB, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_experts": 4, "moe_intermediate_size": EXPERT_FFN}
DELTA, MAMBA = DeltaNet(2, 4, 10, 6), Mamba(8, 6, 2, 5)


def _attention(tp: int, te: bool, bias: bool = False, gate: bool = False, out_bias: bool = False) -> Shapes:
    rows = Heads(HEADS, GROUPS, DIM, gate).block * GROUPS // tp
    norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
    shapes: dict[str, tuple[int, ...]] = {norm: (HIDDEN,), "self_attention.linear_qkv.weight": (rows, HIDDEN)}
    shapes["self_attention.linear_proj.weight"] = (HIDDEN, HEADS * DIM // tp)
    shapes |= {"self_attention.linear_qkv.bias": (rows,)} if bias else {}
    return shapes | ({"self_attention.linear_proj.bias": (HIDDEN,)} if out_bias else {})


def _qk_norm() -> Shapes:
    return {f"self_attention.{side}_layernorm.weight": (DIM,) for side in "qk"}


def _dense(tp: int, te: bool, ffn: int = FFN, prefix: str = "mlp.") -> Shapes:
    norm = (
        {"mlp.linear_fc1.layer_norm_weight" if te else "pre_mlp_layernorm.weight": (HIDDEN,)}
        if prefix == "mlp."
        else {}
    )
    return {
        **norm,
        f"{prefix}linear_fc1.weight": (2 * ffn // tp, HIDDEN),
        f"{prefix}linear_fc2.weight": (HIDDEN, ffn // tp),
    }


def _experts(etp: int, local: int, grouped: bool, bias: bool = False) -> Shapes:
    shapes: dict[str, tuple[int, ...]] = {"pre_mlp_layernorm.weight": (HIDDEN,), "mlp.router.weight": (4, HIDDEN)}
    for number in range(local):
        name = "mlp.experts.{}.%s{}" if grouped else "mlp.experts.local_experts.{1}.{0}.%s"
        for part, fc1, fc2 in (("weight", (2 * EXPERT_FFN // etp, HIDDEN), (HIDDEN, EXPERT_FFN // etp)),
                               ("bias", (2 * EXPERT_FFN // etp,), (HIDDEN,)))[: 2 if bias else 1]:  # fmt: skip
            shapes[(name % part).format("linear_fc1", number)] = fc1
            shapes[(name % part).format("linear_fc2", number)] = fc2
    return shapes | ({"mlp.router.bias": (4,)} if bias else {})


def _layers(family: str, grid: Grid, te: bool) -> list[Shapes]:
    """Local shapes of the two layers of a model of a family; Transformer Engine's names or the local ones."""
    tp, experts = grid.tp, _experts(grid.etp, 4 // grid.ep, grouped=te)
    shared = _dense(tp, te, SHARED_FFN, "mlp.shared_experts.")
    gate = {"mlp.shared_experts.gate_weight": (1, HIDDEN)}
    if family == "deepseek_v3":
        return [{**_latent(tp, te), **_dense(tp, te)}, {**_latent(tp, te), **experts, **shared, **_expert_bias()}]
    if family == "gpt_oss":
        sinks = {"self_attention.core_attention.softmax_offset": (HEADS // tp,)}
        layer = {**_attention(tp, te, True, out_bias=True), **sinks, **_experts(grid.etp, 4 // grid.ep, te, bias=True)}
        return [layer, layer]
    if family == "qwen3_next":
        rest = {**experts, **shared, **gate}
        return [{**_delta_net(tp, te), **rest}, {**_attention(tp, te, gate=True), **_qk_norm(), **rest}]
    if family == "nemotron_h":
        mlp = {"mlp.linear_fc1.layer_norm_weight": (HIDDEN,), "mlp.linear_fc1.weight": (FFN // tp, HIDDEN)}
        return [_mixer(tp), _attention(tp, te), {**mlp, "mlp.linear_fc2.weight": (HIDDEN, FFN // tp)}]
    more = {
        "llama": _dense(tp, te), "mistral": _dense(tp, te), "qwen2": _dense(tp, te),
        "qwen3": {**_dense(tp, te), **_qk_norm()}, "qwen3_moe": {**experts, **_qk_norm()}, "mixtral": experts,
        "qwen2_moe": {**experts, **shared, **gate},
    }[family]  # fmt: skip
    layer = {**_attention(tp, te, bias=family in ("qwen2", "qwen2_moe")), **more}
    return [layer, layer]


def _expert_bias() -> Shapes:
    return {"mlp.router.expert_bias": (4,)}


def _latent(tp: int, te: bool) -> Shapes:
    """Down projections: a layer of its own on every rank with Transformer Engine, column-parallel without."""
    cut = 1 if te else tp
    q_norm, kv_norm = ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight") if te else (
        "q_layernorm.weight", "kv_layernorm.weight")  # fmt: skip
    shapes = {
        "linear_q_down_proj.weight": (16 // cut, HIDDEN), q_norm: (16,),
        "linear_q_up_proj.weight": (HEADS * 10 // tp, 16), "linear_kv_down_proj.weight": (24 // cut, HIDDEN),
        kv_norm: (20,), "linear_kv_up_proj.weight": (HEADS * 14 // tp, 20),
        "linear_proj.weight": (HIDDEN, HEADS * 8 // tp),
    }  # fmt: skip
    return {"input_layernorm.weight": (HIDDEN,), **{f"self_attention.{name}": s for name, s in shapes.items()}}


def _delta_net(tp: int, te: bool) -> Shapes:
    conv = 2 * DELTA.keys + DELTA.values
    norm = "self_attention.in_proj.layer_norm_weight" if te else "input_layernorm.weight"
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": ((conv + DELTA.values + 2 * DELTA.value_heads) // tp, HIDDEN),
        "conv1d.weight": (conv // tp, 1, 4), "A_log": (DELTA.value_heads // tp,), "dt_bias": (DELTA.value_heads // tp,),
        "out_norm.weight": (DELTA.value_dim,), "out_proj.weight": (HIDDEN, DELTA.values // tp),
    }  # fmt: skip
    return {norm: (HIDDEN,), **{f"self_attention.{name}": shape for name, shape in shapes.items()}}


def _mixer(tp: int) -> Shapes:
    conv, heads = MAMBA.inner + 2 * MAMBA.shared, MAMBA.heads // tp
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.layer_norm_weight": (HIDDEN,), "in_proj.weight": ((conv + MAMBA.inner + MAMBA.heads) // tp, HIDDEN),
        "conv1d.weight": (conv // tp, 1, 4), "conv1d.bias": (conv // tp,), "A_log": (heads,), "D": (heads,),
        "dt_bias": (heads,), "norm.weight": (MAMBA.inner // tp,), "out_proj.weight": (HIDDEN, MAMBA.inner // tp),
    }  # fmt: skip
    return {f"mixer.{name}": shape for name, shape in shapes.items()}


FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {"hidden_size": HEADS * DIM}, "qwen3": {}, "qwen3_moe": MOE,
    "mixtral": {"num_local_experts": 4, "intermediate_size": EXPERT_FFN},
    "qwen2_moe": {**MOE, "hidden_size": HEADS * DIM, "shared_expert_intermediate_size": SHARED_FFN},
    "deepseek_v3": {
        "moe_intermediate_size": EXPERT_FFN, "n_routed_experts": 4, "q_lora_rank": 16, "kv_lora_rank": 20,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "num_key_value_heads": HEADS,
    },
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": EXPERT_FFN},
    "qwen3_next": {
        **MOE, "shared_expert_intermediate_size": SHARED_FFN, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10, "linear_value_head_dim": 6,
    },
    "nemotron_h": {
        "num_hidden_layers": 3, "hybrid_override_pattern": "M*-", "mamba_num_heads": 8, "mamba_head_dim": 6,
        "n_groups": 2, "ssm_state_size": 5, "conv_kernel": 4,
    },
}  # fmt: skip


def _written(family: str, directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what transformers saves for a model of the family."""
    transformers = pytest.importorskip("transformers")
    from safetensors import safe_open

    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILY_CONFIGS[family]})
    if family == "deepseek_v3":
        config.n_shared_experts = 1
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    shapes = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _planned(family: str, grid: Grid, te: bool, shapes: Shapes) -> Iterator[list[Planned]]:
    hidden = shapes[next(name for name in shapes if "embed" in name)][1]
    numbers = Numbers(
        VOCAB, len(_layers(family, grid, te)), Heads(HEADS, GROUPS, DIM, family == "qwen3_next"),
        gated=family != "nemotron_h", centred=family == "qwen3_next", experts=4, q_lora=16, kv_lora=24, delta=DELTA,
        mamba=MAMBA,
    )  # fmt: skip
    for rank in range(grid.world):
        tensors = {
            "embedding.word_embeddings.weight": (64 // grid.tp, hidden),
            "output_layer.weight": (64 // grid.tp, hidden),
        }
        tensors["decoder.final_layernorm.weight"] = (hidden,)
        for layer, local in enumerate(_layers(family, grid, te)):
            tensors |= {f"decoder.layers.{layer}.{name}": shape for name, shape in local.items()}
        yield plan(layout_of(numbers, grid, rank), Chunk(tensors, range(3)), FAMILIES[family])


@pytest.mark.parametrize("family", sorted(FAMILY_CONFIGS))
def test_names_and_shapes_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """Every family: what the ranks say the checkpoint is, is what transformers writes; each element once."""
    hidden = FAMILY_CONFIGS[family].get("hidden_size", HIDDEN)
    shared = EXPERT_FFN if family == "deepseek_v3" else SHARED_FFN
    written = _written(family, tmp_path)
    for grid in (Grid(), Grid(tp=2, dp=2, ep=2, etp=2)):
        for te in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(globals(), "HIDDEN", hidden)
                patch.setitem(globals(), "SHARED_FFN", shared)
                by_rank = list(_planned(family, grid, te, written))
            assert canonical_shapes(one for ranks in by_rank for one in ranks) == written
            check_once(written, [[one.map for one in ranks] for ranks in by_rank])


def test_stacked_experts_before_the_family() -> None:
    """[E, 2·ffn, hidden] and [E, hidden, ffn] where a checkpoint keeps experts stacked."""
    grid = Grid(dp=4, ep=2, etp=2)
    shapes: dict[str, tuple[int, ...]] = {
        "model.layers.0.mlp.experts.gate_up_proj": (4, 2 * EXPERT_FFN, HIDDEN),
        "model.layers.0.mlp.experts.down_proj": (4, HIDDEN, EXPERT_FFN),
    }
    numbers, by_rank = replace(numbers_of(Model()), experts=4), []
    for rank in range(grid.world):
        local = {f"decoder.layers.0.{n}": s for n, s in _experts(2, 2, grouped=True).items() if ".experts." in n}
        rules = [*STACKED_EXPERTS, *FAMILIES["qwen3_moe"]]
        by_rank.append(plan(layout_of(numbers, grid, rank), Chunk(local, [0]), rules))
    assert canonical_shapes(one for ranks in by_rank for one in ranks) == shapes
    check_once(shapes, [[one.map for one in ranks] for ranks in by_rank])
