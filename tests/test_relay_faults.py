"""Relays as processes that are killed, stopped, filled up and lied to (F17 to F19): every byte right, none twice."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import random
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from deltarefit.errors import NotFoundError, RefitError, StorageFullError, UnavailableError
from deltarefit.relay import running
from deltarefit.relay_api import SHA256
from deltarefit.stores import open_store
from deltarefit.stores.fallback import STREAMS
from deltarefit.stores.relay import RelayStore
from tests import helpers as h
from tests.relays import opened, relay
from tests.test_cli_relay import objects, relay_process

CHUNK_BYTES = 2 << 20
SLOW = ("--most-rate", str(48 << 20))
"""Of a root: so slow that a kill strikes while objects arrive."""


@contextlib.contextmanager
def process(directory: Path, name: str, *parents: str, rest: tuple[str, ...] = ()) -> Iterator[tuple[int, str]]:
    """The process id and URL of a relay."""
    told = [word for parent in parents for word in ("--parent", parent)]
    listen = () if "--listen" in rest else ("--listen", "127.0.0.1:0")
    with relay_process(*told, *listen, "--dir", str(directory / name), *rest) as (made, url):
        yield made.pid, url


def numbers(url: str) -> dict[str, int]:
    with contextlib.closing(RelayStore(url)) as store:
        return store.status()


def fetched(urls: str, keys: list[str]) -> dict[str, bytes]:
    with opened(urls) as store:
        return {key: store.get(key) for key in keys}


def until(there: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ------------------------------------------------------------------------------------ killed and stopped (F17)


@pytest.mark.parametrize("seed", range(2))
def test_the_interior_relay_is_killed(tmp_path: Path, seed: int) -> None:
    """Whatever had come over a link does not come again: the leaf has fetched each byte once, and sent each once to
    each receiver."""
    kept = objects(tmp_path / "root", 8, 8 << 20)
    total, receivers = sum(map(len, kept.values())), 4
    with (
        process(tmp_path, "c0", str(tmp_path / "root"), rest=SLOW) as (_, root),
        process(tmp_path, "c1", root) as (interior_pid, interior),
        process(tmp_path, "c2", interior, root) as (_, leaf),
        ThreadPoolExecutor(receivers) as pool,
    ):
        jobs = [pool.submit(fetched, f"{leaf},{interior},{root}", list(kept)) for _ in range(receivers)]
        at = random.Random(seed).uniform(0.1, 0.7) * total
        until(lambda: numbers(leaf)["fetched_bytes"] >= at)
        os.kill(interior_pid, signal.SIGKILL)
        assert numbers(leaf)["fetched_bytes"] < total, "it was over before the kill"
        assert [job.result(90) == kept for job in jobs] == [True] * receivers
        assert numbers(leaf)["fetched_bytes"] == total
        assert numbers(leaf)["sent_bytes"] == receivers * total


@pytest.mark.parametrize("seed", range(2))
def test_the_relay_that_receivers_use_is_killed(tmp_path: Path, seed: int) -> None:
    kept = objects(tmp_path / "root", 8, 8 << 20)
    total, receivers, got = sum(map(len, kept.values())), 3, [0]
    lock = threading.Lock()

    def receive(urls: str) -> dict[str, bytes]:
        with opened(urls) as store:
            first = store._members[0].store  # type: ignore[attr-defined]
            get = first.get

            def counted(*asked: object) -> bytes:
                data: bytes = get(*asked)
                with lock:
                    got[0] += len(data)
                return data

            first.get = counted
            return {key: store.get(key) for key in kept}

    with (
        process(tmp_path, "c0", str(tmp_path / "root"), rest=SLOW) as (_, root),
        process(tmp_path, "c1", root) as (_, interior),
        process(tmp_path, "c2", interior, root) as (leaf_pid, leaf),
        ThreadPoolExecutor(receivers) as pool,
    ):
        jobs = [pool.submit(receive, f"{leaf},{interior},{root}") for _ in range(receivers)]
        at = random.Random(seed).uniform(0.1, 0.7) * total * receivers
        until(lambda: got[0] >= at)
        before = numbers(interior)["sent_bytes"]
        os.kill(leaf_pid, signal.SIGKILL)
        assert [job.result(90) == kept for job in jobs] == [True] * receivers
        again = numbers(interior)["sent_bytes"] - before
        bound = STREAMS * CHUNK_BYTES  # what was on its way to the leaf when it died
        assert again <= receivers * total - got[0] + bound


def test_a_parent_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    """SIGSTOP: connections stay open and nothing is said. Receivers go on elsewhere, and come back after SIGCONT."""
    kept = objects(tmp_path / "root", 2, 4 << 20)
    more = objects(tmp_path / "root", 2, 100_000)
    with (
        process(tmp_path, "c0", str(tmp_path / "root")) as (_, root),
        process(tmp_path, "c1", root) as (pid, near),
        opened(f"{near},{root}") as store,
    ):
        first = next(iter(kept))
        assert store.get(first) == kept[first]
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert {key: store.get(key) for key in kept} == kept
            assert time.monotonic() - began < 45, "half of what one silent request may take"
        finally:
            os.kill(pid, signal.SIGCONT)
        before = numbers(near)["sent_bytes"]

        def back() -> bool:
            assert {key: store.get(key) for key in more} == more
            return numbers(near)["sent_bytes"] > before

        until(back, 60)


# ------------------------------------------------------------------------------------ damaged and stale (F18, F19)


def sure(urls: str, key: str) -> bytes:
    """As a receiver reads: bytes that are not what the key says are asked for again."""
    with opened(urls) as store:
        for _ in range(3):
            data = store.get(key)
            if hashlib.sha256(data).hexdigest() == key.rpartition("/")[2]:
                return data
    raise AssertionError("damaged three times")


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_cache_is_damaged(tmp_path: Path, how: str, running: bool) -> None:
    kept = objects(tmp_path / "root", 2, 5 << 20)

    def damage() -> None:
        for key, data in kept.items():
            path = tmp_path / "c1" / key.rpartition("/")[2]
            if how == "gone":
                path.unlink()
            else:
                path.write_bytes(bytes([data[0] ^ 1]) + data[1:] if how == "flip" else data[:-1])

    with process(tmp_path, "c0", str(tmp_path / "root")) as (_, root):
        with process(tmp_path, "c1", root) as (_, near):
            assert fetched(near, list(kept)) == kept
            if running:
                damage()
                assert {key: sure(near, key) for key in kept} == kept
                return
        damage()
        with process(tmp_path, "c1", root) as (_, near):
            assert fetched(near, list(kept)) == kept


def test_a_run_is_deleted_and_its_url_used_again(tmp_path: Path) -> None:
    """Relays go on; receivers of the new run get its versions, and nothing that was kept of the old one. An object of
    the old run that comes late and twice changes nothing."""
    late: dict[str, bytes] = {}
    directory = tmp_path / "root"
    with (
        relay(str(directory), tmp_path / "c0") as root,
        relay(root, tmp_path / "c1") as middle,
        relay(middle, tmp_path / "c2") as leaf,
        opened(root) as producer,
        opened(f"{leaf},{root}") as store,
    ):
        for seed, versions in ((1, 4), (2, 2)):
            rng = np.random.default_rng(seed)
            source = h.ArraySource(h.random_model(rng))
            for _ in range(versions):
                h.published(producer, source)
                for key, data in late.items():
                    producer.put(key, data)
                    producer.put(key, data)
                assert h.received(store) == h.bytes_of(source.model)
                h.step(rng, source.model, "many", h.copy_of(source.model))
            if not late:
                late = {key: producer.get(key) for key, _ in producer.list("a") if "/pl/" in key}
                assert late
                for key, _ in list(producer.list()):
                    producer.delete(key)


# ------------------------------------------------------------------------------------ too little room


@pytest.mark.parametrize("limit", [1 << 20, 5 << 20])
def test_a_cache_smaller_than_a_version_or_an_object(tmp_path: Path, limit: int) -> None:
    kept = objects(tmp_path / "root", 3, 3 << 20)
    with (
        process(tmp_path, "c0", str(tmp_path / "root")) as (_, root),
        process(tmp_path, "c1", root, rest=("--limit", str(limit))) as (_, leaf),
        ThreadPoolExecutor(4) as pool,
    ):
        assert list(pool.map(lambda _: fetched(leaf, list(kept)), range(4))) == [kept] * 4
        assert numbers(leaf)["cached_bytes"] <= limit


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    """Below the cache's limit: objects still pass, and writes of others too."""
    kept = objects(tmp_path / "root", 5, 3 << 20)
    (small_disk / "others").write_bytes(bytes(1 << 20))
    with (
        process(tmp_path, "c0", str(tmp_path / "root")) as (_, root),
        process(small_disk, "c1", root) as (_, leaf),
    ):
        assert fetched(leaf, list(kept)) == kept
        with opened(f"{leaf}") as store:
            store.create("a/0000000001/intent", b"x")
        assert fetched(leaf, list(kept)) == kept
    assert open_store(str(tmp_path / "root")).get("a/0000000001/intent") == b"x"


# ------------------------------------------------------------------------------------ clients


def raw(url: str, request: str, body: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    sock = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30)
    sock.sendall(request.replace("\n", "\r\n").encode() + body)
    return sock


def test_slow_readers_beside_fast_ones(tmp_path: Path) -> None:
    """Those that stand still take nobody else's time, and are let go."""
    kept = objects(tmp_path / "root", 1, 32 << 20)
    key = next(iter(kept))
    with (
        process(tmp_path, "c0", str(tmp_path / "root")) as (_, root),
        process(tmp_path, "c1", root) as (_, leaf),
        contextlib.ExitStack() as stack,
    ):
        for _ in range(20):
            stack.enter_context(raw(leaf, f"GET /v1/o/{key} HTTP/1.1\nHost: 127.0.0.1\n\n"))
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _: fetched(leaf, [key]), range(4))) == [kept] * 4
        assert numbers(leaf)["fetched_bytes"] == len(kept[key])


def test_many_clients_at_once(tmp_path: Path) -> None:
    kept = objects(tmp_path / "root", 4, 500_000)
    total = sum(map(len, kept.values()))
    with (
        process(tmp_path, "c0", str(tmp_path / "root")) as (_, root),
        process(tmp_path, "c1", root) as (_, leaf),
        ThreadPoolExecutor(64) as pool,
    ):
        assert list(pool.map(lambda _: fetched(leaf, list(kept)), range(64))) == [kept] * 64
        assert (numbers(leaf)["fetched_bytes"], numbers(root)["sent_bytes"]) == (total, total)


def test_a_connection_that_is_used_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests so short that whoever looks for silent connections never sees one: none is cut between two. One on
    which nothing is asked is."""
    monkeypatch.setattr(running, "SILENT_S", 1.0)
    monkeypatch.setattr(running, "SWEEP_S", 0.2)
    store = open_store(str(tmp_path / "root"))
    store.put("head", b"x")
    with relay(store, tmp_path / "c0") as url:
        parts = urlsplit(url)
        busy = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
        busy.auto_open = 0
        busy.connect()
        with contextlib.closing(busy), raw(url, "") as idle:
            ends = time.monotonic() + 4
            while time.monotonic() < ends:
                busy.request("HEAD", "/v1/o/head")
                answer = busy.getresponse()
                assert (answer.status, answer.read()) == (200, b"")
                time.sleep(0.01)
            assert idle.recv(1) == b""


@pytest.mark.parametrize("verb", ["put", "create"])
@pytest.mark.parametrize("error", [StorageFullError, UnavailableError])
def test_a_write_that_the_root_refuses(tmp_path: Path, verb: str, error: type[RefitError]) -> None:
    """The error arrives as it was said, although it holds on to the bytes that were being written."""

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return getattr(open_store(str(tmp_path / "root")), name)

        def put(self, key: str, data: bytes | memoryview) -> None:
            held = data[:1]
            raise error(f"refused {len(held)}")

        create = put

    with (
        relay(Refusing(), tmp_path / "c0") as root,  # type: ignore[arg-type]
        relay(root, tmp_path / "c1") as leaf,
        contextlib.closing(RelayStore(leaf)) as store,
    ):
        with pytest.raises(error, match="refused 1") as caught:
            getattr(store, verb)("head", b"xyz")
        assert type(caught.value) is error


def test_a_producer_dies_in_the_middle_of_an_upload(tmp_path: Path) -> None:
    """Nothing of it is seen anywhere, nothing of it stays, and it may come again."""
    data = secrets.token_bytes(3 << 20)
    digest = hashlib.sha256(data).hexdigest()
    key = f"a/0000000001/pl/{digest}"
    head = f"PUT /v1/o/{key} HTTP/1.1\nHost: 127.0.0.1\nContent-Length: {len(data)}\n{SHA256}: {digest}\n\n"
    with (
        process(tmp_path, "c0", str(tmp_path / "root")) as (_, root),
        process(tmp_path, "c1", root) as (_, leaf),
        opened(leaf) as store,
    ):
        uploads = [raw(leaf, head, data[: len(data) // 2]) for _ in range(3)]
        until(lambda: len(list((tmp_path / "c1").glob("upload-*"))) == 3)
        for sock in uploads:
            sock.close()
        until(lambda: not list((tmp_path / "c1").glob("upload-*")))
        with pytest.raises(NotFoundError):
            store.get(key)
        assert list(store.list()) == []
        store.put(key, data)
        assert fetched(f"{leaf}", [key]) == {key: data} == fetched(root, [key])
