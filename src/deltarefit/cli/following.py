"""``follow``: keep a checkpoint directory, or the live weights of a serving engine, at the newest version."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltarefit.cli import options, words
from deltarefit.cli.engines import Engine, engine_at, held, sole_follower, target_at
from deltarefit.cli.keys import notary
from deltarefit.cli.output import Output
from deltarefit.cli.patience import DIRECTORY, ENGINE, Patience, Stop
from deltarefit.cli.verbs import Call, app, verb
from deltarefit.errors import IntegrityError, NotFoundError, UnavailableError, UsageError
from deltarefit.events import Emit, Event
from deltarefit.manifest import State
from deltarefit.notary import Notary
from deltarefit.ports import Store
from deltarefit.receiver import Receiver
from deltarefit.runlog import RUN, RunLog
from deltarefit.targets.checkpoint import CheckpointTarget
from deltarefit.targets.engine import EngineTarget
from deltarefit.targets.readiness import PAUSED, WAITING, Readiness, ReadyServer


@verb(app, "follow")
def follow(
    call: Call,
    store: options.Store,
    into: options.Into = None,
    once: options.Once = False,
    poll: options.Poll = 1.0,
    no_prove: options.NoProve = False,
    switch_run: options.SwitchRun = False,
    vllm: options.Vllm = None,
    sglang: options.Sglang = None,
    in_flight: options.InFlight = None,
    ready: options.Ready = None,
    scrub: options.Scrub = None,
    name: options.Name = None,
    trust: options.Trust = None,
) -> int:
    """Keep a checkpoint directory, or a serving engine, at the newest version of a run.

    An empty DIR is filled from the newest anchor; then only changed bits are fetched, checked, and written
    into the files in place. With --vllm or --sglang they are written into the live weights of an engine on
    this machine instead, in short pauses of its generation. Each version is printed as soon as it is held, so
    the last line of stdout is the version held. It may be killed at any instant: the next call goes on from
    there.

    Runs until Ctrl-C or SIGTERM, which end it between two steps with exit code 0 (a second one at once).
    While the store or the engine cannot be reached it keeps trying; with [bold]--once[/] it ends with exit
    code 5.

    Example: [bold]deltarefit follow s3://bucket/run7 --into /models/policy[/]

    Example: [bold]deltarefit follow s3://bucket/run7 --vllm http://127.0.0.1:8000 --ready 0.0.0.0:9000[/]
    """
    engine = engine_at(vllm, sglang, in_flight or "keep")
    if (into is None) is (engine is None):
        found = "none of them" if engine is None else "a directory and an engine"
        raise UsageError("what to keep is not clear", expected="one of --into, --vllm and --sglang", found=found)
    if engine is None and (in_flight or ready or scrub):
        raise UsageError("--in-flight, --ready and --scrub need an engine", next_step="Give --vllm or --sglang.")
    called = name or name_of(str(into.absolute()) if into else engine.url if engine else "")
    how = {
        "name": called,
        "poll_s": poll,
        "prove": not no_prove,
        "switch_run": switch_run,
        "trust": notary(trust).trust,
    }
    with Stop() as stop, call.out.progress() as bars:
        patience = Patience(call.out, stop, DIRECTORY if engine is None else ENGINE, endless=not once)
        errand = Errand(call, store, once, how, stop, patience, Report(call.out, bars, patience))
        if into is not None:
            errand.keep_directory(into)
        elif engine is not None:
            errand.keep_engine(engine, ready, scrub)
    return 128 + stop.number if once and stop.number else 0


@dataclass(frozen=True)
class Errand:
    """One call of ``follow``."""

    call: Call
    store: str
    once: bool
    how: dict[str, Any]
    stop: Stop
    patience: Patience
    report: Report

    def keep_directory(self, into: Path) -> None:
        """Follow into a checkpoint directory until told to stop."""
        if (into / RUN).is_file():
            step = "Choose another --into."
            raise UsageError(f"{into} is a store", expected="a directory for weights", next_step=step)
        objects = self.patience.run(self._await_run)  # before DIR is made: the address may be wrong
        if objects is None:
            return
        with closing(CheckpointTarget(into)) as target:
            receiver = self.patience.run(lambda: Receiver(objects, target, emit=self.report, **self.how))
            if receiver is not None:
                with closing(receiver):
                    self.patience.run(lambda: receiver.follow(once=self.once, stop=self._looks(receiver)))
                self.report.finish(receiver.version or _held(target))

    def keep_engine(self, engine: Engine, ready: str | None, scrub_s: float | None) -> None:
        """Follow into the live weights of an engine until told to stop, wherever that is started anew meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(sole_follower(engine))
            readiness = Readiness(lambda: engine.sockets, lambda: self._trouble(engine))
            if ready is not None:
                server = stack.enter_context(closing(ReadyServer(ready, readiness.status)))
                self.call.out.say(f"Readiness  at {server.url}")
            objects = self.patience.run(self._await_run)
            if objects is None:
                return
            target = stack.enter_context(closing(target_at(engine)))
            receiver = self.patience.run(lambda: self._receiver(objects, target, readiness))
            if receiver is not None:
                with closing(receiver):
                    self.patience.run(lambda: self._keep(receiver, target, readiness, scrub_s))
                self.report.finish(receiver.version or held(target), live=True)

    def _receiver(self, objects: Store, target: EngineTarget, readiness: Readiness) -> Receiver:
        receiver = Receiver(objects, target, emit=_both(readiness, self.report.live), **self.how)
        readiness.expect(receiver.log.run, receiver.log.hint().head)
        return receiver

    def _keep(self, receiver: Receiver, target: EngineTarget, listener: Emit, scrub_s: float | None) -> int:
        asked = self._looks(receiver, live=True)
        while scrub_s is not None and not self.once and not asked():
            due = time.monotonic() + scrub_s
            receiver.follow(stop=lambda due=due: asked() or time.monotonic() >= due)  # type: ignore[misc]
            if not asked():
                scrub(receiver, target, _both(listener, self.report))
        return receiver.follow(once=self.once, stop=asked)

    def _looks(self, receiver: Receiver, *, live: bool = False) -> Callable[[], bool]:
        return self.patience.looks(lambda: self.report.settled(receiver.version, live=live))

    def _trouble(self, engine: Engine) -> str:
        """Why an engine whose weights are whole is not ready."""
        if not self.patience.steady:
            return WAITING
        return "" if engine.serving else PAUSED

    def _await_run(self) -> Store:
        """Receivers may start before the first publish: without ``--once`` a run that is not there yet is waited
        for."""
        try:
            objects = self.call.remote.existing(self.store)
            RunLog.open(objects, Notary(trust=self.how["trust"]))
            return objects
        except NotFoundError as error:
            if not self.patience.endless:
                raise
            raise UnavailableError(error.what, next_step="Waiting for the first publish.") from error


def scrub(receiver: Receiver, target: EngineTarget, emit: Emit) -> None:
    """Read all live bits of an engine that is CLEAN once more, while it serves. If they are not those that its header
    claims, the receiver forgets what it knows: it proves them when it goes on, and takes them for lost."""
    header = target.read_header()
    if header is None or header.state is not State.CLEAN:
        return
    started = time.perf_counter()
    why = "live bits differ from the header's digest"
    try:
        if target.digest() == header.digest:
            emit(Event("proven", "scrub", header.version, seconds=time.perf_counter() - started))
            return
    except IntegrityError as error:
        why = str(error)
    emit(Event("diverged", version=header.version, text=f"found while idle: {why}"))
    receiver.prove = True
    receiver.restart()


def name_of(kept: str) -> str:
    """A receiver's name that is the same after a restart: the dead one is not waited for then."""
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-")[:40] or "host"
    return f"{host}-{hashlib.sha256(kept.encode()).hexdigest()[:8]}"


def _both(first: Emit, second: Emit) -> Emit:
    def emit(event: Event) -> None:
        first(event)
        second(event)

    return emit


def _held(target: CheckpointTarget) -> int:
    """After an error the receiver has forgotten its state; the header has not."""
    header = target.read_header()
    return header.version if header and header.state is State.CLEAN else 0


class Report:
    """The receiver's events as a line per version on stdout, and talk. ``live`` is for an engine: of it the parts of
    the pause are told as well."""

    def __init__(self, out: Output, bars: Emit, patience: Patience) -> None:
        self._out = out
        self._bars = bars
        self._patience = patience
        self._seconds: dict[str, int | float | str] = {}
        self._printed = False

    def __call__(self, event: Event) -> None:
        """An event of a directory."""
        self._tell(event, live=False)

    def live(self, event: Event) -> None:
        """An event of an engine."""
        self._tell(event, live=True)

    def _tell(self, event: Event, live: bool) -> None:
        self._bars(event)
        self._patience.note(event)
        if event.type == "clean":
            self._seconds = event.fields
        elif event.type == "resumed":
            self._version(event, live)
        elif event.type == "adopted":
            self._adopted(event.version)
        elif event.text:
            self._out.warn(event.text)
        elif event.type == "proven":
            tell = self._out.say if event.phase == "scrub" else self._out.detail
            tell(f"Proven     version {event.version} in {words.seconds(event.seconds)}")
        elif event.type == "phase":
            self._out.detail(f"{event.phase:<10} version {event.version} in {words.seconds(event.seconds)}")

    def settled(self, version: int, *, live: bool = False) -> None:
        """There is nothing to do: what was held from the start is told, once."""
        if version and not self._printed:
            self._out.say(f"Holds      version {version} already")
            self.finish(version, live=live)

    def finish(self, version: int, *, live: bool = False) -> None:
        """The last line is the version held, even if no refit was needed."""
        if not self._printed:
            self._line(version, {}, 0.0, {} if live else None)

    def _adopted(self, version: int) -> None:
        self._out.say(f"Holds      version {version} already")
        self._seconds = {}
        self._line(version, {}, 0.0, {})

    def _version(self, event: Event, live: bool) -> None:
        pause = {name: value for name, value in event.fields.items() if name != "pause"} if live else None
        before = {name: value for name, value in self._seconds.items() if name not in (pause or ())}
        parts = f": {_listed(pause)}" if pause else ""
        spent = f"{_listed(before)}; " if before else ""
        self._out.say(f"Holds      version {event.version} ({spent}pause {words.seconds(event.seconds)}{parts})")
        self._line(event.version, self._seconds, event.seconds, pause)

    def _line(
        self,
        version: int,
        seconds: dict[str, int | float | str],
        pause_s: float,
        pause: dict[str, int | float | str] | None,
    ) -> None:
        self._printed = True
        body: dict[str, object] = {"version": version, "seconds": seconds, "pause_s": pause_s}
        self._out.result(version, body if pause is None else {**body, "pause": pause})


def _listed(seconds: dict[str, int | float | str]) -> str:
    return ", ".join(f"{phase} {words.seconds(float(value))}" for phase, value in seconds.items())
