"""``MegatronSource`` on real Megatron-Core models, trained on the CPU under several parallel layouts: the bits that the
ranks publish are those of a dense export, and the model that they make is the model that was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deltarefit.affine import check_coverage
from deltarefit.errors import UsageError
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece
from deltarefit.sources.megatron import MegatronSource
from tests import megatron_oracle as oracle
from tests.distributed import World
from tests.megatron_ranks import CASES, TOKENS, WORLD, Case, run
from tests.sources import Read, flat_bits, put_together

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

TIMEOUT_S = 100
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Written:
    """What one rank wrote down."""

    arrays: dict[str, Any]

    def catalog(self, dtype: str) -> Catalog:
        return Catalog.from_bytes(self.arrays[f"{dtype}/catalog"].tobytes())

    def pieces(self, dtype: str) -> list[Read]:
        count = sum(name.startswith(f"{dtype}/") and name.endswith("/piece") for name in self.arrays)
        rows = [self.arrays[f"{dtype}/{n}/piece"].tolist() for n in range(count)]
        pieces = [Piece(*row[:6], bool(row[6])) for row in rows]
        return [(piece, self.arrays[f"{dtype}/{n}/bits"]) for n, piece in enumerate(pieces)]

    def local(self, chunk: int) -> dict[str, torch.Tensor]:
        prefix = f"local/{chunk}/"
        return {k.removeprefix(prefix): torch.from_numpy(v) for k, v in self.arrays.items() if k.startswith(prefix)}


@dataclass(frozen=True)
class Result:
    """What all ranks wrote down, and what they found out about a copy that drifted."""

    written: list[Written]
    drift: list[str]


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Result]]:
    """All cases, by all ranks."""
    world, found = World(WORLD, "tests.megatron_ranks:preload"), {}
    try:
        for case in CASES:
            job = world.start(run, case.name)
            answers = job.results(TIMEOUT_S)
            found[case.name] = Result([_load(job.directory / f"{rank}.npz") for rank in range(WORLD)], answers)
        yield found
    finally:
        world.kill()


def _load(path: Path) -> Written:
    with np.load(path) as file:
        return Written(dict(file))


def dense_export(case: Case, written: list[Written], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The checkpoint by way of the oracle: every local element goes where import code would have taken it from. Copies
    must agree."""
    shapes = case.model.canonical()
    hf, first = oracle.numbered(shapes)
    total = sum(tensor.size for tensor in hf.values())
    values, seen = torch.zeros(total), torch.zeros(total, dtype=torch.bool)
    for rank in range(WORLD):
        for chunk, (_, expected) in enumerate(oracle.local_tensors(case.model, case.grid, rank, hf)):
            local = written[rank].local(chunk)
            assert sorted(local) == sorted(expected)
            for name, ids in expected.items():
                places, real = torch.from_numpy(ids.reshape(-1)), torch.from_numpy(ids.reshape(-1) != oracle.PADDING)
                places, mine = places[real], local[name].reshape(-1)[real]
                assert torch.equal(values[places][seen[places]], mine[seen[places]]), f"copies of {name} differ"
                values[places], seen[places] = mine, True
    assert seen.all()
    found = {name: values[first[name] :][: hf[name].size].reshape(shape) for name, shape in shapes.items()}
    return {name: tensor if "correction_bias" in name else tensor.to(dtype) for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_published_bits_are_those_of_a_dense_export(case: Case, dtype: str, results: dict[str, Result]) -> None:
    """Every element once over all ranks; names, shapes, dtypes and bits; the same catalog on every rank."""
    written = results[case.name].written
    catalog = written[0].catalog(dtype)
    assert all(one.catalog(dtype) == catalog for one in written)
    check_coverage(catalog, [[piece for piece, _ in one.pieces(dtype)] for one in written])
    found = put_together(catalog, [read for one in written for read in one.pieces(dtype)])
    expected = dense_export(case, written, DTYPES[dtype])
    assert {entry.name: entry.shape for entry in catalog.tensors} == {n: tuple(t.shape) for n, t in expected.items()}
    for name, tensor in expected.items():
        assert np.array_equal(found[name], flat_bits(tensor)), name
    assert all(one.pieces(dtype) for one in written)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_published_model_thinks_alike(case: Case, results: dict[str, Result], tmp_path: Path) -> None:
    """A transformers model with the published tensors gives the trainer's logits: the places are right in meaning, not
    only the same as in the oracle."""
    transformers = pytest.importorskip("transformers")
    written = results[case.name].written
    read = put_together(written[0].catalog("float32"), [r for one in written for r in one.pieces("float32")])
    shapes = {entry.name: entry.shape for entry in written[0].catalog("float32").tensors}
    state = {name: torch.from_numpy(bits.view(np.float32).copy()).reshape(shapes[name]) for name, bits in read.items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**case.hf_config, "architectures": [], "use_cache": False}))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, case.model.vocab, TOKENS))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].numpy()
    theirs = next(one.arrays["logits"] for one in written if "logits" in one.arrays)[:, : case.model.vocab]
    assert np.abs(logits).max() > 0.5
    assert np.abs(logits - theirs).max() < 1e-4 * np.abs(logits).max()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_drifted_copy_is_found(case: Case, results: dict[str, Result]) -> None:
    """One bit of a norm, on the last rank, which names it; whoever shares nothing with that rank is content."""
    *others, last = results[case.name].drift
    layer = case.model.layers - 1
    assert f"decoder.layers.{layer}.input_layernorm.weight (rank " in last
    assert others == ["all alike"] * (WORLD - 1)


def test_dtypes_that_are_none_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    wrong: Any = "bfloat16"
    with pytest.raises(UsageError, match=r"dtype is not a torch\.dtype; found 'bfloat16'"):
        MegatronSource(model, hf_config={}, dtype=wrong)
    with pytest.raises(UsageError, match=r"dtype of \*.gate.weight is not a torch.dtype; found 'bfloat16'"):
        MegatronSource(model, hf_config={}, dtypes={"*.gate.weight": wrong})
