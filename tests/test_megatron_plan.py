"""What each rank publishes, for many parallel layouts, from names and shapes alone; and the name tables against the
checkpoints that transformers writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors import safe_open

from deltarefit.errors import UsageError
from deltarefit.sources import megatron_kinds as kinds
from deltarefit.sources import ownership
from deltarefit.sources.megatron_kinds import Layout, Numbers, Rule
from deltarefit.sources.megatron_layouts import Cut, DeltaNet, Heads, Mamba
from deltarefit.sources.megatron_names import FAMILIES, STACKED_EXPERTS, table
from deltarefit.sources.megatron_plan import Chunk, Planned, canonical_shapes, plan
from tests import megatron_families as families
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
@pytest.mark.parametrize(("model", "grid"), CASES)
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
                assert {name: shapes[name] for name in one.placed.shapes} == dict(one.placed.shapes)
                found = positions(one.map, first)
                owned = found != oracle.PADDING
                assert np.array_equal(found[owned], tensors[one.local].reshape(-1)[owned])
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
    assert _plan({"w": (4, 3)}, own)[0].placed.shapes == {"x": (4, 3)}
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
        assert one.placed.add == add
        assert one.map.boxes


# ------------------------------------------------------------------------------------ tables against transformers


def _written(family: str, directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what transformers saves for a model of the family."""
    config = transformers.AutoConfig.for_model(family, **{**families.COMMON, **families.CONFIGS[family]})
    if family == "deepseek_v3":
        config.n_shared_experts = 1
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    shapes = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _family_numbers(family: str) -> Numbers:
    f = families
    return Numbers(
        f.VOCAB, 2, Heads(f.HEADS, f.GROUPS, f.DIM, family in ("qwen3_next", "qwen3_5_text")),
        gated=family != "nemotron_h", experts=f.EXPERTS, q_lora=f.Q_LORA, kv_lora=f.KV_LORA,
        delta=DeltaNet(f.KEY_HEADS, f.VALUE_HEADS, f.KEY_DIM, f.VALUE_DIM),
        mamba=Mamba(f.MIXER_HEADS, f.MIXER_DIM, f.MIXER_GROUPS, f.MIXER_STATE),
    )  # fmt: skip


OLD = ("qwen3_moe", "mixtral")


@pytest.mark.parametrize("family", sorted(families.CONFIGS))
def test_names_shapes_and_places_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """Every family: what the ranks say the checkpoint is, is what transformers writes; each element goes once, and to
    where import code takes it from."""
    written = _written(family, tmp_path)
    hf, first = oracle.numbered(written)
    for grid in (Grid(), Grid(tp=2, dp=2, ep=2, etp=2)):
        for experts in ("grouped", "sequential", "old")[: 3 if family in OLD else 2]:
            by_rank = []
            for rank in range(grid.world):
                tensors = families.local_tensors(family, grid, rank, hf, experts)
                chunk = Chunk({name: tensor.shape for name, tensor in tensors.items()}, range(3))
                planned = plan(layout_of(_family_numbers(family), grid, rank), chunk, FAMILIES[family])
                for one in planned:
                    found = positions(one.map, first)
                    owned = found != oracle.PADDING
                    assert np.array_equal(found[owned], tensors[one.local].reshape(-1)[owned]), one.name
                by_rank.append(planned)
            assert canonical_shapes(one for planned in by_rank for one in planned) == written
            check_once(written, [[one.map for one in planned] for planned in by_rank])


def _check_rule(rule: Rule, name: str, grid: Grid, shapes: Shapes, expected: Any) -> None:
    """One tensor by one rule, on all ranks: ``expected`` gives the local ids from the canonical ones and the place."""
    hf, first = oracle.numbered(dict(shapes))
    by_rank = []
    for rank in range(grid.world):
        local = expected(hf, grid.place(rank))
        layout = layout_of(replace(numbers_of(Model()), experts=4), grid, rank)
        (one,) = plan(layout, Chunk({name: local.shape}, [0]), [rule])
        found = positions(one.map, first)
        assert np.array_equal(found[found != oracle.PADDING], local.reshape(-1)[found != oracle.PADDING])
        assert dict(one.placed.shapes) == dict(shapes)
        by_rank.append([one.map])
    check_once(shapes, by_rank)


@pytest.mark.parametrize("grid", [Grid(), Grid(tp=2, dp=2), Grid(tp=8)], ids=str)
def test_kinds_for_rules_of_ones_own(grid: Grid) -> None:
    """Kinds that no table uses: norms over all heads, swapped halves, rotary pairs."""
    column = lambda change, n=grid.tp: lambda hf, at: oracle.chunks(change(hf["w"]), n)[at["tp"]]  # noqa: E731
    for side, heads in (("q", 8), ("k", 2)):
        held = min(heads, grid.tp)
        shards = lambda hf, at, n=held: np.split(hf["w"], n)[at["tp"] * n // grid.tp]  # noqa: E731
        rule = Rule(f"x.{side}_norm", kinds.full_norm, ("w",))
        _check_rule(rule, f"x.{side}_norm", grid, {"w": (heads * 4,)}, shards)
    swapped = column(lambda w: np.concatenate([w[:, 6:], w[:, :6]], 1))
    _check_rule(Rule("eh", kinds.eh_proj_swapped, ("w",)), "eh", grid, {"w": (16, 12)}, swapped)
    pairs = column(lambda w: oracle.pairs_from_halves(w, 8, 4))
    _check_rule(Rule("q", kinds.rotary_pairs, ("w",)), "q", grid, {"w": (32, 5)}, pairs)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_before_the_family(transposed: bool) -> None:
    """[E, 2·ffn, hidden] and [E, hidden, ffn] where a checkpoint keeps experts stacked, or with rows last."""
    grid, turn = Grid(dp=4, ep=2, etp=2), (lambda t: np.swapaxes(t, 1, 2)) if transposed else (lambda t: t)
    plain = {"gate_up_proj": (4, 16, 5), "down_proj": (4, 5, 8)}
    prefix = "model.layers.0.mlp.experts."
    shapes = {prefix + name: turn(np.empty(shape)).shape for name, shape in plain.items()}
    hf, first = oracle.numbered(shapes)
    rules, by_rank = [replace(rule, transposed=transposed) for rule in STACKED_EXPERTS], []
    for rank in range(grid.world):
        at, tensors = grid.place(rank), {}
        for number in range(2):
            expert = at["ep"] * 2 + number
            gate, up = np.split(turn(hf[prefix + "gate_up_proj"])[expert], 2)
            down = oracle.chunks(turn(hf[prefix + "down_proj"])[expert], 2, 1)[at["etp"]]
            tensors[f"decoder.layers.0.mlp.experts.linear_fc1.weight{number}"] = oracle.gated_ranks(gate, up, 2)[
                at["etp"]
            ]
            tensors[f"decoder.layers.0.mlp.experts.linear_fc2.weight{number}"] = down
        layout = layout_of(replace(numbers_of(Model()), experts=4), grid, rank)
        chunk = Chunk({name: tensor.shape for name, tensor in tensors.items()}, [0])
        planned = plan(layout, chunk, [*rules, *FAMILIES["qwen3_moe"]])
        for one in planned:
            found = positions(one.map, first)
            assert np.array_equal(found, tensors[one.local].reshape(-1))
        by_rank.append(planned)
    assert canonical_shapes(one for planned in by_rank for one in planned) == shapes
    check_once(shapes, [[one.map for one in planned] for planned in by_rank])


def test_prediction_layers_on_the_last_stage() -> None:
    """Multi-token prediction: numbered on from the last layer, or apart; the second copy of the embedding counts for
    nothing."""
    local = {
        "embedding.word_embeddings.weight": (32, 16), "mtp.layers.1.eh_proj.weight": (16, 32),
        "mtp.layers.1.transformer_layer.mlp.linear_fc2.weight": (16, 16),
        "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc2.weight1": (16, 12),
    }  # fmt: skip
    layout = Layout(replace(numbers_of(Model(layers=4)), experts=4), pp=Cut(1, 2), ep=Cut(1, 2))
    names = {
        "deepseek_v3": ["model.layers.5.eh_proj.weight", "model.layers.5.mlp.down_proj.weight",
                        "model.layers.4.mlp.experts.3.down_proj.weight"],
        "qwen3_next": ["mtp.fc.weight", "mtp.layers.1.mlp.down_proj.weight",
                       "mtp.layers.0.mlp.experts.3.down_proj.weight"],
    }  # fmt: skip
    for family, expected in names.items():
        planned = plan(layout, Chunk(local, []), FAMILIES[family])
        assert sorted(canonical_shapes(planned)) == sorted(expected)
        assert all(one.map.boxes for one in planned)
