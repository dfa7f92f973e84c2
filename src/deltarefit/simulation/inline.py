"""The runtime of one simulated process: its clock, its chance, its points, and an executor without threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from deltarefit.simulation.world import Process

T = TypeVar("T")
SHORTEST_S = 1e-4
"""A sleep takes so long at least: on a clock that only moves in sleep, less could be nothing."""


class Inline(Executor):
    """Does the work at once, in the caller. Death ends the caller, too."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result
            future.set_exception(error)
        return future


class ProcessRuntime:
    """``runtime.Runtime`` of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def now(self) -> float:
        return self._process.now()

    def sleep(self, seconds: float) -> None:
        self._process.rest(max(seconds, SHORTEST_S) / self._process.rate)

    def token(self) -> str:
        return f"{self._process.world.random.getrandbits(128):032x}"

    def executor(self, threads: int, name: str) -> Executor:
        return Inline()

    def pulse(self, work: Callable[[], None], every_s: float) -> AbstractContextManager[None]:
        """Nothing is beside anything here, and no step takes long."""
        return nullcontext()

    def point(self, name: str) -> None:
        self._process.step(name)
