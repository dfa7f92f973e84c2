"""A relay in an event loop of its own: it listens, fetches ahead, lets go of connections on which nothing is asked, and
ends whole."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from aiohttp import web

from deltarefit.addresses import shown
from deltarefit.errors import UnavailableError, UsageError
from deltarefit.relay.auth import check_listen
from deltarefit.relay.serving import Relay
from deltarefit.relay.watching import Watcher

SILENT_S = 30.0
"""How long a connection may stand without a request, also between two."""
SWEEP_S = 5.0
END_S = 5.0
"""How long requests that run may go on after the relay was told to end."""
START_S = 30.0


@contextlib.asynccontextmanager
async def listening(
    relay: Relay, host: str, port: int, tls: ssl.SSLContext | None = None, *, plain: bool = False, shared: bool = False
) -> AsyncIterator[str]:
    """The time in which a relay serves; gives its URL. ``port`` 0: any free one. ``shared``: other processes listen on
    the same port. Raises ``UsageError`` for an address that cannot be listened on, or not without authentication."""
    check_listen(host, relay.settings.auth, tls, plain)
    runner = web.AppRunner(
        relay.app(), access_log=None, keepalive_timeout=SILENT_S, shutdown_timeout=END_S, handle_signals=False
    )
    await runner.setup()
    tasks = []
    try:
        site = web.TCPSite(runner, host, port, ssl_context=tls, backlog=1024, reuse_port=shared or None)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(f"cannot listen on {shown(host)}:{port}", found=error.strerror or str(error)) from None
        tasks = [asyncio.ensure_future(Watcher(relay).run()), asyncio.ensure_future(_let_go_of_silent(runner))]
        yield f"{'https' if tls else 'http'}://{shown(host)}:{_port(runner)}"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()


@contextlib.contextmanager
def serving(make: Callable[[], Relay], host: str = "127.0.0.1", port: int = 0, **rest: object) -> Iterator[str]:
    """A relay in a thread of its own, for tests and for programs that do other things too; gives its URL. ``make`` is
    called in that thread; ``rest`` as in ``listening``."""
    started: list[str | BaseException] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def live() -> None:
        async with listening(make(), host, port, **rest) as url:  # type: ignore[arg-type]
            started.append(url)
            ready.set()
            await stop.wait()

    def body() -> None:
        try:
            loop.run_until_complete(live())
        except BaseException as error:  # noqa: BLE001  # handed to the caller below
            started.append(error)
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=body, name="relay", daemon=True)
    thread.start()
    try:
        if not ready.wait(START_S):
            raise UnavailableError("the relay did not start", expected=f"within {START_S:g} s")
        if isinstance(started[0], BaseException):
            raise started[0]
        yield started[0]
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join(END_S * 2)


def _port(runner: web.AppRunner) -> int:
    return int(runner.addresses[0][1])


async def _let_go_of_silent(runner: web.AppRunner) -> None:
    """A connection on which no request was ever made holds a descriptor for nothing; aiohttp ends only those that fall
    silent after one."""
    loop = asyncio.get_running_loop()
    since: dict[tuple[web.RequestHandler, int], float] = {}
    while True:
        await asyncio.sleep(SWEEP_S)
        connections = runner.server.connections if runner.server else []
        # With the number of its requests: one that is busy with short ones is between two of them at most looks.
        waiting = [(one, getattr(one, "_request_count", 0)) for one in connections if one._current_request is None]
        since = {entry: since.get(entry, loop.time()) for entry in waiting}
        for (one, _), first in since.items():
            if loop.time() - first > SILENT_S:
                one.force_close()
