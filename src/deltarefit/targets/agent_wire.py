"""What agent and client say to each other: JSON behind a length, over a Unix stream socket of one machine and user.

A message is four bytes of length, little-endian, and as many bytes of JSON. A request is ``{"op": name, ...}``, a reply
``{"ok": ...}`` or ``{"error": {...}}``. Payload bytes do not travel here: requests name a file.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from deltarefit import errors
from deltarefit.errors import FormatError, RefitError
from deltarefit.records import Digest

MAX_MESSAGE_BYTES = 64 << 20
"""Most bytes of one message; a catalog or a plan of a hundred thousand tensors has a tenth of that."""
PATH_BYTES = 108
"""A socket's path has fewer bytes (sun_path of unix(7))."""
_LENGTH = struct.Struct("<I")
_CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RefitError)
}


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """One message. ``FormatError`` if it is too large, before any of it is sent."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise FormatError("a message to or from an agent is too large", expected=MAX_MESSAGE_BYTES, found=len(data))
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, begin_s: float | None, rest_s: float | None = None) -> dict[str, Any] | None:
    """The next message, or None if the other side has closed. It must begin within ``begin_s`` (None: whenever), and be
    whole ``rest_s`` later; without ``rest_s`` it must be whole within ``begin_s``.

    ``FormatError`` for what is no message, ``OSError`` as sockets raise it, also in the middle of a message.
    """
    until = None if begin_s is None else time.monotonic() + begin_s
    head = _exactly(connection, _LENGTH.size, until)
    if not head:
        return None
    size = _LENGTH.unpack(head)[0]
    if size > MAX_MESSAGE_BYTES:
        raise FormatError("a message is too large", expected=f"<= {MAX_MESSAGE_BYTES} bytes", found=size)
    data = _exactly(connection, size, until if rest_s is None else time.monotonic() + rest_s)
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise FormatError("a message is not an object", found=type(message).__name__)
    return message


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytes:
    """``size`` bytes, or none if the other side closed before the first; ``TimeoutError`` after ``until``."""
    parts, left = [], size
    while left:
        connection.settimeout(None if until is None else max(0.001, until - time.monotonic()))
        part = connection.recv(min(left, 1 << 20))
        if not part:
            if left == size:
                return b""
            raise ConnectionResetError("closed in the middle of a message")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def error_message(error: RefitError) -> dict[str, Any]:
    """The reply that says so."""
    told = {name: None if (value := getattr(error, name)) is None else str(value) for name in _FIELDS}
    return {"error": {"type": type(error).__name__, **told}}


_FIELDS = ("what", "expected", "found", "next_step")


def error_of(body: object) -> RefitError:
    """The error that an agent replied with, in its own class."""
    if not isinstance(body, dict):
        return RefitError("an agent failed and did not say how", found=repr(body)[:80])
    kind = _CLASSES.get(str(body.get("type")), RefitError)
    told = {name: body.get(name) for name in _FIELDS}
    return kind(str(told["what"]), expected=told["expected"], found=told["found"], next_step=told["next_step"])


def pack_sums(sums: Mapping[int, Digest]) -> dict[str, str]:
    """Sums by class id."""
    return {str(id_): str(digest) for id_, digest in sums.items()}


def unpack_sums(body: Mapping[str, str]) -> dict[int, Digest]:
    return {int(id_): Digest.parse(text) for id_, text in body.items()}
