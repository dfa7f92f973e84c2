"""A process one of whose named points fails as planned: see ``failpoints``."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from deltarefit import runtime
from deltarefit.errors import StorageFullError, UnavailableError
from tests import killing as k


class Fault(enum.Enum):
    CRASH = "the process is dead"
    ERROR = "UnavailableError"
    FULL = "StorageFullError"
    HANG = "it never returns"
    WAKE = "it returns when everyone else is long done (trainers only: a receiver that hangs is killed)"


HANGS = (Fault.HANG, Fault.WAKE)
PLACES = {
    Fault.FULL: ("payload", "baseline", "anchor", "receiver WriteHeader", "trainer Create", "trainer Encode"),
    Fault.WAKE: ("payload put", "baseline", "anchor", "trainer"),
}
"""Beginnings of the points at which a fault can happen, where that is not everywhere: bytes go to a store or a disk,
which may be full; or the process is the trainer's."""


@dataclass
class Plan:
    """``fault`` at hit ``at`` of point ``name``; with ``at`` 0 nothing fails and hits are counted."""

    name: str = ""
    at: int = 0
    fault: Fault = Fault.CRASH
    hits: Counter[str] = field(default_factory=Counter)
    struck: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hit(self, name: str) -> bool:
        with self.lock:
            self.hits[name] += 1
            strikes = name == self.name and self.hits[name] == self.at
        if strikes:
            self.struck.set()
        return strikes


class Process(runtime.SystemRuntime):
    """The runtime of one process, whose points fail as planned. Its clock jumps instead of waiting, or runs ``speed``
    times as fast where processes wait for each other."""

    def __init__(self, plan: Plan, speed: float = 0.0) -> None:
        self._plan, self._speed = plan, speed
        self._skipped = 0.0
        self._dead = False
        self.hung = threading.Event()

    def now(self) -> float:
        return time.monotonic() * (self._speed or 1.0) + self._skipped

    def sleep(self, seconds: float) -> None:
        if self._speed:
            time.sleep(seconds / self._speed)
        else:
            self._skipped += seconds
            time.sleep(0)

    def point(self, name: str) -> None:
        if self._dead:
            raise k.Killed("dead already")
        if self._plan.hit(name):
            self._fail(f"planned at hit {self._plan.at} of {name}")

    def _fail(self, what: str) -> None:
        fault = self._plan.fault
        if fault is Fault.ERROR:
            raise UnavailableError(what)
        if fault is Fault.FULL:
            raise StorageFullError(what)
        self._dead = fault is not Fault.WAKE
        if fault in HANGS:
            self.hung.set()
            self._plan.released.wait()
        if self._dead:
            raise k.Killed(what)
