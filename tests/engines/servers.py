"""Real vLLM and SGLang servers on a CPU, each in processes of its own, and the tokens of a freshly loaded engine.

with VllmServer(checkpoint, tp=2) as server:
    tokens = server.generate([[5, 6, 7]], max_tokens=8)

Prompts and replies are token ids, so no checkpoint needs a tokenizer. Every wait has a deadline, and an error carries
the end of the server's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any

Tokens = list[int]

# Tokens of a prompt and its reply: enough for a stream that lasts seconds.
LENGTH = 2048
READY_S = 240.0
REPLY_S = 60.0
STOP_S = 30.0
EXTENSION = "deltarefit.targets.vllm.RefitWorker"
LOADER = "deltarefit.targets.sglang.load"
_ROOT = Path(__file__).resolve().parents[2]
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Several processes share two cores: a thread that waits must not spin.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_VLLM = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
# SGLang's health check generates a token by default: it takes a second, and a paused server would never answer.
_SGLANG = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


class Server:
    """A server process and all that it starts, in one session of the operating system. A context manager.

    ``url`` is its address. Leaving the context stops it; ``kill`` ends it as a power cut would.
    """

    health = "/health"

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], port: int, ready_s: float) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._environment, self._ready_s = list(command), dict(environment), ready_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.startup_s = 0.0

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start the processes and wait until the server is healthy. After ``kill`` it starts again on the same port."""
        # The server outlives this function, and the log is read while it is written.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        began = time.monotonic()
        self._process = subprocess.Popen(
            self._command, env={**os.environ, **self._environment}, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            self._await_health(began + self._ready_s)
        except BaseException:
            self.kill()
            raise
        self.startup_s = time.monotonic() - began

    def _await_health(self, deadline: float) -> None:
        assert self._process is not None
        while not self.healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"server ended with {self._process.returncode} before it was ready\n{self.log()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"server not ready within {self._ready_s:.0f} s\n{self.log()}")
            time.sleep(0.1)

    def healthy(self) -> bool:
        """Whether the server answers its health check with success, now."""
        try:
            with urllib.request.urlopen(self.url + self.health, timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """End the server politely; what is left after ``STOP_S`` seconds is killed."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL every process of the server, API and ranks, and wait until none is left."""
        if self._process is None:
            return
        deadline = time.monotonic() + STOP_S
        while alive := self.processes():
            for pid in alive:
                _signal(pid, signal.SIGKILL)
            self._process.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {alive} survive SIGKILL for {STOP_S:.0f} s")
            time.sleep(0.02)
        self._process.wait(STOP_S)

    def processes(self) -> dict[int, str]:
        """Process id -> title of everything that runs in the server's session; engines name their ranks in titles."""
        assert self._process is not None
        return dict(_session(self._process.pid))

    def log(self, limit: int = 6000) -> str:
        """The last ``limit`` bytes of what the processes printed."""
        if self._log is None:
            return "(never started)"
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), limit, max(0, size - limit)).decode(errors="replace")
        return f"--- end of the log of {' '.join(self._command[:4])} ---\n{text}"

    def get(self, path: str) -> Any:
        """The JSON (or text) of a GET. Raises ``RuntimeError`` with the server's words for any status but success."""
        return self._open(urllib.request.Request(self.url + path))

    def post(self, path: str, body: object = None, **query: object) -> Any:
        """The JSON (or text) of a POST of ``body`` as JSON, with ``query`` in the address."""
        address = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        data = b"" if body is None else json.dumps(body).encode()
        return self._open(urllib.request.Request(address, data, {"Content-Type": "application/json"}))

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise RuntimeError(f"{request.full_url}: status {error.code}: {said}\n{self.log()}") from error
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError:
            return text

    def generate(
        self, prompts: Sequence[Tokens], *, temperature: float = 0.0, seed: int | None = None, max_tokens: int = 16
    ) -> list[Tokens]:
        """Token ids that continue each prompt; all prompts are sent at once. The end token does not end a reply."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.reply(prompt, temperature, seed, max_tokens)[0], prompts))

    def reply(self, prompt: Tokens, temperature: float, seed: int | None, max_tokens: int) -> tuple[Tokens, Any]:
        """Token ids that continue one prompt, and the engine's own words about the request."""
        raise NotImplementedError

    def stream(
        self, prompt: Tokens, *, temperature: float = 0.0, seed: int | None = None, max_tokens: int = 100
    ) -> Stream:
        """A request whose tokens arrive one by one while the caller goes on."""
        path, body = self._stream_request(prompt, temperature, seed, max_tokens)
        return Stream(self, path, body)

    def _stream_request(
        self, prompt: Tokens, temperature: float, seed: int | None, max_tokens: int
    ) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError

    def _stream_tokens(self, events: Iterator[dict[str, Any]]) -> Iterator[Tokens]:
        """The new tokens of each event of a stream."""
        raise NotImplementedError


class Stream:
    """Tokens of one streamed request, read by a thread: ``wait_for(n)`` while it runs, ``result()`` at its end."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self.tokens: Tokens = []
        self._server, self._changed, self._done = server, threading.Condition(), False
        self._error: BaseException | None = None
        self._request = urllib.request.Request(
            server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=REPLY_S) as reply:
                for new in self._server._stream_tokens(_events(reply)):
                    with self._changed:
                        self.tokens += new
                        self._changed.notify_all()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def wait_for(self, count: int, timeout_s: float = REPLY_S) -> Tokens:
        """The tokens so far, at least ``count``; raises if the stream ends or ``timeout_s`` passes before that."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.tokens) >= count or self._done, timeout_s)
            if len(self.tokens) < count:
                raise RuntimeError(f"{len(self.tokens)} of {count} tokens, error {self._error!r}\n{self._server.log()}")
            return list(self.tokens)

    def result(self, timeout_s: float = REPLY_S) -> Tokens:
        """All tokens, once the stream has ended; raises what ended it badly."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"stream still open after {timeout_s:.0f} s and {len(self.tokens)} tokens")
        if self._error is not None:
            raise RuntimeError(f"stream broke after {len(self.tokens)} tokens") from self._error
        return list(self.tokens)


class VllmServer(Server):
    """vLLM's OpenAI server with our worker extension and the development endpoints (pause, weights, collective_rpc)."""

    def __init__(
        self, checkpoint: Path, tp: int = 1, *, extension: str | None = EXTENSION, extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None, ready_s: float = READY_S,
    ) -> None:  # fmt: skip
        port = free_port()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
            "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init",
            "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", str(LENGTH),
            "--max-num-seqs", "4", "--tensor-parallel-size", str(tp), "--generation-config", "vllm",
            "--enable-scale-out",
            *(["--worker-extension-cls", extension] if extension else []), *extra_args,
        ]  # fmt: skip
        settings = {**_QUIET, **_VLLM, "VLLM_CPU_OMP_THREADS_BIND": _cores(tp), "PYTHONPATH": _path()}
        if tp == 1:
            # The rank then lives in the engine's process, as it does on a GPU, and a third of the start-up is saved.
            command += ["--distributed-executor-backend", "uni"]
            settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        super().__init__(command, {**settings, **(env or {})}, port, ready_s)

    def reply(self, prompt: Tokens, temperature: float, seed: int | None, max_tokens: int) -> tuple[Tokens, Any]:
        path, body = self._stream_request(prompt, temperature, seed, max_tokens)
        choice = self.post(path, {**body, "stream": False})["choices"][0]
        return choice["token_ids"], choice

    def _stream_request(
        self, prompt: Tokens, temperature: float, seed: int | None, max_tokens: int
    ) -> tuple[str, dict[str, Any]]:
        sampling = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True}
        return "/inference/v1/generate", {
            "model": "model", "token_ids": list(prompt), "sampling_params": {**sampling, "detokenize": False},
            "stream": True,
        }  # fmt: skip

    def _stream_tokens(self, events: Iterator[dict[str, Any]]) -> Iterator[Tokens]:
        for event in events:
            yield from ((choice["token_ids"] or []) for choice in event.get("choices", ()))


class SglangServer(Server):
    """SGLang's server with our loader, reachable as ``load_format=loader`` of ``/update_weights_from_tensor``."""

    def __init__(
        self, checkpoint: Path, tp: int = 1, *, loader: str | None = LOADER, extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None, ready_s: float = READY_S,
    ) -> None:  # fmt: skip
        port = free_port()
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--host", "127.0.0.1",
            "--port", str(port), "--device", "cpu", "--dtype", "bfloat16", "--tp-size", str(tp),
            "--skip-tokenizer-init", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule",
            "--skip-server-warmup", "--context-length", str(LENGTH), "--max-total-tokens", str(4 * LENGTH),
            "--mem-fraction-static", "0.3", *(["--custom-weight-loader", loader] if loader else []), *extra_args,
        ]  # fmt: skip
        settings = {**_QUIET, **_SGLANG, "SGLANG_CPU_OMP_THREADS_BIND": _cores(tp), "PYTHONPATH": _path()}
        super().__init__(command, {**settings, **(env or {})}, port, ready_s)

    def reply(self, prompt: Tokens, temperature: float, seed: int | None, max_tokens: int) -> tuple[Tokens, Any]:
        path, body = self._stream_request(prompt, temperature, seed, max_tokens)
        answer = self.post(path, {**body, "stream": False})
        return answer["output_ids"], answer["meta_info"]

    def _stream_request(
        self, prompt: Tokens, temperature: float, seed: int | None, max_tokens: int
    ) -> tuple[str, dict[str, Any]]:
        if seed is not None:
            raise ValueError(
                "SGLang's sampling on a CPU gives other tokens each time, whatever the seed: use temperature 0"
            )
        sampling = {"temperature": temperature, "max_new_tokens": max_tokens, "ignore_eos": True}
        return "/generate", {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}

    def _stream_tokens(self, events: Iterator[dict[str, Any]]) -> Iterator[Tokens]:
        # Each event repeats the reply from its beginning.
        seen = 0
        for event in events:
            yield event["output_ids"][seen:]
            seen = len(event["output_ids"])


def fresh_generate(
    checkpoint: Path, prompts: Sequence[Tokens], *, temperature: float = 0.0, seed: int | None = None,
    max_tokens: int = 16, tp: int = 1, extension: str | None = EXTENSION, options: Mapping[str, object] | None = None,
) -> list[Tokens]:  # fmt: skip
    """What an engine says that has just loaded ``checkpoint`` and shares nothing with the one under test.

    At TP 1 the engine is a process of its own without servers in it (``fresh.py``), made with the keyword arguments
    ``options`` besides the usual ones; at TP 2 it is a whole server.
    """
    if tp > 1:
        with VllmServer(checkpoint, tp, extension=extension) as server:
            return server.generate(prompts, temperature=temperature, seed=seed, max_tokens=max_tokens)
    request = {
        "checkpoint": str(checkpoint), "prompts": [list(prompt) for prompt in prompts], "temperature": temperature,
        "seed": seed, "max_tokens": max_tokens, "extension": extension, "options": dict(options or {}),
    }  # fmt: skip
    settings = {**os.environ, **_QUIET, **_VLLM, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": _path()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.fresh", json.dumps(request)], env=settings, capture_output=True,
        timeout=READY_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"a fresh engine failed with {done.returncode}\n{done.stderr.decode()[-6000:]}")
    return json.loads(done.stdout.decode().splitlines()[-1])


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cores(tp: int) -> str:
    """One core for each rank: ``0|1``."""
    return "|".join(str(rank) for rank in range(tp))


def _path() -> str:
    """Servers find this repository's tests (worker extensions of tests among them) and what the caller has added."""
    return os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))


def _events(reply: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events until the stream says that it is done."""
    for line in reply:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"server said {event['error']}")
        yield event


def _session(session: int) -> Iterator[tuple[int, str]]:
    """(process id, title) of the living processes of one session; field 6 of /proc/PID/stat is the session."""
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            title = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            yield int(directory.name), title


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
