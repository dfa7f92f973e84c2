"""The agent: one rank's live weights behind a Unix socket, in the worker process that holds them.

It carries out one request at a time, whoever asks, and to its end, whether or not the one who asked is still there.
What must outlive a follower (header, staged payloads) is kept by the ``RankWeights`` that it serves. Whoever attached
last may use the weights; what an earlier follower still had on its way is refused: it cannot meet its successor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from deltarefit.codec import check_object
from deltarefit.errors import FormatError, NotFoundError, RefitError, UnavailableError, UsageError
from deltarefit.localfiles import disk_errors
from deltarefit.manifest import Catalog, PayloadRef
from deltarefit.protocol.messages import Op
from deltarefit.records import Digest
from deltarefit.targets.agent_wire import PATH_BYTES, error_message, pack_sums, receive, send

MAX_CONNECTIONS = 32
"""Most connections at a time; further ones are closed at once."""
FIRST_S = 30.0
"""Longest time until a connection's first message begins: who says nothing must not shut others out."""
MESSAGE_S = 30.0
"""Longest time that the rest of a message, or a reply, may take on its way."""
OnMain = Callable[[Callable[[], Any]], Any]
"""Runs a function where the weights may be used, and returns what it returns."""
_SOCKET = re.compile(r"agent-(\d+)-\d+-[0-9a-f]+\.sock")
_PEER = struct.Struct("3i")


class RankWeights(Protocol):
    """One rank's side of ``ports.LiveTarget``. Calls come one at a time. Sums are by class id (``ranks.RankGroup``)."""

    header: bytes | None

    def ready_for(self, catalog: str) -> bool: ...
    def attach(self, run: str, catalog: Catalog) -> dict[str, Any]: ...
    def assign(self, assignment: dict[str, Any]) -> None: ...
    def stage(self, ref: PayloadRef, data: bytes) -> dict[int, tuple[Digest, Digest]]: ...
    def staged(self, ref: PayloadRef) -> bool: ...
    def live(self, ref: PayloadRef) -> dict[int, Digest] | None: ...
    def write(self, ref: PayloadRef, op: Op) -> None: ...
    def fill(self, ref: PayloadRef, data: bytes) -> None: ...
    def digest(self) -> dict[int, Digest]: ...
    def drop(self) -> None: ...
    def proof(self) -> Digest | None: ...


class Agent:
    """Serves ``weights`` of rank ``rank`` of ``size`` from ``start`` to ``close``, in daemon threads.

    ``directory`` is private to the user; by default ``run_directory()``. ``on_main`` runs every operation on the
    weights; by default the connection's own thread does.
    """

    def __init__(
        self,
        weights: RankWeights,
        rank: int,
        size: int,
        *,
        directory: Path | None = None,
        on_main: OnMain = lambda work: work(),
    ) -> None:
        self.incarnation = secrets.token_hex(8)
        self.rank, self.size = rank, size
        self._weights, self._on_main, self._directory = weights, on_main, directory
        self._lock = threading.Lock()
        self._owner: object = None
        self._plan = ""
        self._busy = ""
        self._listening: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self.path = ""

    @property
    def header(self) -> str | None:
        """What a follower noted here about the weights (``engine.read_note``)."""
        header = self._weights.header
        return None if header is None else header.decode()

    def start(self) -> str:
        """Listen; the path of the socket."""
        directory = private_directory(self._directory or run_directory())
        remove_dead(directory)
        path = str(directory / f"agent-{os.getpid()}-{self.rank}-{self.incarnation[:8]}.sock")
        if len(path.encode()) >= PATH_BYTES:
            step = "Set DELTAREFIT_RUN_DIR to a directory with a shorter path."
            raise UsageError(
                "a socket's path is too long", expected=f"< {PATH_BYTES} bytes", found=path, next_step=step
            )
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with disk_errors(f"socket {path}"):
            listening.bind(path)
            Path(path).chmod(0o600)
            listening.listen(MAX_CONNECTIONS)
        self.path, self._listening = path, listening
        threading.Thread(target=self._accept, args=(listening,), name=f"refit-agent-{self.rank}", daemon=True).start()
        return path

    def close(self) -> None:
        """Stop, after the request that is being carried out."""
        listening, self._listening = self._listening, None
        if listening is None:
            return
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        Path(self.path).unlink(missing_ok=True)
        with self._lock:
            for connection in list(self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------------ connections

    def _accept(self, listening: socket.socket) -> None:
        while self._listening is listening:
            try:
                connection, _ = listening.accept()
                uid = peer_uid(connection)
            except OSError:  # closed; else out of descriptors, or the peer went away already
                time.sleep(0.01)
                continue
            if uid != os.geteuid() or len(self._connections) >= MAX_CONNECTIONS:
                connection.close()
                continue
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="refit-client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one client until it closes, dies or says what is no message."""
        with connection, contextlib.suppress(OSError):
            try:
                wait: float | None = FIRST_S
                while (request := receive(connection, wait, MESSAGE_S)) is not None:
                    wait = None
                    reply = self._answer(connection, request)
                    connection.settimeout(MESSAGE_S)
                    send(connection, reply)
            except FormatError as error:
                send(connection, error_message(error))
            finally:
                self._connections.discard(connection)

    def _answer(self, who: object, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": self._carry_out(who, request)}
        except RefitError as error:
            return error_message(error)
        except MemoryError as error:
            return error_message(UnavailableError(f"rank {self.rank} is out of memory", found=error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who asked must know
            what = f"rank {self.rank} failed in {str(request.get('op'))[:40]}: {type(error).__name__}: {error}"
            return error_message(RefitError(what, next_step="Look into the log of the engine's worker."))

    # ------------------------------------------------------------------------------------ requests

    def _carry_out(self, who: object, request: dict[str, Any]) -> Any:
        name = request.get("op")
        if name == "hello":
            return self._hello(who)
        work = self._OPS.get(str(name))
        if work is None:
            raise UsageError("an agent was asked for what it does not know", expected=sorted(self._OPS), found=name)
        with self._lock:
            if name == "attach":
                self._owner = who
            elif name != "ready_for" and self._owner is not who:
                raise UnavailableError(
                    f"another follower has attached to rank {self.rank} since",
                    next_step="Run one follower per engine.",
                )
            self._busy = str(name)
            try:
                return self._on_main(lambda: work(self, request))
            finally:
                self._busy = ""

    def _hello(self, who: object) -> dict[str, Any]:
        """Who this is and what it holds; never waits for a request that is being carried out."""
        return {
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "rank": self.rank,
            "size": self.size,
            "header": self.header,
            "busy": self._busy,
            "plan": self._plan,
            "attached": self._owner is who,
        }

    def _ready_for(self, request: dict[str, Any]) -> bool:
        return self._weights.ready_for(str(request["catalog"]))

    def _attach(self, request: dict[str, Any]) -> dict[str, Any]:
        catalog = Catalog.from_bytes(request["catalog"].encode(), "catalog of an attach")
        plan = self._weights.attach(str(request["run"]), catalog)
        self._plan = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        return {"plan": plan, "identity": self._plan}

    def _assign(self, request: dict[str, Any]) -> None:
        self._weights.assign(request["assignment"])

    def _set_header(self, request: dict[str, Any]) -> None:
        text = request["header"]
        self._weights.header = None if text is None else str(text).encode()

    def _get_header(self, request: dict[str, Any]) -> str | None:
        return self.header

    def _stage(self, request: dict[str, Any]) -> dict[str, list[str]]:
        ref = _ref(request)
        sums = self._weights.stage(ref, _payload(request, ref))
        return {str(id_): [str(now), str(then)] for id_, (now, then) in sums.items()}

    def _staged(self, request: dict[str, Any]) -> bool:
        return self._weights.staged(_ref(request))

    def _live(self, request: dict[str, Any]) -> dict[str, str] | None:
        sums = self._weights.live(_ref(request))
        return None if sums is None else pack_sums(sums)

    def _write(self, request: dict[str, Any]) -> None:
        self._weights.write(_ref(request), Op(request["write"]))

    def _fill(self, request: dict[str, Any]) -> None:
        ref = _ref(request)
        self._weights.fill(ref, _payload(request, ref))

    def _digest(self, request: dict[str, Any]) -> dict[str, str]:
        return pack_sums(self._weights.digest())

    def _drop(self, request: dict[str, Any]) -> None:
        self._weights.drop()

    def _proof(self, request: dict[str, Any]) -> str | None:
        proof = self._weights.proof()
        return None if proof is None else str(proof)

    _OPS: dict[str, Callable[[Agent, dict[str, Any]], Any]] = {  # noqa: RUF012 - never changed
        "ready_for": _ready_for, "attach": _attach, "assign": _assign, "set_header": _set_header,
        "get_header": _get_header, "stage": _stage, "staged": _staged, "live": _live, "write": _write, "fill": _fill,
        "digest": _digest, "drop": _drop, "proof": _proof,
    }  # fmt: skip


def _ref(request: dict[str, Any]) -> PayloadRef:
    return PayloadRef.from_bytes(request["ref"].encode(), "reference of a payload")


def _payload(request: dict[str, Any], ref: PayloadRef) -> bytes:
    """The bytes of a payload, from the file that a follower of this machine put them in."""
    path = Path(request["path"])
    try:
        with disk_errors(f"payload file {path}"), open(path, "rb", opener=_at_once) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(ref.size + 1) if regular else b""
    except NotFoundError as error:
        step = "Follower and engine need one file system: run them on one machine, in one container."
        raise UsageError(f"the engine does not see payload file {path}", next_step=step) from error
    if not regular:
        raise UsageError(f"payload file {path} is no regular file")
    check_object(data, ref.sha256, ref.size, f"payload file {path}")
    return data


def _at_once(path: str, flags: int) -> int:
    """Opens a pipe without waiting for its writer: the rank's lock is held."""
    return os.open(path, flags | os.O_NONBLOCK)


# ------------------------------------------------------------------------------------------ places


def run_directory() -> Path:
    """Where agents' sockets are: ``$DELTAREFIT_RUN_DIR``, else a directory of this user's in the system's place for
    such."""
    if own := os.environ.get("DELTAREFIT_RUN_DIR"):
        return Path(own)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "deltarefit"
    return Path(tempfile.gettempdir()) / f"deltarefit-{os.geteuid()}"


def private_directory(path: Path) -> Path:
    """``path``, made if it is not there. ``UsageError`` unless it is a directory that only this user can enter."""
    with disk_errors(f"directory {path}"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{path} is not private",
            expected=f"a directory of user {os.geteuid()} with mode 700",
            found=f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}",
            next_step="Remove it, change its mode, or set DELTAREFIT_RUN_DIR to another.",
        )
    return path


def remove_dead(directory: Path) -> None:
    """Sockets whose processes are gone."""
    for path in directory.glob("agent-*.sock"):
        match = _SOCKET.fullmatch(path.name)
        if match and not alive(int(match[1])):
            path.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Whether a process of this number exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def peer_uid(connection: socket.socket) -> int:
    """The user that the other side runs as, as the kernel says."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)
