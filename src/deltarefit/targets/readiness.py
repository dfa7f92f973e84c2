"""Is an engine at the newest version, right now? A tiny HTTP server of the follower, for load balancers and people.

``GET /ready`` answers 200 if the live weights are CLEAN at the newest version that the follower knows of, every rank's
agent is alive at this moment, generation runs, and the follower has no trouble; else 503. The body is JSON either way.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deltarefit.errors import RefitError, UnavailableError, UsageError
from deltarefit.events import Event
from deltarefit.manifest import Header, State
from deltarefit.targets.agent_client import AgentClient
from deltarefit.targets.engine import read_note

PATH = "/ready"
ASK_S = 0.5
"""Longest wait for the agents, all together: who probes waits for a second or so."""
_REQUEST_S = 10.0
_DOUBT, _TRUST = ("diverged",), ("clean", "proven", "adopted")
GONE, EMPTY, DIVERGED = "gone", "empty", "diverged"
"""States beside those of a header: an agent does not answer, no header yet, bits proven wrong."""
WAITING, PAUSED = "waiting", "paused"
"""The follower starts, or tries again after an error; generation stands still."""


@dataclass(frozen=True)
class Status:
    """What ``/ready`` says. ``state`` is that of the header, or ``gone``, ``empty``, ``diverged``, ``waiting`` or
    ``paused``."""

    version: int
    head: int
    state: str
    digest: str

    @property
    def ready(self) -> bool:
        return self.state == State.CLEAN.value and self.version >= self.head


class Readiness:
    """Knows from the follower's events which version is the newest, and asks the agents for the rest.

    ``sockets`` gives those of all ranks, none while the engine is not known. ``trouble`` says what else keeps an
    engine with whole weights from serving them (``WAITING``, ``PAUSED``), "" if nothing does; it has to answer at once.
    """

    def __init__(self, sockets: Callable[[], Sequence[str]], trouble: Callable[[], str]) -> None:
        self._sockets, self._trouble = sockets, trouble
        self._run = ""
        self._head = 0
        self._doubted = False

    def expect(self, run: str, head: int) -> None:
        """The run that is followed, and its head as far as it is known already."""
        self._run, self._head = run, max(self._head, head)

    def __call__(self, event: Event) -> None:
        """An event of the receiver."""
        self._head = max(self._head, event.version)
        if event.type in _DOUBT:
            self._doubted = True
        elif event.type in _TRUST:
            self._doubted = False

    def status(self) -> Status:
        """As it is at this moment; never waits for a refit, nor longer than ``ASK_S`` for the ranks."""
        try:
            header = self._header()
        except RefitError:
            return self._status(None, GONE)
        if header is None:
            return self._status(None, EMPTY)
        if header.state is not State.CLEAN:
            return self._status(header, header.state.value)
        return self._status(header, DIVERGED if self._doubted else self._trouble() or header.state.value)

    def _status(self, header: Header | None, state: str) -> Status:
        if header is None:
            return Status(0, self._head, state, "")
        return Status(header.version, max(self._head, header.version), state, str(header.digest))

    def _header(self) -> Header | None:
        """Rank 0's note, if it speaks of the agents that answer now and of the run that is followed."""
        until = time.monotonic() + ASK_S
        hellos = [_hello(path, until) for path in self._sockets()]
        if not hellos:
            raise UnavailableError("no agent is known")
        if (text := hellos[0]["header"]) is None:
            return None
        incarnations, header = read_note(text)
        found = [hello["incarnation"] for hello in hellos]
        return header if incarnations == found and header.run == self._run else None


def _hello(path: str, until: float) -> dict[str, Any]:
    if (left := until - time.monotonic()) <= 0:
        raise UnavailableError("the agents do not answer in time")
    with closing(AgentClient(path, left)) as client:
        answer: dict[str, Any] = client.call("hello", max(0.001, until - time.monotonic()))
        return answer


class ReadyServer:
    """Serves ``status()`` at ``address`` (``HOST:PORT``; port 0: any free one) from ``start`` to ``close``."""

    def __init__(self, address: str, status: Callable[[], Status]) -> None:
        host, port = parse_address(address)
        try:
            self._server = _Server((host, port), _handler(status))
        except OSError as error:
            raise UsageError(
                f"cannot serve readiness at {address}", found=error.strerror or error, next_step="Give another --ready."
            ) from error
        self.url = f"http://{host}:{self._server.server_address[1]}{PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="refit-ready", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and let go of the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Quiet about who gave up waiting for the answer."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _handler(status: Callable[[], Status]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S
        server_version, sys_version = "deltarefit", ""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != PATH:
                self._answer(404, {"error": f"only {PATH} is served here"})
                return
            found = status()
            self._answer(200 if found.ready else 503, asdict(found))

        def _answer(self, code: int, body: dict[str, object]) -> None:
            data = json.dumps(body).encode() + b"\n"
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nobody wants a line per probe."""

    return Handler


def parse_address(address: str) -> tuple[str, int]:
    """``HOST:PORT``. ``UsageError`` if it is none."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError("bad address to serve readiness at", expected="HOST:PORT", found=repr(address)[:80])
    return host.strip("[]"), int(port)
