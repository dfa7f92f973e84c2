"""Chains of real relays in this process: each in a thread and an event loop of its own, over real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltarefit.ports import Store
from deltarefit.relay.cache import Cache
from deltarefit.relay.running import serving
from deltarefit.relay.serving import Relay, Settings
from deltarefit.stores import open_store

CHUNK_BYTES = 256 << 10


@contextlib.contextmanager
def relay(
    parent: Store | str,
    directory: Path,
    limit: int = 256 << 20,
    chunk_bytes: int = CHUNK_BYTES,
    settings: Settings | None = None,
    **listen: Any,
) -> Iterator[str]:
    """The URL of a relay in front of ``parent``."""
    with contextlib.ExitStack() as stack:
        store = open_store(parent) if isinstance(parent, str) else parent
        if isinstance(parent, str) and hasattr(store, "close"):
            stack.callback(store.close)
        cache = stack.enter_context(contextlib.closing(Cache(directory, limit, chunk_bytes)))
        made = settings or Settings()
        yield stack.enter_context(serving(lambda: Relay(store, cache, made), **listen))


@contextlib.contextmanager
def chain(root: Store | str, directory: Path, depth: int, **rest: Any) -> Iterator[str]:
    """The URL of the last of ``depth`` relays, each in front of the one before."""
    with contextlib.ExitStack() as stack:
        above: Store | str = root
        for number in range(depth):
            above = stack.enter_context(relay(above, directory / f"relay-{number}", **rest))
        assert isinstance(above, str)
        yield above


@contextlib.contextmanager
def opened(urls: str, **access: Any) -> Iterator[Store]:
    """A store over relays, closed at the end."""
    store = open_store(urls, **access)
    try:
        yield store
    finally:
        store.close()  # type: ignore[attr-defined]
