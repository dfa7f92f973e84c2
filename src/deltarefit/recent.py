"""A store that remembers what was just put: the baseline reads committed payloads from memory, not over the network."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from deltarefit.ports import Store

RECENT_BYTES = 96 << 20


class RecentPayloads:
    """``ports.Store`` over another; keeps objects of ``put`` up to ``RECENT_BYTES`` until ``forget``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recent: dict[str, bytes] = {}
        self._room = RECENT_BYTES
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._store.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._store.put(key, data)
        with self._lock:
            if len(data) > self._room:
                return
            self._room -= len(data)
        self._recent[key] = bytes(data)

    def create(self, key: str, data: bytes) -> None:
        self._store.create(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if start == 0 and (data := self._recent.get(key)) is not None and (length is None or len(data) <= length):
            return data
        return self._store.get(key, start, length)

    def size(self, key: str) -> int:
        return self._store.size(key)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._recent.pop(key, None)
        self._store.delete(key)

    def forget(self) -> None:
        """Drop what is remembered."""
        self._recent.clear()
        self._room = RECENT_BYTES
