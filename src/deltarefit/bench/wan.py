"""A slow, long and lossy link between two network namespaces: ``python -m deltarefit.bench.wan NEAR FAR SHAPE``.

A TUN device in each namespace, and this process between them: a packet that arrives on one is put on the other when
the link's rate and delay let it out, or never. The bottleneck's queue holds a tenth of a second and drops what does not
fit. Says ``ready``; ends when stdin does. No packet is early; one may be late by the millisecond in which epoll counts.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque

from deltarefit.bench import links
from deltarefit.bench.links import FAR, NEAR, Shape

QUEUE_S = 0.1
"""What the bottleneck's queue holds, and at least ``QUEUE_PACKETS``."""
QUEUE_PACKETS = 64
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET = 1 << 16
_AT_ONCE = 64
_IDLE_S = 1.0


class Direction:
    """Packets from one device to the other."""

    def __init__(self, source: int, sink: int, shape: Shape) -> None:
        self._source, self._sink, self._shape = source, sink, shape
        self._rate = shape.mbit * 1e6 / 8
        self._room = max(self._rate * QUEUE_S, QUEUE_PACKETS * shape.mtu)
        self._free = 0.0
        self._flying: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Let packets in that wait at the source."""
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self._source, _PACKET)
            except BlockingIOError:
                return
            self._enter(packet, time.monotonic())

    def _enter(self, packet: bytes, now: float) -> None:
        if self._shape.loss and random.random() < self._shape.loss:  # noqa: S311  # no secret hangs on it
            return
        begin = max(self._free, now)
        if (begin - now) * self._rate > self._room:
            return
        self._free = begin + len(packet) / self._rate
        self._flying.append((self._free + self._shape.one_way_s, packet))

    def deliver(self) -> float:
        """Put out what is due; seconds until the next."""
        while self._flying:
            due, packet = self._flying[0]
            if (left := due - time.monotonic()) > 0:
                return left
            try:
                os.write(self._sink, packet)
            except BlockingIOError:
                return 0.001
            self._flying.popleft()
        return _IDLE_S


def main(near: str, far: str, shape: Shape) -> None:
    """Carry packets until stdin ends."""
    one, other = _tun(near, NEAR, shape.mtu), _tun(far, FAR, shape.mtu)
    directions = {one: Direction(one, other, shape), other: Direction(other, one, shape)}
    poll, wait = select.epoll(), 0.0
    for handle in (one, other, sys.stdin.fileno()):
        poll.register(handle, select.EPOLLIN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        for handle, _ in poll.poll(wait):
            if handle not in directions:
                return
            directions[handle].take()
        wait = min(direction.deliver() for direction in directions.values())


def _tun(namespace: str, address: str, mtu: int) -> int:
    """A new TUN device with an address in a namespace; its descriptor, which stays with this process."""
    handle, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"{namespace}0"
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    links.into(namespace, name)
    links.up(namespace, name, address, mtu)
    return handle


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Shape(**json.loads(sys.argv[3])))
