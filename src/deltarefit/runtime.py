"""Where time, chance and threads come from, and the named points at which a test may stop a process.

The two paths ask here and nowhere else, so that the simulator (``simulation``) runs the same code on a clock, a
generator and a scheduler of its own. The runtime belongs to the context of the caller: work that an executor of this
module carries out sees the same one.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Runtime(Protocol):
    """What the world outside of the protocol gives to it."""

    def now(self) -> float:
        """Seconds of a clock that never jumps (F52: wall clocks decide nothing)."""

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""

    def token(self) -> str:
        """32 hex digits that nobody else has: run ids, nonces, incarnations."""

    def executor(self, threads: int, name: str) -> Executor:
        """Threads of that name, or none at all."""

    def pulse(self, work: Callable[[], None], every_s: float) -> AbstractContextManager[None]:
        """``work`` is done beside the block, again and again; it must be quick, and raise nothing."""

    def point(self, name: str) -> None:
        """A line of the protocol is about to be carried out; may raise, and may never return."""


class SystemRuntime:
    """The real one. Its points do nothing."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def token(self) -> str:
        return secrets.token_hex(16)

    def executor(self, threads: int, name: str) -> Executor:
        return _ContextExecutor(threads, thread_name_prefix=name)

    @contextmanager
    def pulse(self, work: Callable[[], None], every_s: float) -> Iterator[None]:
        over = threading.Event()

        def beat() -> None:
            while not over.wait(every_s):
                work()

        thread = threading.Thread(target=copy_context().run, args=(beat,), name="refit-pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def point(self, name: str) -> None:
        """Nothing stops a process here."""


class _ContextExecutor(ThreadPoolExecutor):
    """Threads that work in the context of whoever asked for the work."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return super().submit(copy_context().run, fn, *args, **kwargs)


_current: ContextVar[Runtime] = ContextVar("runtime", default=SystemRuntime())  # noqa: B039 - it has no state


@contextmanager
def using(runtime: Runtime) -> Iterator[None]:
    """Inside the block, in this context, everything asks ``runtime``."""
    before = _current.set(runtime)
    try:
        yield
    finally:
        _current.reset(before)


def now() -> float:
    """``Runtime.now`` of this context."""
    return _current.get().now()


def sleep(seconds: float) -> None:
    """``Runtime.sleep`` of this context."""
    _current.get().sleep(seconds)


def token() -> str:
    """``Runtime.token`` of this context."""
    return _current.get().token()


def executor(threads: int, name: str) -> Executor:
    """``Runtime.executor`` of this context."""
    return _current.get().executor(threads, name)


def pulse(work: Callable[[], None], every_s: float) -> AbstractContextManager[None]:
    """``Runtime.pulse`` of this context."""
    return _current.get().pulse(work, every_s)


def point(name: str) -> None:
    """``Runtime.point`` of this context."""
    _current.get().point(name)
