"""Stores around a store: below a prefix, with retries, with planned faults. Each passes ``StoreContract``."""

from __future__ import annotations

import fnmatch
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from deltarefit.errors import NotFoundError, StorageFullError, UnavailableError
from deltarefit.ports import Store
from deltarefit.storekeys import check_key, check_prefix

_T = TypeVar("_T")


class Prefixed:
    """The objects of ``store`` below ``prefix``, as a store of their own."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = check_key(prefix)

    @property
    def url(self) -> str:
        """The other store's, with the prefix."""
        return f"{self._store.url}/{self._prefix}"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See ``Store.put``."""
        self._store.put(self._at(key), data)

    def create(self, key: str, data: bytes) -> None:
        """See ``Store.create``."""
        self._store.create(self._at(key), data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See ``Store.get``."""
        return self._store.get(self._at(key), start, length)

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        return self._store.size(self._at(key))

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See ``Store.list``."""
        below = check_prefix(prefix)
        for key, size in self._store.list(self._at(below) if below else self._prefix):
            yield key[len(self._prefix) + 1 :], size

    def delete(self, key: str) -> None:
        """See ``Store.delete``."""
        self._store.delete(self._at(key))

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key)}"


class Retrying:
    """Calls again what may be called twice: every verb but ``create``, after ``UnavailableError`` only.

    Up to ``attempts`` calls. Before each further one it waits a random time up to ``backoff``, twice that,
    four times ..., at most ``longest`` seconds, so that those that failed together do not return together.
    A full store is not asked again: only making room cures it.
    """

    def __init__(
        self,
        store: Store,
        attempts: int = 5,
        backoff: float = 0.2,
        longest: float = 10.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._backoff = backoff
        self._longest = longest
        self._sleep = sleep

    @property
    def url(self) -> str:
        """The other store's."""
        return self._store.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See ``Store.put``."""
        self._again(lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        """See ``Store.create``. Never repeated: the caller must read back first."""
        self._store.create(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See ``Store.get``."""
        return self._again(lambda: self._store.get(key, start, length))

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        return self._again(lambda: self._store.size(key))

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See ``Store.list``. Read to its end here, so that a failure half-way is repeated too."""
        return iter(self._again(lambda: [*self._store.list(prefix)]))

    def delete(self, key: str) -> None:
        """See ``Store.delete``."""
        self._again(lambda: self._store.delete(key))

    def _again(self, call: Callable[[], _T]) -> _T:
        for failures in range(self._attempts - 1):
            try:
                return call()
            except StorageFullError:
                raise
            except UnavailableError:
                most = min(self._longest, self._backoff * 2**failures)
                self._sleep(random.uniform(0, most))  # noqa: S311
        return call()


class Limited:
    """``ports.Store`` over another whose uploads share ``bytes_per_s``, as over one slow link. For benchmarks."""

    def __init__(self, store: Store, bytes_per_s: float) -> None:
        self._store, self._rate = store, bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def url(self) -> str:
        return self._store.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._pass(len(data))
        self._store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._pass(len(data))
        self._store.create(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._store.get(key, start, length)

    def size(self, key: str) -> int:
        return self._store.size(key)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def _pass(self, nbytes: int) -> None:
        """Wait until the link has carried what was before, and this."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))


class Kind(Enum):
    """What goes wrong in one call."""

    BEFORE = "UnavailableError, and nothing happened"
    AFTER = "UnavailableError, although it happened"
    MISSING = "NotFoundError, although it may be there"
    CORRUPT = "one bit of the bytes read is flipped"
    TRUNCATE = "half of the bytes read are missing"
    DELAY = "it takes ``seconds`` longer"


@dataclass(frozen=True)
class Fault:
    """``kind`` happens to calls ``first``, ``first + every`` ... ``last`` that ``verb`` and ``key`` match.

    ``verb`` and ``key`` are shell patterns. Calls count from 1; ``last=None`` means for ever. CORRUPT and
    TRUNCATE can only happen to ``get``.
    """

    kind: Kind
    verb: str = "*"
    key: str = "*"
    first: int = 1
    last: int | None = 1
    every: int = 1
    seconds: float = 0.0

    def strikes(self, number: int) -> bool:
        """Whether it happens to the call of that number."""
        last = number if self.last is None else self.last
        return self.first <= number <= last and (number - self.first) % self.every == 0

    def matches(self, verb: str, key: str) -> bool:
        """Whether a call of this verb on this key counts."""
        return fnmatch.fnmatchcase(verb, self.verb) and fnmatch.fnmatchcase(key, self.key)


class Faulty:
    """Does what ``store`` does, except for the faults of ``plan``. For tests and simulation.

    ``fired`` lists (verb, key, kind) in the order in which faults struck, so that a test can prove they did.
    """

    def __init__(self, store: Store, plan: Sequence[Fault], sleep: Callable[[float], None] = time.sleep) -> None:
        self._store = store
        self._plan = plan
        self._sleep = sleep
        self._seen = [0] * len(plan)
        self._lock = threading.Lock()
        self.fired: list[tuple[str, str, Kind]] = []

    @property
    def url(self) -> str:
        """The other store's."""
        return self._store.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See ``Store.put``."""
        self._run("put", key, lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        """See ``Store.create``."""
        self._run("create", key, lambda: self._store.create(key, data))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See ``Store.get``."""
        data, kinds = self._run("get", key, lambda: self._store.get(key, start, length))
        if Kind.CORRUPT in kinds and data:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data[: len(data) // 2] if Kind.TRUNCATE in kinds else data

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        return self._run("size", key, lambda: self._store.size(key))[0]

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See ``Store.list``. One call, however much of it is read."""
        return self._run("list", prefix, lambda: self._store.list(prefix))[0]

    def delete(self, key: str) -> None:
        """See ``Store.delete``."""
        self._run("delete", key, lambda: self._store.delete(key))

    def _run(self, verb: str, key: str, call: Callable[[], _T]) -> tuple[_T, set[Kind]]:
        faults = self._due(verb, key)
        kinds = {fault.kind for fault in faults}
        self._sleep_for(faults)
        if Kind.BEFORE in kinds:
            raise UnavailableError(f"planned fault before {verb} of {key!r}")
        if Kind.MISSING in kinds:
            raise NotFoundError(f"planned fault: {verb} does not find {key!r}")
        result = call()
        if Kind.AFTER in kinds:
            raise UnavailableError(f"planned fault after {verb} of {key!r}")
        return result, kinds

    def _sleep_for(self, faults: Sequence[Fault]) -> None:
        seconds = sum(fault.seconds for fault in faults if fault.kind is Kind.DELAY)
        if seconds:
            self._sleep(seconds)

    def _due(self, verb: str, key: str) -> Sequence[Fault]:
        """Count this call for every fault it matches; the faults whose turn it is."""
        due = []
        with self._lock:
            for number, fault in enumerate(self._plan):
                if not fault.matches(verb, key):
                    continue
                self._seen[number] += 1
                if fault.strikes(self._seen[number]):
                    due.append(fault)
                    self.fired.append((verb, key, fault.kind))
        return due
