"""HTTP servers that answer like the engines' own, over agents that are real: for tests of controls and of ``follow``.

Both keep the rules that matter: weights may be written only while paused (``live_ranks`` looks at the file ``paused``),
caches reset only then, and a loader is called only inside a session.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = tuple[int, Any]
Agents = Callable[[], list[str]]


class Server:
    """Listens from ``start`` to ``stop``, and again on the same port. ``calls`` are (method, path with query, body)."""

    def __init__(self, port: int = 0) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.port = port
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paths(self) -> list[str]:
        """Paths of all calls that do something."""
        return [path for method, path, _ in self.calls if method == "POST"]

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Answer:
        """(status, body) of one call; a body that is text is sent as it is."""
        raise NotImplementedError


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._do()

        def do_POST(self) -> None:
            self._do()

        def _do(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(data) if data else None
            server.calls.append((self.command, self.path, body))
            server.headers.append(dict(self.headers))
            parts = urllib.parse.urlsplit(self.path)
            status, answer = server.answer(self.command, parts.path, dict(urllib.parse.parse_qsl(parts.query)), body)
            text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Handler


class VllmHttp(Server):
    """vLLM 0.32's development endpoints, as far as a follower uses them."""

    def __init__(self, agents: Agents, paused: Path) -> None:
        self.agents, self.paused_file = agents, paused
        self.dev_mode = self.extension = self.metrics = True
        self.asleep = self.paused = self.dead = False
        self.version = "default"
        self.objections: list[str] = []
        self.replicas = 1
        self.busy_cache = 0
        """How often the prefix cache cannot be reset yet."""
        super().__init__()

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Answer:
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/metrics" and self.metrics:
            gauge = 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state='
            return 200, f'# HELP x\n{gauge}"awake"}} {0.0 if self.asleep else 1.0}\n{gauge}"discard_all"}} 0.0\n'
        known = getattr(self, "_" + method.lower() + path.replace("/", "_"), None)
        if known is None or not self.dev_mode:
            return 404, {"detail": "Not Found"}
        if self.dead:
            return 500, {"error": {"message": "EngineDeadError: EngineCore encountered an issue."}}
        answer: Answer = known(query, body)
        return answer

    def _get_is_sleeping(self, query: dict[str, str], body: Any) -> Answer:
        return 200, {"is_sleeping": self.asleep or self.paused}

    def _get_get_world_size(self, query: dict[str, str], body: Any) -> Answer:
        size = len(self.agents())
        return 200, {"world_size": size * (self.replicas if query["include_dp"] == "true" else 1)}

    def _post_collective_rpc(self, query: dict[str, str], body: Any) -> Answer:
        if not self.extension:
            return 500, f"Call to collective_rpc method failed: 'Worker' object has no attribute '{body['method']}'"
        paths = self.agents()
        told = {"size": len(paths), "objections": self.objections}
        found = [{"socket": path, "rank": rank, **told} for rank, path in enumerate(paths)]
        return 200, {"results": found[::-1]}

    def _post_pause(self, query: dict[str, str], body: Any) -> Answer:
        if query["mode"] not in ("keep", "wait", "abort"):
            return 400, {"error": "Invalid pause mode"}
        self.paused = True
        self.paused_file.touch()
        return 200, {"status": "paused"}

    def _post_resume(self, query: dict[str, str], body: Any) -> Answer:
        self.paused = False
        self.paused_file.unlink(missing_ok=True)
        return 200, {"status": "resumed"}

    def _post_reset_prefix_cache(self, query: dict[str, str], body: Any) -> Answer:
        if query != {"reset_running_requests": "true", "reset_external": "true"}:
            return 200, {"success": False}
        self.busy_cache -= 1
        return 200, {"success": self.busy_cache < 0}

    def _post_reset_encoder_cache(self, query: dict[str, str], body: Any) -> Answer:
        return 200, ""

    def _post_update_weight_version(self, query: dict[str, str], body: Any) -> Answer:
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def _get_weight_info(self, query: dict[str, str], body: Any) -> Answer:
        return 200, {"weight_version": self.version}


class SglangHttp(Server):
    """SGLang 0.5.23's endpoints, as far as a follower uses them. ``directory`` is the agents' run directory."""

    def __init__(self, agents: Agents, paused: Path, directory: Path) -> None:
        self.agents, self.paused_file, self.directory = agents, paused, directory
        self.loaders = ["deltarefit.targets.sglang.load"]
        self.session = self.paused = self.asleep = False
        self.version = "default"
        self.objections: list[str] = []
        self.error = ""
        self.facts: dict[str, Any] = {}
        self.busy_cache = 0
        self._timer: threading.Timer | None = None
        super().__init__()

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Answer:
        known = getattr(self, "_" + method.lower() + path.replace("/", "_"), None)
        if known is None:
            return 404, {"detail": "Not Found"}
        answer: Answer = known(query, body)
        return answer

    def _get_ping(self, query: dict[str, str], body: Any) -> Answer:
        return 503 if self.asleep else 200, ""

    def _get_ready(self, query: dict[str, str], body: Any) -> Answer:
        return 503 if self.paused else 200, ""

    def _get_server_info(self, query: dict[str, str], body: Any) -> Answer:
        if self._timer is not None:
            self._timer.join()  # ranks answer in order
        facts = {"tp_size": len(self.agents()), "pp_size": 1, "dp_size": 1, "port": self.port}
        return 200, {**facts, "custom_weight_loader": self.loaders, **self.facts}

    def _get_model_info(self, query: dict[str, str], body: Any) -> Answer:
        return 200, {"weight_version": self.version}

    def _post_pause_generation(self, query: dict[str, str], body: Any) -> Answer:
        self.paused = True
        if body["mode"] == "retract":
            # SGLang answers before its ranks have heard of it.
            self._timer = threading.Timer(0.05, self.paused_file.touch)
            self._timer.start()
        return 200, {"status": "ok"}

    def _post_continue_generation(self, query: dict[str, str], body: Any) -> Answer:
        self.paused = False
        self.paused_file.unlink(missing_ok=True)
        return 200, {"status": "ok"}

    def _post_begin_weight_update(self, query: dict[str, str], body: Any) -> Answer:
        if self.session:
            return 400, {"success": False, "message": "a weight-update session is already open; call end first"}
        self.session = True
        return 200, {"success": True, "message": "Success"}

    def _post_end_weight_update(self, query: dict[str, str], body: Any) -> Answer:
        was, self.session = self.session, False
        return 200 if was else 400, {"success": was, "message": "Success" if was else "no session is open"}

    def _post_update_weights_from_tensor(self, query: dict[str, str], body: Any) -> Answer:
        paths = self.agents()
        if not self.session or not self.paused or body["load_format"] not in self.loaders:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        if body["serialized_named_tensors"] != ["gARdlC4="] * len(paths) or body["flush_cache"]:
            return 400, {"success": False, "message": "tensors"}
        for rank, path in enumerate(paths):
            pid = int(Path(path).name.split("-")[1])
            told = {"pid": pid, "rank": rank, "size": len(paths), "objections": self.objections, "socket": path}
            told |= {"error": self.error} if self.error else {}
            (self.directory / f"sglang-{self.port}-{rank}.json").write_text(json.dumps(told))
        return 200, {"success": True, "message": "Success"}

    def _post_flush_cache(self, query: dict[str, str], body: Any) -> Answer:
        self.busy_cache -= 1
        return (200, "Cache flushed.") if self.busy_cache < 0 else (400, "Flush cache failed.")

    def _post_update_weight_version(self, query: dict[str, str], body: Any) -> Answer:
        if body["abort_all_requests"]:
            return 400, {"success": False}
        self.version = body["new_version"]
        return 200, {"success": True}


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until ``holds()``; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)
