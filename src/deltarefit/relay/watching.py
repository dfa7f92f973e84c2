"""Fetching ahead: what has appeared above is taken before anybody below asks for it, and told on at once.

A parent that is a relay tells its news. A root's parent is a directory or a bucket, at which somebody has to look: at
the attempt that is open, and for the next one. Neither decides anything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

from deltarefit import runlog, runtime
from deltarefit.errors import FormatError, NotFoundError, RefitError
from deltarefit.events import Event
from deltarefit.manifest import Hint
from deltarefit.ports import LocalFiles, Store, Watched
from deltarefit.relay.serving import Relay
from deltarefit.relay_api import content_hash

T = TypeVar("T")

POLL_S = 0.5
"""Between two looks at a store that tells nothing."""
NEWS_S = 20.0
"""One question for news, if there is none."""
AGAIN_S = 2.0
"""After an error."""
ROOM_S = 0.5
"""Between two looks for room in the cache."""
PATIENCE_S = 60.0
"""How long something is kept in mind for which the cache has no room."""


class Watcher:
    """Keeps a relay's news and cache ahead of its children; ``run`` in the relay's event loop until it is cancelled."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._ahead: set[asyncio.Task[None]] = set()
        self._path, self._trouble = relay.path, ""

    async def run(self) -> None:
        """For ever. Errors of the parent are waited out."""
        look = _Told(self._relay.parent) if isinstance(self._relay.parent, Watched) else _Looked(self._relay.parent)
        try:
            while True:
                try:
                    for key, size in await _apart(look.next):
                        self._heard(key, size)
                except RefitError as error:
                    self._say(f"the parent tells nothing: {error}")
                    self._tell_path()
                    await asyncio.sleep(AGAIN_S)
                else:
                    self._say("")
                    self._tell_path()
        finally:
            for task in self._ahead:
                task.cancel()

    def _say(self, trouble: str) -> None:
        """What is wrong with the parent, once; and that it is over."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._relay.emit(Event("away", text=trouble or "the parent tells again"))

    def _tell_path(self) -> None:
        """Children hear at once that the way to the root has changed: a loop of parents is known by it."""
        if self._relay.path != self._path:
            self._path = self._relay.path
            self._relay.news.hurry()

    def _heard(self, key: str, size: int) -> None:
        ahead = self._relay.news.add(key, size) and _is_delta(key)  # anchors are large, and few want them
        if ahead and not isinstance(self._relay.parent, LocalFiles):
            task = asyncio.ensure_future(self._fetch(key, size))
            self._ahead.add(task)
            task.add_done_callback(self._ahead.discard)

    async def _fetch(self, key: str, size: int) -> None:
        """Into the cache, once it has room. An error leaves it to whoever asks for it."""
        sha256 = content_hash(key) or ""
        for _ in range(int(PATIENCE_S / ROOM_S)):
            try:
                if size > self._relay.limit or await self._relay.objects.get(key, sha256, size=size) is not None:
                    return
            except RefitError:
                return
            await asyncio.sleep(ROOM_S)


def _is_delta(key: str) -> bool:
    return key.startswith("a/") and content_hash(key) is not None


async def _apart(work: Callable[[], T]) -> T:
    """Work that may wait for long, in a thread that nobody waits for when the relay ends."""
    future: Future[T] = Future()

    def body() -> None:
        with suppress(InvalidStateError):  # cancelled: nobody awaits it any more
            try:
                future.set_result(work())
            except RefitError as error:
                future.set_exception(error)

    threading.Thread(target=body, name="relay-news", daemon=True).start()
    return await asyncio.wrap_future(future)


class _Told:
    """New keys from a parent that tells them."""

    def __init__(self, parent: Watched) -> None:
        self._parent, self._cursor = parent, ""

    def next(self) -> Sequence[tuple[str, int]]:
        # The first answer comes at once: with it the path to the root, which shows a loop.
        self._cursor, keys = self._parent.news(self._cursor, NEWS_S if self._cursor else 0.0)
        return keys


class _Looked:
    """New keys of the newest attempt of a run, by looking (docs/format.md §1)."""

    def __init__(self, parent: Store) -> None:
        self._parent = parent
        self._attempt = 0
        self._seen: set[str] = set()
        self._first = True

    def next(self) -> Sequence[tuple[str, int]]:
        if not self._first:
            runtime.sleep(POLL_S)
        self._first = False
        self._attempt = self._attempt or max(1, self._hint())
        found = self._new()
        while self._is_there(runlog.attempt_key(self._attempt + 1, "intent")):
            self._attempt, self._seen = self._attempt + 1, set()
            found += self._new()
        return found

    def _new(self) -> list[tuple[str, int]]:
        listed = self._parent.list(f"a/{self._attempt:010d}")
        found = [(key, size) for key, size in listed if key not in self._seen and "/v/" not in key]
        self._seen.update(key for key, _ in found)
        return found

    def _is_there(self, key: str) -> bool:
        try:
            self._parent.size(key)
        except NotFoundError:
            return False
        return True

    def _hint(self) -> int:
        try:
            return Hint.from_bytes(self._parent.get(runlog.HINT)).head
        except (NotFoundError, FormatError):
            return 0
