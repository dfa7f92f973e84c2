"""A whole run over a tree of relays whose processes are killed at any instant: every version, every bit, no reload."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltarefit.ports import Store
from deltarefit.stores import open_store
from deltarefit.stores.wrappers import Retrying
from tests import fleet
from tests import helpers as h
from tests.test_cli_relay import relay_process
from tests.test_stream import streaming


class Relay:
    """A relay process on one port, started again whenever it was killed."""

    def __init__(self, parents: str, directory: Path) -> None:
        self._arguments = ("--dir", str(directory), *(word for url in parents.split(",") for word in ("--parent", url)))
        self._stack = contextlib.ExitStack()
        self.url = "http://127.0.0.1:0"
        self.start()

    def start(self) -> None:
        listen = self.url.removeprefix("http://")
        started = relay_process(*self._arguments, "--listen", listen, "--chunk-bytes", "65536")
        self._process, self.url = self._stack.enter_context(started)

    def kill(self) -> None:
        self._process.kill()
        self._stack.close()

    close = kill


@contextlib.contextmanager
def tree(directory: Path) -> Iterator[tuple[Relay, Relay, Relay]]:
    """A root over a directory, one below it, and one below that, which knows both."""
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(contextlib.closing(Relay(str(directory / "store"), directory / "c0")))
        middle = stack.enter_context(contextlib.closing(Relay(root.url, directory / "c1")))
        leaf = stack.enter_context(contextlib.closing(Relay(f"{middle.url},{root.url}", directory / "c2")))
        yield root, middle, leaf


def patient(urls: str) -> Store:
    """A store over relays that waits out what the command line's follower waits out."""
    return Retrying(open_store(urls), attempts=40, backoff=0.1, longest=1.0)


@contextlib.contextmanager
def killing(rng: np.random.Generator, *relays: Relay) -> Iterator[list[int]]:
    """Relays are killed now and then, stay away for a while, and come back. Gives how often."""
    stop, killed = threading.Event(), [0]

    def body() -> None:
        while not stop.wait(rng.uniform(0.0, 0.6)):
            one = relays[rng.integers(len(relays))]
            one.kill()
            killed[0] += 1
            stop.wait(rng.uniform(0.0, 0.4))
            one.start()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.parametrize("mode", ["stage", "stream"])
def test_versions_arrive_while_relays_die(tmp_path: Path, mode: str) -> None:
    rng = np.random.default_rng(8)
    source = h.ArraySource(h.random_model(rng))
    with tree(tmp_path) as (root, middle, leaf):
        producer = patient(root.url)
        streaming(producer, source, mode=mode)
        below = patient(f"{leaf.url},{middle.url},{root.url}")
        with fleet.following(below, 1, 2) as followers, killing(rng, middle, leaf) as killed:
            deadline = time.monotonic() + 90
            version = 1
            while (version < 12 or killed[0] < 6) and time.monotonic() < deadline:
                h.step(rng, source.model, ("few", "many", "nothing", "back")[version % 4], h.copy_of(source.model))
                version = streaming(producer, source, mode=mode)
                for one in followers:
                    fleet.until(lambda one=one: one.failure is not None or one.clean(version))  # type: ignore[misc]  # noqa: B023
                    assert h.bits(one.target) == h.bytes_of(source.model)
        assert killed[0] >= 6
        assert version >= 12
        assert all(one.failure is None for one in followers)
        assert not any(one.heard["diverged"] for one in followers)


def test_a_root_that_comes_back_goes_on(tmp_path: Path) -> None:
    """The root is the store: while it is away nothing new is made, and nothing is lost."""
    rng = np.random.default_rng(9)
    source = h.ArraySource(h.random_model(rng))
    with tree(tmp_path) as (root, middle, leaf):
        producer = patient(root.url)
        streaming(producer, source)
        with fleet.following(patient(f"{leaf.url},{middle.url}"), 1) as (one,):
            for turn in range(4):
                h.step(rng, source.model, "many", h.copy_of(source.model))
                with killing(np.random.default_rng(turn), root) as killed:
                    fleet.until(lambda killed=killed: killed[0] > 0)  # type: ignore[misc]
                version = streaming(producer, source)
                fleet.until(lambda version=version: one.failure is not None or one.clean(version))  # type: ignore[misc]
                assert h.bits(one.target) == h.bytes_of(source.model)
