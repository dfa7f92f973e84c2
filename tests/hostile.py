"""HTTP servers that answer whatever a test says: raw bytes over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

FLOOD_BYTES = 64 << 20
"""What a server may get rid of before it must be that the client reads without end; buffers of sockets take some."""


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[Request], Iterable[bytes]]


def says(status: int, body: bytes = b"", length: object = None, **headers: str) -> bytes:
    """One answer. ``length`` if its Content-Length is another than the body's; "" for none."""
    lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    if length != "":
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Server:
    """Answers as ``answer`` says, on one connection after another request; an exception in it ends the connection."""

    answer: Answer
    read: Callable[[socket.socket, int], bytes] = lambda sock, count: exactly(sock, count)
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    sent: int = 0
    url: str = ""

    def serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, EOFError):
            while True:
                self.requests.append(request := self._request(sock))
                for piece in self.answer(request):
                    sock.sendall(piece)
                    self.sent += len(piece)

    def _request(self, sock: socket.socket) -> Request:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += exactly(sock, 1)
        first, *rest = head.decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
        body = self.read(sock, int(headers.get("content-length", 0)))
        return Request(*first.split(" ")[:2], headers, body)


def exactly(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (piece := sock.recv(count - len(found))):
            raise EOFError
        found += piece
    return found


@contextlib.contextmanager
def server(answer: Answer, **rest: object) -> Iterator[Server]:
    made = Server(answer, **rest)  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    open_sockets: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                made.connections += 1
                open_sockets.append(sock)
                threading.Thread(target=made.serve, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        for sock in (listener, *open_sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        thread.join(10)


def always(*pieces: bytes) -> Answer:
    return lambda _: pieces


def endless(head: bytes) -> Answer:
    """``head``, then bytes for as long as somebody takes them, up to ``FLOOD_BYTES``."""

    def answer(_: Request) -> Iterator[bytes]:
        yield head
        for _ in range(FLOOD_BYTES >> 16):
            yield bytes(1 << 16)

    return answer


def trickle(head: bytes) -> Answer:
    def answer(_: Request) -> Iterator[bytes]:
        yield head
        while True:
            time.sleep(0.05)
            yield b"x"

    return answer
