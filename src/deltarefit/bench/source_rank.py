"""One rank of ``bench source``: train, publish in one of two ways after each step, then compare with a dense export."""

from __future__ import annotations

import contextlib
import hashlib
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

WARM_STEPS = 2
"""Optimizer steps before the first version: AdamW's first ones move every weight by the whole learning rate."""


def measure(rank: Rank, size: str, sharding: str, way: str, steps: int, threads: int) -> dict[str, Any]:
    """What one rank saw: memory ``before``, the ``first`` publish, and one row for each of ``steps``; ``content`` is a
    hash of the last bits."""
    trainer = Trainer(rank, size, sharding)
    for _ in range(WARM_STEPS):
        trainer.step()
    before = meter.settled()
    store = open_store(str(rank.directory.parent / "store"))
    publishing = (Ours if way == "ours" else Gathering)(rank, trainer.model, store, threads)
    first = _published(publishing, 0)
    rows = [_published(publishing, step, trainer.step()) for step in range(1, steps + 1)]
    received = _received(rank, rank.directory.parent / "store")
    equal, content = _compared(received, trainer.model)
    return {"before": before, "first": first, "steps": rows, "equal": equal, "content": content}


def _published(publishing: Ours | Gathering, step: int, train: float = 0.0) -> dict[str, Any]:
    """One publish: seconds by stage, bytes sent to other ranks, most resident bytes, and what it was."""
    meter.settled()
    publishing.watch.seconds.clear()
    traffic = publishing.traffic
    dist.barrier()
    started = time.perf_counter()
    published = publishing.publish(step)
    peak = meter.peak()
    dist.barrier()
    seconds = {"train": train, **publishing.watch.seconds, "total": time.perf_counter() - started}
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


def _received(rank: Rank, store: Path) -> MemoryBaseline:
    """What a receiver that comes now holds; empty on other ranks than 0."""
    target = MemoryBaseline()
    if rank.number == 0:
        with contextlib.closing(Receiver(open_store(str(store)), target)) as receiver:
            receiver.follow(once=True)
    return target


def _compared(received: MemoryBaseline, model: torch.nn.Module) -> tuple[bool, str]:
    """Whether it holds exactly the bits of all parameters, gathered by all ranks, and a hash of these. Where nothing
    was received it is true."""
    equal, content = True, hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        dense = bits(parameter)
        content.update(name.encode() + dense.tobytes())
        if received.catalog is not None:
            with received.window(received.catalog.index[name], 0, dense.size) as (array, _):
                equal = equal and np.array_equal(array, dense)
    return equal, content.hexdigest()
