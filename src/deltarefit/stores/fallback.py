"""Several stores that show the same objects, as one: ordered parents in a tree of relays, or a relay and its bucket.

A store that fails is left out for a while, and what it had not delivered is asked of the next. A content-named object
is taken in chunks, side by side, each from whoever has it: what has arrived is never asked for again (F17). Who asks
for the same bytes of one again got damaged ones: another store is preferred then (F18). Whatever is not named by its
content comes whole from one store.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from deltarefit.errors import RefitError, StorageFullError, UnavailableError
from deltarefit.ports import Store, Watched
from deltarefit.relay_api import MOST_PATH, content_hash
from deltarefit.storekeys import check_key, check_range

T = TypeVar("T")

CHUNK_BYTES = 2 << 20
STREAMS = 8
FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
"""How long a store is left out after a failure, and after many in a row."""
ROUNDS = 3
"""How often all are asked before it is an error."""
PAUSE_S = 0.25
"""Longest wait before the second round; twice that before the third."""
DOUBT_S = 20.0
"""So soon after a read, the same once more means that what came was damaged; later it is a reader of its own."""
REMEMBERED = 4096
"""Reads of content-named objects of which it is known who answered."""


@dataclass
class _Member:
    store: Store
    rest_s: float = FIRST_REST_S
    back_at: float = float("-inf")


class Fallback:
    """``ports.Store`` and ``ports.Watched`` over ``stores``, the preferred one first. Thread-safe.

    Every store is asked before ``UnavailableError``, also those that failed lately, up to ``ROUNDS`` times; that
    something is not there is an answer. ``create`` is asked of one store once: the caller must read back
    (protocol §3.5).
    """

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        streams: int = STREAMS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._members = [_Member(store) for store in stores]
        self._chunk_bytes, self._streams = chunk_bytes, streams
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._gave: OrderedDict[tuple[str, int, int | None], tuple[Store, float]] = OrderedDict()
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="deltarefit-chunk")

    @property
    def url(self) -> str:
        """All of them, joined by commas."""
        return ",".join(member.store.url for member in self._members)

    @property
    def path(self) -> tuple[str, ...]:
        """Ids of the relays from the preferred one that answers to the root. One that leads back here is not on the way
        if any other does not: else those below would take a loop for it that nobody goes round."""
        stores = [member.store for member in self._order()]
        straight = [store for store in stores if not getattr(store, "loops", False)]
        path: tuple[str, ...] = getattr((straight or stores)[0], "path", ())
        return path[:MOST_PATH]

    def __repr__(self) -> str:
        return f"Fallback({self.url!r})"

    def close(self) -> None:
        """End the threads and close what can be closed."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for member in self._members:
            if (close := getattr(member.store, "close", None)) is not None:
                close()

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See ``Store.put``."""
        self._ask(lambda store: store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        """See ``Store.create``. After an unknown answer the others are asked first, for the read-back too."""
        member = self._order()[0]
        try:
            member.store.create(key, data)
        except StorageFullError:
            raise
        except UnavailableError:
            self._failed(member)
            raise

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See ``Store.get``."""
        check_key(key)
        check_range(start, length)
        if content_hash(key) is None:
            return self._ask(lambda store: store.get(key, start, length))
        if length is not None and length <= self._chunk_bytes:
            return self._chunk(key, start, length)
        return b"".join(self._chunks(key, start, length))

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        return self._ask(lambda store: store.size(key))

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See ``Store.list``."""
        return iter(self._ask(lambda store: [*store.list(prefix)]))

    def delete(self, key: str) -> None:
        """See ``Store.delete``."""
        self._ask(lambda store: store.delete(key))

    def news(self, after: str, seconds: float) -> tuple[str, Sequence[tuple[str, int]]]:
        """See ``Watched.news``. A cursor belongs to the store that gave it: the next one begins anew."""
        errors = []
        for member in self._order():
            if not isinstance(member.store, Watched):
                continue
            number, (mine, _, cursor) = self._members.index(member), after.partition(":")
            try:
                cursor, keys = member.store.news(cursor if mine == str(number) else "", seconds)
                self._answered(member)
                return f"{number}:{cursor}", keys
            except UnavailableError as error:
                self._failed(member)
                errors.append(error)
        raise errors[0] if errors else UnavailableError(f"nobody tells news of {self.url}")

    def wait(self, key: str, seconds: float) -> bool:
        """See ``Watched.wait``: asked of the preferred store that can tell, once. ``UnavailableError`` if none can."""
        for member in self._order():
            if isinstance(member.store, Watched):
                try:
                    return member.store.wait(key, seconds)
                except UnavailableError:
                    self._failed(member)
                    raise
        raise UnavailableError(f"{self.url} does not tell what appears")

    # ------------------------------------------------------------------------------------ chunks

    def _chunks(self, key: str, start: int, length: int | None) -> Iterator[bytes]:
        """The chunks of an object in order, the next ``streams`` of them under way, until one is short. The first is
        waited for alone: most objects are smaller than a chunk."""
        doubted = self._doubted((key, start, self._chunk_bytes))
        first = self._chunk(key, start, self._chunk_bytes, doubted)
        yield first
        stop = None if length is None else start + length
        position, under_way = start + self._chunk_bytes, deque[tuple[int, "Future[bytes]"]]()
        whole = len(first) == self._chunk_bytes
        try:
            while whole and (under_way or stop is None or position < stop):
                while len(under_way) < self._streams and (stop is None or position < stop):
                    count = self._chunk_bytes if stop is None else min(self._chunk_bytes, stop - position)
                    under_way.append((count, self._pool.submit(self._chunk, key, position, count, doubted)))
                    position += count
                count, job = under_way.popleft()
                piece = job.result()
                yield piece
                whole = len(piece) == count
        finally:
            for _, job in under_way:
                job.cancel()

    def _chunk(self, key: str, start: int, length: int, doubted: Store | None = None) -> bytes:
        """``doubted``: who gave where the object begins; a wrong size may have hidden this chunk then."""
        what = key, start, length

        def get(store: Store) -> bytes:
            data = store.get(*what)
            self._remember(what, store)
            return data

        return self._ask(get, self._doubted(what) or doubted)

    def _doubted(self, what: tuple[str, int, int | None]) -> Store | None:
        """Who gave these bytes just now."""
        with self._lock:
            store, at = self._gave.get(what, (None, 0.0))
        return store if self._clock() - at < DOUBT_S else None

    def _remember(self, what: tuple[str, int, int | None], store: Store) -> None:
        with self._lock:
            self._gave[what] = store, self._clock()
            self._gave.move_to_end(what)
            if len(self._gave) > REMEMBERED:
                self._gave.popitem(last=False)

    # ------------------------------------------------------------------------------------ whom to ask

    def _ask(self, call: Callable[[Store], T], doubted: Store | None = None) -> T:
        """The first answer, from the preferred store on; the ``doubted`` one after the others that are well."""
        for turn in range(ROUNDS):
            errors = []
            for member in self._order(doubted):
                try:
                    answer = call(member.store)
                except StorageFullError:
                    raise
                except UnavailableError as error:
                    self._failed(member)
                    errors.append(error)
                except RefitError:  # that something is not there is an answer, too
                    self._answered(member)
                    raise
                else:
                    self._answered(member)
                    return answer
            if turn < ROUNDS - 1:
                self._sleep(random.uniform(0, PAUSE_S * 2**turn))  # noqa: S311
        if len(errors) == 1:
            raise errors[0]
        raise UnavailableError(
            f"none of {len(errors)} stores answers",
            found="; ".join(str(error) for error in errors),
            next_step="Check them and the network, then run it again.",
        )

    def _order(self, doubted: Store | None = None) -> Sequence[_Member]:
        """The preferred one first; those that failed lately last."""
        now = self._clock()
        return sorted(self._members, key=lambda member: (member.back_at > now, member.store is doubted))

    def _failed(self, member: _Member) -> None:
        with self._lock:
            if member.back_at > (now := self._clock()):
                return  # many fail at once, and count as one
            member.back_at = now + member.rest_s
            member.rest_s = min(2 * member.rest_s, LONGEST_REST_S)

    def _answered(self, member: _Member) -> None:
        if member.rest_s != FIRST_REST_S or member.back_at > float("-inf"):
            with self._lock:
                member.rest_s, member.back_at = FIRST_REST_S, float("-inf")
