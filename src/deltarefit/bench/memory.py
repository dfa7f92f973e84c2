"""Peak memory of ``publish`` and ``follow``, and of a trainer's ranks: real processes, as the kernel accounts them.

``publish`` and ``follow`` keep their copy of the weights in files (baseline, followed directory) that are mapped window
by window, so the peak must not grow with the model. ``base`` is the same program that does nothing
(``deltarefit --version``).

A rank (``of_ranks``) keeps its baseline in memory. It may need that, and beside it an amount that does not grow with
the model either.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltarefit.bench.goals import at_most
from deltarefit.bench.ranks import run_ranks
from deltarefit.demo.train import write_bf16
from deltarefit.errors import RefitError

TENSOR_ELEMENTS = 32 << 20
DENSITY = 0.03
DEADLINE_S = 600.0
EXTRA_BYTES = 512 << 20
"""What a rank may need beside its baseline."""


def peaks(work: Path, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Peak resident bytes by size of model: {"base": n, "sizes": {size: {"publish": n, "follow": n}}}."""
    base = _peak("--version")
    return {"base": base, "sizes": {size: _peaks_of(work, size) for size in sizes}}


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """What ranks need, and whether that stays in bounds; JSON-ready. The largest tensor has 640 MiB."""
    with tempfile.TemporaryDirectory(prefix="deltarefit-memory-") as name:
        rows = of_ranks(Path(name), (16 if quick else 640) << 20, (1,) if quick else (1, 2), say)
    return {"quick": quick, "cores": len(os.sched_getaffinity(0)), "rows": rows, "goals": [goal(rows)]}


def goal(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a rank needs must not grow with its model."""
    extra = [row["beyond_baseline"] / 2**20 for row in rows]
    return at_most("memory of a rank beside its baseline, MiB", extra, EXTRA_BYTES / 2**20)


def of_ranks(work: Path, large: int, sizes: Sequence[int], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each number of ranks, kind of weights and phase: most bytes beyond what the bare rank holds with the
    same shard, of the rank that needs most; ``beyond_baseline`` without its baseline. ``large`` is the bytes of the
    largest tensor."""
    rows = []
    for ranks in sizes:
        masters = ranks > 1
        arguments = {"large": large, "masters": masters}
        weights = "float32 as bfloat16" if masters else "bfloat16"
        for job in ("publishing", "rebuilding"):
            say(f"{job} with {ranks} rank{'s' if ranks > 1 else ''} ...")
            directory = work / f"memory-{ranks}" / job
            found = run_ranks(f"deltarefit.bench.memory_rank:{job}", ranks, directory, arguments)
            rows += [{"ranks": ranks, "weights": weights, "largest": large, **row} for row in _phases(found)]
    return rows


def _phases(ranks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for phase in ranks[0]["peaks"]:
        rank = max(ranks, key=lambda rank: int(rank["peaks"][phase]) - int(rank["baseline"]))
        extra, baseline = rank["peaks"][phase], rank["baseline"]
        yield {"phase": phase, "extra": extra, "baseline": baseline, "beyond_baseline": extra - baseline}


def _peaks_of(work: Path, size: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory(prefix="deltarefit-memory-", dir=work) as name:
        root = Path(name)
        store, old, new = root / "store", root / "old", root / "new"
        _write_pair(old, new, size)
        where = ("--to", str(store), "--baseline", str(root / "baseline"), "-q")
        first = _peak("publish", str(old), *where)
        follow_first = _peak("follow", str(store), "--into", str(root / "into"), "--once", "-q")
        publish = max(first, _peak("publish", str(new), *where))
        follow = max(follow_first, _peak("follow", str(store), "--into", str(root / "into"), "--once", "-q"))
        if not filecmp.cmp(root / "into" / "model.safetensors", new / "model.safetensors", shallow=False):
            raise RefitError("the followed directory differs from what was published")
    return {"publish": publish, "follow": follow}


def _write_pair(old: Path, new: Path, size: int) -> None:
    """Two bf16 checkpoints of about ``size`` bytes; one block of random bits serves all tensors."""
    generator = np.random.default_rng(0)
    elements = min(TENSOR_ELEMENTS, size // 2)
    bits = generator.integers(0, 1 << 16, elements, dtype=np.uint16)
    moved = bits + (generator.random(elements, dtype=np.float32) < DENSITY).astype(np.uint16)
    names = [f"layers.{i}.weight" for i in range(max(1, size // 2 // elements))]
    for directory, array in ((old, bits), (new, moved)):
        directory.mkdir()
        write_bf16(directory / "model.safetensors", dict.fromkeys(names, array))


_LAUNCH = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Linux counts the memory of the forking process into its child's peak, exec or not: so a small process forks."""


def _peak(*arguments: str) -> int:
    """Run the command line; its peak resident size in bytes."""
    command = [sys.executable, "-c", _LAUNCH, sys.executable, "-m", "deltarefit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)  # noqa: S603
    if done.returncode != 0:
        raise RefitError(f"{' '.join(arguments)} failed with {done.returncode}: {done.stderr[-2000:]}")
    return int(done.stdout) * 1024
