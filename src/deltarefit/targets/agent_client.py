"""The client of one rank's agent: typed calls, each with a deadline. Reads nothing but what the agent says.

``UnavailableError`` if the agent is not there (any more) or does not answer in time; the connection is of no use then,
as a late reply would answer another question. Whatever else an agent's rank raises is raised here in its own class.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from deltarefit.errors import FormatError, IntegrityError, UnavailableError, UsageError
from deltarefit.manifest import Catalog, PayloadRef
from deltarefit.protocol.messages import Op
from deltarefit.records import Digest
from deltarefit.targets.agent_wire import PATH_BYTES, error_of, receive, send, unpack_sums

T = TypeVar("T")
HELLO_S = 10.0
ATTACH_S = 600.0
"""Recording what a native loader of a large model does."""
WORK_S = 300.0
"""One payload, staged, summed or written; also waiting for the request of a follower that died."""
DIGEST_S = 900.0
"""All bits of one rank, read once; also of the checkpoint it was loaded from."""


class AgentClient:
    """One connection. Not for several threads at once."""

    def __init__(self, path: str, deadline_s: float = HELLO_S) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = self._connected(deadline_s)

    def close(self) -> None:
        """Let go of the connection; a call that waits in another thread ends with ``UnavailableError``."""
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):  # closed by the agent already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def call(self, op: str, deadline_s: float, **arguments: Any) -> Any:
        """What the agent answers."""
        with self._lock:
            reply = self._exchanged({"op": op, **arguments}, deadline_s)
        if "error" in reply:
            raise error_of(reply["error"])
        return reply.get("ok")

    # ------------------------------------------------------------------------------------ calls

    def hello(self) -> dict[str, Any]:
        """incarnation, pid, rank, size, header, busy (the operation at hand, or ""), plan (its identity, or ""),
        attached (this connection was the last to attach)."""
        return self._dict(self.call("hello", HELLO_S))

    def ready_for(self, catalog: str) -> bool:
        """Whether attaching to a catalog, by identity, leaves loader and weights alone."""
        return bool(self.call("ready_for", HELLO_S, catalog=catalog))

    def attach(self, run: str, catalog: Catalog) -> tuple[dict[str, Any], str]:
        """The rank's plan and its identity."""
        found = self.call("attach", ATTACH_S, run=run, catalog=catalog.to_bytes().decode())
        return self._read(found, lambda told: (dict(told["plan"]), str(told["identity"])))

    def assign(self, assignment: dict[str, Any]) -> None:
        self.call("assign", ATTACH_S, assignment=assignment)

    def header(self) -> str | None:
        text = self.call("get_header", WORK_S)
        return None if text is None else str(text)

    def set_header(self, text: str | None) -> None:
        self.call("set_header", WORK_S, header=text)

    def stage(self, ref: PayloadRef, file: Path) -> dict[int, tuple[Digest, Digest]]:
        found = self.call("stage", WORK_S, ref=_text(ref), path=str(file))
        return self._read(found, _pairs)

    def staged(self, ref: PayloadRef) -> bool:
        return self.call("staged", WORK_S, ref=_text(ref)) is True

    def live(self, ref: PayloadRef) -> dict[int, Digest] | None:
        """None: not staged on this rank."""
        found = self.call("live", WORK_S, ref=_text(ref))
        return None if found is None else self._read(found, unpack_sums)

    def write(self, ref: PayloadRef, op: Op) -> None:
        self.call("write", WORK_S, ref=_text(ref), write=op.value)

    def fill(self, ref: PayloadRef, file: Path) -> None:
        self.call("fill", WORK_S, ref=_text(ref), path=str(file))

    def digest(self) -> dict[int, Digest]:
        return self._read(self.call("digest", DIGEST_S), unpack_sums)

    def drop(self) -> None:
        self.call("drop", WORK_S)

    def proof(self) -> Digest | None:
        text = self.call("proof", DIGEST_S)
        return None if text is None else Digest.parse(text)

    # ------------------------------------------------------------------------------------ the connection

    def _connected(self, deadline_s: float) -> socket.socket:
        if len(self.path.encode()) >= PATH_BYTES:
            raise UsageError("a socket's path is too long", expected=f"< {PATH_BYTES} bytes", found=self.path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(deadline_s)
        try:
            connection.connect(self.path)
        except OSError as error:
            connection.close()
            raise self._gone(f"no agent: {error}") from error
        return connection

    def _exchanged(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        started = time.monotonic()
        connection = self._socket
        if connection is None:
            raise self._gone("the connection was given up")
        try:
            connection.settimeout(deadline_s)
            send(connection, request)
            reply = receive(connection, max(0.001, started + deadline_s - time.monotonic()))
        except TimeoutError as error:
            self.close()
            raise self._gone(f"no answer to {request['op']} within {deadline_s:g} s") from error
        except (OSError, FormatError) as error:
            self.close()
            raise self._gone(f"lost it during {request['op']}: {error}") from error
        if reply is None:
            self.close()
            raise self._gone(f"it closed during {request['op']}")
        return reply

    def _gone(self, what: str) -> UnavailableError:
        step = "The engine was stopped, or is being started; follow again once it serves."
        return UnavailableError(f"agent at {self.path}: {what}", next_step=step)

    def _dict(self, found: object) -> dict[str, Any]:
        if not isinstance(found, dict):
            raise self._malformed(found)
        return found

    def _read(self, found: Any, parse: Callable[[Any], T]) -> T:
        """What ``parse`` makes of a reply; ``IntegrityError`` if it is of another form."""
        try:
            return parse(found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._malformed(found) from error

    def _malformed(self, found: object) -> IntegrityError:
        return IntegrityError(f"agent at {self.path}: a reply of the wrong form", found=json.dumps(found)[:80])


def _pairs(found: dict[str, Any]) -> dict[int, tuple[Digest, Digest]]:
    return {int(id_): (Digest.parse(now), Digest.parse(then)) for id_, (now, then) in found.items()}


def _text(ref: PayloadRef) -> str:
    return ref.to_bytes().decode()
