"""Whose fetch comes next where only so many may run: what a client waits for goes before what is fetched ahead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Turns:
    """At most ``count`` at once; among those who wait the first that is wanted, else the first. Used by one event loop
    only."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[asyncio.Future[None], Callable[[], bool]]] = []

    @contextlib.asynccontextmanager
    async def one(self, wanted: Callable[[], bool]) -> AsyncIterator[None]:
        """The time of one turn. ``wanted`` is asked whenever a turn is given."""
        await self._take(wanted)
        try:
            yield
        finally:
            self._give()

    async def _take(self, wanted: Callable[[], bool]) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (turn, wanted)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(entry)
            else:  # it was given in the same moment
                self._give()
            raise

    def _give(self) -> None:
        live = [entry for entry in self._waiting if not entry[0].done()]
        chosen = next((entry for entry in live if entry[1]()), live[0] if live else None)
        if chosen is None:
            self._free += 1
        else:
            self._waiting.remove(chosen)
            chosen[0].set_result(None)
