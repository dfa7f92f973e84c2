"""``relay``: serve a store to many, from a bounded cache."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deltarefit import runtime
from deltarefit.addresses import parse_listen
from deltarefit.cli import options, relaying_options, words
from deltarefit.cli.keys import notary
from deltarefit.cli.output import Output
from deltarefit.cli.patience import Stop
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
    parent: relaying_options.Parents = None,
    listen: relaying_options.Listen = "127.0.0.1:8470",
    directory: relaying_options.CacheDir = None,
    limit: relaying_options.Limit = LIMIT_BYTES,
    streams: relaying_options.Streams = STREAMS,
    chunk_bytes: relaying_options.ChunkBytes = CHUNK_BYTES,
    tokens: relaying_options.Tokens = None,
    cert: relaying_options.Cert = None,
    key: relaying_options.Key = None,
    client_ca: relaying_options.ClientCa = None,
    plain_http: relaying_options.PlainHttp = False,
    most_requests: relaying_options.MostRequests = REQUESTS,
    most_rate: relaying_options.MostRate = 0.0,
    least_rate: relaying_options.LeastRate = LEAST_RATE,
    tree: relaying_options.TreeFile = None,
    name: relaying_options.RelayName = None,
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
    tls = _context(cert, key, client_ca)
    settings = {
        "auth": _auth(tokens, certified=client_ca is not None),
        "budget": _relay("budgets").Budget(most_requests, most_rate, least_rate),
        "streams": streams,
        "name": name or runtime.token()[:16],
    }
    _relay("auth").check_listen(host, settings["auth"], tls, plain_http)  # before anything is opened or made
    with Stop() as stop, _directory(directory) as where, _opened(call, parents, settings) as store:
        cache = _relay("cache").Cache(where, limit, chunk_bytes)
        with contextlib.closing(cache):
            asyncio.run(_serve(call.out, stop, store, cache, settings, host, port, tls, plain_http))
    return 0


async def _serve(
    out: Output,
    stop: Stop,
    store: Store,
    cache: Any,
    settings: dict[str, Any],
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    plain: bool,
) -> None:
    serving = _relay("serving")
    relay = serving.Relay(store, cache, serving.Settings(**settings), _report(out))
    async with _relay("running").listening(relay, host, port, tls, plain=plain) as url:
        out.result(url, {"url": url, "name": relay.settings.name, "parent": store.url})
        while not stop.asked():
            await asyncio.sleep(STOP_POLL_S)
    moved = relay.meter.numbers()
    out.say(f"Relayed    {words.size(moved['sent_bytes'])}; {words.size(moved['fetched_bytes'])} of it came from above")


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
def _opened(call: Call, parents: str, settings: dict[str, Any]) -> Iterator[Store]:
    store = call.remote.open(parents, settings["name"])
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
