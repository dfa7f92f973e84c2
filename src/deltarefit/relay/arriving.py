"""One content-named object on its way into a file: what of it is there, and whether it is what its name says.

Used by one event loop only. Readers are let at whatever has arrived, except for the last byte: that one leaves only
after the whole was proven, so that nobody below ever takes a damaged object for a complete one (F18).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from deltarefit.errors import RefitError

LEAST_WAIT_S = 0.001


class Bell:
    """Wakes everybody who waits for the next ``ring``."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, seconds: float) -> bool:
        """Whether it rang within ``seconds``."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait_for(future, max(seconds, LEAST_WAIT_S))
        except asyncio.TimeoutError:  # another class before Python 3.11
            return False
        finally:
            self._waiting.discard(future)
        return True


class Arrival:
    """An object of ``size`` bytes whose SHA-256 is ``sha256``, in a file at ``path`` that has that size already. It
    arrives in chunks of ``chunk_bytes``, in any order. ``proven``: all of it is there and hashes to its name.
    ``filling``: it is being fetched. ``read``: somebody below has asked for it, not only fetched it ahead. ``doubted``:
    its file is not there any more, or has another size, whatever was proven before."""

    def __init__(self, sha256: str, size: int, path: Path, chunk_bytes: int) -> None:
        self.sha256, self.size, self.path, self.chunk_bytes = sha256, size, path, chunk_bytes
        self.proven, self.filling = False, True
        self.error: RefitError | None = None
        self.read = self.doubted = False
        self._there = bytearray(-(-size // chunk_bytes))
        self._bell = Bell()

    @classmethod
    def kept(cls, sha256: str, size: int, path: Path) -> Arrival:
        """A whole file that an earlier process left; not proven yet."""
        arrival = cls(sha256, size, path, max(size, 1))
        arrival._there[:] = b"\1" * len(arrival._there)
        arrival.filling = False
        return arrival

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(start, length) of all chunks."""
        return [(start, min(self.chunk_bytes, self.size - start)) for start in range(0, self.size, self.chunk_bytes)]

    def arrived(self, start: int) -> None:
        """The chunk at ``start`` is in the file."""
        self._there[start // self.chunk_bytes] = 1
        self._bell.ring()

    def prove(self) -> None:
        """The whole was found to be what its name says."""
        self.proven, self.filling, self.doubted = True, False, False
        self._bell.ring()

    def fail(self, error: RefitError) -> None:
        """It will not arrive, or is not what its name says."""
        self.error, self.filling = error, False
        self._bell.ring()

    def contiguous(self, position: int) -> int:
        """Where the bytes that are there from ``position`` on end."""
        chunk = position // self.chunk_bytes
        while chunk < len(self._there) and self._there[chunk]:
            chunk += 1
        return max(position, min(chunk * self.chunk_bytes, self.size))

    def readable(self, position: int) -> int:
        """Where the bytes that may be read from ``position`` on end."""
        stop = self.contiguous(position)
        return stop if self.proven else max(position, min(stop, self.size - 1))

    async def readable_beyond(self, position: int, seconds: float) -> int:
        """``readable`` once it is more than ``position``. Raises the error that ended the arrival, and ``TimeoutError``
        if nothing came within ``seconds``."""
        while (stop := self.readable(position)) <= position:
            if self.error is not None:
                raise self.error
            if not await self._bell.wait(seconds):
                raise TimeoutError
        return stop

    async def settled(self) -> None:
        """Returns once it is proven; raises the error that ended the arrival. Whoever fills it bounds the time."""
        while not self.proven:
            if self.error is not None:
                raise self.error
            await self._bell.wait(60.0)

    async def change(self) -> None:
        """Returns when something has changed, or after a while."""
        await self._bell.wait(1.0)
