"""Real processes of a relay tree for ``bench relay``: payloads in a directory, its root relay on the near side of a
link, relays and receivers on the far side."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from deltarefit.bench.links import Link, Side
from deltarefit.errors import RefitError
from deltarefit.stores.directory import DirectoryStore
from deltarefit.stores.relay import RelayStore

ROOT = "root"
CACHE_BYTES = 4 << 30
START_S, STOP_S = 60.0, 10.0
WEIGHTS = (1, 6, 3, 8, 5, 2, 7, 4)
"""Of the sizes of objects, by turns."""
Above = Mapping[str, str]
"""The relay, or the root, at which each relay hangs; parents come first."""


@dataclass(frozen=True)
class Payloads:
    """Objects of random bytes in a directory store, as one attempt's payloads."""

    directory: Path
    sizes: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


def make_payloads(directory: Path, nbytes: int, objects: int) -> Payloads:
    """``objects`` payloads of mixed sizes, ``nbytes`` in all, in a new store."""
    store, generator = DirectoryStore(directory), np.random.default_rng(0)
    weights = [WEIGHTS[n % len(WEIGHTS)] for n in range(objects)]
    ends = [nbytes * sum(weights[: n + 1]) // sum(weights) for n in range(objects)]
    sizes = {}
    for start, stop in zip([0, *ends], ends, strict=False):
        data = generator.bytes(stop - start)
        key = f"a/0000000001/pl/{hashlib.sha256(data).hexdigest()}"
        store.put(key, data)
        sizes[key] = len(data)
    return Payloads(directory, sizes)


def parents(above: Above, name: str) -> list[str]:
    """The one above, the one above that, and so on up to the root: the order in which they are asked."""
    found = []
    while name != ROOT:
        name = above[name]
        found.append(name)
    return found


def leaves(above: Above) -> list[str]:
    """Relays that no other hangs at."""
    return [name for name in above if name not in above.values()]


class Relay:
    """A relay process on one side of a link."""

    def __init__(self, side: Side, process: subprocess.Popen[str], url: str, token: str | None) -> None:
        self.url, self._side, self._process = url, side, process
        self._store = RelayStore(url, token=token)

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        return self._side.call(self._store.status)

    def kill(self) -> None:
        """SIGKILL, and it is gone on return."""
        self._process.kill()
        self._process.wait(STOP_S)


class Tree:
    """Relays with empty caches over ``link``: the root, before the link, and those that hang below, behind it."""

    def __init__(self, link: Link, payloads: Payloads, above: Above, work: Path, stack: contextlib.ExitStack) -> None:
        self.link, self._payloads, self.above = link, payloads, above
        self._work, self._stack, self._token = work, stack, secrets.token_hex(16)
        tokens = work / "tokens"
        tokens.write_text(f"publish {self._token}\n")
        tokens.chmod(0o600)
        guarded = ["--tokens", str(tokens), "--plain-http"]
        self.relays = {ROOT: self._start(link.near, link.near.address, [str(payloads.directory)], ROOT, guarded)}
        for name in above:
            urls = [self.relays[parent].url for parent in parents(above, name)]
            self.relays[name] = self._start(link.far, "127.0.0.1", urls, name, [])

    def _start(self, side: Side, host: str, urls: Sequence[str], name: str, more: Sequence[str]) -> Relay:
        command = relay_command(urls, f"{host}:0", self._work / name, more)
        process = self._stack.enter_context(started(side, command, self._token))
        return Relay(side, process, first_line(process), self._token)

    def status(self) -> dict[str, dict[str, Any]]:
        """What each relay that runs says of itself, all asked at once."""
        with ThreadPoolExecutor(len(self.relays)) as asking:
            return dict(zip(self.relays, asking.map(Relay.status, self.relays.values()), strict=True))

    def kill(self, name: str) -> None:
        """SIGKILL a relay."""
        self.relays.pop(name).kill()

    def receivers(self, count: int, fetches: int) -> Receivers:
        """Processes that hold ``count`` receivers, ready to fetch from the leaves."""
        urls = [self.relays[name].url for name in leaves(self.above)]
        return Receivers(self.link.far, self._payloads, urls, count, fetches, self._stack)


@contextlib.contextmanager
def grown(link: Link, payloads: Payloads, above: Above) -> Iterator[Tree]:
    """A tree, and the end of all its processes and caches."""
    with tempfile.TemporaryDirectory(prefix="deltarefit-relays-") as work, contextlib.ExitStack() as stack:
        yield Tree(link, payloads, above, Path(work), stack)


class Receivers:
    """Receivers in as many processes as there are cores. Each fetches every payload and compares every byte."""

    def __init__(
        self, side: Side, payloads: Payloads, urls: Sequence[str], count: int, fetches: int, stack: contextlib.ExitStack
    ) -> None:
        processes = min(count, len(os.sched_getaffinity(0)))
        self._running = []
        for number in range(processes):
            mine = [urls[n % len(urls)] for n in range(number, count, processes)]
            job = {"urls": mine, "fetches": fetches, "directory": str(payloads.directory), "keys": list(payloads.sizes)}
            command = [sys.executable, "-m", "deltarefit.bench.relay_receiver", json.dumps(job)]
            self._running.append(stack.enter_context(started(side, command)))
        for process in self._running:
            first_line(process)

    def go(self) -> None:
        """Let all of them begin."""
        for process in self._running:
            told(process, "go")

    def done(self, most_s: float) -> list[dict[str, Any]]:
        """Of each receiver its seconds, bytes and whether they were the right ones, once all are done."""
        deadline = time.monotonic() + most_s
        return [
            one for process in self._running for one in json.loads(line_within(process, deadline - time.monotonic()))
        ]


# ------------------------------------------------------------------------------------------ processes


def relay_command(urls: Sequence[str], listen: str, directory: Path, more: Sequence[str] = ()) -> list[str]:
    """The command line of a relay."""
    above = [word for url in urls for word in ("--parent", url)]
    cache = ("--dir", str(directory), "--limit", str(CACHE_BYTES))
    flags = ("--no-progress", "-q")
    return [sys.executable, "-m", "deltarefit", "relay", *above, "--listen", listen, *cache, *more, *flags]


@contextlib.contextmanager
def started(
    side: Side, command: Sequence[str], token: str | None = None, core: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process on one side, on one core if that is given, that ends with the block. What it says on stderr is shown if
    it ends early."""
    environment = dict(os.environ)
    environment.pop("DELTAREFIT_TOKEN", None)
    if token is not None:
        environment["DELTAREFIT_TOKEN"] = token
    with tempfile.TemporaryFile("w+") as errors:

        def start() -> subprocess.Popen[str]:
            with _pinned(core):
                return _popen(command, environment, errors)

        with side.call(start) as process:
            process.errors = errors  # type: ignore[attr-defined]
            try:
                yield process
            finally:
                _end(process)


def first_line(process: subprocess.Popen[str]) -> str:
    """What a process says once it is ready. Raises if it ends instead."""
    return line_within(process, START_S)


def _popen(command: Sequence[str], environment: Mapping[str, str], errors: IO[str]) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    return subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]  # noqa: S603


@contextlib.contextmanager
def _pinned(core: int | None) -> Iterator[None]:
    """What this thread starts runs on that core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def line_within(process: subprocess.Popen[str], seconds: float) -> str:
    """The next line of its stdout."""
    lines: queue.Queue[str] = queue.Queue()
    stdout = process.stdout
    if stdout is None:
        raise RefitError("a process without stdout")
    threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
    try:
        line = lines.get(timeout=max(seconds, 0.0))
    except queue.Empty:
        raise _failed(process, f"no line within {seconds:.0f} s") from None
    if not line:
        raise _failed(process, "it ended")
    return line.strip()


def _failed(process: subprocess.Popen[str], found: str) -> RefitError:
    errors: IO[str] = process.errors  # type: ignore[attr-defined]
    errors.seek(0)
    return RefitError("a process of the benchmark did not do its work", found=f"{found}: {errors.read()[-1000:]}")


def told(process: subprocess.Popen[str], line: str) -> None:
    """Say a line to it."""
    if process.stdin is None:
        raise RefitError("a process without stdin")
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
