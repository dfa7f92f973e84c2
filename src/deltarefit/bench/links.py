"""Two sides and the link between them, as real network namespaces of one machine, for benchmarks of programs that talk.

``shaped`` limits the rate (the kernel's token bucket), ``distant`` adds delay and loss (``bench.wan``: kernels may lack
netem), ``loopback`` is no link at all, for machines where ``missing`` gives a reason. Names carry the process's number;
everything is removed when the block ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deltarefit.errors import RefitError

T = TypeVar("T")

NEAR, FAR = "198.18.78.1", "198.18.78.2"
"""Inside the namespaces; from the range for benchmarks (RFC 2544)."""
_CLONE_NEWNET = 0x40000000
_COMMAND_S, _READY_S = 10.0, 30.0
_CALLS = 8
_PIECE = 1 << 18
_numbers = itertools.count()


@dataclass(frozen=True)
class Shape:
    """A link's rate, delay in one direction, share of packets that are lost, and largest packet in bytes."""

    mbit: float
    one_way_s: float = 0.0
    loss: float = 0.0
    mtu: int = 1500

    def __str__(self) -> str:
        if not self.one_way_s:
            return f"{self.mbit:g} Mbit/s"
        return f"{self.mbit:g} Mbit/s, {2e3 * self.one_way_s:g} ms there and back, {self.loss:.1%} lost, MTU {self.mtu}"


class Side:
    """One end: where processes are started and sockets made."""

    def __init__(self, address: str, namespace: str | None = None) -> None:
        self.address, self._namespace = address, namespace
        self._threads = ThreadPoolExecutor(_CALLS, initializer=_enter, initargs=(namespace,))

    def call(self, work: Callable[[], T]) -> T:
        """``work`` in a thread of this side: what it opens or starts is here, and stays here."""
        return self._threads.submit(work).result()

    def received(self) -> int:
        """Bytes of packets that came over the link."""
        lines = self.call(lambda: Path("/proc/thread-self/net/dev").read_text()).splitlines()[2:]
        counts = {name.strip(): int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        return sum(count for name, count in counts.items() if name.startswith(_PREFIX))

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown()


@dataclass(frozen=True)
class Link:
    """``shape`` is None on loopback, where both sides are one."""

    near: Side
    far: Side
    shape: Shape | None

    def __str__(self) -> str:
        return str(self.shape) if self.shape else "loopback, not shaped"

    def crossed(self) -> int | None:
        """Bytes of packets that came out at the far end, with all headers; None on loopback."""
        return self.far.received() if self.shape else None


def missing() -> str:
    """Why this machine has no shaped links to give; empty if it has."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need root on Linux"
    try:
        with shaped(Shape(100)), distant(Shape(100, 0.001)):
            return ""
    except (OSError, RefitError) as error:
        return str(error)


@contextlib.contextmanager
def loopback() -> Iterator[Link]:
    """No namespaces."""
    with contextlib.closing(Side("127.0.0.1")) as side:
        yield Link(side, side, None)


@contextlib.contextmanager
def shaped(shape: Shape) -> Iterator[Link]:
    """A link whose rate towards the far side is ``shape.mbit``; delay and loss do not count here."""
    shape = dataclasses.replace(shape, one_way_s=0.0, loss=0.0)
    with _namespaces() as (near, far):
        here, there = f"{near}0", f"{far}0"
        _ip("link", "add", here, "netns", near, "type", "veth", "peer", "name", there, "netns", far)
        for space, device, address in ((near, here, NEAR), (far, there, FAR)):
            up(space, device, address, shape.mtu)
        # A tenth of a second of queue, as in ``wan``; the burst is what one tick of the kernel's clock lets through.
        rate = ("tbf", "rate", f"{shape.mbit:g}mbit", "burst", "256kb", "latency", "100ms")
        _run("tc", "-n", near, "qdisc", "add", "dev", here, "root", *rate)
        with _sides(near, far) as (one, other):
            yield Link(one, other, shape)


@contextlib.contextmanager
def distant(shape: Shape) -> Iterator[Link]:
    """A link with rate, delay and loss in both directions."""
    with _namespaces() as (near, far):
        command = [sys.executable, "-m", "deltarefit.bench.wan", near, far, json.dumps(dataclasses.asdict(shape))]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as wan,  # noqa: S603
            _ended(wan),
            _sides(near, far) as (one, other),
        ):
            if not wan.stdout or wan.stdout.readline() != "ready\n":
                raise RefitError("the program that carries packets did not start", found=f"exit code {wan.wait(5)}")
            yield Link(one, other, shape)


def up(namespace: str, device: str, address: str, mtu: int) -> None:
    """Give a device of a namespace its address, and let it run."""
    _ip("-n", namespace, "addr", "add", f"{address}/30", "dev", device)
    _ip("-n", namespace, "link", "set", device, "up", "mtu", str(mtu), "txqueuelen", "1000")


def into(namespace: str, device: str) -> None:
    """Move a device to a namespace."""
    _ip("link", "set", device, "netns", namespace)


def plain_copy(link: Link, nbytes: int, streams: int, most_s: float) -> float:
    """Bytes a second of a bare TCP copy from near to far over ``streams`` connections that never lack bytes, until
    ``nbytes`` have arrived in all, or ``most_s`` are over: what the link gives to any program."""
    copy = _Copy(nbytes)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2 * streams))
        server = stack.enter_context(link.near.call(lambda: socket.create_server((link.near.address, 0))))
        address = server.getsockname()
        started = time.perf_counter()
        for _ in range(streams):
            client = link.far.call(lambda: socket.create_connection(address, _READY_S))
            pool.submit(copy.take, stack.enter_context(client))
            pool.submit(copy.give, stack.enter_context(server.accept()[0]))
        copy.enough.wait(most_s)
        rate = copy.done / (time.perf_counter() - started)
        copy.enough.set()
        return rate


class _Copy:
    """Bytes that arrive on any connection; ``enough`` ends all of them."""

    def __init__(self, nbytes: int) -> None:
        self.done, self._nbytes = 0, nbytes
        self.enough, self._lock = threading.Event(), threading.Lock()

    def give(self, connection: socket.socket) -> None:
        piece = bytes(_PIECE)
        with contextlib.suppress(OSError):  # the other end has enough
            while not self.enough.is_set():
                connection.sendall(piece)

    def take(self, connection: socket.socket) -> None:
        room = bytearray(_PIECE)
        with connection:
            while not self.enough.is_set() and (count := connection.recv_into(room)):
                with self._lock:
                    self.done += count
                    if self.done >= self._nbytes:
                        self.enough.set()


# ------------------------------------------------------------------------------------------ namespaces

_PREFIX = f"dr{os.getpid()}"
"""Of namespaces and devices; devices have at most 15 characters."""


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    """(near, far), removed at the end with every device in them."""
    number = next(_numbers)
    near, far = f"{_PREFIX}n{number}", f"{_PREFIX}f{number}"
    with contextlib.ExitStack() as stack:
        for name in (near, far):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "set", "lo", "up")
        yield near, far


@contextlib.contextmanager
def _sides(near: str, far: str) -> Iterator[tuple[Side, Side]]:
    with contextlib.closing(Side(NEAR, near)) as one, contextlib.closing(Side(FAR, far)) as other:
        yield one, other


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


def _enter(namespace: str | None) -> None:
    """Move the calling thread, and it alone, into a namespace."""
    if namespace is None:
        return
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)  # noqa: S603
    if done.returncode:
        raise RefitError(f"{' '.join(command)} failed", found=done.stderr.strip()[-300:])
