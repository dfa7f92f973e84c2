"""One question to the parent for all who ask the same at the same time.

Nobody is given an answer to a question that was put before his own: whoever comes while one is under way shares the
next one. So what was written is seen at once (``Store.get``), and many that look for one key cost two questions a round
trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any


class Shared:
    """Questions under way, and the next of each. Used by one event loop only."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[Any]] = {}
        self._next: dict[Hashable, asyncio.Future[Any]] = {}

    async def ask(self, what: Hashable, put: Callable[[], Awaitable[Any]]) -> Any:
        """The answer to ``what``, which ``put`` asks for; raises what it raises."""
        if (waiting := self._next.get(what)) is None:
            waiting = self._next[what] = asyncio.ensure_future(self._put(what, put))
        return await asyncio.shield(waiting)

    async def _put(self, what: Hashable, put: Callable[[], Awaitable[Any]]) -> Any:
        while (running := self._running.get(what)) is not None:
            await asyncio.wait([running])
        mine = self._running[what] = self._next.pop(what)
        try:
            return await put()
        finally:
            if self._running.get(what) is mine:
                del self._running[what]
