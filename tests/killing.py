"""Sudden death for tests: stores and targets whose process dies at the n-th call, before or after its effect, or in the
middle of a write."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from deltarefit.elements import Elements
from deltarefit.manifest import Catalog, Header
from deltarefit.ports import Spool, Store, Target


class Killed(BaseException):
    """The process died here. Not an Exception: nothing in the product may catch it and go on."""


class Fuse:
    """Counts calls; at call ``at`` and ever after, the process is dead."""

    def __init__(self, at: int, after: bool = False) -> None:
        self.at = at
        self.after = after
        self.calls = 0
        self._lock = threading.Lock()

    @property
    def blown(self) -> bool:
        return self.calls >= self.at

    def strike(self) -> bool:
        """Count a call; True if this is the one, ``Killed`` if that one has been."""
        with self._lock:
            if self.calls >= self.at:
                raise Killed("dead already")
            self.calls += 1
            return self.calls == self.at

    def call(self, work: Callable[[], Any]) -> Any:
        last = self.strike()
        if last and not self.after:
            raise Killed(f"killed before call {self.at}")
        result = work()
        if last:
            raise Killed(f"killed after call {self.at}")
        return result


class KillingStore:
    """``ports.Store`` whose process dies at a call."""

    def __init__(self, store: Store, fuse: Fuse) -> None:
        self._store = store
        self._fuse = fuse

    @property
    def url(self) -> str:
        return self._store.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._fuse.call(lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        self._fuse.call(lambda: self._store.create(key, data))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._fuse.call(lambda: self._store.get(key, start, length))  # type: ignore[no-any-return]

    def size(self, key: str) -> int:
        return self._fuse.call(lambda: self._store.size(key))  # type: ignore[no-any-return]

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return self._fuse.call(lambda: self._store.list(prefix))  # type: ignore[no-any-return]

    def delete(self, key: str) -> None:
        self._fuse.call(lambda: self._store.delete(key))


class _KillingSpool:
    def __init__(self, spool: Spool, fuse: Fuse) -> None:
        self._spool = spool
        self._fuse = fuse

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._fuse.call(lambda: self._spool.put(name, data))

    def get(self, name: str) -> bytes | None:
        return self._fuse.call(lambda: self._spool.get(name))  # type: ignore[no-any-return]

    def clear(self) -> None:
        self._fuse.call(self._spool.clear)


class KillingTarget:
    """``ports.Target`` whose process dies at a call; with ``tear`` a write then leaves a random part of its changes."""

    def __init__(self, target: Target, fuse: Fuse, tear: np.random.Generator | None = None) -> None:
        self._target = target
        self._fuse = fuse
        self._tear = tear
        self.tore = 0

    @property
    def catalog(self) -> Catalog | None:
        return self._target.catalog

    @property
    def spool(self) -> Spool:
        return _KillingSpool(self._target.spool, self._fuse)

    def read_header(self) -> Header | None:
        return self._fuse.call(self._target.read_header)  # type: ignore[no-any-return]

    def write_header(self, header: Header) -> None:
        self._fuse.call(lambda: self._target.write_header(header))

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        self._fuse.call(lambda: self._target.seed(catalog, files))

    def finish_seed(self) -> None:
        self._fuse.call(self._target.finish_seed)

    def window(self, tensor: int, start: int, stop: int) -> AbstractContextManager[tuple[Elements, int]]:
        return self._window(tensor, start, stop)

    @contextmanager
    def _window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        last = self._fuse.strike()
        if last and self._tear is None and not self._fuse.after:
            raise Killed("killed before a window")
        with self._target.window(tensor, start, stop) as (array, first):
            if not last or self._tear is None:
                yield array, first
            else:
                copy = array.copy()
                yield copy, first
                self._apply_part(array, copy, self._tear)
        if last:
            raise Killed("killed in or after a window")

    def _apply_part(self, array: Elements, copy: Elements, rng: np.random.Generator) -> None:
        changed = array != copy
        chosen = changed & (rng.random(array.shape) < rng.random())
        array[chosen] = copy[chosen]
        self.tore += bool(chosen.any() and (chosen != changed).any())

    def flush(self) -> None:
        self._fuse.call(self._target.flush)

    def pause(self) -> None:
        self._fuse.call(self._target.pause)

    def resume(self) -> None:
        self._fuse.call(self._target.resume)


def fuses(after: bool = False, stride: int = 1) -> Iterator[Fuse]:
    """Fuses for call 1, 2, 3 ...; ends with the first run that lives to its end."""
    for at in itertools.count(1, stride):
        fuse = Fuse(at, after)
        yield fuse
        if not fuse.blown:
            return
