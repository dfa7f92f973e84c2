"""What all verbs share: the application, the common flags, and how an end becomes an exit code.

========  =================================================================
exit code
========  =================================================================
0         done
1         unexpected: a fault of deltarefit
2         usage: the command line, an address or a permission is wrong
3         not found
4         integrity or base mismatch; ``compare``, ``verify``: bits differ
5         temporary: the same command may do later
128 + n   ended by signal n (130: Ctrl-C)
========  =================================================================
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import typer

import deltarefit
from deltarefit.cli import access_options, options
from deltarefit.cli.output import Flags, Output
from deltarefit.cli.settings import Remote
from deltarefit.errors import RefitError, UsageError

UNEXPECTED, DIFFERENT = 1, 4

Verb = TypeVar("Verb", bound=Callable[..., int | None])

_HELP = """
Ship only the bits that changed from a trainer to rollout servers: bit-exact, recoverable, fast.

`publish` compares a checkpoint with the version before and puts the changed bits into a store; `follow` keeps
a checkpoint directory, or the live weights of a running vLLM or SGLang, at the newest version.

Try: [bold]deltarefit publish CKPT --to STORE[/], then [bold]deltarefit follow STORE --into DIR --once[/],
or [bold]deltarefit follow STORE --vllm URL[/].
Or see it all at work: [bold]deltarefit demo --quick[/].
"""
_EPILOG = (
    "Exit codes: 0 done, 1 unexpected, 2 usage, 3 not found, 4 integrity or base mismatch (compare, verify: "
    "bits differ), 5 temporary: try again, 128 + n ended by signal n."
)
app = typer.Typer(
    name="deltarefit",
    epilog=_EPILOG,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Terminated(BaseException):
    """SIGTERM arrived. Raised so that temporary files are removed on the way out."""


@dataclass(frozen=True)
class Call:
    """What a verb is handed beside its own arguments."""

    out: Output
    remote: Remote


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltarefit {deltarefit.__version__}")
        raise typer.Exit


def _paragraphs(docstring: str) -> str:
    """Line breaks of the source mean nothing in the help; empty lines do."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


@app.callback(help=_paragraphs(_HELP))
def _application(
    version: bool = typer.Option(
        False,
        "--version",
        is_eager=True,
        callback=_print_version,
        help="Print the version of deltarefit and exit.",
    ),
) -> None:
    """Options of ``deltarefit`` itself."""


def verb(on: typer.Typer, name: str, *, remote: bool = True) -> Callable[[Verb], Verb]:
    """Register a function as a verb with the common flags; it is called with a ``Call`` and its own
    arguments.

    The function's docstring is the help. It returns its exit code (None: 0) or raises.
    """

    def register(function: Verb) -> Verb:
        hints = typing.get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
        parameters += _shared(_flags) + (_shared(_access) if remote else [])

        def command(**given: Any) -> int:
            flags = Flags(**{field: given.pop(field) for field in Flags.__dataclass_fields__})
            access = Remote(**{name: given.pop(name, None) for name in Remote.__dataclass_fields__})
            call = Call(Output(flags), access)
            return exit_code(call.out, lambda: function(call, **given))

        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        on.command(name, help=_paragraphs(function.__doc__ or ""))(command)
        return function

    return register


def _flags(
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_progress: options.NoProgress = False,
) -> None:
    """The flags of every verb."""


def _access(
    endpoint: options.Endpoint = None,
    region: options.Region = None,
    token_file: access_options.TokenFile = None,
    ca: access_options.Ca = None,
    client_cert: access_options.ClientCert = None,
) -> None:
    """The options of every verb that uses a store."""


def _shared(prototype: Callable[..., None]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(prototype, include_extras=True)
    parameters = inspect.signature(prototype).parameters.values()
    return [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in parameters]


def exit_code(out: Output, work: Callable[[], int | None]) -> int:
    """Run a verb; whatever it raises becomes words and an exit code."""
    try:
        return work() or 0
    except RefitError as error:
        return _failed(out, error, error.exit_code)
    except BrokenPipeError:
        return _pipe_closed()
    except KeyboardInterrupt:
        return _failed(out, RefitError("interrupted"), 128 + signal.SIGINT)
    except Terminated:
        return _failed(out, RefitError("terminated"), 128 + signal.SIGTERM)
    except Exception as error:  # noqa: BLE001  # the last line of defence: one line for the user, not a traceback
        return _failed(out, error, UNEXPECTED)


def _failed(out: Output, error: BaseException, code: int) -> int:
    try:
        out.error(error, code)
    except BrokenPipeError:
        return _pipe_closed()
    return code


def _pipe_closed() -> int:
    """Whoever read our stdout has gone (``| head``): end as if by the signal, without a word at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def run(argv: list[str]) -> int:
    """Parse and run one command line; the exit code."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        code = app(argv or ["--help"], prog_name="deltarefit", standalone_mode=False)
    except Terminated:  # before or after the verb itself
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's own, wherever this version of typer keeps it
            raise
        return _bad_command_line(error, argv)
    finally:
        signal.signal(signal.SIGTERM, before)
    return int(code or 0)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _bad_command_line(error: Any, argv: list[str]) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "deltarefit"
    wrong = UsageError(error.format_message().rstrip("."), next_step=f"See: {path} --help")
    return _failed(Output(Flags(json="--json" in argv)), wrong, wrong.exit_code)
