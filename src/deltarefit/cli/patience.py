"""How ``follow`` waits: it ends when told to, and tries again what only failed for now."""

from __future__ import annotations

import secrets
import signal
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

from deltarefit.cli import words
from deltarefit.cli.engines import HasFollowerError
from deltarefit.cli.output import Output
from deltarefit.cli.verbs import Terminated
from deltarefit.errors import UnavailableError
from deltarefit.events import Event

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FIRST_WAIT_S, _LONGEST_WAIT_S, _LONGEST_WAIT_OF_ENGINE_S = 1.0, 30.0, 3.0
"""A store has many receivers, an engine one follower, on its own machine."""
ENGINE, DIRECTORY, _STORE = "engine", "directory", "store"
_LOOKS = 3
"""Of a ``receiver.follow``: it asks whether to stop before it reads the log, before it waits, and while it waits."""


class Stop:
    """Inside the block the first SIGINT or SIGTERM only sets ``number``; a second one raises, as it would
    outside."""

    def __init__(self) -> None:
        self.number = 0
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}

    def asked(self) -> bool:
        return self.number != 0

    def __enter__(self) -> Stop:
        for number in _SIGNALS:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked():
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        self.number = number


class Patience:
    """Tries again what only failed for now: for ever if ``endless``, else not at all. ``target`` is the word for what
    is kept: "engine" or "directory".

    ``steady``: the receiver has been seen to wait for a next version, or to refit, and the target has not failed since.
    """

    def __init__(self, out: Output, stop: Stop, target: str, *, endless: bool) -> None:
        self._out = out
        self._stop = stop
        self._target = target
        self.endless = endless
        self.steady = False
        self._failed = ""
        """What failed last and is not cured yet."""
        self._wait_s = _FIRST_WAIT_S
        self._looks = 0

    def looks(self, settled: Callable[[], None]) -> Callable[[], bool]:
        """``stop`` for a receiver. ``settled`` is called when that has nothing to do: store and engine have answered
        since the last failure."""

        def asked() -> bool:
            self._looks += 1
            if self._looks == _LOOKS:
                self._cured()
                settled()
            return self._stop.asked()

        return asked

    def note(self, event: Event) -> None:
        """An event of the receiver: whether what failed goes well again. A target whose bits are proven answers; of
        the store that says nothing."""
        if event.type in ("adopted", "resumed") or (self._failed == self._target and event.type in ("proven", "clean")):
            self._cured()

    def run(self, work: Callable[[], T]) -> T | None:
        """What ``work`` returns, or None if a stop was asked for first."""
        while not self._stop.asked():
            self._looks = 0
            try:
                result = work()
            except HasFollowerError:
                raise
            except UnavailableError as error:
                self.steady &= not _is_of_target(error)  # an engine serves on while only the store is away
                if not self.endless:
                    raise
                self._wait(error)
            else:
                return result
        return None

    def _cured(self) -> None:
        if self._failed:
            self._out.say(f"Back:      the {self._failed} answers again")
        self._failed, self._wait_s, self.steady = "", _FIRST_WAIT_S, True

    def _wait(self, error: UnavailableError) -> None:
        self._failed = self._target if _is_of_target(error) else _STORE
        longest = _LONGEST_WAIT_OF_ENGINE_S if self._failed == ENGINE else _LONGEST_WAIT_S
        self._wait_s = min(self._wait_s, longest)
        wait_s = self._wait_s * (0.5 + secrets.randbelow(1000) / 1000)  # many receivers must not come back as one
        self._out.warn(f"{str(error).rstrip('.')}. Trying again in {words.seconds(wait_s)}.")
        end = time.monotonic() + wait_s
        while not self._stop.asked() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
        self._wait_s = min(2 * self._wait_s, longest)


def _is_of_target(error: BaseException) -> bool:
    """Whether it was raised by what stands for an engine or a directory, not by the store."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__", "")).startswith("deltarefit.targets.") for frame in frames)
