"""One rank of a trainer as a process, for tests that kill it: ``python -m tests.rank_process '{...}'``.

It publishes a model that depends only on the seed and the step, and kills itself with SIGKILL where it is told to. What
it published goes to stdout as JSON lines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltarefit import Publisher, open_store
from deltarefit.errors import RefitError
from deltarefit.events import Event
from deltarefit.exchange import StoreExchange
from tests import helpers as h
from tests import ranks as r

SHAPES: h.Shapes = {f"t{n:02}.weight": ("BF16", (60, 64)) for n in range(12)}


@dataclass
class Task:
    """``die`` is where to die in the ``at``-th publish: see ``Deadly``; "" for nowhere."""

    store: str
    session: str
    rank: int
    size: int
    seed: int
    first: int
    steps: int
    deadline_s: float = 3.0
    baseline: str = ""
    die: str = ""
    at: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def model_at(seed: int, step: int) -> h.Model:
    """The bits after ``step``: each step changes some of them."""
    model = h.random_model(np.random.default_rng(seed), SHAPES)
    for number in range(1, step + 1):
        h.step(np.random.default_rng((seed, number)), model, "some")
    return model


class Deadly(r.Forwarding):
    """Dies at a call of the store: "<before|after> <put|create> <part of the key>", of the ``at``-th publish."""

    def __init__(self, inner: Any, task: Task) -> None:
        super().__init__(inner)
        self._task, self.publish = task, 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._watch("put", key, lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        self._watch("create", key, lambda: self.inner.create(key, data))

    def _watch(self, verb: str, key: str, work: Any) -> None:
        when, _, what = self._task.die.partition(" ")
        hit = self.publish == self._task.at and what == f"{verb} {key.split('/')[2] if key.count('/') > 1 else key}"
        if hit and when == "before":
            die()
        work()
        if hit and when == "after":
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def run(task: Task) -> None:
    store = Deadly(open_store(task.store), task)
    model = model_at(task.seed, task.first)
    catalog = h.catalog_of(model, SHAPES)
    dealt = r.cut(np.random.default_rng(task.seed + task.size), catalog, task.size)[task.rank]
    exchange = StoreExchange(store, task.session, task.rank, task.size)  # type: ignore[arg-type]
    source = DyingSource(model, catalog, dealt, exchange)

    def hear(event: Event) -> None:
        if task.die == f"event {event.phase}" and event.type == "phase" and store.publish == task.at:
            die()

    publisher = Publisher(
        store,  # type: ignore[arg-type]
        source,
        threads=1,
        deadline_s=task.deadline_s,
        baseline=task.baseline or None,
        emit=hear,
        payload_bytes=600,
        **task.options,
    )
    for step in range(task.first, task.first + task.steps):
        store.publish += 1
        if step > task.first:
            h.step(np.random.default_rng((task.seed, step)), model, "some")
        source.dies = task.die == "read" and store.publish == task.at
        tell(step=step, began=True)
        started = time.monotonic()
        try:
            published = publisher.publish(step)
            tell(step=step, version=published.version)
        except RefitError as error:
            tell(step=step, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - started)
            break
    os._exit(0)


class DyingSource(r.PieceSource):
    """Dies at the second read of a publish, with a payload perhaps on its way."""

    dies = False
    reads = 0

    def read(self, piece: int, start: int, stop: int) -> Any:
        self.reads += 1 if self.dies else 0
        if self.dies and self.reads == 2:
            die()
        return super().read(piece, start, stop)


def tell(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    run(Task(**json.loads(sys.argv[1])))
