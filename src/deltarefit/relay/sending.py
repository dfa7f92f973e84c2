"""Bytes of files on their way to a client, the kernel copying them, as far as they have arrived."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import BinaryIO

from aiohttp import web

from deltarefit.errors import RefitError, UnavailableError
from deltarefit.relay.arriving import Arrival
from deltarefit.relay.budgets import Budgets
from deltarefit.relay.meter import Meter

Upto = Callable[[int], Awaitable[int]]
"""Where what may be sent from a position on ends, once there is something."""

SLICE_BYTES = 8 << 20
"""Sent between two looks at the peer's budget."""
PIECE_BYTES = 2 << 20
ARRIVAL_S = 120.0
"""Longest wait for the next bytes from above while a client holds on."""


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of an object of ``size`` bytes (None: not known), ``partial`` if a range was asked for."""

    start: int
    stop: int
    size: int | None
    partial: bool

    @classmethod
    def of(cls, start: int, length: int | None, size: int, *, partial: bool) -> Range:
        """As far as an object of this size has them."""
        stop = size if length is None else min(size, start + length)
        return cls(min(start, size), max(stop, min(start, size)), size, partial)

    @property
    def empty(self) -> bool:
        """Nothing of it exists, and HTTP has a status of its own for that."""
        return self.partial and self.start >= self.stop

    def headers(self) -> dict[str, str]:
        size = "*" if self.size is None else self.size
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if self.empty:
            return headers | {"Content-Range": f"bytes */{size}"}
        headers["Content-Length"] = str(self.stop - self.start)
        if self.partial:
            headers["Content-Range"] = f"bytes {self.start}-{self.stop - 1}/{size}"
        return headers

    @property
    def status(self) -> int:
        return 416 if self.empty else 206 if self.partial else 200


class Sender:
    """Answers with bytes; one for a relay."""

    def __init__(self, budgets: Budgets, meter: Meter) -> None:
        self._budgets, self._meter = budgets, meter

    async def bytes_(self, data: bytes, part: Range) -> web.StreamResponse:
        """A small body that is in memory."""
        self._meter.sent(len(data))
        return web.Response(body=data, status=part.status, headers=part.headers())

    async def file(self, request: web.Request, peer: str, file: BinaryIO, part: Range) -> web.StreamResponse:
        """Part of a whole file."""

        async def everything(position: int) -> int:
            return part.stop

        return await self._stream(request, peer, file, part, everything)

    async def arriving(self, request: web.Request, peer: str, arrival: Arrival, part: Range) -> web.StreamResponse:
        """Part of an object that may still be arriving. If it fails half-way the connection is cut: the client sees a
        short body, and goes on elsewhere from there."""

        async def so_far(position: int) -> int:
            return min(part.stop, await arrival.readable_beyond(position, ARRIVAL_S))

        arrival.read = True
        try:
            file = arrival.path.open("rb")  # first of all: it may be moved or removed while we wait
        except FileNotFoundError:
            arrival.doubted = True
            raise UnavailableError("the relay's copy has just gone", next_step="Fetch it again.") from None
        with file:
            if os.fstat(file.fileno()).st_size != arrival.size:
                arrival.doubted = True
                raise UnavailableError("the relay's copy is damaged", next_step="Fetch it again.")
            return await self._arriving(request, peer, arrival, file, part, so_far)

    async def passing(
        self, request: web.Request, peer: str, part: Range, fetch: Callable[[int, int], Awaitable[bytes]]
    ) -> web.StreamResponse:
        """Part of an object that is not kept, a piece at a time, so that memory stays small."""
        response = web.StreamResponse(status=part.status, headers=part.headers())
        await response.prepare(request)
        try:
            for position in range(part.start, part.stop, PIECE_BYTES):
                piece = await fetch(position, min(PIECE_BYTES, part.stop - position))
                await self._budgets.pass_(peer, len(piece))
                await asyncio.wait_for(response.write(piece), self._budgets.budget.seconds_for(len(piece)))
                self._meter.sent(len(piece))
            await response.write_eof()
        except (RefitError, OSError, TimeoutError, asyncio.TimeoutError):
            _cut(request)
        return response

    async def _arriving(
        self, request: web.Request, peer: str, arrival: Arrival, file: BinaryIO, part: Range, so_far: Upto
    ) -> web.StreamResponse:
        if part.stop > part.start and not arrival.proven:
            await so_far(part.start)  # an error that comes before the first byte still has a status of its own
        return await self._stream(request, peer, file, part, so_far)

    async def _stream(
        self, request: web.Request, peer: str, file: BinaryIO, part: Range, upto: Upto
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=part.status, headers=part.headers())
        await response.prepare(request)
        try:
            await self._pieces(request, peer, file, part, upto)
        except (RefitError, OSError, TimeoutError, asyncio.TimeoutError):
            _cut(request)
            return response
        await response.write_eof()
        return response

    async def _pieces(self, request: web.Request, peer: str, file: BinaryIO, part: Range, upto: Upto) -> None:
        if part.empty:
            return
        if request.transport is None:
            raise ConnectionResetError
        loop, position = asyncio.get_running_loop(), part.start
        while position < part.stop:
            count = min(await upto(position) - position, SLICE_BYTES)
            await self._budgets.pass_(peer, count)
            sending = loop.sendfile(request.transport, file, position, count)
            done = await asyncio.wait_for(sending, self._budgets.budget.seconds_for(count))
            if done != count:
                raise ConnectionResetError
            self._meter.sent(count)
            position += count


def _cut(request: web.Request) -> None:
    """End the connection so that nobody takes what was sent for all of it."""
    if request.transport is not None:
        request.transport.abort()
