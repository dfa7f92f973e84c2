"""``follow``: keep a checkpoint directory at the newest version."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable
from contextlib import closing
from types import FrameType, TracebackType
from typing import TypeVar

from deltarefit.cli import options, words
from deltarefit.cli.output import Output
from deltarefit.cli.verbs import Call, Terminated, app, verb
from deltarefit.errors import NotFoundError, UnavailableError, UsageError
from deltarefit.events import Emit, Event
from deltarefit.ports import Store
from deltarefit.receiver import Receiver
from deltarefit.runlog import RUN, RunLog
from deltarefit.targets.checkpoint import CheckpointTarget

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0


@verb(app, "follow")
def follow(
    call: Call,
    store: options.Store,
    into: options.Into,
    once: options.Once = False,
    poll: options.Poll = 1.0,
    no_prove: options.NoProve = False,
    switch_run: options.SwitchRun = False,
) -> int:
    """Keep a checkpoint directory at the newest version of a run.

    An empty DIR is filled from the newest anchor; then only changed bits are fetched, checked, and written
    into the files in place. Each version is printed as soon as DIR holds it, so the last line of stdout is
    the version that DIR holds. It may be killed at any instant: the next call goes on from there.

    Runs until Ctrl-C or SIGTERM, which end it between two steps with exit code 0 (a second one at once).
    While the store cannot be reached it keeps trying; with [bold]--once[/] it ends with exit code 5.

    Example: [bold]deltarefit follow s3://bucket/run7 --into /models/policy[/]
    """
    if (into / RUN).is_file():
        raise UsageError(f"{into} is a store", expected="a directory for weights", next_step="Choose another --into.")
    with Stop() as stop, call.out.progress() as bars:
        patience = Patience(call.out, stop, endless=not once)
        # Before DIR is made: the address may be wrong.
        objects = patience.run(lambda: _await_run(call, store, patience))
        if objects is None:
            return 128 + stop.number if once else 0
        with closing(CheckpointTarget(into)) as target:
            report = Report(call.out, bars, patience)
            receiver = patience.run(
                lambda: Receiver(objects, target, emit=report, poll_s=poll, prove=not no_prove, switch_run=switch_run)
            )
            if receiver is not None:
                with closing(receiver):
                    patience.run(lambda: receiver.follow(once=once, stop=stop.asked))
                report.finish(receiver.version or _held(target))
    return 128 + stop.number if once and stop.number else 0


def _await_run(call: Call, store: str, patience: Patience) -> Store:
    """Receivers may start before the first publish: without ``--once`` a run that is not there yet is waited for."""
    try:
        objects = call.remote.existing(store)
        RunLog.open(objects)
        return objects
    except NotFoundError as error:
        if not patience.endless:
            raise
        raise UnavailableError(error.what, next_step="Waiting for the first publish.") from error


def _held(target: CheckpointTarget) -> int:
    """After an error the receiver has forgotten its state; the header has not."""
    header = target.read_header()
    return header.version if header else 0


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
    """Tries again what only failed for now: for ever if ``endless``, else not at all."""

    def __init__(self, out: Output, stop: Stop, *, endless: bool) -> None:
        self._out = out
        self._stop = stop
        self.endless = endless
        self._wait_s = _FIRST_WAIT_S

    def restart(self) -> None:
        """Something went well: the next wait is a short one again."""
        self._wait_s = _FIRST_WAIT_S

    def run(self, work: Callable[[], T]) -> T | None:
        """What ``work`` returns, or None if a stop was asked for first."""
        while not self._stop.asked():
            try:
                return work()
            except UnavailableError as error:
                if not self.endless:
                    raise
                self._wait(error)
        return None

    def _wait(self, error: UnavailableError) -> None:
        wait_s = self._wait_s * (0.5 + secrets.randbelow(1000) / 1000)  # many receivers must not come back as one
        self._out.warn(f"{str(error).rstrip('.')}. Trying again in {words.seconds(wait_s)}.")
        end = time.monotonic() + wait_s
        while not self._stop.asked() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)


class Report:
    """The receiver's events as a line per version on stdout, and talk."""

    def __init__(self, out: Output, bars: Emit, patience: Patience) -> None:
        self._out = out
        self._bars = bars
        self._patience = patience
        self._seconds: dict[str, int | float | str] = {}
        self._printed = False

    def __call__(self, event: Event) -> None:
        self._bars(event)
        if event.type == "clean":
            self._seconds = event.fields
        elif event.type == "resumed":
            self._version(event.version, event.seconds)
        elif event.text:
            self._out.warn(event.text)
        elif event.type == "proven":
            self._out.detail(f"Proven     version {event.version} in {words.seconds(event.seconds)}")
        elif event.type == "phase":
            self._out.detail(f"{event.phase:<10} version {event.version} in {words.seconds(event.seconds)}")

    def finish(self, version: int) -> None:
        """The last line is the version held, even if no refit was needed."""
        if not self._printed:
            self._line(version, {}, 0.0)

    def _version(self, version: int, pause_s: float) -> None:
        self._patience.restart()
        spent = ", ".join(f"{phase} {words.seconds(float(value))}" for phase, value in self._seconds.items())
        self._out.say(f"Holds      version {version} ({spent}; pause {words.seconds(pause_s)})")
        self._line(version, self._seconds, pause_s)

    def _line(self, version: int, seconds: dict[str, int | float | str], pause_s: float) -> None:
        self._printed = True
        self._out.result(version, {"version": version, "seconds": seconds, "pause_s": pause_s})
