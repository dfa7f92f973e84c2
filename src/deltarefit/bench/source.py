"""``deltarefit bench source``: what it costs a sharded trainer to publish, shard by shard and by gathering.

A Llama-style model takes AdamW steps on some processes of one machine, and every step is published, by every rank from
its own shard (*ours*), or by rank 0 after a gather, as trainers without shard-local diffs do (*gather*). Both ways see
the same steps, store and number of threads over all ranks. Seconds of a stage are summed over threads, of the slowest
rank; figures are medians over steps. Then: do payloads leave while others are built (``bench.stream``)? What a rank of
a large model needs is measured by ``bench memory``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deltarefit import _kernel
from deltarefit.bench import stream
from deltarefit.bench.goals import at_most
from deltarefit.bench.ranks import run_ranks

Say = Callable[[str], None]

STAGES = ("train", "gather", "read/encode", "upload", "total")
SHARDINGS = ("fsdp2", "replicated")
WAYS = ("ours", "gather")


def run(ranks: int, size: str, quick: bool, say: Say) -> dict[str, Any]:
    """All cases and streaming, and whether each goal is reached; JSON-ready."""
    size, steps = ("tiny", 2) if quick else (size, 3)
    with tempfile.TemporaryDirectory(prefix="deltarefit-source-") as name:
        work = Path(name)
        cases = [_case(work, sharding, ranks, size, steps, say) for sharding in SHARDINGS[: 1 if quick else 2]]
    say("streaming ...")
    rows = stream.measure(1 << (20 if quick else 28), _cores())
    result = {
        "quick": quick, "level": _kernel.level(), "cores": _cores(), "load": os.getloadavg()[0],
        "ranks": ranks, "size": size, "steps": steps, "cases": cases, "stream": rows,
    }  # fmt: skip
    return {**result, "goals": goals(result)}


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _case(work: Path, sharding: str, ranks: int, size: str, steps: int, say: Say) -> dict[str, Any]:
    """Both ways over the same steps, in processes of their own. ``equal``: a receiver held the dense export's bits in
    either; ``same_bits``: the steps of both came to the same."""
    ways = {}
    for way in WAYS:
        say(f"{sharding}, {way} ...")
        threads = _cores() if way == "gather" else max(1, _cores() // ranks)
        arguments = {"size": size, "sharding": sharding, "way": way, "steps": steps, "threads": threads}
        function = "deltarefit.bench.source_rank:measure"
        ways[way] = summary(run_ranks(function, ranks, work / sharding / way / "ranks", arguments), threads)
    same = ways["ours"]["content"] == ways["gather"]["content"]
    return {"sharding": sharding, "ways": ways, "same_bits": same, "equal": all(way["equal"] for way in ways.values())}


def summary(ranks: Sequence[dict[str, Any]], threads: int) -> dict[str, Any]:
    """What ``source_rank.measure`` returned on all ranks, as one way's figures. Memory is of each rank, in bytes beyond
    what it held before it made its publisher; bytes between ranks are summed over ranks, of one publish."""
    steps = list(zip(*(rank["steps"] for rank in ranks), strict=True))
    firsts = [rank["first"] for rank in ranks]
    told = [by_rank[0] for by_rank in steps]
    return {
        "threads": threads,
        "seconds": {stage: statistics.median(_slowest(by_rank, stage) for by_rank in steps) for stage in STAGES},
        "first_seconds": {stage: _slowest(firsts, stage) for stage in STAGES[1:]},
        "bytes_between_ranks": statistics.median(sum(row["traffic"] for row in by_rank) for by_rank in steps),
        "memory": [max(row["peak"] for row in rank["steps"]) - rank["before"] for rank in ranks],
        "first_memory": [rank["first"]["peak"] - rank["before"] for rank in ranks],
        "density": statistics.median(row["density"] for row in told),
        "wire_bytes": statistics.median(row["wire_bytes"] for row in told),
        "dense_bytes": told[0]["dense_bytes"],
        "content": ranks[0]["content"],
        "equal": all(rank["equal"] for rank in ranks),
    }


def _slowest(by_rank: Sequence[dict[str, Any]], stage: str) -> float:
    return max(float(row["seconds"].get(stage, 0.0)) for row in by_rank)


# ------------------------------------------------------------------------------------------------ goals


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each goal with its figure in the worst case that it covers, and whether it is reached."""
    unequal = sum(not case["equal"] for case in result["cases"])
    slowest = [row["wall/allowed"] for row in result["stream"] if row["bytes_per_s"] == stream.LINK]
    return [
        at_most("cases whose receiver differs from the dense export", [unequal], 0),
        at_most(f"publish / ({stream.FACTOR} longer half + {stream.SLACK_S} s), 50 MB/s", slowest, 1.0),
    ]
