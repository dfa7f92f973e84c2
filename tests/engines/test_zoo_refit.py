"""Every model of the zoo, refitted in a live engine: each tensor has the bits that a dense native load gives.

A checkpoint and a changed one are two versions of a run. An engine that was started from the first follows the run; one
that is started from the second shares nothing with it. Both tell the SHA-256 of everything that their models keep, on
every rank, also what they derive from weights; and what they say.
"""

from __future__ import annotations

import collections
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltarefit import Publisher
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.stores import open_store
from tests.engines import zoo
from tests.engines.refitted import Child

PROMPTS = [([5, 6, 7, 8], 0.0, None), ([20, 30, 40], 0.0, None)]
DENSITY = 0.1
NAN, MINUS_ZERO = 0x7FA5, -0x8000
"""A NaN with a payload, and -0.0, as bfloat16 bits."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embeddings.weight")
TP2 = ("qwen2-tied", "qwen3-moe", "deepseek-v3")


def change(checkpoint: Path, into: Path, seed: int = 1) -> Path:
    """A copy with low bits flipped in a tenth of the elements of every tensor, and in the embedding of the last token,
    which nobody says, a NaN with a payload and a -0.0."""
    shutil.copytree(checkpoint, into)
    random, planted = torch.Generator().manual_seed(seed), False
    for file in sorted(into.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            bits = tensor.view(-1).view(torch.int16)
            chosen = torch.rand(bits.shape, generator=random) < DENSITY
            bits[chosen] ^= torch.randint(1, 64, bits.shape, generator=random, dtype=torch.int16)[chosen]
            if name.endswith(EMBEDDINGS):
                bits[-1], bits[-2], planted = NAN, MINUS_ZERO, True
        save_file(tensors, file, metadata={"format": "pt"})
    assert planted
    return into


def refit(
    child: Child, name: str, checkpoint: Path, scratch: Path, options: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Publish both checkpoints, and have an engine in ``child`` follow, which was started with ``options`` besides what
    the model needs; what ``refitted`` answers."""
    store = open_store(str(scratch / "store"))
    changed = change(checkpoint, scratch / "changed")
    publisher = Publisher(store, CheckpointSource(checkpoint))
    publisher.publish(0)
    publisher.source = CheckpointSource(changed)
    published = publisher.publish(1)
    publisher.close()
    answer = child.ask(
        checkpoint=str(checkpoint), changed=str(changed), store=str(scratch / "store"), prompts=PROMPTS,
        max_tokens=8, spool=str(scratch / "spool"), options={**zoo.VLLM_OPTIONS.get(name, {}), **(options or {})},
    )  # fmt: skip
    return {**answer, "published": [published.version, published.digest]}


def summary(answer: dict[str, Any]) -> str:
    """How the tensors reached the engine: modes with counts and reasons."""
    if "refused" in answer:
        return str(answer["refused"])
    counts = collections.Counter((mode, reason) for _, mode, reason, _ in answer["rows"])
    parts = (f"{n} {mode}{f' ({reason})' if reason else ''}" for (mode, reason), n in counts.most_common())
    seconds = {phase: round(s, 4) for type_, phase, version, s in answer["events"] if version == 2 and s}
    return f"{', '.join(parts)}; {json.dumps(seconds)}"


def check(name: str, answer: dict[str, Any]) -> None:
    """The refitted engine is the fresh one, bit for bit, and its digest is the log's."""
    assert "refused" not in answer, answer["refused"]
    refitted, fresh, before = answer["refitted"], answer["fresh"], answer["before"]
    assert [answer["version"], refitted["digest"]] == answer["published"]
    assert len(refitted["sums"]) == len(fresh["sums"]) == len(before["sums"])
    for rank, (found, expected) in enumerate(zip(refitted["sums"], fresh["sums"], strict=True)):
        assert found.keys() == expected.keys()
        assert not [key for key in expected if found[key] != expected[key]], f"rank {rank}"
    assert before["sums"] != fresh["sums"]
    assert "seed" not in [phase for _, phase, _, _ in answer["events"]], "a whole load is no refit"
    assert refitted["tokens"] == fresh["tokens"]


@pytest.fixture(scope="module")
def one() -> Iterator[Child]:
    with Child() as child:
        yield child


@pytest.fixture(scope="module")
def two() -> Iterator[Child]:
    with Child(tp=2) as child:
        yield child


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_refit_is_a_dense_load(name: str, one: Child, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    answer = refit(one, name, checkpoint(name), tmp_path)
    print(f"{name}: {summary(answer)}")
    check(name, answer)


@pytest.mark.parametrize("name", TP2)
def test_a_refit_of_two_ranks_is_a_dense_load(
    name: str, two: Child, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    answer = refit(two, name, checkpoint(name), tmp_path)
    print(f"{name}: {summary(answer)}")
    check(name, answer)


@pytest.mark.parametrize(("dtype", "mode"), [("float16", "opaque"), ("float32", "xor-shifted")])
def test_an_engine_that_serves_another_dtype(
    dtype: str, mode: str, one: Child, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """float32 keeps the bits of bfloat16, and more; what float16 does not is made anew by the engine's loader."""
    answer = refit(one, "llama", checkpoint("llama"), tmp_path, {"dtype": dtype})
    assert {found for _, found, _, _ in answer["rows"]} == {mode}
    check("llama", answer)
