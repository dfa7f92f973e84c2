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
    """``size`` processes that form one process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._jobs = 0

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """What every rank returned, by rank."""
        return self.start(function, *arguments).results(timeout)

    def start(self, function: Callable[..., Any], *arguments: Any) -> Started:
        """Without waiting; ``results`` of what is returned waits. One job at a time."""
        if not self._processes:
            self._launch()
        self._jobs += 1
        directory = self._directory / str(self._jobs)
        directory.mkdir()
        order = {"function": f"{function.__module__}:{function.__qualname__}", "arguments": arguments}
        line = json.dumps({**order, "directory": str(directory)}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return Started(self, directory)

    def _launch(self) -> None:
        import torch.distributed as dist

        self._scratch = tempfile.TemporaryDirectory(prefix="world")
        self._directory = Path(self._scratch.name)
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        path = os.pathsep.join([str(ROOT), *sys.path])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        for rank in range(self.size):
            command = [sys.executable, "-m", "tests.distributed", str(rank), str(self.size), str(self._store.port)]
            with (self._directory / f"{rank}.log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, cwd=ROOT)
                )
        self.run(_ready, timeout=START_SECONDS)

    def dead(self) -> list[int]:
        """Ranks whose processes have ended."""
        return [rank for rank, process in enumerate(self._processes) if process.poll() is not None]

    def log(self, rank: int) -> str:
        """The end of what a rank printed."""
        return (self._directory / f"{rank}.log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """End all processes; the next job starts new ones."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        if self._processes:
            self._scratch.cleanup()
        self._processes = []


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
            if len(found) < size and (time.monotonic() > deadline or set(self.world.dead()) - set(found)):
                self._fail(found)
            time.sleep(0.01)
        if any("error" in result for result in found.values()):
            self._fail(found)
        return [found[rank]["value"] for rank in range(size)]

    def _fail(self, found: dict[int, dict[str, Any]]) -> None:
        lines = []
        for rank in range(self.world.size):
            result = found.get(rank)
            said = f"did not answer; log:\n{self.world.log(rank)}" if result is None else result.get("error", "is fine")
            lines.append(f"--- rank {rank}: {said}")
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


# ------------------------------------------------------------------------------------------ inside a rank


def _serve(rank: int, size: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, False, timeout=MEETING)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=MEETING)
    for line in sys.stdin:
        order = json.loads(line)
        directory = Path(order["directory"])
        result = _result(Job(rank, size, directory), order["function"], order["arguments"])
        part = directory / f"{rank}.part"
        part.write_text(json.dumps(result))
        part.replace(directory / f"{rank}.result")


def _result(job: Job, function: str, arguments: list[Any]) -> dict[str, Any]:
    module, name = function.split(":")
    try:
        return {"value": getattr(importlib.import_module(module), name)(job, *arguments)}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    _serve(*(int(argument) for argument in sys.argv[1:]))
