"""One event record for everything that is reported: text, JSON lines, progress bars and tables are views of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """Something happened. ``phase`` is one word.

    Progress events (type ``progress``) have ``done`` and ``total`` in bytes of ``phase``; an event that ends a phase
    (type ``phase``) has ``seconds``. A publisher ends prepare, encode, hint and baseline (see ``Published``), and makes
    progress in encode, seed (rebuilding its baseline) and baseline. A receiver ends seed, stage, quiesce (until
    generation stands still), write, verify and resume, and makes progress in seed and stage. Other verbs make progress
    in compare, verify, anchor, prune, compose and fetch.
    ``fields`` holds what else there is to know: integers, floats and strings only.
    """

    type: str
    phase: str = ""
    version: int = 0
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    text: str = ""
    fields: dict[str, int | float | str] = field(default_factory=dict)


Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The default listener: nobody."""
