"""Relays are stores: the contract suite against chains of real ones, over a directory and memory, with faults."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltarefit.ports import Store
from deltarefit.stores import open_store
from deltarefit.stores.wrappers import Fault, Faulty, Kind, Retrying
from deltarefit.testing import StoreContract
from tests.relays import chain


@pytest.fixture(autouse=True, scope="class")
def _chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    here, directory = request.cls, tmp_path_factory.mktemp("chain")
    with chain(here.root(directory), directory, here.depth) as here._url, contextlib.ExitStack() as here._opened:
        yield


class RelayContract(StoreContract):
    """A chain of ``depth`` relays over ``root``, for the whole class."""

    depth = 1
    rounds = 10
    large_bytes = 12 << 20
    _url = ""
    _opened: contextlib.ExitStack

    @staticmethod
    def root(directory: Path) -> Store:
        return open_store(str(directory / "root"))

    def open(self) -> Store:
        store = open_store(self._url)
        self._opened.callback(store.close)  # type: ignore[attr-defined]
        return store


class TestDepth1(RelayContract):
    pass


class TestDepth2(RelayContract):
    depth = 2


class TestDepth3(RelayContract):
    depth = 3


class TestDepth2OverMemory(RelayContract):
    """A root that is not a directory: everything that is kept goes through the cache."""

    depth = 2

    @staticmethod
    def root(directory: Path) -> Store:
        return open_store(f"memory://relay-{secrets.token_hex(8)}")


class TestDepth2OverFaults(RelayContract):
    """A root that fails now and then: the suite sees nothing of it through clients that retry."""

    depth = 2

    @staticmethod
    def root(directory: Path) -> Store:
        plan = [
            Fault(Kind.BEFORE, "get", first=3, last=None, every=7),
            Fault(Kind.BEFORE, "size", first=2, last=None, every=5),
            Fault(Kind.BEFORE, "put", first=5, last=None, every=9),
            Fault(Kind.BEFORE, "list", first=2, last=None, every=3),
            Fault(Kind.AFTER, "put", first=7, last=None, every=9),
        ]
        return Faulty(open_store(f"memory://relay-{secrets.token_hex(8)}"), plan)

    def open(self) -> Store:
        return Retrying(super().open(), attempts=8, backoff=0.01)
