"""Objects that are put: taken whole into a file, checked, and handed to the parent; nothing of one that breaks off is
ever seen. Create-once is the root's business (protocol §3.5): an answer that does not come stays unknown here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

from aiohttp import ClientError, web

from deltarefit.errors import IntegrityError, UnavailableError, UsageError
from deltarefit.localfiles import disk_errors
from deltarefit.manifest import MAX_PAYLOAD_BYTES
from deltarefit.relay.budgets import Budget
from deltarefit.relay.cache import Cache
from deltarefit.relay_api import SHA256, content_hash

MOST_UPLOAD_BYTES = MAX_PAYLOAD_BYTES
"""Also the limit of a record."""
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Upload:
    """A body that arrived whole and is what the client says."""

    path: Path
    size: int
    sha256: str

    def data(self) -> memoryview:
        """All of it; in memory only as far as it is touched. Goes when nobody holds a part of it any more, which an
        error may for a while."""
        if self.size == 0:
            return memoryview(b"")
        with self.path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@contextlib.asynccontextmanager
async def received(request: web.Request, key: str, cache: Cache, budget: Budget) -> AsyncIterator[Upload]:
    """The body of a PUT; its file is gone at the end unless it was taken from there. Raises ``UsageError`` for one that
    says no length or too much, ``IntegrityError`` for other bytes than were announced, ``UnavailableError`` for one
    that breaks off or stands still."""
    size = _announced(request, key)
    path = cache.spool()
    try:
        hasher = hashlib.sha256()
        with disk_errors(f"cannot take {key!r}"), path.open("xb", buffering=0) as file:
            path.chmod(0o600)
            received = 0
            async for piece in _pieces(request, key, budget):
                received += len(piece)
                if received > size:
                    break
                await asyncio.to_thread(_take, file, hasher, piece)
        if received != size:
            raise UnavailableError(f"the body of {key!r} broke off", expected=f"{size} bytes", found=f"{received}")
        _check(key, hasher.hexdigest(), request.headers.get(SHA256))
        yield Upload(path, size, hasher.hexdigest())
    finally:
        path.unlink(missing_ok=True)


def _announced(request: web.Request, key: str) -> int:
    size = request.content_length
    if size is None:
        raise UsageError(f"PUT of {key!r} without a length", expected="Content-Length", next_step="Send it.")
    if size > MOST_UPLOAD_BYTES:
        raise UsageError(f"{key!r} is too large", expected=f"at most {MOST_UPLOAD_BYTES} bytes", found=size)
    stated = request.headers.get(SHA256)
    if stated is not None and not re.fullmatch(r"[0-9a-f]{64}", stated, re.ASCII):
        raise UsageError(f"bad {SHA256}", expected="64 lower-case hex digits")
    return size


async def _pieces(request: web.Request, key: str, budget: Budget) -> AsyncIterator[bytes]:
    while True:
        reading = request.content.read(PIECE_BYTES)
        try:
            piece = await asyncio.wait_for(reading, budget.seconds_for(PIECE_BYTES))
        except (asyncio.TimeoutError, ClientError, ConnectionError, web.RequestPayloadError) as error:
            found = f"{type(error).__name__}"
            raise UnavailableError(f"the body of {key!r} broke off", found=found, next_step="Send it again.") from None
        if not piece:
            return
        yield piece


def _take(file: RawIOBase, hasher: hashlib._Hash, piece: bytes) -> None:
    view = memoryview(piece)
    hasher.update(view)
    while view:
        view = view[file.write(view) or 0 :]


def _check(key: str, found: str, stated: str | None) -> None:
    for expected in (content_hash(key), stated):
        if expected is not None and expected != found:
            raise IntegrityError(
                f"the body of {key!r} is not what was announced", expected=expected, found=found,
                next_step="Send it again.",
            )  # fmt: skip
