"""A cheap load generator for HTTP servers: ``python -m deltarefit.bench.relay_load JOB``; JOB is JSON.

Says ``ready``, waits for a line on stdin, and takes whole objects over a few connections for some seconds. The kernel
throws bodies away uncopied (``MSG_TRUNC``, tcp(7)), so that on a core of its own it is quicker than any server. The
last line is JSON: seconds, and bytes and number of the bodies that came whole.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle

from deltarefit.errors import RefitError

PIECE = 1 << 22
SILENT_S = 30.0


class Connection:
    """Requests one after another."""

    def __init__(self, address: tuple[str, int], targets: Iterator[tuple[str, int]]) -> None:
        self.socket = socket.create_connection(address, SILENT_S)
        self.bytes, self.requests = 0, 0
        self._targets, self._host = targets, f"{address[0]}:{address[1]}"
        self._head, self._left = b"", 0
        self._ask()

    def _ask(self) -> None:
        target, self._size = next(self._targets)
        self._left, self._head = -1, b""
        self.socket.sendall(f"GET {target} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())

    def step(self) -> None:
        """Take what is there."""
        if self._left < 0:
            self._take_head()
        else:
            # The bytes need room in the call, not in memory: they are not copied.
            self._left -= self._some(self.socket.recv_into(_ROOM, min(self._left, PIECE), socket.MSG_TRUNC))
        if self._left == 0:
            self.bytes, self.requests = self.bytes + self._size, self.requests + 1
            self._ask()

    def _take_head(self) -> None:
        """Byte counts come from the answer itself, and must be those of the object."""
        seen = self.socket.recv(2048, socket.MSG_PEEK)
        self._some(len(seen))
        head, end, _ = seen.partition(b"\r\n\r\n")
        if not end:
            return
        self.socket.recv(len(head) + len(end))
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), -1)
        if b" 200 " not in lines[0] or length != self._size:
            raise RefitError("not the object that was asked for", expected=f"{self._size} bytes", found=lines[0][:80])
        self._left = length

    def _some(self, count: int) -> int:
        if not count:
            raise RefitError("the server closed a connection", found=f"{self._left} bytes were missing")
        return count


_ROOM = bytearray(PIECE)


def main(host: str, port: int, targets: Sequence[tuple[str, int]], connections: int, seconds: float) -> None:
    """Load the server, and tell."""
    _say("ready")
    sys.stdin.readline()
    supply, poll = cycle(targets), selectors.DefaultSelector()
    started = time.perf_counter()
    opened = [Connection((host, port), supply) for _ in range(connections)]
    for one in opened:
        poll.register(one.socket, selectors.EVENT_READ, one)
    while time.perf_counter() - started < seconds:
        for key, _ in poll.select(SILENT_S):
            key.data.step()
    spent = time.perf_counter() - started
    done = {"bytes": sum(one.bytes for one in opened), "requests": sum(one.requests for one in opened)}
    _say(json.dumps({"seconds": spent, **done}))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
