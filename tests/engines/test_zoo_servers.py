"""The zoo and the servers themselves, without a refit: what the other tests of this directory stand on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engines import zoo
from tests.engines.servers import SglangServer, VllmServer, fresh_generate

PROMPTS = [[5, 6, 7, 8], [50, 9]]


def bits(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor.view(torch.int16)
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_seed_decides_every_bit_of_a_model(name: str, tmp_path: Path) -> None:
    once, again, other = (bits(zoo.save(name, tmp_path / str(i), seed)) for i, seed in enumerate([1, 1, 2]))

    assert once.keys() == again.keys() == other.keys()
    assert all(torch.equal(once[tensor], again[tensor]) for tensor in once)
    assert not [tensor for tensor in once if torch.equal(once[tensor], other[tensor])]
    assert not [tensor for tensor in once if once[tensor].unique().numel() == 1], "equal elements hide misplaced ones"


@pytest.fixture(scope="module")
def vllm(checkpoint: Callable[..., Path]) -> Iterator[VllmServer]:
    with VllmServer(checkpoint("llama"), extension=None) as server:
        yield server


@pytest.fixture(scope="module")
def sglang(checkpoint: Callable[..., Path]) -> Iterator[SglangServer]:
    with SglangServer(checkpoint("llama"), loader=None) as server:
        yield server


def test_a_vllm_server_says_what_a_fresh_engine_says(vllm: VllmServer, checkpoint: Callable[..., Path]) -> None:
    said = vllm.generate(PROMPTS, max_tokens=16)

    assert [len(tokens) for tokens in said] == [16, 16]
    assert said == fresh_generate(checkpoint("llama"), PROMPTS, max_tokens=16, extension=None)
    assert said != fresh_generate(checkpoint("llama", 1), PROMPTS, max_tokens=16, extension=None)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_stream_gives_the_tokens_of_a_reply(engine: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(engine)

    with_stream = server.stream(PROMPTS[0], max_tokens=64)

    assert len(with_stream.wait_for(5)) >= 5
    assert with_stream.result() == server.generate(PROMPTS[:1], max_tokens=64)[0]


def test_a_seed_decides_a_random_reply(vllm: VllmServer) -> None:
    one, same, other = (vllm.generate(PROMPTS, temperature=1.0, seed=seed, max_tokens=16) for seed in (3, 3, 4))

    assert one == same
    assert one != other


def test_a_stream_waits_while_vllm_is_paused(vllm: VllmServer) -> None:
    whole = vllm.generate(PROMPTS[:1], max_tokens=1000)[0]
    stream = vllm.stream(PROMPTS[0], max_tokens=1000)
    stream.wait_for(5)

    vllm.post("/pause", mode="keep", clear_cache="false")
    held = len(stream.tokens)
    with pytest.raises(RuntimeError, match="of 1000 tokens"):
        stream.wait_for(1000, timeout_s=1.0)
    assert held <= len(stream.tokens) < 1000
    vllm.post("/resume")

    assert stream.result() == whole


def test_a_killed_server_leaves_no_process_and_starts_again(vllm: VllmServer) -> None:
    assert len(vllm.processes()) >= 2, "the API server and the engine"

    vllm.kill()

    assert not vllm.processes()
    assert not vllm.healthy()
    vllm.start()
    assert vllm.generate(PROMPTS, max_tokens=4)
