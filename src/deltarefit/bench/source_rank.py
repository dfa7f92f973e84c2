"""One rank of ``bench source``: train, publish in one of two ways after each step, then compare with a dense export."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deltarefit.baseline import MemoryBaseline
from deltarefit.bench import meter
from deltarefit.bench.ranks import Rank
from deltarefit.bench.training import Trainer
from deltarefit.bench.ways import Gathering, Ours, bits
from deltarefit.publisher import Published
from deltarefit.receiver import Receiver
from deltarefit.stores import open_store

WARM_STEPS = 3
"""Optimizer steps before the first version: AdamW's first ones move every weight by the whole learning rate."""


def measure(rank: Rank, size: str, sharding: str, way: str, steps: int, threads: int) -> dict[str, Any]:
    """What one rank saw: memory ``before``, the ``first`` publish, and one row for each of ``steps``."""
    trainer = Trainer(rank, size, sharding)
    for _ in range(WARM_STEPS):
        trainer.step()
    before = meter.settled()
    store = open_store(str(rank.directory.parent / "store"))
    publishing = (Ours if way == "ours" else Gathering)(rank, trainer.model, store, threads)
    first = _published(publishing, 0)
    rows = [{"train": trainer.step(), **_published(publishing, step)} for step in range(1, steps + 1)]
    equal = _holds_dense_export(rank, trainer.model, rank.directory.parent / "store")
    return {"before": before, "first": first, "steps": rows, "equal": equal}


def _published(publishing: Ours | Gathering, step: int) -> dict[str, Any]:
    """One publish: seconds by stage, bytes sent to other ranks, most resident bytes, and what it was."""
    meter.settled()
    publishing.watch.seconds.clear()
    traffic = publishing.traffic
    dist.barrier()
    started = time.perf_counter()
    published = publishing.publish(step)
    peak = meter.peak()
    dist.barrier()
    seconds = {**publishing.watch.seconds, "total": time.perf_counter() - started}
    return {"seconds": seconds, "traffic": publishing.traffic - traffic, "peak": peak, **_facts(published)}


def _facts(published: Published | None) -> dict[str, Any]:
    if published is None:
        return {}
    return {
        "density": published.density,
        "dense_bytes": published.dense_bytes,
        "wire_bytes": published.wire_bytes,
        "publisher": published.seconds,
    }


def _holds_dense_export(rank: Rank, model: torch.nn.Module, store: Path) -> bool:
    """Whether a receiver that comes now holds exactly the bits of all gathered parameters; known to rank 0 only, true on
    others."""
    target = MemoryBaseline()
    if rank.number == 0:
        with contextlib.closing(Receiver(open_store(str(store)), target)) as receiver:
            receiver.follow(once=True)
    return all([_same(target, name, parameter) for name, parameter in sorted(model.named_parameters())])


def _same(target: MemoryBaseline, name: str, parameter: torch.Tensor) -> bool:
    dense = bits(parameter)
    if target.catalog is None:
        return True
    with target.window(target.catalog.index[name], 0, dense.size) as (array, _):
        return np.array_equal(array, dense)
