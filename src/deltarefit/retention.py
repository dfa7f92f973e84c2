"""What may be deleted, in records: pins that keep objects, tombstones that give them up (docs/late-joiners.md). Pure.

Neither is signed, and neither decides about bits: a forged pin keeps objects too long, a forged tombstone sends a
receiver whose next version is missing to an anchor at once, where it would go after a wait.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass

from deltarefit.errors import NotFoundError
from deltarefit.records import Record

PINS, MEMBERS, TOMBS = "pin/", "member/", "tomb/"


@dataclass(frozen=True)
class Pin(Record):
    """Replaceable ``pin/<name>-<nonce>``: whoever wrote it still reads ``version`` and what follows. ``beat`` counts up
    while it does; nobody compares clocks."""

    run: str
    name: str
    version: int
    beat: int


class Doomed(str, enum.Enum):
    """What a tombstone stands for."""

    ATTEMPT = "attempt"
    ANCHOR = "anchor"


@dataclass(frozen=True)
class Tombstone(Record):
    """Create-once ``tomb/<n>`` of an attempt, ``tomb/anchor/<v>`` of an anchor: all its objects but intent and outcome
    are deleted, or soon will be. ``objects`` and ``size`` (bytes) are what was there then; ``anchor`` is where to start
    instead: the oldest that is kept."""

    run: str
    what: Doomed
    number: int
    objects: int
    size: int
    anchor: int


def pin_key(name: str, nonce: str) -> str:
    return f"{PINS}{name}-{nonce}"


def tomb_key(what: Doomed, number: int) -> str:
    return f"{TOMBS}{'anchor/' if what is Doomed.ANCHOR else ''}{number:010d}"


def is_condemned(key: str, size: Callable[[str], int]) -> bool:
    """Whether the object at ``key`` belongs to an attempt or anchor that has a tombstone, by the store's ``size``."""
    kind, _, rest = key.partition("/")
    what = {"a": Doomed.ATTEMPT, "anchor": Doomed.ANCHOR}.get(kind)
    number = rest.partition("/")[0]
    if what is None or not number.isdecimal():
        return False
    try:
        return size(tomb_key(what, int(number))) >= 0
    except NotFoundError:
        return False


def version_of(data: bytes) -> int | None:
    """The ``version`` that a pin's or a member's record states; None if it cannot be read."""
    try:
        version = json.loads(data.partition(b"\n")[0])["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return version if type(version) is int and version >= 0 else None
