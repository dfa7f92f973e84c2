"""Where words go: data on stdout, talk on stderr. The last line of stdout is the result, in text or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from deltarefit.cli.progress import bars
from deltarefit.errors import RefitError
from deltarefit.events import Emit

_WIDE = 500
"""Room for tables: a narrow terminal may wrap a line, but no number is ever cut."""


class _Console(Console):
    """Rich ends the program by itself when a reader has gone; that is decided in ``verbs``."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@dataclass(frozen=True)
class Flags:
    """The flags that every verb has."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    no_progress: bool = False


class Output:
    """All that one command says."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self._err = _Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Talk, unless quiet."""
        if not self.flags.quiet:
            self._err.print(text)

    def detail(self, text: str) -> None:
        """Talk for those who asked for more."""
        if self.flags.verbose:
            self.say(text)

    def warn(self, text: str) -> None:
        """Something that is being dealt with, but should be known."""
        if not self.flags.quiet:
            self._err.print(Text.assemble(("warning: ", "bold yellow"), text))

    def data(self, text: str) -> None:
        """A line of data, in text mode."""
        if not self.flags.json:
            print(text, flush=True)  # noqa: T201  # stdout is this program's product

    def table(self, table: RenderableType) -> None:
        """A table of data, in text mode."""
        if not self.flags.json:
            _Console(width=_WIDE, highlight=False, markup=False).print(table)

    def record(self, body: Mapping[str, object]) -> None:
        """A JSON object on a line of its own, in JSON mode."""
        if self.flags.json:
            print(json.dumps(body, separators=(",", ":")), flush=True)  # noqa: T201

    def result(self, text: object, body: Mapping[str, object]) -> None:
        """The last line: ``text``, or ``body`` as JSON."""
        self.data(str(text))
        self.record(body)

    def final(self, body: Mapping[str, object]) -> None:
        """A last line that is JSON in either mode."""
        print(json.dumps(body, separators=(",", ":")), flush=True)  # noqa: T201

    def error(self, error: BaseException, exit_code: int) -> None:
        """What went wrong, on stderr; with ``--json`` also as the last line of stdout."""
        known = isinstance(error, RefitError)
        text = str(error) if known or exit_code > 1 else f"unexpected: {type(error).__name__}: {error}"
        self._err.print(Text.assemble(("error: ", "bold red"), text))
        if self.flags.verbose and not known and exit_code == 1:
            self._err.print("".join(traceback.format_exception(error)).rstrip())
        fields = ("expected", "found", "next_step")
        sides = {name: getattr(error, name, None) for name in fields}
        sides = {name: None if value is None else str(value) for name, value in sides.items()}
        self.record({"error": getattr(error, "what", text), "exit_code": exit_code, **sides})

    @contextlib.contextmanager
    def progress(self) -> Iterator[Emit]:
        """A listener that draws progress bars while the block runs, where somebody can see them."""
        flags = self.flags
        shown = sys.stderr.isatty() and not (flags.quiet or flags.json or flags.no_progress)
        with bars(self._err, shown) as emit:
            yield emit


def columns(*names: str, left: int = 0) -> Table:
    """A table without lines; all columns but the first ``left`` are numbers and stand to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    return table
