"""How objects go down a chain of relays: once over each link, while they arrive, before they are asked for."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltarefit.errors import NotFoundError, UnavailableError
from deltarefit.manifest import Intent, Mode, Run
from deltarefit.ports import Store
from deltarefit.records import Digest
from deltarefit.stores import open_store
from deltarefit.stores.relay import RelayStore
from tests.relays import CHUNK_BYTES, chain, opened, relay

INTENT = "a/0000000001/intent"


def memory() -> Store:
    return open_store(f"memory://flow-{secrets.token_hex(8)}")


def put(store: Store, size: int) -> tuple[str, bytes]:
    data = secrets.token_bytes(size)
    key = f"a/0000000001/pl/{hashlib.sha256(data).hexdigest()}"
    store.put(key, data)
    return key, data


def until(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Gated:
    """A store that hands out a chunk only once it may: ``allow`` bytes from the start of every object."""

    def __init__(self, store: Store) -> None:
        self._store, self._allowed = store, 0
        self._changed = threading.Condition()

    def allow(self, nbytes: int) -> None:
        with self._changed:
            self._allowed = nbytes
            self._changed.notify_all()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: start + (length or 0) <= self._allowed, 30)
        return self._store.get(key, start, length)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.mark.parametrize("depth", [1, 3])
def test_an_object_passes_on_while_it_arrives(tmp_path: Path, depth: int) -> None:
    """The root has given out three chunks of ten: a client at the end of the chain has read two of them."""
    store = memory()
    key, data = put(store, 10 * CHUNK_BYTES)
    gated = Gated(store)
    gated.allow(3 * CHUNK_BYTES)
    with chain(gated, tmp_path, depth) as url, ThreadPoolExecutor(1) as pool:
        client = RelayStore(url)
        assert client.get(key, 0, 2 * CHUNK_BYTES) == data[: 2 * CHUNK_BYTES]
        whole = pool.submit(client.get, key)
        assert not whole.done()
        gated.allow(len(data))
        assert whole.result(30) == data


def test_the_last_byte_waits_for_the_proof(tmp_path: Path) -> None:
    """A root that lies about one chunk: nobody below gets all bytes of the object."""
    store = memory()
    key, data = put(store, 6 * CHUNK_BYTES)
    store.put(key, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with chain(store, tmp_path, 2) as url:
        with pytest.raises(UnavailableError):
            RelayStore(url).get(key)
        store.put(key, data)
        with opened(url) as client:
            assert client.get(key) == data


@pytest.mark.parametrize("receivers", [1, 8])
def test_bytes_cross_each_link_once(tmp_path: Path, receivers: int) -> None:
    store = memory()
    objects = dict(put(store, size) for size in (5 * CHUNK_BYTES + 3, CHUNK_BYTES, 100))
    with (
        relay(store, tmp_path / "r0") as top,
        relay(top, tmp_path / "r1") as middle,
        relay(middle, tmp_path / "r2") as leaf,
    ):
        with ThreadPoolExecutor(receivers) as pool:
            found = list(pool.map(lambda _: fetched(leaf, list(objects)), range(receivers)))
        assert found == [objects] * receivers
        total = sum(map(len, objects.values()))
        for url in (top, middle, leaf):
            assert RelayStore(url).status()["fetched_bytes"] == total
        assert RelayStore(top).status()["sent_bytes"] == total
        assert RelayStore(leaf).status()["sent_bytes"] == receivers * total


def fetched(url: str, keys: list[str]) -> dict[str, bytes]:
    with opened(url) as client:
        return {key: client.get(key) for key in keys}


def test_objects_are_there_before_they_are_asked_for(tmp_path: Path) -> None:
    """Put at the root, through a relay or beside it: every relay below fetches it by itself."""
    store = memory()
    with relay(store, tmp_path / "r0") as top, relay(top, tmp_path / "r1") as leaf:
        below = RelayStore(leaf)
        until(lambda: len(below.status()["path"]) == 2, "the leaf has heard of its parent")
        beside, _ = put(store, 2 * CHUNK_BYTES)
        until(lambda: below.status()["cached_bytes"] == 2 * CHUNK_BYTES, "an object that was put into the root's store")
        through, _ = put(RelayStore(top), 3 * CHUNK_BYTES)
        until(lambda: below.status()["cached_bytes"] == 5 * CHUNK_BYTES, "an object that was put through the root")
        until(lambda: below.status()["fetched_bytes"] == 5 * CHUNK_BYTES, "each was fetched once")
        before = RelayStore(top).status()["sent_bytes"]
        assert len(below.get(beside)) + len(below.get(through)) == 5 * CHUNK_BYTES
        assert RelayStore(top).status()["sent_bytes"] == before


def test_what_is_not_there_is_not_remembered(tmp_path: Path) -> None:
    store = memory()
    with chain(store, tmp_path, 3) as url, opened(url) as client:
        for key in ("a/0000000001/intent", "a/0000000001/pl/" + "0" * 64, "head"):
            with pytest.raises(NotFoundError):
                client.get(key)
        store.put("head", b"1")
        assert client.get("head") == b"1"
        store.put("head", b"2")
        assert client.get("head") == b"2"
        key, data = put(store, 1000)
        assert client.get(key) == data


def test_more_than_the_cache_holds_still_passes(tmp_path: Path) -> None:
    store = memory()
    objects = dict(put(store, 3 * CHUNK_BYTES) for _ in range(4))
    with chain(store, tmp_path, 2, limit=4 * CHUNK_BYTES) as url, ThreadPoolExecutor(4) as pool, opened(url) as client:
        for _ in range(2):
            assert dict(zip(objects, pool.map(client.get, objects), strict=True)) == objects
        big, data = put(store, 6 * CHUNK_BYTES)
        assert client.get(big) == data
        assert RelayStore(url).status()["cached_bytes"] <= 4 * CHUNK_BYTES


def test_a_waiting_client_hears_at_once(tmp_path: Path) -> None:
    """Through three relays, while the parent is looked at once a second at most."""
    store = memory()
    with chain(store, tmp_path, 3) as url:
        client = RelayStore(url)
        assert not client.wait("a/0000000001/intent", 0.1)
        threading.Timer(0.2, lambda: store.put("a/0000000001/intent", b"x")).start()
        assert client.wait("a/0000000001/intent", 25)


def test_records_of_a_run_that_is_gone_are_not_served(tmp_path: Path) -> None:
    """A store emptied and used again (F19): whoever opens the new run sees nothing of the old one, at any depth."""
    store = memory()
    with chain(store, tmp_path, 3) as url, opened(url) as client:
        for run in ("0" * 32, "1" * 32):
            for key, record in (("run", Run(run, "c" * 64)), (INTENT, Intent(run, 1, 0, Digest(), Mode.STAGE, run))):
                store.put(key, record.to_bytes())
            for _ in range(2):
                assert Run.from_bytes(client.get("run")).run == run
                assert Intent.from_bytes(client.get(INTENT)).run == run
            fetched_before = RelayStore(url).status()["fetched_bytes"]
            client.get(INTENT)
            assert RelayStore(url).status()["fetched_bytes"] == fetched_before  # kept
            for key, _ in list(store.list()):
                store.delete(key)
