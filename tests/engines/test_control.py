"""The controls and the command line against real servers: one vLLM and one SGLang server, each refitted once."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltarefit.errors import UnavailableError
from deltarefit.targets.http import HttpClient
from deltarefit.targets.sglang_control import SglangControl
from deltarefit.targets.vllm_control import VllmControl
from tests.desk import Desk, Following
from tests.engines.servers import Server, SglangServer, VllmServer, free_port, fresh_generate

PROMPT = [5, 6, 7, 8]
LONG = 600


class Place:
    """A run with one version, and an engine that has loaded that; commands run in ``desk``."""

    def __init__(self, root: Path, first: Path, server: Server, option: str) -> None:
        self.root, self.server, self.option = root, server, option
        self.desk = Desk(root, [], {"DELTAREFIT_RUN_DIR": str(root / "run")})
        self.store = root / "store"
        self.publish(first)

    def publish(self, checkpoint: Path) -> None:
        done = self.desk.run("publish", checkpoint, "--to", self.store, "--baseline", self.root / "baseline", "-q")
        assert done.code == 0, done.err

    def call(self, verb: str) -> dict[str, Any]:
        """The JSON of a verb that must succeed."""
        done = self.desk.run(verb, self.store, self.option, self.server.url, "--json")
        assert done.code == 0, done.err
        return done.body


def asked(port: int) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def vllm(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("v")
    (root / "tmp").mkdir()
    with VllmServer(checkpoint("llama"), env={"DELTAREFIT_RUN_DIR": str(root / "run")}) as server:
        yield Place(root, checkpoint("llama"), server, "--vllm")


@pytest.fixture(scope="module")
def sglang(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("s")
    (root / "tmp").mkdir()
    with SglangServer(checkpoint("qwen3-moe"), env={"DELTAREFIT_RUN_DIR": str(root / "run")}) as server:
        yield Place(root, checkpoint("qwen3-moe"), server, "--sglang")


def refitted(place: Place, second: Path) -> tuple[list[int], dict[str, Any]]:
    """Follow while a request runs, publish ``second``; the tokens of that request, and what the follower said."""
    stream = place.server.stream(PROMPT, max_tokens=LONG)
    stream.wait_for(5)
    port = free_port()
    arguments = (place.store, place.option, place.server.url, "--poll", 0.05, "--json", "--ready", f"127.0.0.1:{port}")
    with Following(place.desk, *arguments) as following:
        following.wait_for('"version":1')
        until(lambda: asked(port)[0] == 200)
        place.publish(second)
        following.wait_for('"version":2')
        until(lambda: asked(port)[0] == 200 and asked(port)[1]["version"] == 2)
        assert following.end(signal.SIGTERM) == 0
        bodies = [json.loads(line) for line in following.out]
    assert [body["version"] for body in bodies] == [1, 2]
    return stream.result(), bodies[-1]


def test_vllm_end_to_end(vllm: Place, checkpoint: Callable[..., Path]) -> None:
    """An engine of version 1 is adopted, and refitted under a running request, which loses no token."""
    report = vllm.call("doctor")
    assert (report["ranks"], report["serves"], report["holds"]) == (1, "default", "no version yet")
    assert [one["mode"] for one in report["placements"]] == ["xor"]
    assert vllm.call("verify")["version"] == 1
    before = vllm.server.generate([PROMPT])

    tokens, body = refitted(vllm, checkpoint("llama", 1))

    assert len(tokens) == LONG
    assert set(body["pause"]) == {"quiesce", "write", "verify", "cache", "resume"}
    assert vllm.call("verify")["served"] == "2"
    after = vllm.server.generate([PROMPT])
    assert after == fresh_generate(checkpoint("llama", 1), [PROMPT])
    assert after != before


def test_vllm_stands_still_and_forgets(vllm: Place) -> None:
    control = VllmControl(vllm.server.url)
    stream = vllm.server.stream(PROMPT, max_tokens=LONG)
    stream.wait_for(5)
    control.pause()
    control.pause()
    control.check()
    held = len(stream.tokens)
    time.sleep(0.5)
    assert len(stream.tokens) == held < LONG
    control.reset_cache()
    control.resume()
    control.resume()
    assert stream.result() == vllm.server.generate([PROMPT], max_tokens=LONG)[0]


def test_vllm_aborts_or_waits_if_it_is_told_so(vllm: Place) -> None:
    for mode, ends in (("abort", False), ("wait", True)):
        control = VllmControl(vllm.server.url, in_flight=mode)
        stream = vllm.server.stream(PROMPT, max_tokens=LONG)
        stream.wait_for(5)
        control.pause()
        assert (len(stream.result()) == LONG) is ends
        control.resume()


def test_vllm_asleep(vllm: Place) -> None:
    control = VllmControl(vllm.server.url)
    vllm.server.post("/sleep", level=0, mode="keep")
    with pytest.raises(UnavailableError, match="asleep"):
        control.check()
    vllm.server.post("/wake_up")
    control.check()


def test_a_method_that_workers_do_not_have(vllm: Place) -> None:
    """So does vLLM answer where our extension is missing: the name of the method is in it."""
    reply = HttpClient(vllm.server.url, "vLLM").request("POST", "/collective_rpc", {"method": "no_such_method"})
    assert reply.status == 500
    assert "no_such_method" in reply.text
    assert vllm.server.healthy()


def test_sglang_end_to_end(sglang: Place, checkpoint: Callable[..., Path]) -> None:
    report = sglang.call("doctor")
    assert (report["ranks"], report["serves"], report["holds"]) == (1, "default", "no version yet")
    assert {one["mode"] for one in report["placements"]} == {"xor"}
    assert sglang.call("verify")["version"] == 1
    before = sglang.server.generate([PROMPT])

    tokens, body = refitted(sglang, checkpoint("qwen3-moe", 1))

    assert len(tokens) == LONG
    assert set(body["pause"]) == {"quiesce", "write", "verify", "cache", "resume"}
    assert sglang.call("verify")["served"] == "2"
    assert sglang.server.generate([PROMPT]) != before


def test_sglang_stands_still_and_forgets(sglang: Place) -> None:
    control = SglangControl(sglang.server.url)
    stream = sglang.server.stream(PROMPT, max_tokens=LONG)
    stream.wait_for(5)
    control.pause()
    control.check()
    held = len(stream.tokens)
    time.sleep(0.5)
    assert held <= len(stream.tokens) < LONG
    control.reset_cache()
    control.resume()
    assert len(stream.result()) == LONG
    control = SglangControl(sglang.server.url, in_flight="abort")
    stream = sglang.server.stream(PROMPT, max_tokens=LONG)
    stream.wait_for(5)
    control.pause()
    assert len(stream.result()) < LONG
    control.reset_cache()
    control.resume()
    assert sglang.server.generate([PROMPT], max_tokens=4)
