"""Content-named objects from the parent, chunk by chunk, each fetched once however many want it (docs/relays.md §2).

Chunks come over parallel streams and are readable as soon as they are in the file. The whole is hashed beside, from its
start on. A parent's store decides where a chunk comes from and tries again elsewhere; here a chunk comes or does not.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from deltarefit.errors import IntegrityError, RefitError, UnavailableError
from deltarefit.ports import Store
from deltarefit.relay.arriving import Arrival
from deltarefit.relay.cache import Cache
from deltarefit.relay.meter import Meter
from deltarefit.relay.turns import Turns

T = TypeVar("T")

Flight = Callable[[], Coroutine[Any, Any, Arrival | None]]
Flights = dict[str, "asyncio.Future[Arrival | None]"]

HASH_BYTES = 1 << 20


class Objects:
    """The cache, filled from ``parent`` over at most ``streams`` fetches at once. Used by one event loop only."""

    def __init__(self, parent: Store, cache: Cache, streams: int, meter: Meter) -> None:
        self._parent, self._cache, self._meter = parent, cache, meter
        self._turns = Turns(streams)
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="relay-fetch")
        self._disk = ThreadPoolExecutor(2, thread_name_prefix="relay-hash")
        self._beginning: Flights = {}
        self._proving: Flights = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, key: str, sha256: str, *, size: int | None = None, prove: bool = False) -> Arrival | None:
        """The object, whole or arriving; fetched if it is not here. None if the cache has no room for it. ``prove``:
        somebody got damaged bytes from here, so the file is hashed again first. ``size`` if it is known: it is being
        fetched ahead then, and makes no object go that nobody has read. Raises what the parent says."""
        if (arrival := self._cache.get(sha256)) is not None:
            if arrival.filling or (arrival.proven and not prove and not arrival.doubted):
                return arrival
            held = arrival
            if await self._once(self._proving, sha256, lambda: self._proven_again(held)) is not None:
                return arrival
        return await self._once(self._beginning, sha256, lambda: self._begin(key, sha256, size))

    async def _once(self, under_way: Flights, sha256: str, start: Flight) -> Arrival | None:
        """What comes of it, started once for all who ask meanwhile."""
        if (flight := under_way.get(sha256)) is None:
            flight = under_way[sha256] = asyncio.ensure_future(start())
            flight.add_done_callback(lambda _: under_way.pop(sha256, None))
        return await asyncio.shield(flight)

    async def close(self) -> None:
        """Stop fetching."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def _begin(self, key: str, sha256: str, size: int | None) -> Arrival | None:
        known = size if size is not None else await self._in(self._pool, lambda: self._parent.size(key))
        if (arrived := self._cache.get(sha256)) is not None:  # it was put here meanwhile
            return arrived
        try:
            arrival = self._cache.begin(sha256, known, wanted=size is None)
        except RefitError:
            self._meter.count("not_kept")
            return None  # a full or broken disk costs the cache, and not the object
        if arrival is not None:
            task = asyncio.ensure_future(self._fill(key, arrival))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return arrival

    async def _fill(self, key: str, arrival: Arrival) -> None:
        """Fetch all chunks and prove the whole."""
        chunks = [asyncio.ensure_future(self._chunk(key, arrival, *chunk)) for chunk in arrival.chunks]
        try:
            await asyncio.gather(self._prove(arrival), *chunks)
            self._cache.keep(arrival)
        except IntegrityError as error:  # no fault of whoever asks: it may be whole elsewhere, or at the second fetch
            self._meter.count("damaged")
            self._lost(arrival, UnavailableError(error.what, next_step="Fetch it again."))
        except RefitError as error:
            self._lost(arrival, error)
        except OSError as error:
            self._lost(arrival, UnavailableError(f"cannot keep {key}", found=str(error)))
        except asyncio.CancelledError:
            self._lost(arrival, UnavailableError("the relay is ending", next_step="Use another parent."))
            raise
        finally:
            for chunk in chunks:
                chunk.cancel()

    def _lost(self, arrival: Arrival, error: RefitError) -> None:
        self._cache.drop(arrival)
        arrival.fail(error)

    async def _chunk(self, key: str, arrival: Arrival, start: int, length: int) -> None:
        async with self._turns.one(lambda: arrival.read):
            if arrival.error is None:
                await self._in(self._pool, lambda: self._fetch(key, arrival.path, start, length))
                arrival.arrived(start)

    def _fetch(self, key: str, path: Path, start: int, length: int) -> None:
        data = self._parent.get(key, start, length)
        self._meter.fetched(len(data))
        if len(data) != length:
            raise UnavailableError(
                f"the parent sent a part of {key}", expected=f"{length} bytes at {start}", found=f"{len(data)}"
            )
        with path.open("r+b", buffering=0) as file:
            _write_at(file.fileno(), data, start)

    async def _prove(self, arrival: Arrival) -> None:
        """Hash what has arrived, in order, until all of it has. Raises ``IntegrityError`` if it is something else."""
        hasher, position = hashlib.sha256(), 0
        while position < arrival.size:
            if arrival.error is not None:
                raise arrival.error
            if (stop := arrival.contiguous(position)) == position:
                await arrival.change()
                continue
            await self._in(self._disk, lambda at=position, to=stop: _hash(arrival.path, hasher, at, to))  # type: ignore[misc]
            position = stop
        if hasher.hexdigest() != arrival.sha256:
            raise IntegrityError(f"the parent sent other bytes than {arrival.sha256} names")

    async def _proven_again(self, arrival: Arrival) -> Arrival | None:
        """A whole file is hashed once more; None, and forgotten, if it is not what its name says."""
        with suppress(RefitError, OSError):
            await self._prove(arrival)
            self._cache.keep(arrival)
            return arrival
        self._meter.count("damaged")
        self._lost(arrival, UnavailableError("the relay's copy is damaged", next_step="Fetch it again."))
        return None

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def _write_at(handle: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, start)
        view, start = view[done:], start + done


def _hash(path: Path, hasher: hashlib._Hash, start: int, stop: int) -> None:
    with path.open("rb", buffering=0) as file:
        for position in range(start, stop, HASH_BYTES):
            length = min(HASH_BYTES, stop - position)
            piece = os.pread(file.fileno(), length, position)
            if len(piece) != length:
                raise OSError(f"{path} is short")
            hasher.update(piece)
