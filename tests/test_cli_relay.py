"""``deltarefit relay`` as users start it: real processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltarefit.errors import UsageError
from deltarefit.stores import open_store
from deltarefit.stores.relay import RelayStore

DELTAREFIT = [sys.executable, "-m", "deltarefit"]


@contextlib.contextmanager
def relay_process(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A relay that listens, and its URL."""
    process = subprocess.Popen(
        [*DELTAREFIT, "relay", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        url = process.stdout.readline().strip()  # type: ignore[union-attr]
        assert url, process.stderr.read()  # type: ignore[union-attr]
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DELTAREFIT, *arguments], capture_output=True, text=True, timeout=60)


def objects(directory: Path, count: int, size: int) -> dict[str, bytes]:
    store, found = open_store(str(directory)), {}
    for _ in range(count):
        data = secrets.token_bytes(size)
        key = f"a/0000000001/pl/{hashlib.sha256(data).hexdigest()}"
        store.put(key, data)
        found[key] = data
    return found


def test_it_says_where_it_listens_and_ends_when_told(tmp_path: Path) -> None:
    kept = objects(tmp_path / "root", 1, 100_000)
    with relay_process("--parent", str(tmp_path / "root"), "--listen", "127.0.0.1:0") as (process, url):
        store = open_store(url)
        assert {key: store.get(key) for key in kept} == kept
        store.close()  # type: ignore[attr-defined]
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Relayed" in said


def test_a_cache_survives_a_kill(tmp_path: Path) -> None:
    kept = objects(tmp_path / "root", 3, 300_000)
    with relay_process("--parent", str(tmp_path / "root"), "--listen", "127.0.0.1:0") as (_, root):
        arguments = ("--parent", root, "--listen", "127.0.0.1:0", "--dir", str(tmp_path / "cache"))
        for fetched in (900_000, 0):
            with relay_process(*arguments) as (process, url):
                store = RelayStore(url)
                assert {key: store.get(key) for key in kept} == kept
                assert store.status()["fetched_bytes"] == fetched
                process.kill()


def test_workers_share_a_port_and_come_back(tmp_path: Path) -> None:
    kept = objects(tmp_path / "root", 4, 300_000)
    with relay_process("--parent", str(tmp_path / "root"), "--listen", "127.0.0.1:0", "--workers", "2") as (
        process,
        url,
    ):
        names = set()
        deadline = time.monotonic() + 60
        while len(names) < 2 and time.monotonic() < deadline:
            one = RelayStore(url)
            names.add(one.status()["name"])
            assert {key: one.get(key) for key in kept} == kept
            one.close()
        assert len(names) == 2
        ended = run(
            "relay", "--parent", str(tmp_path / "r2"), "--listen", url.removeprefix("http://"), "--workers", "2"
        )
        assert ended.returncode == 2  # two relays never share a port
        workers = children(process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        while workers[0] in children(process.pid) or len(children(process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        store = open_store(url)
        with ThreadPoolExecutor(8) as pool:
            assert dict(zip(kept, pool.map(store.get, kept), strict=True)) == kept
        store.create("a/0000000001/intent", b"once")
        store.close()  # type: ignore[attr-defined]
        assert open_store(str(tmp_path / "root")).get("a/0000000001/intent") == b"once"
        left = children(process.pid)
        process.kill()
        process.wait(30)
        while any(alive(pid) for pid in left):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_bad_calls_end_at_once(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    for arguments, said in (
        (("--listen", "127.0.0.1:0"), "parents"),
        (("--parent", root, "--listen", "0.0.0.0:0"), "authentication"),
        (("--parent", root, "--listen", "::1:80"), "brackets"),
        (("--parent", root, "--client-ca", "x.pem"), "--cert"),
        (("--parent", root, "--tokens", str(tmp_path / "none")), "none"),
        (("--parent", root, "--tree", "x", "--name", "y"), "parents"),
    ):
        ended = run("relay", *arguments)
        assert ended.returncode in (2, 3), ended
        assert said in ended.stderr, ended
    assert not (tmp_path / "root").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    ended = run("relay", "--parent", root, "--dir", str(tmp_path / "mine"))
    assert ended.returncode == 2
    assert "no cache" in ended.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with relay_process("--parent", str(tmp_path / "root"), "--listen", "127.0.0.1:0") as (_, url):
        taken = url.removeprefix("http://")
        for more in ((), ("--workers", "2")):
            ended = run("relay", "--parent", str(tmp_path / "root"), "--listen", taken, *more)
            assert ended.returncode == 2
            assert taken in ended.stderr


def test_a_token_from_the_environment(tmp_path: Path) -> None:
    token = secrets.token_hex(16)
    (tmp_path / "tokens").write_text(f"follow {token}\n")
    (tmp_path / "tokens").chmod(0o600)
    kept = objects(tmp_path / "root", 1, 1000)
    with (
        relay_process(
            "--parent", str(tmp_path / "root"), "--listen", "127.0.0.1:0", "--tokens", str(tmp_path / "tokens")
        ) as (_, above),
        relay_process("--parent", above, "--listen", "127.0.0.1:0", DELTAREFIT_TOKEN=token) as (_, url),
    ):
        store = RelayStore(url)
        assert {key: store.get(key) for key in kept} == kept
        with pytest.raises(UsageError, match="token"):
            RelayStore(above).get(next(iter(kept)))


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if alive(int(one))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
