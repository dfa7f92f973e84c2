"""Stores whose calls end as a test tells them, and a clock that goes when it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from deltarefit.errors import AlreadyExistsError, NotFoundError

Say = Callable[[int], Exception | None]
"""What a store's nth call ends with, counted from 0."""


class Told:
    """A store of ``objects`` whose calls end as ``say`` tells, before or ``after`` they were done; it counts them."""

    def __init__(self, name: str, objects: dict[str, bytes], say: Say = lambda _: None, after: bool = False) -> None:
        self.url, self._objects, self.say, self._after = f"memory://{name}", objects, say, after
        self.calls: list[tuple[object, ...]] = []
        self.gave: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()

    def _call(self, *call: object) -> Exception | None:
        with self._lock:
            self.calls.append(call)
            error = self.say(len(self.calls) - 1)
        if error is not None and not self._after:
            raise error
        return error

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        error = self._call("get", key, start, length)
        if key not in self._objects:
            raise NotFoundError(key)
        data = self._objects[key][start : None if length is None else start + length]
        if error is not None:
            raise error
        self.gave.append((start, data))
        return data

    def put(self, key: str, data: bytes | memoryview) -> None:
        error = self._call("put", key)
        self._objects[key] = bytes(data)
        if error is not None:
            raise error

    def create(self, key: str, data: bytes) -> None:
        error = self._call("create", key)
        if key in self._objects:
            raise AlreadyExistsError(key)
        self._objects[key] = data
        if error is not None:
            raise error

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        error = self._call("list", prefix)
        for key, data in sorted(self._objects.items()):
            yield key, len(data)
            if error is not None:
                raise error

    def delete(self, key: str) -> None:
        error = self._call("delete", key)
        self._objects.pop(key, None)
        if error is not None:
            raise error


class Watching(Told):
    """One that tells what appears."""

    def news(self, after: str, seconds: float) -> tuple[str, Sequence[tuple[str, int]]]:
        self._call("news", after)
        return f"{self.url}-{len(self.calls)}", []

    def wait(self, key: str, seconds: float) -> bool:
        self._call("wait", key)
        return key in self._objects


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now
