"""FSDP2 and DTensor models as sources: all ranks together hold every bit of a dense export, once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FullyShardedDataParallel

from deltarefit import affine
from deltarefit.errors import UsageError
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece
from deltarefit.sources.fsdp import FsdpSource
from deltarefit.sources.process_group import TorchExchange
from tests import fsdp_ranks as ranks
from tests.distributed import world
from tests.sources import Read, assert_same, bits_of, put_together, read_pieces
from tests.tiny_models import MODELS, build


def read_by_all(directory: Path, answers: dict[int, dict[str, Any]]) -> tuple[Catalog, dict[int, list[Read]]]:
    """What each rank read; they agree on the catalog and own every element once."""
    (text,) = {answer["catalog"] for answer in answers.values()}
    catalog = Catalog.from_bytes(text.encode())
    read: dict[int, list[Read]] = {}
    for rank, answer in answers.items():
        with np.load(directory / f"{rank}.npz") as arrays:
            pieces = [Piece(*piece) for piece in answer["pieces"]]
            read[rank] = [(piece, arrays[str(number)]) for number, piece in enumerate(pieces)]
    affine.check_coverage(catalog, [[piece for piece, _ in one] for one in read.values()])
    return catalog, read


def check_dense(directory: Path, catalog: Catalog, read: dict[int, list[Read]]) -> None:
    """Names, shapes and bits are those of the dense export."""
    dense = load_file(directory / "dense" / "model.safetensors")
    assert {e.name: e.shape for e in catalog.tensors} == {name: tuple(t.shape) for name, t in dense.items()}
    assert_same(put_together(catalog, [pair for one in read.values() for pair in one]), bits_of(dense))


def check_against_dense(*arguments: Any) -> tuple[Catalog, dict[int, list[Read]]]:
    """Run ``publishes`` on four ranks."""
    started = world(4).start(ranks.publishes, *arguments)
    catalog, read = read_by_all(started.directory, dict(enumerate(started.results(60))))
    check_dense(started.directory, catalog, read)
    return catalog, read


# ------------------------------------------------------------------------------------------ every bit of a dense export


@pytest.mark.parametrize("name", MODELS)
def test_every_family_as_bfloat16(name: str) -> None:
    """Float32 shards of prime vocabularies over four ranks, cast on the shard."""
    _, read = check_against_dense(name, "fsdp", "bfloat16", 100)
    assert all(read.values())


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [
        ("gpt-oss", "fsdp", None),
        ("qwen2-tied", "hsdp", "bfloat16"),
        ("deepseek-v3", "hsdp", None),
        ("llama", "tp", "bfloat16"),
        ("qwen3-moe", "experts", "bfloat16"),
        ("gpt-oss", "experts", None),
        ("gpt2", "dim 1", None),
        ("qwen3-moe", "dim 1", "bfloat16"),
        ("llama", "mixed", "bfloat16"),
        ("qwen3-moe", "wrapped", "bfloat16"),
        ("phi3", "plain", "bfloat16"),
    ],
)
def test_layouts(name: str, layout: str, dtype: str | None) -> None:
    check_against_dense(name, layout, dtype, None)


def test_strided_shards_were_uneven() -> None:
    """The case in which other rules for strided shards give other offsets did occur above."""
    found = world(4).run(ranks.strided_shards)[0]
    assert found
    assert all(size % 2 for size in found.values())


def test_two_of_four_ranks() -> None:
    started = world(4).start(ranks.publishes_on_two_of_four, "qwen3-moe")
    answers = {rank: answer for rank, answer in enumerate(started.results(60)) if answer}
    assert sorted(answers) == [0, 2]
    check_dense(started.directory, *read_by_all(started.directory, answers))


def test_one_process_without_a_process_group(tmp_path: Path) -> None:
    model = build("qwen3-moe")
    source = FsdpSource(model, dtype=None, files={"config.json": b"{}"})
    assert (source.exchange.rank, source.exchange.size, source.files()) == (0, 1, {"config.json": b"{}"})
    model.save_pretrained(tmp_path)
    found = put_together(source.catalog, read_pieces(source))
    assert_same(found, bits_of(load_file(tmp_path / "model.safetensors")))


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("qwen2-tied", None)])
def test_a_transformers_model_brings_its_config(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """A directory of the canonical tensors and the side files opens as the model that it is."""
    transformers = pytest.importorskip("transformers")
    model = build(name)
    before = model.config.to_json_string(use_diff=False)
    source = FsdpSource(model, dtype=dtype)
    for file, data in source.files().items():
        (tmp_path / file).write_bytes(data)
    assert model.config.to_json_string(use_diff=False) == before
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.architectures, config.dtype) == ([type(model).__name__], dtype or torch.float32)
    names, tensors = [entry.name for entry in source.catalog.tensors], model.state_dict()
    wanted = {name: tensors[name].to(dtype or torch.float32) for name in names}
    save_file(wanted, tmp_path / "model.safetensors", {"format": "pt"})
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened) is type(model)
    assert_same(bits_of(opened.state_dict()), bits_of({n: t.to(opened.dtype) for n, t in model.state_dict().items()}))


def test_side_files_are_the_models_own_or_the_callers() -> None:
    assert FsdpSource(build("llama"), files={}).files() == {}
    assert FsdpSource(torch.nn.Linear(2, 2)).files() == {}


def test_replicas_share_the_work() -> None:
    """Under HSDP, tensors above the limit are split between the two holders of each shard; small ones are not."""
    catalog, read = check_against_dense("qwen3-moe", "hsdp", None, None)
    elements = [sum(piece.length for piece, _ in one) for one in read.values()]
    assert max(elements) < 0.3 * catalog.numel
    owners = {
        entry.name: sum(any(piece.tensor == number for piece, _ in one) for one in read.values())
        for number, entry in enumerate(catalog.tensors)
    }
    assert owners["lm_head.weight"] == 4
    assert owners["model.norm.weight"] == 2


def test_a_tied_tensor_has_the_name_it_is_saved_under() -> None:
    source = FsdpSource(build("qwen2-tied"))
    entry = source.catalog.tensors[source.catalog.index["model.embed_tokens.weight"]]
    assert (entry.aliases, entry.dtype) == (("lm_head.weight",), "BF16")


def test_buffers_keep_their_dtype() -> None:
    source = FsdpSource(build("deepseek-v3"))
    dtypes = {entry.name: entry.dtype for entry in source.catalog.tensors}
    assert dtypes.pop("model.layers.1.mlp.gate.e_score_correction_bias") == "F32"
    assert set(dtypes.values()) == {"BF16"}


def test_dtypes_by_canonical_name() -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    source = FsdpSource(build("qwen3-moe"), dtype={name: torch.float16})
    dtypes = {entry.name: entry.dtype for entry in source.catalog.tensors}
    assert dtypes.pop(name) == "F16"
    assert set(dtypes.values()) == {"F32"}


def test_a_conversion_of_the_callers_own(tmp_path: Path) -> None:
    model = build("llama")
    source = FsdpSource(model, dtype=None, conversions=lambda t: {f"x.{n}": w.t() for n, w in t.items() if w.ndim == 2})
    found = put_together(source.catalog, read_pieces(source))
    assert_same(found, bits_of({f"x.{n}": w.t() for n, w in model.named_parameters() if w.ndim == 2}))
    plain = FsdpSource(build("qwen3-moe"), conversions=None)
    assert "model.layers.1.mlp.experts.gate_up_proj" in plain.catalog.index


def test_residuals_may_gather() -> None:
    started = world(4).start(ranks.residual)
    catalog, read = read_by_all(started.directory, dict(enumerate(started.results(60))))
    owners = [rank for rank, one in read.items() if any(piece.overwrite for piece, _ in one)]
    assert owners == [2]
    found = put_together(catalog, [pair for one in read.values() for pair in one])
    with np.load(started.directory / "expected.npz") as expected:
        assert np.array_equal(found["merged"], expected["merged"])


# ------------------------------------------------------------------------------------------ states of training


def test_gathered_parameters_are_resharded_first() -> None:
    assert world(4).run(ranks.after_a_forward_pass) == [["False", "", ""]] * 4


def test_a_parameter_that_is_sharded_anew_or_gone_is_named() -> None:
    for replicated, same, gone in world(4).run(ranks.sharded_anew):
        assert replicated.startswith(
            "BaseMismatch: w is sharded differently now; expected shape (8, 2), placements (Shar"
        )
        assert "; found shape (8, 2), placements (Replicate(),), mesh DeviceMesh" in replicated
        assert replicated.endswith(". Make a new source and a new Publisher on every rank.")
        assert same == ""
        assert gone.startswith("BaseMismatch: w is gone from the model")


def test_an_optimizer_step_while_held_is_named() -> None:
    for said in (text for one in world(4).run(ranks.written_while_held) for text in one):
        assert said.startswith("IntegrityError: ")
        assert "was written to while it was being published" in said


def test_replicas_that_drift_are_named_where_they_drift() -> None:
    said = world(4).run(ranks.drifts)
    assert [one.pop("fine") for one in said] == [""] * 4
    assert [one.pop("fine again") for one in said] == [""] * 4
    shard, buffer = ([one[key] for one in said] for key in ("wrong on 3", "wrong on 2"))
    assert [bool(text) for text in shard] == [False, False, False, True]
    assert "rank 3 holds other bits" in shard[3]
    assert "found 0.weight (rank 1)." in shard[3]
    assert [bool(text) for text in buffer] == [False, False, True, False]
    assert "found steps (rank 0)." in buffer[2]


def test_replicas_are_checked_as_often_as_asked() -> None:
    said = world(4).run(ranks.checks_now_and_then)
    assert [[bool(text) for text in one] for one in said] == [
        [rank == 1 and hold in (0, 3) for hold in range(5)] for rank in range(4)
    ]
    assert "0.bias (rank 0)" in said[1][0]


def test_a_silent_rank_is_named() -> None:
    said = world(4).run(ranks.silent_peer)
    assert ["UnavailableError: rank 0 did not take part" in text for text in said] == [False, True, True, True]


def test_a_key_deleted_while_it_is_asked_for_says_nothing() -> None:
    """Between "is it there" and "what is it" its writer may delete it; the store then gives empty bytes."""
    store = torch.distributed.HashStore()
    exchange = TorchExchange(store, 0, 1)
    exchange._store.set("ask", "")
    assert exchange.get("ask") is None
    exchange.put("ask", b"1")
    assert exchange.get("ask") == b"1"


def test_ranks_talk_through_the_key_value_store() -> None:
    heard = [[rank, 0, 255] for rank in range(4)]
    assert world(4).run(ranks.talks) == [[rank, 4, heard, True, True] for rank in range(4)]


# ------------------------------------------------------------------------------------------ refused


REFUSALS = {
    "partial": "UsageError: w cannot be published; expected Shard or Replicate; found P",
    "unpaired": "UsageError: w is sharded in an order that cannot be told; expected one of [1]; found split factor 2",
    "shape": "UsageError: w is sharded by rules that are not known here; expected a local shape (2, 2); found (3, 2)",
    "strides": "UsageError: tensors that cannot be published; found w is not contiguous",
    "mesh": "UsageError: w: copies of its mesh do not fill the ranks that publish; found",
    "conversions": "UsageError: unknown conversions; expected 'auto', None or a function; found 'all'",
    "opaque": "UsageError: tensors that the conversion does not merely copy",
    "exchange": "UsageError: the exchange is not one of the ranks that publish",
    "ranks": "UsageError: the exchange is not one of the ranks that publish",
    "good": "",
}


def test_what_cannot_be_published_is_refused_by_name() -> None:
    for rank, said in enumerate(world(4).run(ranks.refusals)):
        assert sorted(said) == sorted(REFUSALS)
        for case, words in REFUSALS.items():
            assert said[case].startswith(words), (rank, case)
            assert bool(said[case]) == bool(words), (rank, case, said[case])
    assert "x (made by aten.add.Tensor)" in said["opaque"]


def test_a_mesh_without_this_rank_is_refused() -> None:
    inside, outside = "w: copies of its mesh", "w: this rank is not in the tensor's mesh"
    said = world(4).run(ranks.outside_of_the_mesh)
    assert [outside in text for text in said] == [False, False, True, True]
    assert not any(inside in text for text in said)


def test_flat_parameters_are_refused() -> None:
    class Flat(FullyShardedDataParallel):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    with pytest.raises(UsageError, match="sharded with FSDP1"):
        FsdpSource(torch.nn.Sequential(Flat()))


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"bias is on the meta device.*weight is on the meta device"):
        FsdpSource(model)


def test_a_transformers_that_does_not_say_how_it_saves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    with pytest.raises(UsageError, match="does not say how it saves models"):
        FsdpSource(build("llama"))
    FsdpSource(build("llama"), conversions=None)
