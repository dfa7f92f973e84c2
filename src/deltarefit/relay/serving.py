"""The relay itself: HTTP requests in, a parent store behind, a cache between (docs/relays.md §2).

What is named by its content is fetched once and served while it arrives; create-once records are kept once they were
seen; everything else is asked of the parent each time, and every change is the parent's to make.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from deltarefit.addresses import is_loopback
from deltarefit.errors import NotFoundError, RefitError, UsageError
from deltarefit.events import Emit, ignore
from deltarefit.ports import LocalFiles, Store
from deltarefit.relay.auth import Auth
from deltarefit.relay.budgets import Budget, Budgets
from deltarefit.relay.cache import Cache
from deltarefit.relay.meter import Meter, prometheus
from deltarefit.relay.news import News
from deltarefit.relay.objects import Objects
from deltarefit.relay.records import Records
from deltarefit.relay.sending import Range, Sender
from deltarefit.relay.sharing import Shared
from deltarefit.relay.uploads import Upload, received
from deltarefit.relay_api import (
    LIST,
    METRICS,
    MOST_PATH,
    MOST_WAIT_S,
    NEWS,
    OBJECTS,
    PATH,
    STATUS,
    body_of,
    content_hash,
    role_for,
    status_of,
)
from deltarefit.storekeys import check_key, check_prefix

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LOOK_S = 1.0
"""Between two looks at the parent while somebody waits for a key of which no news may come."""
CALLS = 32
"""Calls to the parent at once that are not fetches."""
WHOLE_AT_ONCE = 4
"""Objects that are not kept, and so pass through memory, at once."""
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{0,19})", re.ASCII)


@dataclass
class Settings:
    """How a relay works; see ``deltarefit relay --help``."""

    auth: Auth = field(default_factory=Auth.open)
    budget: Budget = field(default_factory=Budget)
    streams: int = 16
    name: str = field(default_factory=lambda: secrets.token_hex(8))


class Relay:
    """A store behind HTTP. ``parent`` is closed by nobody here. Belongs to the event loop in which ``app`` runs."""

    def __init__(self, parent: Store, cache: Cache, settings: Settings, emit: Emit = ignore) -> None:
        self.parent, self.settings, self.emit = parent, settings, emit
        self.meter, self.news = Meter(), News()
        self.objects = Objects(parent, cache, settings.streams, self.meter)
        self._cache, self._records = cache, Records()
        self._budgets = Budgets(settings.budget)
        self._sender = Sender(self._budgets, self.meter)
        self._calls = ThreadPoolExecutor(CALLS, thread_name_prefix="relay-call")
        self._shared = Shared()
        self._whole = asyncio.Semaphore(WHOLE_AT_ONCE)

    def app(self) -> web.Application:
        """The application to run; it ends what it began when it is cleaned up."""
        app = web.Application(middlewares=[self._guard], client_max_size=0)
        app.router.add_get(OBJECTS + "{key:.+}", self._get, allow_head=False)
        app.router.add_head(OBJECTS + "{key:.+}", self._head)
        app.router.add_put(OBJECTS + "{key:.+}", self._put)
        app.router.add_delete(OBJECTS + "{key:.+}", self._delete)
        app.router.add_get(LIST, self._list)
        app.router.add_get(NEWS, self._news)
        app.router.add_get(STATUS, self._status)
        app.router.add_get(METRICS, self._metrics)
        app.on_response_prepare.append(self._sign)
        app.on_shutdown.append(self._end)
        app.on_cleanup.append(self._close)
        return app

    @property
    def path(self) -> tuple[str, ...]:
        """The ids of the relays from this one to the root, as far as the parent told."""
        above: tuple[str, ...] = getattr(self.parent, "path", ())
        return (self.settings.name, *above)[:MOST_PATH]

    @property
    def limit(self) -> int:
        """Bytes that the cache may take."""
        return self._cache.limit

    async def call(self, work: Callable[[], T]) -> T:
        """A call to the parent, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._calls, work)

    # ------------------------------------------------------------------------------------ every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who may come in, what they may take, and how an error is told."""
        try:
            self._check_host(request)
            self._admit(request)
            async with self._budgets.request(_peer(request)):
                return await handler(request)
        except RefitError as error:
            self.meter.count("refused" if isinstance(error, UsageError) else "not_answered")
            return _told(error)
        except web.HTTPException as error:  # no such path or method
            return web.Response(status=error.status, body=body_of(UsageError(error.reason)))

    async def _sign(self, _: web.Request, response: web.StreamResponse) -> None:
        """Whoever sees its own id in an answer knows that its parents form a loop."""
        response.headers[PATH] = ",".join(self.path)

    def _check_host(self, request: web.Request) -> None:
        """Without authentication only this machine may ask, and no web page in its browsers under a name of its own
        (DNS rebinding)."""
        if self.settings.auth.everybody is not None and not self.settings.auth.certificate:
            host = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdecimal() else request.host
            if not is_loopback(host.strip("[]")):
                raise _Forbidden("this relay serves this machine only", found=f"Host: {request.host[:80]}")

    def _admit(self, request: web.Request) -> None:
        """Raises if whoever asks may not do this."""
        header = request.headers.get("Authorization")
        role = self.settings.auth.role(header)
        if role is None:
            what = "asks for a token" if header is None else "does not know this token"
            step = "Give the token of that relay: --token-file, or DELTAREFIT_TOKEN."
            raise _Unauthorized(f"relay {self.settings.name} {what}", next_step=step)
        key = request.match_info.get("key", "")
        if role < (least := role_for(request.method, key)):
            raise _Forbidden(
                f"a {role.name.lower()} token may not {request.method} {key[:80]!r} at relay {self.settings.name}",
                expected=f"a {least.name.lower()} token",
                next_step="Use a token with that role.",
            )

    # ------------------------------------------------------------------------------------ objects

    async def _get(self, request: web.Request) -> web.StreamResponse:
        key, (start, length) = _key(request), _range(request)
        partial = "Range" in request.headers
        sha256 = content_hash(key)
        if isinstance(self.parent, LocalFiles):
            return await self._from_files(self.parent, request, key, start, length, partial=partial)
        if sha256 is not None:
            prove = "no-cache" in request.headers.get("Cache-Control", "")
            arrival = await self.objects.get(key, sha256, prove=prove)
            if arrival is not None:
                part = Range.of(start, length, arrival.size, partial=partial)
                return await self._sender.arriving(request, _peer(request), arrival, part)
            return await self._past_the_cache(request, key, start, length, partial=partial)
        if (data := self._records.get(key)) is not None:
            part = Range.of(start, length, len(data), partial=partial)
            return await self._sender.bytes_(data[part.start : part.stop], part)
        return await self._passed(key, start, length, partial=partial)

    async def _from_files(
        self, parent: LocalFiles, request: web.Request, key: str, start: int, length: int | None, *, partial: bool
    ) -> web.StreamResponse:
        """The parent's own files need no copy."""
        path = await self.call(lambda: parent.file(key))
        if path is None:
            raise NotFoundError(f"no object {key!r} in {self.parent.url}")
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise NotFoundError(f"no object {key!r} in {self.parent.url}") from None
        with file:
            part = Range.of(start, length, os.fstat(file.fileno()).st_size, partial=partial)
            return await self._sender.file(request, _peer(request), file, part)

    async def _past_the_cache(
        self, request: web.Request, key: str, start: int, length: int | None, *, partial: bool
    ) -> web.StreamResponse:
        """A content-named object for which there is no room."""
        size = await self.call(lambda: self.parent.size(key))
        part = Range.of(start, length, size, partial=partial)
        return await self._sender.passing(request, _peer(request), part, lambda at, n: self._fetch(key, at, n))

    async def _passed(self, key: str, start: int, length: int | None, *, partial: bool) -> web.StreamResponse:
        """An object that is not kept."""
        data = await self._shared.ask((key, start, length), lambda: self._fetch(key, start, length))
        return await self._sender.bytes_(data, Range(start, start + len(data), None, partial))

    async def _fetch(self, key: str, start: int, length: int | None) -> bytes:
        async with self._whole:
            data = await self.call(lambda: self.parent.get(key, start, length))
        self.meter.fetched(len(data))
        if start == 0 and (length is None or len(data) < length):
            self._records.saw(key, data)
        return data

    async def _head(self, request: web.Request) -> web.StreamResponse:
        """Always the parent's answer: whether an object is there decides what a publisher does next."""
        key, seconds = _key(request), _seconds(request)
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                size = await self._shared.ask(key, lambda: self.call(lambda: self.parent.size(key)))
                return web.Response(headers={"Content-Length": str(size)})
            except NotFoundError:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or self.news.ended:
                    raise
            await self.news.another(min(left, LOOK_S))

    async def _put(self, request: web.Request) -> web.StreamResponse:
        key = _key(request)
        once = request.headers.get("If-None-Match") == "*"
        async with received(request, key, self._cache, self.settings.budget) as upload:
            await self.call(lambda: self._hand_over(key, upload, once=once))
            if content_hash(key) and not isinstance(self.parent, LocalFiles):
                self._cache.adopt(upload.sha256, upload.size, upload.path)
            self.news.add(key, upload.size)
        return web.Response(status=201 if once else 204)

    def _hand_over(self, key: str, upload: Upload, *, once: bool) -> None:
        if once:
            self.parent.create(key, bytes(upload.data()))
        else:
            self.parent.put(key, upload.data())

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        key = _key(request)
        await self.call(lambda: self.parent.delete(key))
        self._records.forget(key)
        self.news.forget(key)
        return web.Response(status=204)

    # ------------------------------------------------------------------------------------ the rest

    async def _list(self, request: web.Request) -> web.StreamResponse:
        prefix = check_prefix(request.query.get("prefix", ""))
        found = await self.call(lambda: list(self.parent.list(prefix)))
        lines = [json.dumps(entry) for entry in found]
        return web.Response(text="\n".join([*lines, "null"]) + "\n", content_type="application/x-ndjson")

    async def _news(self, request: web.Request) -> web.StreamResponse:
        cursor, keys = await self.news.since(request.query.get("after", "")[:80], _seconds(request))
        return web.json_response({"cursor": cursor, "keys": keys})

    async def _status(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({
            "name": self.settings.name,
            "path": self.path,
            "parent": self.parent.url,
            "limit_bytes": self._cache.limit,
            **self._numbers(),
        })  # fmt: skip

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=prometheus(self._numbers()))

    def _numbers(self) -> dict[str, int]:
        return {**self.meter.numbers(), "cached_bytes": self._cache.used}

    async def _end(self, _: web.Application) -> None:
        self.news.end()

    async def _close(self, _: web.Application) -> None:
        await self.objects.close()
        self._calls.shutdown(wait=False, cancel_futures=True)


class _Unauthorized(UsageError):
    """HTTP 401."""


class _Forbidden(UsageError):
    """HTTP 403."""


def _told(error: RefitError) -> web.Response:
    status = 401 if isinstance(error, _Unauthorized) else 403 if isinstance(error, _Forbidden) else status_of(error)
    return web.Response(status=status, body=body_of(error), content_type="application/json")


def _peer(request: web.Request) -> str:
    """Whose budget it is: that of an address."""
    return request.remote or "unknown"


def _key(request: web.Request) -> str:
    return check_key(request.match_info["key"])


def _range(request: web.Request) -> tuple[int, int | None]:
    """(start, length) that was asked for."""
    header = request.headers.get("Range")
    if header is None:
        return 0, None
    found = _RANGE.fullmatch(header)
    if found is None or (found[2] and int(found[2]) < int(found[1])):
        raise UsageError("bad range", expected="bytes=FIRST-LAST or bytes=FIRST-", found=header[:80])
    start = int(found[1])
    return start, int(found[2]) - start + 1 if found[2] else None


def _seconds(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    if not re.fullmatch(r"\d{1,4}(\.\d{1,6})?", text, re.ASCII):
        raise UsageError("bad wait", expected=f"0 to {MOST_WAIT_S:g} seconds", found=text[:20])
    return min(float(text), MOST_WAIT_S)
