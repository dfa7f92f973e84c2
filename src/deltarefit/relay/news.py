"""What has appeared in the store lately, told to those below so that they fetch it before they are asked for it.

Hints only: one that is missed costs time. A cursor is this process's own; one of another process begins anew.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

from deltarefit.relay.arriving import Bell
from deltarefit.relay_api import MOST_NEWS


class News:
    """The ``MOST_NEWS`` newest keys, in the order in which they became known here. Used by one event loop only."""

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(8)
        self._keys: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._last = 0
        self._bell = Bell()
        self.ended = False

    @property
    def cursor(self) -> str:
        """Of the newest key."""
        return f"{self._epoch}-{self._last}"

    def add(self, key: str, size: int) -> bool:
        """Whether it is new here."""
        if key in self._keys:
            return False
        self._last += 1
        self._keys[key] = (self._last, size)
        if len(self._keys) > MOST_NEWS:
            self._keys.popitem(last=False)
        self._bell.ring()
        return True

    def forget(self, key: str) -> None:
        """It was deleted: should it come again, that is news."""
        self._keys.pop(key, None)

    async def since(self, cursor: str, seconds: float) -> tuple[str, list[tuple[str, int]]]:
        """(the next cursor, (key, size) of what came since), after a wait of up to ``seconds`` if nothing has."""
        epoch, _, number = cursor.partition("-")
        known = epoch == self._epoch and number.isdecimal() and len(number) < 20
        after = int(number) if known else self._last
        if after >= self._last and not self.ended:
            await self._bell.wait(seconds)
        return self.cursor, [(key, size) for key, (at, size) in self._keys.items() if at > after]

    def hurry(self) -> None:
        """Whoever waits is answered now, though nothing has appeared: the answer's head has news."""
        self._bell.ring()

    def end(self) -> None:
        """Nobody waits any more."""
        self.ended = True
        self._bell.ring()

    async def another(self, seconds: float) -> None:
        """Returns when there is news, or after ``seconds``."""
        if not self.ended:
            await self._bell.wait(seconds)
