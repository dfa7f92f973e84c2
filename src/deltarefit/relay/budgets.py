"""How much one peer may take of a relay at once: requests, bytes a second, and time without progress.

A peer that asks for more than its share waits, or is told to come back: nobody starves the others, and a reader that
stands still is let go (back-pressure is by pull: nothing is sent that was not asked for).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from deltarefit.errors import UnavailableError


@dataclass(frozen=True)
class Budget:
    """For each peer. ``bytes_per_s`` 0: no limit. A body must move at ``least_bytes_per_s`` after ``grace_s``."""

    requests: int = 256
    bytes_per_s: float = 0.0
    least_bytes_per_s: float = 64 << 10
    grace_s: float = 15.0

    def seconds_for(self, nbytes: int) -> float:
        """How long so many bytes may take on their way to or from a peer."""
        return self.grace_s + nbytes / self.least_bytes_per_s


class Budgets:
    """What each peer has in use. Used by one event loop only."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._running: Counter[str] = Counter()
        self._free_at: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def request(self, peer: str) -> AsyncIterator[None]:
        """The time of one request. ``UnavailableError`` if the peer has too many already."""
        if self._running[peer] >= self.budget.requests:
            raise UnavailableError(
                "too many requests of one client at once",
                expected=f"at most {self.budget.requests}",
                next_step="Wait, or use another relay.",
            )
        self._running[peer] += 1
        try:
            yield
        finally:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]
                self._free_at.pop(peer, None)

    async def pass_(self, peer: str, nbytes: int) -> None:
        """Wait until the peer's rate allows so many more bytes."""
        if not self.budget.bytes_per_s:
            return
        now = asyncio.get_running_loop().time()
        free_at = max(self._free_at.get(peer, now), now)
        self._free_at[peer] = free_at + nbytes / self.budget.bytes_per_s
        await asyncio.sleep(free_at - now)
