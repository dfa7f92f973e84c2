"""Shard baselines on several threads: the same bits as on one, and no thread that writes on after an error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from deltarefit import runtime
from deltarefit.baseline import MemoryBaseline
from deltarefit.events import Event
from deltarefit.pieces import whole
from deltarefit.publishing import foreign
from deltarefit.publishing.shard_baseline import ShardBaseline
from deltarefit.publishing.shards import MemoryBits
from deltarefit.runlog import RunLog
from tests import helpers as h
from tests.ranks import Forwarding, Trainer, cut

WAIT_S = 10.0


@pytest.mark.parametrize("positions", [7, 1 << 18])
@pytest.mark.parametrize("seed", range(4))
def test_rebuilt_on_many_threads_from_another_layout(
    seed: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks publish, then three with other pieces: their baselines come from payloads that fit none of theirs."""
    monkeypatch.setattr(foreign, "_POSITIONS", positions)
    monkeypatch.setattr("deltarefit.weights.SEGMENT_BYTES", 512)
    rng = np.random.default_rng(seed)
    store, model = h.new_store(), h.random_model(rng)
    catalog = h.catalog_of(model)
    for ranks in (2, 3):
        trainer = Trainer(store, model, catalog, cut(rng, catalog, ranks), threads=4, payload_bytes=300)
        for kind in ("some", "many", "few"):
            h.step(rng, model, kind)
            published = trainer.publish()
        trainer.close()
    target = MemoryBaseline()
    assert h.followed(store, target) == published[0].version == 6
    assert h.bits(target) == h.bytes_of(model)


def chain() -> tuple[h.Chain, RunLog, list[Any]]:
    made = h.publish_chain(np.random.default_rng(0), ("many", "many"))
    log = RunLog.open(made.store)
    return made, log, [whole(number, entry.numel) for number, entry in enumerate(log.catalog.tensors) if entry.numel]


def test_threads_read_payloads_side_by_side() -> None:
    """The first payload of the anchor is not there before the second is asked for."""
    made, log, pieces = chain()
    asked: list[str] = []
    second = threading.Event()

    def get(key: str, *range_: Any) -> bytes:
        if "/pl/" in key:
            asked.append(key)
            if len(asked) > 1:
                second.set()
            assert second.wait(WAIT_S), "one at a time"
        return made.store.get(key, *range_)

    store: Any = Forwarding(made.store)
    store.get = get
    bits = MemoryBits()
    ShardBaseline(log, pieces, bits, store, lambda _: None, threads=2).move(made.head)
    assert [bits.array(n).tobytes() for n in range(len(pieces))] == [b for b in made.history[made.head] if b]


def test_no_thread_writes_on_after_a_listener_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener fails at the first payload, while others are being read: these have ended when its error is raised,
    and no further one has begun."""
    leaving = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *how: Any, **more: Any) -> None:
            leaving.set()
            super().shutdown(*how, **more)

    made, log, pieces = chain()
    monkeypatch.setattr(runtime, "executor", lambda threads, name: Pool(threads))
    begun: list[str] = []
    ended: list[str] = []
    lock = threading.Lock()

    def get(key: str, *range_: Any) -> bytes:
        if "/pl/" in key:
            with lock:
                begun.append(key)
                first = len(begun) == 1
            assert first or leaving.wait(WAIT_S)
            ended.append(key)
        return made.store.get(key, *range_)

    def listen(event: Event) -> None:
        if event.type == "progress":
            raise OSError("nobody listens")

    store: Any = Forwarding(made.store)
    store.get = get
    baseline = ShardBaseline(log, pieces, MemoryBits(), store, listen, threads=2)
    with pytest.raises(OSError, match="nobody listens") as caught:  # who keeps an error keeps what it came through
        baseline.move(made.head)
    assert caught.value.__traceback__ is not None
    assert sorted(begun) == sorted(ended)
    assert len(begun) <= 3 < len([key for key, _ in made.store.list("anchor")])
