"""Several processes with torch.distributed over gloo, that run functions of the tests: ``world(4).run(function, 1)``.

A world starts once, since importing torch takes seconds, and serves all tests until Python ends. ``function`` is at the
top of a module, is called on every rank as ``function(job, *arguments)``, and returns what JSON can hold; arrays go
through files in ``job.directory``. A function that fails or takes too long fails the test with every rank's traceback,
and the world is killed and started anew for the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
START_SECONDS = 120.0
GRACE_SECONDS = 5.0
"""How long the other ranks may go on after one has failed."""
MEETING = timedelta(seconds=60)
"""How long a collective waits for a rank."""


class RankFailedError(AssertionError):
    """A rank raised, died or took too long."""


@dataclass(frozen=True)
class Job:
    """What a function is told: its rank, how many there are, and a directory that all ranks and the test share."""

    rank: int
    size: int
    directory: Path


class World:
    """``size`` processes that form one process group: forks of one that has imported what is slow to import.

    ``preload`` names modules and functions that it imports and calls before it forks.
    """

    def __init__(self, size: int, preload: str = "tests.tiny_models:preload") -> None:
        self.size = size
        self._preload = preload
        self._nursery: subprocess.Popen[bytes] | None = None
        self._orders: list[int] = []
        self._jobs = 0

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """What every rank returned, by rank."""
        return self.start(function, *arguments).results(timeout)

    def start(self, function: Callable[..., Any], *arguments: Any) -> Started:
        """Without waiting; ``results`` of what is returned waits. One job at a time."""
        if self._nursery is None:
            self._launch()
        self._jobs += 1
        directory = self._directory / str(self._jobs)
        directory.mkdir()
        order = {"function": f"{function.__module__}:{function.__qualname__}", "arguments": arguments}
        line = json.dumps({**order, "directory": str(directory)}).encode() + b"\n"
        for pipe in self._orders:
            os.write(pipe, line)
        return Started(self, directory)

    def _launch(self) -> None:
        import torch.distributed as dist

        self._scratch = tempfile.TemporaryDirectory(prefix="world")
        self._directory = Path(self._scratch.name)
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
        pipes = [os.pipe() for _ in range(self.size)]
        heard = [read for read, _ in pipes]
        command = [sys.executable, "-m", "tests.distributed", self._preload, str(self._store.port), *map(str, heard)]
        with (self._directory / "nursery.log").open("wb") as log:
            self._nursery = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, cwd=self._directory, pass_fds=heard, start_new_session=True
            )
        for read in heard:
            os.close(read)
        self._orders = [write for _, write in pipes]
        self.run(_ready, timeout=START_SECONDS)

    def is_dead(self) -> bool:
        """A process has ended, and with it all others."""
        return self._nursery is None or self._nursery.poll() is not None

    def log(self, name: str) -> str:
        """The end of what a process printed."""
        path = self._directory / f"{name}.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def kill(self) -> None:
        """End all processes; the next job starts new ones."""
        if self._nursery is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._nursery.pid, signal.SIGKILL)
        self._nursery.wait()
        for pipe in self._orders:
            os.close(pipe)
        self._scratch.cleanup()
        self._nursery = None


@dataclass(frozen=True)
class Started:
    """A job under way."""

    world: World
    directory: Path

    def results(self, timeout: float) -> list[Any]:
        """Wait for all ranks."""
        deadline, size = time.monotonic() + timeout, self.world.size
        found: dict[int, dict[str, Any]] = {}
        while len(found) < size:
            for rank in set(range(size)) - set(found):
                with contextlib.suppress(FileNotFoundError):
                    found[rank] = json.loads((self.directory / f"{rank}.result").read_text())
                    if "error" in found[rank]:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if len(found) < size and (time.monotonic() > deadline or self.world.is_dead()):
                self._fail(found)
            time.sleep(0.01)
        if any("error" in result for result in found.values()):
            self._fail(found)
        return [found[rank]["value"] for rank in range(size)]

    def _fail(self, found: dict[int, dict[str, Any]]) -> None:
        lines = []
        for rank in range(self.world.size):
            result = found.get(rank)
            silent = f"did not answer; log:\n{self.world.log(str(rank))}"
            lines.append(f"--- rank {rank}: {silent if result is None else result.get('error', 'is fine')}")
        lines.append(self.world.log("nursery"))
        self.world.kill()
        raise RankFailedError("\n".join(lines))


_worlds: dict[int, World] = {}


def world(size: int) -> World:
    """The one world of this size."""
    if size not in _worlds:
        _worlds[size] = World(size)
        atexit.register(_worlds[size].kill)
    return _worlds[size]


def _ready(job: Job) -> int:
    return job.rank


# ------------------------------------------------------------------------------------------ the other side


def _raise_ranks(preload: str, port: int, orders: list[int]) -> None:
    """Fork all ranks, then wait: when one ends, for whatever reason, all end."""
    _named(preload)()
    pids = [_born(rank, port, orders) for rank in range(len(orders))]
    for pipe in orders:
        os.close(pipe)
    os.wait()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _born(rank: int, port: int, orders: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for number, pipe in enumerate(orders):
        if number != rank:
            os.close(pipe)
    try:
        _serve(rank, len(orders), port, orders[rank])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _serve(rank: int, size: int, port: int, orders: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, False, timeout=MEETING)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=MEETING)
    with os.fdopen(orders) as lines:
        for line in lines:
            order = json.loads(line)
            directory = Path(order["directory"])
            result = _result(Job(rank, size, directory), order["function"], order["arguments"])
            part = directory / f"{rank}.part"
            part.write_text(json.dumps(result))
            part.replace(directory / f"{rank}.result")


def _result(job: Job, function: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"value": _named(function)(job, *arguments)}
    except Exception:
        return {"error": traceback.format_exc()}


def _named(function: str) -> Callable[..., Any]:
    module, name = function.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


if __name__ == "__main__":
    _raise_ranks(sys.argv[1], int(sys.argv[2]), [int(argument) for argument in sys.argv[3:]])
