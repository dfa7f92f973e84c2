"""End to end, real trainers: families by layouts, several AdamW steps; a receiver holds the bits of a dense export.

Ranks are processes over gloo. Every version is rebuilt from the store alone, by a receiver that starts there and by one
that has followed since the first; tensor by tensor, buffers included, it is what ``save_pretrained`` of the gathered
model writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deltarefit import MemoryBaseline, Receiver, open_store
from deltarefit.asof import AsOf
from deltarefit.runlog import RunLog
from tests import helpers as h
from tests import refit_ranks as ranks
from tests.distributed import World, world
from tests.sources import bits_of, flat_bits
from tests.tiny_models import MODELS

Bits = Mapping[str, Any]
TIMEOUT_S = 100


def check_versions(store: Path, versions: list[int], dense: list[Bits]) -> None:
    """Each version, for a new receiver and for one that follows."""
    log, follower = RunLog.open(open_store(str(store))), MemoryBaseline()
    assert h.check_linear(log.store) == versions
    for version, expected in zip(versions, dense, strict=True):
        then: Any = AsOf(log, version)
        for target in (MemoryBaseline(), follower):
            receiver = Receiver(then, target, threads=1)
            assert receiver.follow(once=True) == version
            receiver.close()
            check_bits(log, target, expected, version)


def check_bits(log: RunLog, target: MemoryBaseline, expected: Bits, version: int) -> None:
    assert {entry.name for entry in log.catalog.tensors} == set(expected)
    for number, entry in enumerate(log.catalog.tensors):
        with target.window(number, 0, entry.numel) as (found, _):
            assert found.itemsize == expected[entry.name].itemsize, entry.name
            assert np.array_equal(found, expected[entry.name]), f"{entry.name} of version {version}"


def changed(dense: list[Bits]) -> int:
    return sum(int((one[name] != other[name]).sum()) for one, other in itertools.pairwise(dense) for name in one)


CASES = [
    *((name, "fsdp", "bfloat16") for name in MODELS),
    ("llama", "tp", "bfloat16"),
    ("llama", "mixed", "bfloat16"),
    ("qwen2-tied", "hsdp", "bfloat16"),
    ("gpt-oss", "hsdp", None),
    ("qwen3-moe", "experts", "bfloat16"),
    ("gpt2", "dim 1", None),
    ("qwen3-moe", "dim 1", "bfloat16"),
    ("qwen3-moe", "wrapped", "bfloat16"),
    ("phi3", "plain", "bfloat16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "dtype"), CASES)
def test_a_model_under_fsdp2(name: str, layout: str, dtype: str | None) -> None:
    job = world(4).start(ranks.refits, name, layout, dtype)
    answers = job.results(TIMEOUT_S)
    assert len({tuple(answer) for answer in answers}) == 1
    dense = [bits_of(load_file(job.directory / f"dense-{n}" / "model.safetensors")) for n in range(ranks.STEPS)]
    assert changed(dense), "nothing was trained"
    check_versions(job.directory / "store", list(answers[0]), dense)


# ------------------------------------------------------------------------------------ Megatron


@pytest.fixture(scope="module")
def megatron() -> Iterator[World]:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    made = World(4, "tests.megatron_ranks:preload")
    yield made
    made.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "narrow", "stages", "experts", "mixed"])
def test_a_model_under_megatron(megatron: World, name: str) -> None:
    """TP with DP, more TP than query groups, PP with VPP and a tied output layer, EP, EP with TP."""
    from tests.megatron_ranks import CASES as MODELS_OF
    from tests.test_source_megatron import Written, dense_export

    case = next(case for case in MODELS_OF if case.name == name)
    job = megatron.start(ranks.refits_megatron, name)
    answers = job.results(TIMEOUT_S)
    dense = []
    for step in range(ranks.STEPS):
        written = [Written(dict(np.load(job.directory / f"{rank}-{step}.npz"))) for rank in range(4)]
        tensors = dense_export(case, written, torch.bfloat16)
        dense.append({key: flat_bits(tensor) for key, tensor in tensors.items()})
    assert changed(dense), "nothing was trained"
    check_versions(job.directory / "store", list(answers[0]), dense)
