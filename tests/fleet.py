"""Receivers that follow in threads of their own, and die at named points: for tests of what happens before COMMIT."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from deltarefit import Receiver, runtime
from deltarefit.errors import UnavailableError
from deltarefit.manifest import Header, State
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from deltarefit.runtime import SystemRuntime
from tests import helpers as h

WAIT_S = 60.0


class Died(BaseException):
    """The agent is gone at once; its weights, header and spool live on."""


class Mortal(SystemRuntime):
    """Dies at a point, by chance. ``rate`` 0: never again."""

    def __init__(self, rng: np.random.Generator, rate: float) -> None:
        self._rng, self.rate = rng, rate
        self.deaths = 0

    def point(self, name: str) -> None:
        if name.startswith(("receiver", "payload")) and self._rng.random() < self.rate:
            self.deaths += 1
            raise Died(name)


class Follower:
    """One target, followed by one agent after another."""

    def __init__(
        self, store: Store, rng: np.random.Generator, rate: float = 0.0, name: str = "", target: Any = None
    ) -> None:
        self.target = target or h.StrictTarget(RunLog.open(store).run)
        self.heard, self.mortal = h.Heard(), Mortal(rng, rate)
        self._store, self._name = store, name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends between two steps, wherever that is."""
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _live(self) -> None:
        while not self._stop.is_set():
            try:
                with runtime.using(self.mortal):
                    receiver = Receiver(
                        self._store, self.target, threads=1, poll_s=0.02, emit=self.heard, name=self._name
                    )
                    with closing(receiver):
                        receiver.follow(stop=self._stop.is_set)
            except Died:
                continue
            except BaseException as error:  # told by ``stop``
                self.failure = error
                return

    def _header(self) -> Header | None:
        try:
            return self.target.read_header()  # type: ignore[no-any-return]
        except UnavailableError:  # a live target that is being attached to
            return None

    def clean(self, version: int) -> bool:
        header = self._header()
        return header is not None and header.state is State.CLEAN and header.version == version

    def dirty(self) -> bool:
        header = self._header()
        return header is not None and header.state is State.DIRTY


def until(what: Callable[[], bool]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextmanager
def following(store: Store, *seeds: int, rate: float = 0.0, target: Any = None) -> Iterator[list[Follower]]:
    """Receivers of a run, each at its present head."""
    fleet = [Follower(store, np.random.default_rng(seed), rate, f"r{seed}", target) for seed in seeds]
    head = RunLog.open(store).head()
    assert head is not None
    for one in fleet:
        one.start()
    try:
        for one in fleet:
            until(lambda one=one: one.failure is not None or one.clean(head.number))  # type: ignore[misc]
        yield fleet
    finally:
        for one in fleet:
            one.mortal.rate = 0.0
            one.stop()
