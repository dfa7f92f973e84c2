"""Progress events as bars on stderr: bytes, rate, time left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from deltarefit.events import Emit, Event, ignore


@contextlib.contextmanager
def bars(console: Console, shown: bool) -> Iterator[Emit]:
    """A listener that draws a bar per phase while the block runs, and nothing if not ``shown``."""
    if not shown:
        yield ignore
        return
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress)


class _Bars:
    """One bar per phase that is under way; a finished one disappears."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, event: Event) -> None:
        if event.type != "progress":
            return
        if event.phase not in self._tasks:
            self._tasks[event.phase] = self._progress.add_task(event.phase, total=event.total)
        self._progress.update(self._tasks[event.phase], completed=event.done, total=event.total)
        if event.done >= event.total:
            self._progress.remove_task(self._tasks.pop(event.phase))
