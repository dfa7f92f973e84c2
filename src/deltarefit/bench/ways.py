"""Two ways to publish a sharded model: ours, where every rank diffs its own shard, and the gather that others do.

The gathering way is what trainers without shard-local diffs do: all ranks take part in ``full_tensor()`` of one
parameter after the other, and rank 0, which keeps a full baseline, diffs, encodes and uploads alone. Here it runs with
our own kernel, pipeline and log, gathers bfloat16 instead of the float32 masters, and gathers the next parameter while
the last is being encoded: nothing but the gather and who encodes tells the two apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from deltarefit.bench.meter import Stopwatch
from deltarefit.bench.ranks import Rank
from deltarefit.elements import Elements
from deltarefit.exchange import WholeTensors
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.ports import Exchange, Source, Store
from deltarefit.publisher import Published, Publisher
from deltarefit.sources.fsdp import FsdpSource
from deltarefit.sources.process_group import default_exchange

READ_ENCODE, GATHER, UPLOAD = "read/encode", "gather", "upload"


class CountingExchange:
    """``ports.Exchange`` over another that counts what it carries; ``nbytes`` has both directions."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.rank, self.size = exchange.rank, exchange.size
        self.messages, self.nbytes = 0, 0

    def put(self, key: str, data: bytes) -> None:
        self._count(len(key) + len(data))
        self._exchange.put(key, data)

    def get(self, key: str) -> bytes | None:
        data = self._exchange.get(key)
        self._count(len(key) + len(data or b""))
        return data

    def delete(self, key: str) -> None:
        self._count(len(key))
        self._exchange.delete(key)

    def _count(self, nbytes: int) -> None:
        self.messages += 1
        self.nbytes += nbytes


class TimedStore:
    """``ports.Store`` over another that times its uploads."""

    def __init__(self, store: Store, watch: Stopwatch) -> None:
        self._store, self._watch = store, watch
        self.url = store.url
        self.get, self.size, self.list, self.delete = store.get, store.size, store.list, store.delete

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._watch.time(UPLOAD):
            self._store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        with self._watch.time(UPLOAD):
            self._store.create(key, data)


class TimedSource:
    """``ports.Source`` over another that times reading together with what is done inside: diff and encoding."""

    def __init__(self, source: Source, watch: Stopwatch) -> None:
        self._source, self._watch = source, watch
        self.catalog, self.exchange, self.pieces = source.catalog, source.exchange, source.pieces
        self.files = source.files

    def hold(self) -> AbstractContextManager[None]:
        return self._source.hold()

    @contextmanager
    def read(self, piece: int, start: int, stop: int) -> Iterator[Elements]:
        with self._watch.time(READ_ENCODE), self._source.read(piece, start, stop) as elements:
            yield elements


class GatherSource(WholeTensors):
    """``ports.Source`` of rank 0 alone. A tensor is gathered when its first element is wanted, in the order of the
    catalog, and dropped when its last was read."""

    def __init__(self, catalog: Catalog, gather: Callable[[int], Elements], watch: Stopwatch) -> None:
        self._catalog, self._gather, self._watch = catalog, gather, watch
        self._lock = threading.Lock()
        self._next = 0
        self._there: dict[int, Elements] = {}
        self._unread: dict[int, int] = {}

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def files(self) -> Mapping[str, bytes]:
        return {}

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Every tensor is gathered once."""
        self._next = 0
        yield

    @contextmanager
    def read(self, piece: int, start: int, stop: int) -> Iterator[Elements]:
        flat = self._flat(piece)
        with self._watch.time(READ_ENCODE):
            yield flat[start:stop]
        self._let_go(piece, stop - start)

    def _flat(self, tensor: int) -> Elements:
        with self._lock:
            while self._next <= tensor:
                flat = self._gather(self._next)
                self._there[self._next], self._unread[self._next] = flat, flat.size
                self._next += 1
            return self._there[tensor]

    def _let_go(self, tensor: int, count: int) -> None:
        with self._lock:
            self._unread[tensor] -= count
            if not self._unread[tensor]:
                del self._there[tensor]


class Ours:
    """One rank of the shard-local way."""

    def __init__(self, rank: Rank, model: torch.nn.Module, store: Store, threads: int) -> None:
        self.watch = Stopwatch()
        self._exchange = CountingExchange(default_exchange())
        source = FsdpSource(model, exchange=self._exchange)
        self.catalog = source.catalog
        timed = TimedSource(source, self.watch)
        self._publisher = Publisher(TimedStore(store, self.watch), timed, threads=threads)

    def publish(self, step: int) -> Published | None:
        """The next version; every rank gets the same."""
        return self._publisher.publish(step)

    @property
    def traffic(self) -> int:
        """Bytes that this rank has exchanged so far."""
        return self._exchange.nbytes


class Gathering:
    """One rank of the gathering way."""

    def __init__(self, rank: Rank, model: torch.nn.Module, store: Store, threads: int) -> None:
        self.watch = Stopwatch()
        self._parameters = dict(sorted(model.named_parameters()))
        self.catalog = _catalog(self._parameters)
        self._names = [entry.name for entry in self.catalog.tensors]
        self._size, self.traffic = rank.size, 0
        self._publisher: Publisher | None = None
        if rank.number == 0:
            source = GatherSource(self.catalog, self._gathered, self.watch)
            self._publisher = Publisher(TimedStore(store, self.watch), source, threads=threads)

    def publish(self, step: int) -> Published | None:
        """The next version, on rank 0; the others only take part in the gather."""
        if self._publisher is not None:
            return self._publisher.publish(step)
        for number in range(len(self._names)):
            self._gathered(number)
        return None

    def _gathered(self, number: int) -> Elements:
        parameter = self._parameters[self._names[number]]
        self.traffic += sent_bytes(parameter, self._size)
        with self.watch.time(GATHER):
            return bits(parameter)


def bits(parameter: torch.Tensor) -> Elements:
    """All of a parameter, cast to bfloat16 on its shard, gathered on all ranks; flat. All ranks call this together."""
    with torch.no_grad():
        cast = parameter.detach().to(torch.bfloat16)
        full = cast.full_tensor() if isinstance(cast, DTensor) else cast
        flat: Elements = full.reshape(-1).view(torch.uint16).numpy()
        return flat


def sent_bytes(parameter: torch.Tensor, ranks: int) -> int:
    """Bytes that one rank sends so that all ``ranks`` have all of a parameter, as bfloat16: its chunk of rows, padded
    to the largest, to every other rank."""
    if not isinstance(parameter, DTensor) or not parameter.numel():
        return 0
    rows = parameter.shape[0]
    return (ranks - 1) * -(-rows // ranks) * (parameter.numel() // rows) * torch.bfloat16.itemsize


def _catalog(parameters: Mapping[str, Any]) -> Catalog:
    return Catalog(tuple(TensorEntry(name, "BF16", tuple(p.shape)) for name, p in parameters.items()))
