"""The controls of serving engines, and their HTTP client, against servers that answer like the engines' own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltarefit.cli import patience
from deltarefit.cli.output import Flags, Output
from deltarefit.errors import RefitError, UnavailableError, UsageError
from deltarefit.events import Event
from deltarefit.records import Digest
from deltarefit.targets import sglang_control, vllm_control
from deltarefit.targets.http import HttpClient
from deltarefit.targets.readiness import Readiness, ReadyServer, Status, parse_address
from deltarefit.targets.sglang_control import SglangControl
from deltarefit.targets.vllm_control import VllmControl
from tests.engine_http import Answer, Server, SglangHttp, VllmHttp

SOCKETS = ["/run/agent-1-0-aa.sock", "/run/agent-1-1-bb.sock"]


class Fixed(Server):
    """Answers every call in one way."""

    reply: Answer = (200, {"a": 1})

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Answer:
        return self.reply


@pytest.fixture
def fixed() -> Iterator[Fixed]:
    server = Fixed()
    yield server
    server.stop()


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[VllmHttp]:
    server = VllmHttp(lambda: SOCKETS, tmp_path / "paused")
    yield server
    server.stop()


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangHttp]:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("DELTAREFIT_RUN_DIR", str(run))
    server = SglangHttp(lambda: SOCKETS, tmp_path / "paused", run)
    yield server
    server.stop()


# ------------------------------------------------------------------------------------------ the client


def test_what_is_asked_and_answered(fixed: Fixed) -> None:
    client = HttpClient(fixed.url + "/", "vLLM", key="secret")
    assert client.post("/x", {"b": [1]}, {"mode": "keep"}) == {"a": 1}
    assert client.get("/y") == {"a": 1}
    assert fixed.calls == [("POST", "/x?mode=keep", {"b": [1]}), ("GET", "/y", None)]
    assert all(headers["Authorization"] == "Bearer secret" for headers in fixed.headers)
    assert HttpClient(fixed.url, "vLLM").get("/z") == {"a": 1}
    assert "Authorization" not in fixed.headers[-1]


def test_no_proxy_is_asked(fixed: Fixed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert HttpClient(fixed.url, "vLLM").get("/x") == {"a": 1}


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        ((500, {"error": "boom"}), UnavailableError, "boom"),
        ((503, ""), UnavailableError, "status 503"),
        ((429, "slow down"), UnavailableError, "slow down"),
        ((404, {"detail": "Not Found"}), UsageError, "does not know /x"),
        ((400, "bad mode"), UsageError, "bad mode"),
        ((401, "who?"), UsageError, "DELTAREFIT_ENGINE_KEY"),
        ((200, "<html>hello</html>"), UsageError, "is no vLLM"),
        ((200, "[" * 100_000), UsageError, "is no vLLM"),
    ],
)
def test_what_a_status_means(fixed: Fixed, reply: Answer, kind: type[RefitError], says: str) -> None:
    fixed.reply = reply
    with pytest.raises(kind, match=says) as caught:
        HttpClient(fixed.url, "vLLM").post("/x")
    assert type(caught.value) is kind
    assert caught.value.next_step
    assert len(str(caught.value)) < 1000


def test_nobody_listens(fixed: Fixed) -> None:
    fixed.stop()
    with pytest.raises(UnavailableError, match=r"does not answer.*refused"):
        HttpClient(fixed.url, "vLLM").get("/x")


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nslow", b"\x00\x01 nothing\r\n"])
def test_deadlines_hold(part: bytes) -> None:
    """Silence, a body that trickles in for ever, and what is no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(part)
                for _ in range(50):
                    time.sleep(0.1)
                    try:
                        connection.sendall(b"." if b"slow" in part else b"")
                    except OSError:
                        return

        threading.Thread(target=serve, daemon=True).start()
        client = HttpClient(f"http://127.0.0.1:{listening.getsockname()[1]}", "vLLM")
        started = time.monotonic()
        with pytest.raises(UnavailableError, match="does not answer"):
            client.get("/x", deadline_s=0.5)
        assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://h/x", "http://", "http://h:99999", "http://h:x", "http://h/?a=1", "unix:/run/x", ""],
)
def test_bad_addresses(url: str) -> None:
    for make in (VllmControl, SglangControl):
        with pytest.raises(UsageError, match="bad address"):
            make(url)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="holds a password") as caught:
        VllmControl("http://me:hunter2@127.0.0.1:8000")
    assert "hunter2" not in str(caught.value)


# ------------------------------------------------------------------------------------------ vLLM


def test_vllm_gives_its_agents_rank_by_rank(vllm: VllmHttp) -> None:
    control = VllmControl(vllm.url)
    control.check()
    assert control.agents() == SOCKETS == control.sockets
    assert ("POST", "/collective_rpc", {"method": "deltarefit_agent"}) in vllm.calls


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_vllm_through_a_pause(vllm: VllmHttp, mode: str) -> None:
    control = VllmControl(vllm.url, in_flight=mode)
    assert control.version() == "default"
    vllm.busy_cache = 2
    for call in (control.pause, control.pause, control.reset_cache):
        call()
    control.set_version(7, Digest(1, 2))
    control.resume()
    control.resume()
    reset = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
    assert vllm.paths == [
        *[f"/pause?mode={mode}&clear_cache=false"] * 2, *[reset] * 3, "/reset_encoder_cache", "/update_weight_version",
        *["/resume"] * 2,
    ]  # fmt: skip
    assert control.version() == "7"


def test_vllm_that_never_forgets(vllm: VllmHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_control, "CACHE_S", 0.2)
    vllm.busy_cache = 10**9
    with pytest.raises(UnavailableError, match="does not forget"):
        VllmControl(vllm.url).reset_cache()


def test_a_paused_vllm_is_not_asleep(vllm: VllmHttp) -> None:
    control = VllmControl(vllm.url)
    control.pause()
    control.check()
    vllm.asleep = True
    with pytest.raises(UnavailableError, match=r"asleep\. Wake it up"):
        control.check()
    vllm.metrics = False
    with pytest.raises(UnavailableError, match="asleep or paused"):
        control.check()
    vllm.asleep = vllm.paused = False
    control.check()


def test_vllm_serves_unless_it_is_paused_or_asleep(vllm: VllmHttp) -> None:
    control = VllmControl(vllm.url)
    assert not control.serving, "nobody has looked yet"
    control.check()
    assert control.serving
    control.pause()
    assert not control.serving
    control.check()
    assert not control.serving
    control.resume()
    assert control.serving
    vllm.asleep = True
    with pytest.raises(UnavailableError):
        control.check()
    assert not control.serving


def test_agents_that_the_guard_refuses_are_not_given_out(vllm: VllmHttp) -> None:
    control, seen = VllmControl(vllm.url), []

    def guard(sockets: Any) -> None:
        seen.append(list(sockets))
        raise UnavailableError("taken")

    control.guard = guard
    with pytest.raises(UnavailableError, match="taken"):
        control.agents()
    assert seen == [SOCKETS]
    assert not control.sockets


def test_the_other_engine_is_named(vllm: VllmHttp, sglang: SglangHttp) -> None:
    for wrong in (SglangControl(vllm.url).check, SglangControl(vllm.url).agents):
        with pytest.raises(UsageError, match=rf"is no SGLang; .*found vLLM\. This is vLLM: use --vllm {vllm.url}\."):
            wrong()
    with pytest.raises(UsageError, match=rf"is no vLLM; .*found SGLang\. This is SGLang: use --sglang {sglang.url}\."):
        VllmControl(sglang.url).check()


def test_vllm_without_development_endpoints(vllm: VllmHttp) -> None:
    vllm.dev_mode = False
    for call in (VllmControl(vllm.url).check, VllmControl(vllm.url).agents):
        with pytest.raises(UsageError, match=r"no development endpoints.*VLLM_SERVER_DEV_MODE=1 and --worker-ext"):
            call()


def test_vllm_without_the_extension(vllm: VllmHttp) -> None:
    vllm.extension = False
    with pytest.raises(UsageError, match=r"without the extension.*--worker-extension-cls deltarefit\.targets\.vllm"):
        VllmControl(vllm.url).agents()


def test_vllm_that_cannot_be_refitted_says_why(vllm: VllmHttp) -> None:
    vllm.objections = ["LoRA adapters are enabled: start it without --enable-lora", "it is quantized"]
    with pytest.raises(UsageError, match=r"cannot be refitted:\n  LoRA .*\n  it is quantized\n"):
        VllmControl(vllm.url).agents()
    assert not VllmControl(vllm.url).sockets


def test_vllm_replicas_are_refused(vllm: VllmHttp) -> None:
    vllm.replicas = 2
    with pytest.raises(UsageError, match="replicas"):
        VllmControl(vllm.url).agents()
    assert "/collective_rpc" not in vllm.paths


def test_a_dead_vllm_may_come_back(vllm: VllmHttp) -> None:
    vllm.dead = True
    control = VllmControl(vllm.url)
    for call in (control.check, control.agents, control.pause, control.reset_cache, control.resume):
        with pytest.raises(UnavailableError):
            call()


@pytest.mark.parametrize("reply", [(404, "nothing here"), (200, "<html>"), (200, {}), (200, [1])])
def test_what_is_no_engine(fixed: Fixed, reply: Answer) -> None:
    fixed.reply = reply
    with pytest.raises(UsageError, match="is no vLLM"):
        VllmControl(fixed.url).check()
    with pytest.raises(UsageError, match=r"is no SGLang|does not know /server_info"):
        SglangControl(fixed.url).agents()


# ------------------------------------------------------------------------------------------ SGLang


def live_sockets(monkeypatch: pytest.MonkeyPatch, server: SglangHttp) -> list[str]:
    """Sockets whose names claim that this very process has made them: it lives."""
    import os

    found = [f"/run/agent-{os.getpid()}-{rank}-cc.sock" for rank in range(2)]
    server.agents = lambda: found
    return found


def test_sglang_starts_agents_once(sglang: SglangHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    found, control = live_sockets(monkeypatch, sglang), SglangControl(sglang.url)
    control.check()
    assert control.agents() == found == control.sockets
    assert sglang.paths == [
        "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update",
        "/continue_generation",
    ]  # fmt: skip
    assert not sglang.paused
    sglang.calls.clear()
    assert SglangControl(sglang.url).agents() == found
    assert not sglang.paths, "a second follower disturbs nobody"


def test_sglang_agents_of_dead_workers_are_not_believed(sglang: SglangHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    found, control = live_sockets(monkeypatch, sglang), SglangControl(sglang.url)
    for rank in range(2):
        dead = {"pid": 2**22 + 1, "rank": rank, "size": 2, "objections": [], "socket": "/run/old.sock"}
        (sglang.directory / f"sglang-{sglang.port}-{rank}.json").write_text(json.dumps(dead))
    assert control.agents() == found
    (sglang.directory / f"sglang-{sglang.port}-1.json").write_text("{")
    assert control.agents() == found


def test_a_paused_sglang_stays_paused(sglang: SglangHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights may be half written: whoever finishes them lets it go on."""
    found = live_sockets(monkeypatch, sglang)
    sglang.paused = True
    assert SglangControl(sglang.url).agents() == found
    assert sglang.paused


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_what_a_killed_follower_began_is_ended(
    sglang: SglangHttp, monkeypatch: pytest.MonkeyPatch, session: bool, written: bool
) -> None:
    found, control = live_sockets(monkeypatch, sglang), SglangControl(sglang.url)
    if written:
        control.agents()
    sglang.paused, sglang.session = True, session
    (sglang.directory / f"sglang-{sglang.port}.starting").touch()
    assert control.agents() == found
    assert not sglang.paused
    assert not sglang.session
    assert not list(sglang.directory.glob("*.starting"))


def test_what_somebody_else_began_is_left_alone(sglang: SglangHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    found, control = live_sockets(monkeypatch, sglang), SglangControl(sglang.url)
    sglang.session = True
    with pytest.raises(UnavailableError, match="somebody else is updating"):
        control.agents()
    assert sglang.session
    assert not sglang.paused
    sglang.session = False
    assert control.agents() == found


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_sglang_through_a_pause(sglang: SglangHttp, mode: str) -> None:
    control = SglangControl(sglang.url, in_flight=mode)
    sglang.busy_cache = 2
    control.pause()
    assert sglang.paused_file.exists(), "the pause has arrived at the ranks"
    control.reset_cache()
    control.set_version(7, Digest(1, 2))
    control.resume()
    bodies = [body for _, path, body in sglang.calls if path == "/pause_generation"]
    assert bodies == [{"mode": one} for one in (["abort", "retract"] if mode == "abort" else ["retract"])]
    assert sglang.paths[-5:] == [*["/flush_cache"] * 3, "/update_weight_version", "/continue_generation"]
    assert control.version() == "7"


def test_sglang_that_never_forgets(sglang: SglangHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_control, "CACHE_S", 0.2)
    sglang.busy_cache = 10**9
    with pytest.raises(UnavailableError, match="does not forget"):
        SglangControl(sglang.url).reset_cache()


def test_sglang_cannot_wait_for_requests(sglang: SglangHttp) -> None:
    with pytest.raises(UsageError, match="SGLang cannot wait"):
        SglangControl(sglang.url, in_flight="wait")
    with pytest.raises(UsageError, match="bad choice"):
        VllmControl(sglang.url, in_flight="drop")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda s: s.loaders.clear(), r"without the loader.*--custom-weight-loader deltarefit\.targets\.sglang\.load"),
        (lambda s: s.facts.update(custom_weight_loader=None), "without the loader"),
        (lambda s: s.facts.update(dp_size=2), "replicas"),
        (lambda s: s.facts.update(tokenizer_worker_num=2), "replicas"),
    ],
)
def test_sglang_as_it_was_started(sglang: SglangHttp, spoil: Callable[[SglangHttp], None], says: str) -> None:
    spoil(sglang)
    with pytest.raises(UsageError, match=says):
        SglangControl(sglang.url).agents()
    assert not sglang.paths, "asking for a loader that is not there ends a real server"


def test_sglang_that_cannot_be_refitted_says_why(sglang: SglangHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    live_sockets(monkeypatch, sglang)
    sglang.objections = ["LoRA adapters are enabled"]
    with pytest.raises(UsageError, match=r"cannot be refitted:\n  LoRA adapters are enabled\n"):
        SglangControl(sglang.url).agents()
    sglang.error = "RuntimeError: no room"
    for file in sglang.directory.glob("*.json"):
        file.unlink()
    with pytest.raises(UsageError, match=r"cannot start agents.*rank 0: RuntimeError: no room; rank 1"):
        SglangControl(sglang.url).agents()
    assert not sglang.paused


def test_sglang_serves_unless_it_is_paused_or_asleep(sglang: SglangHttp) -> None:
    control = SglangControl(sglang.url)
    control.check()
    assert control.serving
    sglang.paused = True
    control.check()
    assert not control.serving
    control.resume()
    assert control.serving
    control.pause()
    assert not control.serving
    sglang.paused, sglang.asleep = False, True
    with pytest.raises(UnavailableError):
        control.check()
    assert not control.serving


def test_an_sglang_that_is_not_up_may_come(sglang: SglangHttp) -> None:
    sglang.asleep = True
    with pytest.raises(UnavailableError):
        SglangControl(sglang.url).check()
    sglang.stop()
    for call in (SglangControl(sglang.url).check, SglangControl(sglang.url).agents):
        with pytest.raises(UnavailableError, match="does not answer"):
            call()


# ------------------------------------------------------------------------------------------ waiting


@pytest.mark.parametrize(("whose", "longest"), [("engine", 0.02), ("store", 0.08)])
def test_waits_between_tries(
    fixed: Fixed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whose: str, longest: float
) -> None:
    """Short ones for an engine, longer ones for a store; short again once it is cured, which is told once."""
    settings = {"_FIRST_WAIT_S": 0.01, "_LONGEST_WAIT_OF_ENGINE_S": 0.02, "_LONGEST_WAIT_S": 0.08}
    for name, value in settings.items():
        monkeypatch.setattr(patience, name, value)
    fixed.stop()
    it, tries = patience.Patience(Output(Flags()), patience.Stop(), "engine", endless=True), []

    def work() -> str:
        tries.append(it.steady)
        if len(tries) == 6:
            return "done"
        if whose == "engine":
            VllmControl(fixed.url).check()
        raise UnavailableError("the store is away")

    assert it.run(work) == "done"
    assert it._wait_s == longest
    assert not any(tries)
    it.note(Event("proven", "prove", 3))
    assert it.steady is (whose == "engine"), "that a target answers says nothing of the store"
    settled: list[int] = []
    asked = it.looks(lambda: settled.append(3))
    for _ in range(4):
        assert not asked()
    assert settled == [3]
    assert it.steady
    assert it._wait_s == 0.01
    err = capsys.readouterr().err
    assert err.count("Trying again in") == 5
    assert err.count(f"Back:      the {whose} answers again") == 1


# ------------------------------------------------------------------------------------------ readiness


def asked(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_readiness_is_served() -> None:
    status = Status(3, 3, "CLEAN", "00")
    server = ReadyServer("127.0.0.1:0", lambda: status)
    try:
        assert asked(server.url) == (200, {"version": 3, "head": 3, "state": "CLEAN", "digest": "00"})
        for other in (Status(3, 4, "CLEAN", "00"), Status(3, 3, "DIRTY", "00"), Status(0, 0, "gone", "")):
            status = other
            assert asked(server.url)[0] == 503
        assert asked(server.url.replace("/ready", "/other"))[0] == 404
        with pytest.raises(UsageError, match="cannot serve readiness"):
            ReadyServer(server.url.split("/")[2], lambda: status)
    finally:
        server.close()


def test_a_probe_that_gives_up_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    gone, begun = threading.Event(), threading.Event()

    def status() -> Status:
        begun.set()
        assert gone.wait(10)
        return Status(3, 3, "CLEAN", "0" * 100_000)

    server = ReadyServer("127.0.0.1:0", status)
    try:
        host, port = server.url.split("/")[2].split(":")
        with socket.create_connection((host, int(port))) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # closed with a reset
            probe.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
            assert begun.wait(10)
        gone.set()
        assert asked(server.url)[0] == 200
        time.sleep(0.2)
    finally:
        server.close()
    assert capfd.readouterr().err == ""


def test_readiness_does_not_wait_for_agents_that_hang(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{n}.sock") for n in range(3)]
    with contextlib.ExitStack() as stack:
        for path in paths:
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(path)
            listening.listen()
        started = time.monotonic()
        assert Readiness(lambda: paths, lambda: "").status().state == "gone"
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("address", ["", "9000", "host:", ":9000", "host:70000", "host:x"])
def test_bad_addresses_for_readiness(address: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(address)
