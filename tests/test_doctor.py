"""The doctor passes good stores, names what bad ones do, and leaves nothing behind."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltarefit.doctor import Check, check_store, judge_race
from deltarefit.errors import AlreadyExistsError, NotFoundError
from deltarefit.ports import Store
from deltarefit.stores import Limits, open_store
from deltarefit.stores.wrappers import Fault, Faulty, Kind, Prefixed
from tests.seaweed import Seaweed

SMALL = 1 << 20


def memory() -> Store:
    return open_store(f"memory://{secrets.token_hex(8)}")


def broken(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.detail for check in checks if not check.ok}


@pytest.mark.slow
def test_good_stores_are_healthy_and_left_clean(tmp_path: Path, seaweed: Seaweed) -> None:
    for store in (
        open_store(str(tmp_path / "store")),
        memory(),
        open_store("s3://refits/patient", **seaweed.login),
    ):
        store.put("users/own", b"1")
        checks = check_store(store, rounds=5, large_bytes=SMALL)
        assert broken(checks) == {}
        assert len(checks) > 20
        assert all(check.seconds >= 0 and check.detail == "" for check in checks)
        assert list(store.list()) == [("users/own", 1)]
        raced = [check for check in checks if "16 processes" in check.name]
        assert len(raced) == store.url.startswith("file://")
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["users", "~tmp"]


def test_a_race_of_processes_with_two_winners_or_none_is_named() -> None:
    store = memory()
    store.put("k", b"entry")
    sha = hashlib.sha256(b"entry").hexdigest()
    judge_race(store, ["k"], [{"k": sha}, {}])
    for won, finding in (
        ([{"k": sha}, {"k": sha}], "2 of 2 processes won"),
        ([{}, {}], "0 of 2 processes won"),
        ([{"k": "other"}, {}], "winner's bytes"),
    ):
        with pytest.raises(AssertionError, match=finding):
            judge_race(store, ["k"], won)


def test_a_store_that_cannot_be_reached_is_one_finding() -> None:
    limits = Limits(connect_s=0.5, request_s=0.5, retries=1, retry_s=1.0)
    store = open_store(
        "s3://b/x", endpoint="http://127.0.0.1:1", access_key="k", secret_key="s", region="r", limits=limits
    )
    start = time.monotonic()
    checks = check_store(store)
    assert [(check.name, check.ok) for check in checks] == [("reach", False)]
    assert "UnavailableError" in checks[0].detail
    assert time.monotonic() - start < 5


class Forgetful(Prefixed):
    """``create`` looks first and then writes: the race that conditional writes exist for."""

    def create(self, key: str, data: bytes) -> None:
        try:
            self.size(key)
        except NotFoundError:
            self.put(key, data)
        else:
            raise AlreadyExistsError("taken")


class Careless(Prefixed):
    """``create`` ignores the condition, as some S3 servers do."""

    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


class Unsorted(Prefixed):
    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return iter(sorted(super().list(prefix), reverse=True))


class Torn(Prefixed):
    """``put`` shows half of an object before the whole."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, bytes(data)[: len(data) // 2])
        time.sleep(0.001)
        super().put(key, data)


class Foreign(Prefixed):
    def delete(self, key: str) -> None:
        raise KeyError(key)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Careless, {"creates once", "racing creates have one winner"}),
        (Forgetful, {"racing creates have one winner"}),
        (Unsorted, {"lists by prefix sorted by key", "lists more than one page"}),
        (Torn, {"readers see whole objects"}),
        (Foreign, {"deletes", "clean up"}),
    ],
)
def test_each_broken_promise_is_named(kind: type[Prefixed], names: set[str]) -> None:
    findings = broken(check_store(kind(memory(), "sick"), rounds=50, large_bytes=SMALL))
    assert names <= set(findings)
    assert all(findings.values())


def test_flipped_bits_are_found_without_printing_the_bytes() -> None:
    store = Faulty(memory(), [Fault(Kind.CORRUPT, "get", last=None)])
    checks = check_store(store)
    assert [check.ok for check in checks] == [False]
    assert checks[0].detail == "get after put: expected 17 bytes, found 17; first difference at byte 8"
