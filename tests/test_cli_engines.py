"""``follow``, ``verify`` and ``doctor`` on serving engines: real commands, real rank processes with real agents, and
HTTP servers in front of them that answer as vLLM and SGLang do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import Publisher, open_store
from deltarefit.errors import UsageError
from deltarefit.manifest import Catalog, State, TensorEntry
from deltarefit.ports import Store
from deltarefit.targets.ranks import RankGroup
from tests import helpers as h
from tests import live_ranks as live
from tests.desk import Desk, Done, Following, Here
from tests.engine_http import Server, SglangHttp, VllmHttp, until

pytest_plugins = ["tests.desk_fixtures"]

KINDS = ("some", "many")
HEAD = 3


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> h.Chain:
    """Three versions in a directory that nobody may write to."""
    store = open_store(str(tmp_path_factory.mktemp("run") / "store"))
    return h.publish_chain(np.random.default_rng(31), KINDS, live.SHAPES, store)


class Place:
    """An engine of two ranks loaded with ``model``, its HTTP server, and a desk whose commands find its agents."""

    def __init__(self, root: Path, chain: h.Chain, model: h.Model, kind: str, nap_s: float) -> None:
        self.run = root / "run"
        self.run.mkdir(mode=0o700)
        self.engine = live.Engine(root / "engine", 2, model, chain.models[1], nap_s)
        paused = root / "engine" / "paused"
        self.http: Any = self._server(kind, paused)
        self.option = f"--{kind}"
        (root / "tmp").mkdir()
        self.desk = Desk(root, [], {"DELTAREFIT_RUN_DIR": str(self.run)})
        self.store = chain.store.url

    def _server(self, kind: str, paused: Path) -> Server:
        def agents() -> list[str]:
            return list(self.engine.paths)

        return VllmHttp(agents, paused) if kind == "vllm" else SglangHttp(agents, paused, self.run)

    def call(self, verb: str, *arguments: object) -> Done:
        return self.desk.run(verb, self.store, self.option, self.http.url, *arguments)

    def following(self, *arguments: object) -> Following:
        return Following(self.desk, self.store, self.option, self.http.url, "--poll", 0.05, *arguments)

    def close(self) -> None:
        self.http.stop()
        self.engine.close()


@pytest.fixture
def place(tmp_path: Path, chain: h.Chain) -> Iterator[Callable[..., Place]]:
    with contextlib.ExitStack() as stack:

        def start(model: int | h.Model = 1, kind: str = "vllm", nap_s: float = 0.0) -> Place:
            loaded = chain.models[model] if isinstance(model, int) else model
            return stack.enter_context(contextlib.closing(Place(tmp_path, chain, loaded, kind, nap_s)))

        yield start


Start = Callable[..., Place]


def ready(port: int) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    except OSError:
        return 0, {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------ follow


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_follow_once(place: Start, chain: h.Chain, kind: str) -> None:
    here = place(1, kind)
    done = here.call("follow", "--once")
    assert (done.code, done.lines) == (0, ["1", "2", "3"]), done.err
    assert not here.engine.wrong(chain.models[HEAD])
    assert not here.engine.paused
    assert here.http.version == str(HEAD)
    assert "Holds      version 1 already" in done.err
    parts = ", ".join(rf"{part} \d+ m?s" for part in ("quiesce", "write", "verify", "cache", "resume"))
    assert re.search(rf"^Holds      version 3 \(stage \d+ m?s; pause \d+ m?s: {parts}\)$", done.err, re.MULTILINE)
    again = here.call("follow", "--once", "--json", "-q")
    assert (again.code, again.err) == (0, "")
    assert again.body == {"version": HEAD, "seconds": {}, "pause_s": 0.0, "pause": {}}


def test_follow_tells_the_parts_of_a_pause(place: Start) -> None:
    done = place().call("follow", "--once", "--json", "--in-flight", "abort")
    bodies = [json.loads(line) for line in done.lines]
    assert [body["version"] for body in bodies] == [1, 2, 3]
    for body in bodies[1:]:
        assert set(body["pause"]) == {"quiesce", "write", "verify", "cache", "resume"}
        assert 0 < sum(body["pause"].values()) <= body["pause_s"]
        assert "stage" in body["seconds"]


def test_follow_needs_no_torch(place: Start) -> None:
    here = place()
    code = (
        "import sys; from deltarefit.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'vllm', 'sglang', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "follow", here.store, "--vllm", here.http.url, "--once"]
    settings = os.environ | here.desk.environment
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n2\n3\n"), done.stderr


def test_follow_starts_before_its_engine_and_outlives_it(place: Start, chain: h.Chain) -> None:
    here, port = place(), free_port()
    here.http.stop()
    with here.following("--ready", f"127.0.0.1:{port}") as following:
        following.wait_for(r"^warning: vLLM at .* does not answer.*Trying again in")
        assert ready(port) == (503, {"version": 0, "head": HEAD, "state": "gone", "digest": ""})
        here.http.start()
        following.wait_for("^Back:      the engine answers again$")
        following.wait_for("^3$")
        until(lambda: ready(port)[0] == 200)
        status, body = ready(port)
        assert (status, body["version"], body["head"], body["state"]) == (200, HEAD, HEAD, "CLEAN")
        header = here.engine.header()
        assert header is not None
        assert body["digest"] == str(header.digest)

        here.engine.kill(1)
        assert ready(port)[:1] == (503,), "at once"
        assert ready(port)[1]["state"] == "gone"
        following.wait_for(r"^warning: agent at .*-1-.*Trying again in")
        here.engine.restart(0)
        here.engine.restart(1)
        following.wait_for("^3$")
        until(lambda: ready(port)[0] == 200)
        assert following.end(signal.SIGTERM) == 0
    assert not here.engine.wrong(chain.models[HEAD])
    assert following.out == ["1", "2", "3", "1", "2", "3"]


@pytest.fixture
def growing(chain: h.Chain, tmp_path: Path) -> tuple[Store, Callable[[], h.Model]]:
    """A copy of the run, and what publishes one version more there and gives its bits."""
    store, source = open_store(str(tmp_path / "growing")), h.ArraySource(h.copy_of(chain.models[HEAD]), live.SHAPES)
    for key, _ in chain.store.list():
        store.put(key, chain.store.get(key))

    def grow() -> h.Model:
        h.step(np.random.default_rng(3), source.model, "many")
        with contextlib.closing(Publisher(store, source, threads=1)) as publisher:
            publisher.publish(9)
        return source.model

    return store, grow


Growing = tuple[Store, Callable[[], h.Model]]


def test_readiness_falls_behind_and_catches_up(place: Start, growing: Growing) -> None:
    """It is not ready while weights are written, nor with a version that is known but not held yet."""
    here, port, (store, grow) = place(1, "vllm", 0.4), free_port(), growing
    here.store = store.url
    with here.following("--ready", f"127.0.0.1:{port}") as following:
        following.wait_for("^3$")
        until(lambda: ready(port)[0] == 200)
        model, seen = grow(), []

        def caught_up() -> bool:
            seen.append(ready(port))
            return seen[-1][0] == 200 and seen[-1][1]["version"] == HEAD + 1

        until(caught_up)
        following.wait_for("^4$")
    behind = [body for status, body in seen if status == 503]
    assert {"DIRTY"} <= {body["state"] for body in behind}
    assert all(body["head"] == HEAD + 1 for body in behind)
    assert all(body["version"] == body["head"] for status, body in seen if status == 200)
    assert not here.engine.wrong(model)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_follower_killed_in_a_pause_is_succeeded(place: Start, growing: Growing, kind: str) -> None:
    """The engine stays paused, and is neither resumed nor taken for asleep before its weights are whole."""
    here, (store, grow) = place(1, kind, 1.0), growing
    here.store = store.url
    assert here.call("follow", "--once").code == 0
    with here.following() as following:
        until(lambda: here.http.calls[-1][0] == "GET")
        model = grow()
        until(lambda: (header := here.engine.header()) is not None and header.state is State.DIRTY)
        following.process.kill()
        following.process.wait(20)
    assert here.engine.paused
    assert here.http.paused
    for verb in ("verify", "doctor"):
        done = here.call(verb)
        assert done.code == 5, "no version is held"
        assert "start follow again" in done.err
    assert here.engine.paused
    done = here.call("follow", "--once")
    assert (done.code, done.last) == (0, str(HEAD + 1)), done.err
    assert not here.engine.wrong(model)
    assert not here.engine.paused
    assert not here.http.paused
    assert here.http.version == str(HEAD + 1)


def test_an_engine_that_sleeps_is_refitted_when_it_wakes(place: Start, chain: h.Chain) -> None:
    here = place()
    here.http.asleep = True
    asleep = here.call("follow", "--once")
    assert (asleep.code, asleep.out) == (5, "")
    assert "the engine is asleep. Wake it up" in asleep.err
    with here.following() as following:
        following.wait_for("the engine is asleep")
        assert not here.engine.wrong(chain.models[1]), "written to while asleep"
        here.http.asleep = False
        following.wait_for("^3$")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_that_stands_still_is_not_ready(place: Start, kind: str) -> None:
    """Whoever paused it, or put it to sleep: its weights are whole, but nobody is served."""
    here, port = place(1, kind), free_port()
    with here.following("--ready", f"127.0.0.1:{port}") as following:
        following.wait_for("^3$")
        until(lambda: ready(port)[0] == 200)
        here.http.paused = True
        until(lambda: ready(port)[0] == 503)
        assert (ready(port)[1]["state"], ready(port)[1]["version"]) == ("paused", HEAD)
        assert "stands still" in here.call("doctor").out
        here.http.paused = False
        until(lambda: ready(port)[0] == 200)
        here.http.asleep = True
        until(lambda: ready(port)[0] == 503)
        until(lambda: ready(port)[1]["state"] == "waiting")
        here.http.asleep = False
        following.wait_for("^Back:      the engine answers again$")
        until(lambda: ready(port)[0] == 200)
        assert following.end(signal.SIGTERM) == 0
        assert following.out == ["1", "2", "3"]


@pytest.mark.parametrize("options", [(), ("--no-prove",)])
def test_a_version_that_is_held_from_the_start_is_told_once(place: Start, options: tuple[str, ...]) -> None:
    here = place()
    assert here.call("follow", "--once").last == str(HEAD)
    with here.following(*options) as following:
        following.wait_for("^Holds      version 3 already$")
        assert following.end(signal.SIGTERM) == 0
        assert following.out == ["3"]


def test_a_scrub_finds_a_flipped_bit_and_mends_it(place: Start, chain: h.Chain) -> None:
    here, port = place(), free_port()
    with here.following("--scrub", 1, "-v", "--ready", f"127.0.0.1:{port}", "--no-prove") as following:
        following.wait_for("^3$")
        following.wait_for(r"^Proven     version 3 in")
        here.engine.say(1, "flip 0")
        following.wait_for(r"^warning: found while idle: live bits differ")
        following.wait_for("^3$")
        following.wait_for(r"^Proven     version 3 in")
        until(lambda: ready(port)[0] == 200)
        assert not here.engine.wrong(chain.models[HEAD])
        assert following.end(signal.SIGINT) == 0


def test_a_scrub_disturbs_nobody(place: Start) -> None:
    here = place()
    with here.following("--scrub", 1) as following:
        following.wait_for("^3$")
        before = list(here.http.paths)
        for _ in range(2):
            following.wait_for(r"^Proven     version 3 in")
        assert here.http.paths == before


def test_one_follower_per_engine(place: Start) -> None:
    here = place()
    with here.following() as following:
        following.wait_for("^3$")
        second = here.call("follow", "--once")
        assert second.code == 5
        assert "has a follower already" in second.err
        assert f"process {following.process.pid}" in second.err
        other_name = here.http.url.replace("127.0.0.1", "localhost")
        third = here.desk.run("follow", here.store, "--vllm", other_name)
        assert third.code == 5, "not even without --once: it would wait for the other to end"
        assert f"{other_name} has a follower already; found process {following.process.pid}" in third.err
        here.engine.restart(0)
        here.engine.restart(1)
        following.wait_for("^3$")
        third = here.desk.run("follow", here.store, "--vllm", other_name)
        assert "has a follower already" in third.err
    assert here.desk.run("follow", here.store, "--vllm", other_name, "--once").last == str(HEAD)
    locks = list(Path(here.engine.paths[0]).parent.glob("agent-*.sock.lock"))
    assert len(locks) == 1, "those of engines that are gone are removed"


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of --into, --vllm and --sglang"),
        (["--into", "d", "--vllm", "http://h:1"], "a directory and an engine"),
        (["--vllm", "http://h:1", "--sglang", "http://h:2"], "two engines"),
        (["--into", "d", "--ready", "h:1"], "need an engine"),
        (["--into", "d", "--in-flight", "keep"], "need an engine"),
        (["--into", "d", "--scrub", "9"], "need an engine"),
        (["--vllm", "h:1"], "bad address of an engine"),
        (["--vllm", "http://h:1", "--in-flight", "drop"], "bad choice for requests in flight"),
        (["--sglang", "http://h:1", "--in-flight", "wait"], "SGLang cannot wait"),
        (["--vllm", "http://h:1", "--ready", "9000"], "HOST:PORT"),
    ],
)
def test_2_bad_choices(
    here: Here, chain: h.Chain, arguments: list[str], says: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("DELTAREFIT_RUN_DIR", str(tmp_path / "r"))
    done = here("follow", chain.store.url, *arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert says in done.err


def test_2_bad_choices_of_verify(here: Here, chain: h.Chain) -> None:
    for arguments in ([], ["dir", "--vllm", "http://h:1"]):
        done = here("verify", chain.store.url, *arguments)
        assert done.code == 2
        assert "one of DIR, --vllm and --sglang" in done.err


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda http: setattr(http, "dev_mode", False), "VLLM_SERVER_DEV_MODE=1"),
        (lambda http: setattr(http, "extension", False), "--worker-extension-cls deltarefit.targets.vllm.RefitWorker"),
        (lambda http: http.objections.append("LoRA adapters are enabled: start it without --enable-lora"), "LoRA"),
        (lambda http: setattr(http, "replicas", 2), "replicas"),
    ],
)
def test_2_an_engine_as_it_was_started(place: Start, spoil: Callable[[VllmHttp], None], says: str) -> None:
    """Not even an endless ``follow`` waits for what no waiting cures; ``doctor`` says the same."""
    here = place()
    spoil(here.http)
    done = here.call("follow")
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    doctor = here.call("doctor", "--json")
    assert (doctor.code, doctor.body["result"]) == (2, "failed")
    assert says in doctor.body["objection"]
    assert here.engine.header() is None


def test_2_an_address_that_is_no_engine(place: Start, here: Here) -> None:
    it = place(1, "sglang")
    done = it.desk.run("follow", it.store, "--vllm", it.http.url)
    assert done.code == 2
    assert "is no vLLM" in done.err


def test_4_weights_of_another_model(place: Start, chain: h.Chain, tmp_path: Path) -> None:
    """Neither a version nor the engine's checkpoint; and another model altogether."""
    rng = np.random.default_rng(77)
    bits = h.random_model(rng, live.SHAPES)
    here = place(bits)
    done = here.call("follow")
    assert (done.code, done.out) == (4, "")
    assert "neither a version of this run nor the checkpoint" in done.err
    assert not here.engine.wrong(bits)
    assert not here.engine.paused
    other = open_store(str(tmp_path / "other"))
    h.published(other, h.ArraySource(h.random_model(rng)))
    here.store = other.url
    for verb in ("follow", "verify"):
        assert here.call(verb).code == 4
    doctor = here.call("doctor")
    assert (doctor.code, doctor.last) == (4, "failed")
    assert "another model's catalog" in doctor.out


@pytest.mark.parametrize(("unknown", "kept", "says"), [(20, 3, True), (3, 20, False)])
def test_the_engine_of_another_model_is_called_so(unknown: int, kept: int, says: bool) -> None:
    names = [f"t{n:02}" for n in range(unknown + kept)]
    catalog = Catalog(tuple(TensorEntry(name, "BF16", (2,)) for name in names))
    reason = "the loader does not take it: KeyError: "
    modes = {name: ["refused", reason] for name in names[:unknown]} | {name: ["xor", ""] for name in names[unknown:]}
    parts = [[n, [[2, 1]], 0] for n in range(unknown, len(names))]
    with pytest.raises(UsageError) as caught:
        RankGroup(catalog, [{"parts": parts, "modes": modes}])
    text = str(caught.value)
    assert text.startswith("the engine serves another model: its loader does not take 20 of 23 tensors") is says
    assert f"{unknown} tensors cannot be kept bit-exact" in text
    assert "\n  t00: the loader does not take it: KeyError\n" in text
    assert ("and 12 more" in text) is says
    assert text.count("KeyError") == min(unknown, 8)


def test_5_no_engine_is_there(place: Start) -> None:
    here = place()
    here.http.stop()
    for verb, *arguments in (("follow", "--once"), ("verify",), ("doctor",)):
        done = here.call(verb, *arguments, "--json")
        assert (done.code, done.body["exit_code"]) == (5, 5)
        assert "does not answer" in done.body["error"]


# ------------------------------------------------------------------------------------------ verify and doctor


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_verify(place: Start, chain: h.Chain, kind: str) -> None:
    here = place(2, kind)
    loaded = here.call("verify", "--json")
    assert (loaded.code, loaded.body["result"], loaded.body["version"]) == (0, "equal", 2)
    assert here.call("verify", "--version", HEAD).last == "differ"
    assert here.engine.header() is None, "verify claims nothing"
    assert here.call("follow", "--once").last == str(HEAD)
    held = here.call("verify", "--json")
    assert (held.code, held.body["version"], held.body["served"]) == (0, HEAD, str(HEAD))
    assert held.body["expected"] == held.body["found"]
    here.engine.say(1, "flip 0")
    flipped = here.call("verify")
    assert (flipped.code, flipped.last) == (4, "differ")
    assert f"does not hold version {HEAD}" in flipped.err
    older = here.call("verify", "--version", 1)
    assert (older.code, older.last) == (4, "differ")
    assert f"Its header claims version {HEAD}" in older.err
    assert not here.engine.paused


def test_verify_names_copies_that_differ(place: Start) -> None:
    here = place()
    assert here.call("follow", "--once").code == 0
    norm = next(n for n, part in enumerate(here.engine.plans[1]["parts"]) if live.NAMES[part[0]] == "d.norm")
    here.engine.say(1, f"flip {norm}")
    done = here.call("verify")
    assert done.code == 4
    assert re.search(r"copies of d\.norm.* do not agree.*rank 0.*rank 1", done.err)


def test_verify_beside_a_follower(place: Start, chain: h.Chain) -> None:
    """The follower is told, and goes on; what the engine holds is not touched."""
    here, port = place(), free_port()
    with here.following("--ready", f"127.0.0.1:{port}") as following:
        following.wait_for("^3$")
        done = here.call("verify", "--json")
        assert (done.code, done.body["result"], done.body["version"]) == (0, "equal", HEAD)
        following.wait_for("another follower has attached")
        until(lambda: ready(port)[0] == 200)
        assert following.end(signal.SIGTERM) == 0
        assert following.out == ["1", "2", "3"]
    assert not here.engine.wrong(chain.models[HEAD])


def test_verify_of_another_run_and_in_the_middle_of_a_refit(place: Start, chain: h.Chain, tmp_path: Path) -> None:
    here = place()
    assert here.call("follow", "--once").code == 0
    mine, other = here.store, open_store(str(tmp_path / "other"))
    h.published(other, h.ArraySource(chain.models[1], live.SHAPES))
    here.store = other.url
    for verb in ("verify", "doctor"):
        done = here.call(verb)
        assert done.code == 4
        assert "follows another run" in done.err + done.out
    header = here.engine.header()
    assert header is not None
    assert header.state is State.CLEAN
    here.store = mine
    assert here.call("verify").last == "equal"


def test_doctor_shows_how_tensors_reach_the_ranks(place: Start) -> None:
    here = place()
    engine_only = here.desk.run("doctor", "--vllm", here.http.url, "--json")
    assert (engine_only.code, engine_only.body["result"]) == (0, "ok")
    assert (engine_only.body["ranks"], engine_only.body["serves"]) == (2, "default")
    done = here.call("doctor")
    assert (done.code, done.last) == (0, "ok")
    assert "opaque: mixed while loading" in done.out
    assert "skipped: g.skipped" in done.out
    body = here.call("doctor", "--json").body
    modes = {one["mode"]: one for one in body["placements"]}
    assert {name for one in modes.values() for name in one["tensors"]} == set(live.NAMES)
    assert modes["opaque"]["tensors"] == ["f.opaque"]
    assert modes["xor"]["ranks"]["1"] > modes["xor"]["ranks"]["0"], "only the last rank has h.late and e.fan"
    assert body["holds"] == "no version yet"
    assert here.call("follow", "--once").code == 0
    assert here.call("doctor", "--json").body["holds"] == f"version {HEAD}"
