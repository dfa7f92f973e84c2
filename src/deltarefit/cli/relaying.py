"""``relay``: serve a store to many, from a bounded cache."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import select
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltarefit import runtime
from deltarefit.addresses import parse_listen, shown
from deltarefit.cli import options, relay_options, words
from deltarefit.cli.keys import notary
from deltarefit.cli.output import Output
from deltarefit.cli.patience import Stop
from deltarefit.cli.relay_workers import Workers, reserved
from deltarefit.cli.verbs import Call, app, verb
from deltarefit.errors import UsageError
from deltarefit.events import Event
from deltarefit.ports import Store
from deltarefit.relay_api import Role
from deltarefit.tls import server_context
from deltarefit.tree import parents_of
from deltarefit.treefiles import read_tree

LIMIT_BYTES = 16 << 30
STREAMS = 16
CHUNK_BYTES = 2 << 20
REQUESTS = 256
LEAST_RATE = 64 << 10
STOP_POLL_S = 0.1


@verb(app, "relay")
def relay(
    call: Call,
    parent: relay_options.Parents = None,
    listen: relay_options.Listen = "127.0.0.1:8470",
    directory: relay_options.CacheDir = None,
    limit: relay_options.Limit = LIMIT_BYTES,
    streams: relay_options.Streams = STREAMS,
    chunk_bytes: relay_options.ChunkBytes = CHUNK_BYTES,
    tokens: relay_options.Tokens = None,
    cert: relay_options.Cert = None,
    key: relay_options.Key = None,
    client_ca: relay_options.ClientCa = None,
    plain_http: relay_options.PlainHttp = False,
    most_requests: relay_options.MostRequests = REQUESTS,
    most_rate: relay_options.MostRate = 0.0,
    least_rate: relay_options.LeastRate = LEAST_RATE,
    workers: relay_options.WorkerCount = 1,
    worker: relay_options.Worker = False,
    tree: relay_options.TreeFile = None,
    name: relay_options.RelayName = None,
    trust: options.Trust = None,
) -> int:
    """Serve a store to many receivers and relays over HTTP, from a bounded cache: each byte crosses the link to the
    parent once, and is passed on while it arrives.

    Wherever a store is asked for, the relay's URL will do. Publishers may use it too; what they create is created
    at the root. The URL is printed as soon as the relay listens. Several parents are tried in their order, so that
    a dead one costs a chunk and not a version. Runs until Ctrl-C or SIGTERM. Needs the relay extra.

    Example: [bold]deltarefit relay --parent s3://bucket/run7 --listen 10.0.0.1:8470 --tokens FILE --cert PEM[/],
    then [bold]deltarefit follow https://10.0.0.1:8470 --token-file FILE --into DIR[/]
    """
    parents = _parents(parent or (), tree, name, trust)
    host, port = parse_listen(listen)
    tls, auth = _context(cert, key, client_ca), _auth(tokens, certified=client_ca is not None)
    budget = _relay("budgets").Budget(most_requests, most_rate, least_rate)
    _relay("auth").check_listen(host, auth, tls, plain_http)  # before anything is opened or made
    place = {"host": host, "port": port, "tls": tls, "plain": plain_http, "shared": worker}
    named = name or runtime.token()[:16]
    with Stop() as stop, _directory(directory) as where, _opened(call, parents, named) as store:
        out = _Errand(call.out, stop, store, where, limit // (1 if workers == 1 else workers + 1), chunk_bytes)
        if workers == 1:
            ended = _input_ended if worker else stop.asked
            asyncio.run(out.serve({"auth": auth, "budget": budget, "streams": streams, "name": named}, place, ended))
        else:
            files = {"--tokens": tokens, "--cert": cert, "--key": key, "--client-ca": client_ca}
            numbers = {"--most-requests": most_requests, "--most-rate": most_rate, "--least-rate": least_rate}
            given = [
                text for flag, value in {**files, **numbers}.items() if value is not None for text in (flag, str(value))
            ]
            asyncio.run(out.serve_by(workers, [*given, *["--plain-http"] * plain_http], streams, named, host, port))
    return 0


@dataclass(frozen=True)
class _Errand:
    """One call of ``relay``."""

    out: Output
    stop: Stop
    store: Store
    directory: Path
    limit: int
    chunk_bytes: int

    async def serve(self, settings: dict[str, Any], place: dict[str, Any], ended: Callable[[], bool]) -> None:
        """One process does it all."""
        async with self._relay(self.directory, settings, place) as (relay, url):
            self.out.result(url, {"url": url, "name": relay.settings.name, "parent": self.store.url})
            while not (self.stop.asked() or ended()):
                await asyncio.sleep(STOP_POLL_S)
        moved = {name: words.size(number) for name, number in relay.meter.numbers().items()}
        self.out.say(f"Relayed    {moved['sent_bytes']}; {moved['fetched_bytes']} came from above")

    async def serve_by(self, count: int, given: list[str], streams: int, name: str, host: str, port: int) -> None:
        """This process fetches, ``count`` others listen."""
        token = runtime.token()
        settings = {"auth": _relay("auth").Auth.of_token(token, Role.PUBLISH), "streams": streams, "name": name}
        async with self._relay(self.directory / "first", settings, {"host": "127.0.0.1", "port": 0}) as (_, above):
            with reserved(host, port) as port:
                where = f"{shown(host)}:{port}"
                sizes = ["--limit", str(self.limit), "--chunk-bytes", str(self.chunk_bytes)]
                told = ["relay", "--parent", above, "--listen", where, "--worker", "-q", *sizes, *given]
                async with Workers(count, told, self.directory, token) as workers:
                    url = f"{'https' if '--cert' in given else 'http'}://{where}"
                    self.out.result(url, {"url": url, "name": name, "parent": self.store.url, "workers": count})
                    watching = asyncio.ensure_future(workers.watch())
                    while not self.stop.asked():
                        await asyncio.sleep(STOP_POLL_S)
                    watching.cancel()

    @contextlib.asynccontextmanager
    async def _relay(
        self, directory: Path, settings: dict[str, Any], place: dict[str, Any]
    ) -> AsyncIterator[tuple[Any, str]]:
        """A relay that listens, and its URL."""
        serving = _relay("serving")
        with contextlib.closing(_relay("cache").Cache(directory, self.limit, self.chunk_bytes)) as cache:
            relay = serving.Relay(self.store, cache, serving.Settings(**settings), _report(self.out))
            async with _relay("running").listening(relay, **place) as url:
                yield relay, url


def _input_ended() -> bool:
    """Whether whoever started this worker is gone: the other end of stdin."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _relay(module: str) -> Any:
    """A module of the relay, which needs aiohttp."""
    try:
        return importlib.import_module(f"deltarefit.relay.{module}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("deltarefit"):
            raise
        step = "Run: pip install 'deltarefit[relay]'"
        raise UsageError("a relay needs a package that is not installed", found=error.name, next_step=step) from None


def _parents(given: Sequence[str], tree: Path | None, name: str | None, trust: list[Path] | None) -> str:
    """Store URLs joined by commas, the preferred one first."""
    if bool(given) is (tree is not None):
        raise UsageError("a relay's parents", expected="--parent, or --tree and --name", next_step="Give one of them.")
    if tree is None:
        return ",".join(given)
    if name is None:
        raise UsageError("--tree without --name", expected="this relay's name in the tree")
    return ",".join(parents_of(read_tree(tree, notary(trust)), name))


def _auth(tokens: Path | None, *, certified: bool) -> Any:
    auth = _relay("auth").Auth
    if tokens is not None:
        return auth.of_file(tokens)
    return auth.certified(Role.FOLLOW) if certified else auth.open()


def _context(cert: Path | None, key: Path | None, client_ca: Path | None) -> ssl.SSLContext | None:
    if cert is None:
        if key is not None or client_ca is not None:
            raise UsageError("--key and --client-ca need --cert", next_step="Give the relay's certificate.")
        return None
    return server_context(cert, key, client_ca)


@contextlib.contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="deltarefit-relay-") as made:
        yield Path(made)


@contextlib.contextmanager
def _opened(call: Call, parents: str, name: str) -> Iterator[Store]:
    store = call.remote.open(parents, name)
    try:
        yield store
    finally:
        close = getattr(store, "close", None)
        if close is not None:
            close()


def _report(out: Output) -> Any:
    def emit(event: Event) -> None:
        out.warn(event.text)

    return emit
