"""``simulate``: the product against simulated faults, seed after seed."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deltarefit.cli import options
from deltarefit.cli.output import Output
from deltarefit.cli.verbs import DIFFERENT, Call, app, verb
from deltarefit.errors import UsageError

_BOTH = "both"
_MOST_SHOWN = 3
"""Failures that are shown with the end of their traces; of more only what failed."""


@verb(app, "simulate", remote=False)
def simulate(
    call: Call,
    seeds: options.Seeds = 200,
    first: options.FirstSeed = 0,
    mode: options.SimulatedMode = _BOTH,
    jobs: options.Jobs = None,
    trace: options.Trace = False,
) -> int:
    """Play publishers and receivers against simulated faults: lost and late answers, corrupt reads, torn writes,
    power losses, crashes at any line, hung processes, clocks that jump.

    All of it is this package's own code, on a simulated clock, store, disk and processes. A seed plays the same run
    every time, so a failure is replayed by its number. The last line of stdout is `ok` or `failed`; the exit code
    is 0 or 4. Needs the simulate extra.
    """
    simulation = _simulation()
    modes = simulation.MODES if mode == _BOTH else (mode,)
    if not set(modes) <= set(simulation.MODES):
        raise UsageError("no such mode", expected=", ".join((*simulation.MODES, _BOTH)), found=repr(mode)[:80])
    started = time.perf_counter()
    runs = simulation.run_seeds(first, seeds, 1 if trace else jobs, modes, None if trace else simulation.TAIL)
    with _bar(call.out, seeds * len(modes)) as counted:
        found = _Found(call.out, trace)
        for run in counted(runs):
            found.add(run)
    return found.say(time.perf_counter() - started)


class _Found:
    """What came of all runs so far."""

    def __init__(self, out: Output, trace: bool) -> None:
        self._out, self._trace = out, trace
        self._runs = self._versions = self._steps = 0
        self._longest = 0.0
        self._failed: list[Any] = []

    def add(self, run: Any) -> None:
        self._runs, self._versions, self._steps = self._runs + 1, self._versions + run.versions, self._steps + run.steps
        self._longest = max(self._longest, run.healed_s)
        if run.failures:
            self._failed.append(run)
        if self._trace or (run.failures and len(self._failed) <= _MOST_SHOWN):
            for line in run.tail:
                self._out.data(line)
        for failure in run.failures:
            self._out.data(f"FAILED seed {run.seed}, {run.mode}: {failure}")
            self._out.data(f"replay: {run.command}")

    def say(self, seconds: float) -> int:
        result = "failed" if self._failed else "ok"
        rate = self._runs / seconds if seconds else 0.0
        self._out.say(
            f"{self._runs:,} runs, {self._steps:,} steps, {self._versions:,} versions in {seconds:.1f} s "
            f"({rate:.0f} runs/s); well again within {self._longest:.0f} simulated seconds"
        )
        failed = [{**dataclasses.asdict(run), "command": run.command} for run in self._failed]
        body = {"result": result, "runs": self._runs, "steps": self._steps, "versions": self._versions}
        self._out.result(result, {**body, "healed_s": self._longest, "seconds": seconds, "failed": failed})
        return DIFFERENT if self._failed else 0


@contextmanager
def _bar(out: Output, total: int) -> Iterator[Any]:
    """Gives a function that passes on what it is given, and counts it where somebody can see it."""
    flags = out.flags
    if not sys.stderr.isatty() or flags.quiet or flags.json or flags.no_progress:
        yield lambda runs: runs
        return
    columns = (TextColumn("simulate"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulate", total=total)

        def counted(runs: Iterable[Any]) -> Iterator[Any]:
            for run in runs:
                progress.advance(task)
                yield run

        yield counted


def _simulation() -> Any:
    try:
        return importlib.import_module("deltarefit.simulation")
    except ModuleNotFoundError as error:
        step = "Install it: pip install 'deltarefit[simulate]'"
        raise UsageError("simulate needs greenlet, which is not installed", found=error.name, next_step=step) from error
