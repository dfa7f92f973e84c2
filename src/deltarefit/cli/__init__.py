"""The command line: ``deltarefit VERB ...``; a thin layer over the library that any program can use instead.

``main`` is the entry point, ``app`` the typer application. Verbs live in one module per subject; what they
share is in ``verbs`` (flags, errors, exit codes), ``options``, ``output`` and ``settings`` (the only place
that reads the environment).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deltarefit.cli import following, history, keys, proofs, publishing, relaying, simulating, tools, trees, upkeep
from deltarefit.cli.verbs import app, run

__all__ = ["app", "main"]

_VERBS = (publishing, following, history, proofs, upkeep, keys, relaying, trees, simulating, tools)
"""Importing them has registered their verbs."""
_ORDER = (
    "publish", "follow", "log", "show", "compare", "verify", "anchor", "prune",
    "keygen", "relay", "tree", "doctor", "simulate", "demo",
)  # fmt: skip

app.registered_commands.sort(key=lambda command: _ORDER.index(command.name or ""))  # as the help lists them


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` by default); the exit code."""
    return run(list(sys.argv[1:] if argv is None else argv))
