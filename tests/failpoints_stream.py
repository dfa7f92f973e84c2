"""The world of ``failpoints`` in mode stream: receivers follow all the time, each in a process of its own, write on
arrival and vote, while the trainer publishes. A process that died or hangs is followed by another on the same weights.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from deltarefit import Publisher, Receiver
from deltarefit.errors import AttemptLostError
from deltarefit.manifest import State
from tests import helpers as h
from tests.failing import Process
from tests.failpoints import DEADLINE_S, PAYLOAD_BYTES, SEED, World

SPEED = 25.0
"""Silence of 10 s is 0.4 s here."""


@dataclass
class StreamWorld(World):
    """``failures``: what ended a receiver that nobody had planned."""

    speed: float = SPEED
    over: threading.Event = field(default_factory=threading.Event)
    keepers: list[threading.Thread] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def publisher(self) -> Publisher:
        return Publisher(
            self.store, self.source, threads=1, payload_bytes=PAYLOAD_BYTES, mode="stream", deadline_s=20.0
        )

    def made(self, publisher: Publisher) -> int:
        """Asked again if a receiver refused or too few were there."""
        for _ in range(3):
            try:
                return super().made(publisher)
            except AttemptLostError:
                continue
        return super().made(publisher)

    def everything(self) -> None:
        for number, target in enumerate(self.targets):
            keeper = threading.Thread(target=self._keep, args=(target, f"r{number}"), daemon=True)
            self.keepers.append(keeper)
            keeper.start()
        self.publish()
        h.step(np.random.default_rng([SEED, 7]), self.source.model, "some")
        self.publish()
        self.anchor()
        self.join()

    def follow(self, target: h.StrictTarget) -> None:
        """Those that are followed anyway get there by themselves."""
        if target is self.joiner:
            super().follow(target)
            return
        until = time.monotonic() + DEADLINE_S
        while h.state_of(target) != (State.CLEAN, max(self.said)) or target.paused:
            assert not self.failures, self.failures
            assert time.monotonic() < until, f"{h.state_of(target)} instead of version {max(self.said)}"
            time.sleep(0.002)

    def close(self) -> None:
        self.over.set()
        super().close()
        for keeper in self.keepers:
            keeper.join(DEADLINE_S)
        assert not self.failures, self.failures

    def _keep(self, target: h.StrictTarget, name: str) -> None:
        while not self.over.is_set() and not self.failures:
            self._follow_until_dead(target, name)

    def _follow_until_dead(self, target: h.StrictTarget, name: str) -> None:
        process, done = Process(self.plan, self.speed), list[bool | BaseException]()

        def start() -> Receiver:
            return Receiver(self.store, target, threads=1, emit=self.heard, name=name)

        def work(receiver: Receiver) -> None:
            receiver.follow(stop=self.over.is_set)

        thread = threading.Thread(target=self._report, args=(done, process, start, work), daemon=True)
        thread.start()
        while thread.is_alive() and not process.hung.is_set():
            thread.join(0.005)
        if not process.hung.is_set() and isinstance(done[0], BaseException):
            self.failures.append(done[0])
