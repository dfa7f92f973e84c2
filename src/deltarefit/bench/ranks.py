"""Ranks of a benchmark: processes of ``torch.distributed`` over gloo that all run one function, then end.

The caller imports no torch and stays small; see ``bench.memory`` for why that matters. What a function is given and
what it returns goes through JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from deltarefit.errors import RefitError

DEADLINE_S = 600.0
GRACE_S = 5.0
"""How long the other ranks may go on after one has failed."""
_MEETING = timedelta(seconds=120)
_PORT = "port"


@dataclass(frozen=True)
class Rank:
    """What a function is told: its rank, how many there are, and a directory that all ranks share."""

    number: int
    size: int
    directory: Path


def run_ranks(function: str, size: int, directory: Path, arguments: Mapping[str, Any]) -> list[Any]:
    """What ``module:function(rank, **arguments)`` returned on every rank, by rank; ``directory`` is made. Raises
    ``RefitError`` with the last words of a rank that failed or was not done within ``DEADLINE_S``."""
    directory.mkdir(parents=True)
    processes = [_started(function, Rank(number, size, directory), arguments) for number in range(size)]
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [number for number, process in enumerate(processes) if process.returncode]
    if failed:
        raise RefitError("\n".join(f"rank {number} failed: {_log(directory, number)}" for number in failed))
    return [json.loads((directory / f"{number}.json").read_text()) for number in range(size)]


def _started(function: str, rank: Rank, arguments: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "deltarefit.bench.ranks", function, str(rank.number), str(rank.size)]
    command += [str(rank.directory), json.dumps(arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with (rank.directory / f"{rank.number}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: S603


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)


def _log(directory: Path, number: int) -> str:
    return (directory / f"{number}.log").read_text(errors="replace")[-2000:]


# ------------------------------------------------------------------------------------------ inside a rank


def _serve(function: str, rank: Rank, arguments: Mapping[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = _meeting_point(rank)
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.size, timeout=_MEETING)
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(rank, **arguments)
    (rank.directory / f"{rank.number}.json").write_text(json.dumps(result))
    dist.barrier()  # rank 0 serves the store that the others use to the end
    dist.destroy_process_group()


def _meeting_point(rank: Rank) -> Any:
    """A key-value store in rank 0, whose free port the others learn from a file."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    path = rank.directory / _PORT
    if rank.number == 0:
        store = TCPStore("127.0.0.1", 0, rank.size, True, _MEETING, wait_for_workers=False)
        part = path.with_suffix(".part")
        part.write_text(str(store.port))
        part.replace(path)
        return store
    deadline = time.monotonic() + _MEETING.total_seconds()
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return TCPStore("127.0.0.1", int(path.read_text()), rank.size, False, _MEETING)


if __name__ == "__main__":
    _function, _number, _size, _directory, _arguments = sys.argv[1:]
    _serve(_function, Rank(int(_number), int(_size), Path(_directory)), json.loads(_arguments))
