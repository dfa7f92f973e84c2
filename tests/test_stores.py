"""Every store and wrapper passes the contract; which URL opens what; what the wrappers do."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import types
from pathlib import Path

import pytest

from deltarefit.errors import (
    AlreadyExistsError,
    NotFoundError,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.ports import Store
from deltarefit.stores import open_store
from deltarefit.stores.wrappers import Fault, Faulty, Kind, Limited, Prefixed, Retrying
from deltarefit.testing import StoreContract
from tests.seaweed import Seaweed


class TestDirectory(StoreContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "new" / "store"

    def open(self) -> Store:
        return open_store(str(self.root))


class TestFileUrl(TestDirectory):
    racers, rounds, large_bytes = 4, 5, 1 << 20

    def open(self) -> Store:
        return open_store(f"file://{self.root}")


class TestMemory(StoreContract):
    @pytest.fixture(autouse=True)
    def _name(self) -> None:
        self.name = secrets.token_hex(8)

    def open(self) -> Store:
        return open_store(f"memory://{self.name}")


@pytest.mark.slow
class TestSeaweed(StoreContract):
    races_at_once = 25

    @pytest.fixture(autouse=True)
    def _server(self, seaweed: Seaweed) -> None:
        self.server = seaweed

    def open(self) -> Store:
        return open_store("s3://refits/some/run", **self.server.login)


class TestRetrying(TestMemory):
    def open(self) -> Store:
        return Retrying(open_store(f"memory://{self.name}"))


class TestRetryingOverFaults(TestMemory):
    """Every second call of each repeatable verb fails, half of those after the fact: nobody notices."""

    def open(self) -> Store:
        plan = [
            Fault(kind, verb, first=first, last=None, every=4)
            for verb in ("put", "get", "size", "list", "delete")
            for first, kind in ((1, Kind.BEFORE), (3, Kind.AFTER))
        ]
        faulty = Faulty(open_store(f"memory://{self.name}"), plan)
        return Retrying(faulty, attempts=60, sleep=lambda _: None)  # racing callers share the count of calls


class TestFaultyWithoutFaults(TestMemory):
    def open(self) -> Store:
        return Faulty(open_store(f"memory://{self.name}"), [])


class TestLimited(TestMemory):
    def open(self) -> Store:
        return Limited(open_store(f"memory://{self.name}"), 1e9)


class TestPrefixed(TestMemory):
    def open(self) -> Store:
        return Prefixed(open_store(f"memory://{self.name}"), "some/run")


# --- open_store


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host/x",
        "memory://",
        "s3://",
        "s3:///x",
        "gs://",
        "s3://bucket/a//b",
        "http://host/x",
        "file://",
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert caught.value.next_step


def test_settings_of_s3_are_refused_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="region"):
        open_store(str(tmp_path), region="us-east-1")


def test_two_opens_of_one_name_see_one_memory() -> None:
    name = secrets.token_hex(8)
    open_store(f"memory://{name}").put("k", b"1")
    assert open_store(f"memory://{name}").get("k") == b"1"
    with pytest.raises(NotFoundError):
        open_store(f"memory://{name}x").get("k")


def test_google_and_azure_urls_open_without_a_network() -> None:
    assert open_store("gs://bucket/a/b").url == "gs://bucket/a/b"
    with pytest.raises(RefitError) as caught:
        open_store("az://container/a")  # no account in the environment
    assert isinstance(caught.value, UsageError | UnavailableError)


def test_opening_a_directory_does_not_import_obstore(tmp_path: Path) -> None:
    code = (
        "import sys; from deltarefit.stores import open_store; "
        f"open_store({str(tmp_path)!r}).put('k', b'1'); sys.exit('obstore' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0


# --- wrappers


def memory() -> Store:
    return open_store(f"memory://{secrets.token_hex(8)}")


def test_faults_strike_as_planned() -> None:
    inner = memory()
    inner.put("a/k", b"\x00" * 10)
    plan = [
        Fault(Kind.BEFORE, "put", "a/*"),
        Fault(Kind.AFTER, "create", first=2, last=2),
        Fault(Kind.CORRUPT, "get", "a/k"),
        Fault(Kind.TRUNCATE, "get", "a/k", first=2, last=2),
        Fault(Kind.MISSING, "get", "a/k", first=3, last=3),
        Fault(Kind.BEFORE, "delete", last=None),
    ]
    store = Faulty(inner, plan)
    with pytest.raises(UnavailableError):
        store.put("a/new", b"1")
    with pytest.raises(NotFoundError):
        inner.get("a/new")
    store.put("a/new", b"1")
    store.create("b/1", b"1")
    with pytest.raises(UnavailableError):
        store.create("b/2", b"2")
    assert inner.get("b/2") == b"2"
    assert store.get("a/k") == b"\x00" * 5 + b"\x01" + b"\x00" * 4
    assert store.get("a/k") == b"\x00" * 5
    with pytest.raises(NotFoundError):
        store.get("a/k")
    assert store.get("a/k") == b"\x00" * 10
    for _ in range(3):
        with pytest.raises(UnavailableError):
            store.delete("a/k")
    assert store.fired == [
        ("put", "a/new", Kind.BEFORE),
        ("create", "b/2", Kind.AFTER),
        ("get", "a/k", Kind.CORRUPT),
        ("get", "a/k", Kind.TRUNCATE),
        ("get", "a/k", Kind.MISSING),
        *[("delete", "a/k", Kind.BEFORE)] * 3,
    ]


def test_a_planned_delay_sleeps() -> None:
    slept: list[float] = []
    store = Faulty(memory(), [Fault(Kind.DELAY, "put", seconds=1.5, last=2)], sleep=slept.append)
    for _ in range(3):
        store.put("k", b"1")
    assert slept == [1.5, 1.5]


def test_retrying_gives_up_after_its_attempts_with_growing_bounded_waits() -> None:
    slept: list[float] = []
    faulty = Faulty(memory(), [Fault(Kind.BEFORE, last=None)])
    store = Retrying(faulty, attempts=6, backoff=1.0, longest=5.0, sleep=slept.append)
    with pytest.raises(UnavailableError):
        store.get("k")
    assert len(faulty.fired) == 6
    assert len(slept) == 5
    assert all(0 <= wait <= most for wait, most in zip(slept, (1, 2, 4, 5, 5), strict=True))


def test_retrying_repeats_every_verb_but_create() -> None:
    inner = memory()
    inner.put("k", b"1")
    for verb in ("put", "get", "size", "list", "delete", "create"):
        faulty = Faulty(inner, [Fault(Kind.AFTER, verb)])
        store = Retrying(faulty, sleep=lambda _: None)
        call = {
            "put": lambda store=store: store.put("k", b"1"),
            "get": lambda store=store: store.get("k"),
            "size": lambda store=store: store.size("k"),
            "list": lambda store=store: [*store.list()],
            "delete": lambda store=store: store.delete("k"),
            "create": lambda store=store: store.create("fresh", b"1"),
        }[verb]
        with pytest.raises(UnavailableError) if verb == "create" else contextlib.nullcontext():
            call()
        assert [struck for struck, _, _ in faulty.fired] == [verb]
        inner.put("k", b"1")


@pytest.mark.parametrize("error", [NotFoundError("x"), UsageError("x"), AlreadyExistsError("x"), StorageFullError("x")])
def test_retrying_repeats_nothing_else(error: RefitError) -> None:
    calls: list[str] = []

    class Refusing(Faulty):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            calls.append(key)
            raise error

    with pytest.raises(type(error)):
        Retrying(Refusing(memory(), []), sleep=lambda _: None).get("k")
    assert calls == ["k"]


def test_uploads_over_a_limited_store_share_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 100 bytes a second, by a clock that stands still until it is moved."""
    now, slept = [50.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr("deltarefit.stores.wrappers.time", clock)
    store = Limited(memory(), 100)
    store.put("a", bytes(200))
    store.create("b", bytes(100))  # behind the first
    assert slept == [2.0, 3.0]
    assert (len(store.get("a")), store.size("b"), [*store.list()]) == (200, 100, [("a", 200), ("b", 100)])
    store.delete("a")
    assert slept == [2.0, 3.0]  # only uploads pass the link
    now[0] += 10  # it has been idle: that earns nothing
    store.put("c", bytes(100))
    assert slept == [2.0, 3.0, 1.0]
