"""Relays that are each other's parents: named, nobody hangs, and a parent that leads to a root is used all the same."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltarefit.errors import NotFoundError, RefitError, UnavailableError
from deltarefit.ports import Store
from deltarefit.stores.relay import RelayStore
from tests.relays import opened
from tests.test_cli_relay import objects, relay_process

PATIENCE_S = 20.0
"""Far below the time that a request may take without an answer, and more than relays need to hear of each other."""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]


@contextlib.contextmanager
def ring(count: int, last_resort: str | None = None) -> Iterator[list[str]]:
    """URLs of relays, each the parent of the one before and the first that of the last, which may know another too."""
    ports = free_ports(count)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        for number, port in enumerate(ports):
            parents = ["--parent", urls[(number + 1) % count]]
            if last_resort is not None and number == count - 1:
                parents += ["--parent", last_resort]
            stack.enter_context(relay_process(*parents, "--listen", f"127.0.0.1:{port}", "--name", f"relay-{number}"))
        yield urls


def path_of(url: str) -> list[str]:
    with contextlib.closing(RelayStore(url)) as store:
        return store.status()["path"]


def there(store: Store, key: str) -> bool:
    try:
        return store.size(key) > 0
    except UnavailableError:
        return False


def until(settled: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not settled():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def error_of(url: str, verb: str, key: str) -> RefitError:
    with contextlib.closing(RelayStore(url)) as store, pytest.raises(RefitError) as caught:
        getattr(store, verb)(key, *([b"x"] if verb in ("put", "create") else []))
    return caught.value


@pytest.mark.timeout(150)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_loop_is_named_and_nobody_hangs(tmp_path: Path, count: int) -> None:
    content = next(iter(objects(tmp_path / "root", 1, 1000)))
    with ring(count) as urls, ThreadPoolExecutor(16) as pool:
        # What is asked before the relays have heard of each other ends by the time of a request only.
        until(lambda: all(path_of(url).count(f"relay-{number}") > 1 for number, url in enumerate(urls)))
        asked = [(url, verb) for url in urls for verb in ("get", "size", "put", "create", "delete")]
        keys = {"get": content, "size": content}
        began = time.monotonic()
        jobs = [pool.submit(error_of, url, verb, keys.get(verb, "run")) for url, verb in asked]
        for (_, verb), job in zip(asked, jobs, strict=True):
            error = job.result(60)
            assert isinstance(error, UnavailableError)
            if verb in ("put", "create", "delete"):  # of others the first question is HEAD, which has no body for it
                assert "loop of relays" in str(error)
                assert "relay-0" in str(error)
        assert time.monotonic() - began < PATIENCE_S


@pytest.mark.timeout(150)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_loop_with_a_way_out_works(tmp_path: Path, count: int) -> None:
    """Every relay of it, all the time: the one that knows a root uses it, and is its neighbours' way there."""
    kept = objects(tmp_path / "root", 4, 100_000)
    with ring(count, f"file://{tmp_path / 'root'}") as urls:
        first = next(iter(kept))
        for url in urls:  # they have to hear of each other first; from then on nothing may fail
            with opened(url) as store:
                until(lambda store=store: there(store, first))  # type: ignore[misc]
        for turn, (key, data) in enumerate(kept.items()):
            for url in urls:
                began = time.monotonic()
                with opened(url) as store:
                    assert store.get(key) == data
                    assert store.size(key) == len(data)
                    with pytest.raises(NotFoundError):
                        store.get(f"member/{turn}")
                    store.create(f"a/{turn + 1:010d}/intent-{urls.index(url)}", b"x")
                assert time.monotonic() - began < PATIENCE_S
            time.sleep(1)  # the parent that leads back is asked again now and then
