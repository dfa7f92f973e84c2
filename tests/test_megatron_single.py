"""``MegatronSource`` over a stand-in for a Megatron model on one rank: what it takes, what it refuses, and how ranks
with different tensors agree on one catalog. Needs no Megatron-Core."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from deltarefit.errors import BaseMismatch, UnavailableError, UsageError
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.sources import megatron_kinds as kinds
from deltarefit.sources.megatron import MegatronSource, numbers_of
from deltarefit.sources.megatron_catalog import agree
from deltarefit.sources.megatron_kinds import Layout, Numbers, Rule
from deltarefit.sources.megatron_layouts import Cut, DeltaNet, Heads, Mamba
from deltarefit.sources.megatron_names import FAMILIES
from tests.ranks import Board
from tests.sources import flat_bits, put_together, read_pieces

HIDDEN, VOCAB, PADDED = 8, 21, 32


def config(**more: Any) -> SimpleNamespace:
    """What a source asks of a ``TransformerConfig``."""
    return SimpleNamespace(**{
        "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4, "num_layers": 1, "gated_linear_unit": True,
        "layernorm_zero_centered_gamma": False, "num_moe_experts": 4, "hidden_size": HIDDEN, **more,
    })  # fmt: skip


class Named(torch.nn.Module):
    """A module tree that has exactly the given tensors, under their dotted names."""

    def add(self, name: str, tensor: torch.Tensor, *, buffer: bool = False, persistent: bool = True) -> None:
        first, _, rest = name.partition(".")
        if rest:
            if first not in self._modules:
                self.add_module(first, Named())
            self.get_submodule(first).add(rest, tensor, buffer=buffer, persistent=persistent)
        elif buffer:
            self.register_buffer(first, tensor, persistent)
        else:
            self.register_parameter(first, torch.nn.Parameter(tensor))


def model(**options: Any) -> Named:
    """One layer with experts, whose router has the buffers that Megatron's has."""
    built = Named()
    layer = "decoder.layers.0."
    tensors = {
        "embedding.word_embeddings.weight": (PADDED, HIDDEN), "output_layer.weight": (PADDED, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,), layer + "self_attention.linear_qkv.weight": (32, HIDDEN),
        layer + "mlp.router.weight": (4, HIDDEN),
        **{layer + f"mlp.experts.linear_fc2.weight{n}": (HIDDEN, 12) for n in range(4)},
    }  # fmt: skip
    for name, shape in tensors.items():
        built.add(name, torch.randn(shape, generator=torch.Generator().manual_seed(len(name))))
    built.add(layer + "mlp.router.expert_bias", torch.randn(4), buffer=True)
    built.add(layer + "mlp.router.local_tokens_per_expert", torch.zeros(4), buffer=True, persistent=False)
    built.get_submodule("decoder.layers.0").layer_number = 1
    built.decoder.layers = torch.nn.ModuleList([built.decoder.layers.get_submodule("0")])
    built.config, built.share_embeddings_and_output_weights = config(**options), False
    return built


HF = {"model_type": "glm4_moe", "vocab_size": VOCAB, "tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's parallel state of a single rank."""
    state = ModuleType("parallel_state")
    for group in ("tensor_model", "pipeline_model", "data", "expert_model", "expert_tensor", "expert_data"):
        setattr(state, f"get_{group}_parallel_rank", lambda *_: 0)
        setattr(state, f"get_{group}_parallel_world_size", lambda *_: 1)
    core = ModuleType("megatron.core")
    core.parallel_state = state  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)


def published(source: MegatronSource) -> dict[str, Any]:
    return put_together(source.catalog, read_pieces(source))


def entry(source: MegatronSource, name: str) -> TensorEntry:
    return source.catalog.tensors[source.catalog.index[name]]


BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"


def test_parameters_and_persistent_buffers_are_published() -> None:
    """In bfloat16, expert biases in float32, without padding; counters that are not persistent are not."""
    one = model()
    source = MegatronSource(one, hf_config=HF)
    found = published(source)
    assert len(found) == 3 + 3 + 1 + 4 + 1
    assert {e.dtype for e in source.catalog.tensors if e.name != BIAS} == {"BF16"}
    assert (found[BIAS] == flat_bits(one.decoder.layers[0].mlp.router.expert_bias)).all()
    embedding = one.embedding.word_embeddings.weight[:VOCAB]
    assert (found["model.embed_tokens.weight"] == flat_bits(embedding.to(torch.bfloat16))).all()


def test_dtypes_by_pattern() -> None:
    name = "model.layers.0.mlp.gate.weight"
    source = MegatronSource(model(), hf_config=HF, dtypes={"*.gate.weight": torch.float32, BIAS: torch.float16})
    assert (entry(source, name).dtype, entry(source, BIAS).dtype) == ("F32", "F16")
    assert entry(source, "lm_head.weight").dtype == "BF16"


def test_norms_stored_minus_one_are_published_plus_one() -> None:
    """The sum is rounded in the trainer's precision, then in the checkpoint's."""
    one = model(layernorm_zero_centered_gamma=True)
    found = published(MegatronSource(one, hf_config=HF))["model.norm.weight"]
    assert (found == flat_bits((one.decoder.final_layernorm.weight + 1).to(torch.bfloat16))).all()


def test_rebound_tensors_and_buffers_of_new_precision_are_found() -> None:
    """Half-precision wrappers turn the expert bias into bfloat16, and Megatron turns it back when it first runs."""
    one = model().bfloat16()
    source = MegatronSource(one, hf_config=HF)
    router = one.decoder.layers[0].mlp.router
    published(source)
    router.expert_bias.data = router.expert_bias.data.float() + 0.001
    router.weight = torch.nn.Parameter(torch.ones_like(router.weight))
    found = published(source)
    assert (found[BIAS] == flat_bits(router.expert_bias)).all()
    assert (found["model.layers.0.mlp.gate.weight"] == flat_bits(router.weight)).all()
    router.weight = torch.nn.Parameter(router.weight.float())
    with pytest.raises(BaseMismatch, match=r"router\.weight"):
        published(source)


class Lazy(torch.nn.Module):
    """Data parallelism that brings new parameters only when it must, as Megatron's may."""

    def __init__(self, module: torch.nn.Module, late: bool) -> None:
        super().__init__()
        self.module, self.ddp_config = module, SimpleNamespace(overlap_param_gather=late)

    def start_param_sync(self, *, force_sync: bool) -> None:
        assert force_sync
        with torch.no_grad():
            self.module.decoder.final_layernorm.weight.fill_(3)


@pytest.mark.parametrize("late", [True, False])
def test_parameters_are_gathered_before_they_are_read(late: bool) -> None:
    """Only where Megatron puts that off; behind another wrapper as well."""
    one = model()
    outer = torch.nn.Module()
    outer.module = Lazy(one, late)
    source = MegatronSource([outer], hf_config=HF)
    before = one.decoder.final_layernorm.weight.detach().clone()
    expected = torch.full_like(before, 3) if late else before
    assert (published(source)["model.norm.weight"] == flat_bits(expected.to(torch.bfloat16))).all()


def test_rules_of_ones_own_come_first() -> None:
    one = model()
    one.add("decoder.extra", torch.ones(6))
    with pytest.raises(UsageError, match=r"1 tensors.*decoder\.extra \(6,\).*no rule"):
        MegatronSource(one, hf_config=HF)
    names = [Rule("decoder.extra", kinds.replicated, ("model.extra",)), *FAMILIES["glm4_moe"]]
    assert entry(MegatronSource(one, hf_config=HF, names=names), "model.extra").shape == (6,)


def test_an_unknown_buffer_is_refused() -> None:
    one = model()
    one.add("decoder.running_mean", torch.ones(6), buffer=True)
    with pytest.raises(UsageError, match=r"decoder\.running_mean \(6,\)"):
        MegatronSource(one, hf_config=HF)


@pytest.mark.parametrize(
    ("options", "hf", "found"),
    [
        ({}, {"tie_word_embeddings": True}, r"disagree whether the output layer is tied"),
        ({}, {"vocab_size": None}, r"has no vocab_size"),
        ({}, {"model_type": "vicuna"}, r"no names are known for the model family 'vicuna'"),
        ({"heterogeneous_block_specs": True}, {}, r"layers of different sizes"),
        ({"num_query_groups": 4}, {}, r"linear_qkv.*another shape"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], hf: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        MegatronSource(model(**options), hf_config={**HF, **hf})


def test_other_models_and_other_worlds_are_refused() -> None:
    with pytest.raises(UsageError, match=r"expected GPTModel or MambaModel, with a decoder; found Linear"):
        MegatronSource(torch.nn.Linear(2, 2), hf_config=HF)
    with pytest.raises(UsageError, match=r"expected 1 ranks in Megatron's parallel state; found 2 in the exchange"):
        MegatronSource(model(), hf_config=HF, exchange=Board(2).ranks[0])


def test_numbers_from_configurations() -> None:
    more = {
        "q_lora_rank": 3, "kv_lora_rank": 5, "qk_pos_emb_head_dim": 2, "attention_output_gate": True,
        "moe_mlp_glu_interleave_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 6, "linear_value_head_dim": 7, "mamba_head_dim": 4, "mamba_num_groups": 2,
        "mamba_state_dim": 9, "mamba_num_heads": None,
    }  # fmt: skip
    found = numbers_of(config(**more), SimpleNamespace(vocab_size=VOCAB), [])
    assert found == Numbers(
        VOCAB, 1, Heads(4, 2, 4, True), experts=4, interleave=32, q_lora=3, kv_lora=7, delta=DeltaNet(2, 4, 6, 7),
        mamba=Mamba(4, 4, 2, 9),
    )  # fmt: skip
    assert numbers_of(config(), HF, []) == Numbers(VOCAB, 1, Heads(4, 2, 4), experts=4)


# ------------------------------------------------------------------------------------ one catalog


def _layout(pp: Cut = Cut(), ep: Cut = Cut(), edp: Cut = Cut()) -> Layout:  # noqa: B008 - frozen
    return Layout(Numbers(VOCAB, 1, Heads(4, 2, 4)), pp=pp, ep=ep, edp=edp)


def _entries(*names: str, dtype: str = "BF16") -> list[TensorEntry]:
    return [TensorEntry(name, dtype, (2, 3)) for name in sorted(names)]


def test_stages_and_experts_agree_on_one_catalog() -> None:
    """Each rank knows some tensors; of those that know the same, one speaks."""
    board, spoken = Board(8), []
    for exchange in board.ranks:
        exchange.put = lambda key, data: spoken.append(key) or board.said.update({key: data})  # type: ignore[method-assign]
    places = [(pp, ep, edp) for pp in range(2) for ep in range(2) for edp in range(2)]

    def one(rank: int) -> Catalog:
        pp, ep, edp = places[rank]
        own = _entries("shared", f"dense {pp}", f"expert {pp} {ep}")
        return agree(own, _layout(Cut(pp, 2), Cut(ep, 2), Cut(edp, 2)), board.ranks[rank], 20)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    assert all(catalog == found[0] for catalog in found)
    assert sorted(entry.name for entry in found[0].tensors) == sorted(
        ["shared", "dense 0", "dense 1", *(f"expert {pp} {ep}" for pp in range(2) for ep in range(2))]
    )
    assert sorted(spoken) == [f"catalog/{number}" for number in range(4)]


def test_a_silent_stage_and_a_disagreement_are_reported() -> None:
    board = Board(2)
    with pytest.raises(UnavailableError, match=r"did not say which tensors it has; expected catalog/1"):
        agree(_entries("a"), _layout(Cut(0, 2)), board.ranks[0], 0.05)
    with pytest.raises(UsageError, match=r"ranks disagree on a"):
        agree(_entries("a", dtype="F32"), _layout(Cut(1, 2)), board.ranks[1], 20)
