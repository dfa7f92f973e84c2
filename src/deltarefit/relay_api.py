"""What a relay and its clients say to each other over HTTP, and what a relay may keep (docs/relays.md §2).

Every object of a store has one path. Errors travel as JSON with the fields of ``RefitError``, so that a caller sees the
same error through any number of relays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import IntEnum

from deltarefit.errors import (
    AlreadyExistsError,
    IntegrityError,
    NotFoundError,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)

OBJECTS = "/v1/o/"
"""GET (``Range``), HEAD (``?wait=S``: until the key is there, at most S seconds), PUT, DELETE of one object; a PUT with
``If-None-Match: *`` creates."""
LIST = "/v1/list"
"""GET ``?prefix=P``: lines of JSON ``[key, size]``, the last one ``null``."""
NEWS = "/v1/news"
"""GET ``?after=CURSOR&wait=S``: JSON ``{"cursor": C, "keys": [[key, size], ...]}``: objects that appeared since."""
STATUS = "/v1/status"
METRICS = "/metrics"

PATH = "Deltarefit-Path"
"""In every answer: the ids of the relays from the one that answers up to the root, as far as it knows."""
SHA256 = "Deltarefit-SHA256"
"""Of a PUT's body, 64 hex digits: a body that arrives otherwise is refused and leaves nothing."""
PROVE = {"Cache-Control": "no-cache"}
"""With a GET: prove the copy that is kept before it is served, for the last answer was damaged."""
CREATE = {"If-None-Match": "*"}

MOST_WAIT_S = 30.0
MOST_NEWS = 4096
"""Most keys of one answer."""
MOST_PATH = 16
"""Most relays between a client and the root."""
MOST_ERROR_BYTES = 64 << 10

_STATUS: tuple[tuple[type[RefitError], int], ...] = (
    (NotFoundError, 404),
    (AlreadyExistsError, 412),
    (StorageFullError, 507),
    (UnavailableError, 503),
    (IntegrityError, 422),
    (UsageError, 400),
)
_CONTENT = re.compile(r"(?:a/\d{10}/pl|anchor/\d{10}/(?:pl|file)|catalog)/([0-9a-f]{64})", re.ASCII)
_RECORD = re.compile(r"a/\d{10}/(?:intent|outcome|p/\d{1,5}|b/\d{1,5}/\d{1,9})|anchor/\d{10}/anchor", re.ASCII)
_FOLLOWERS = re.compile(r"member/[\w-]{1,64}|a/\d{10}/v/[\w-]{1,64}|pin/[\w-]{1,200}", re.ASCII)


class Role(IntEnum):
    """What a client may do. Each may do all that those before it may."""

    READ = 1
    FOLLOW = 2
    PUBLISH = 3


def role_for(method: str, key: str) -> Role:
    """The least role that may do it. A follower writes its signs of life, votes and pins, and nothing else: no relay or
    receiver below can change what the log says."""
    if method in ("GET", "HEAD"):
        return Role.READ
    return Role.FOLLOW if _FOLLOWERS.fullmatch(key) else Role.PUBLISH


def content_hash(key: str) -> str | None:
    """The SHA-256 that the object's bytes must have, for keys that name it (docs/format.md §1)."""
    found = _CONTENT.fullmatch(key)
    return found[1] if found else None


def is_record(key: str) -> bool:
    """Whether it is a create-once record of the log, whose bytes never change once they are there."""
    return _RECORD.fullmatch(key) is not None


def status_of(error: RefitError) -> int:
    """The HTTP status that says it."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def body_of(error: RefitError) -> bytes:
    """The error as JSON."""
    fields = {"what": error.what, "expected": error.expected, "found": error.found, "next_step": error.next_step}
    said = {name: str(value)[:1000] for name, value in fields.items() if value is not None}
    return json.dumps(said).encode()


def error_of(status: int, body: bytes, what: str) -> RefitError:
    """The error that an answer with this status means; ``what`` says what was asked for, in case the body does not."""
    kind = _kind_of(status)
    said = _fields(body)
    if not said:
        return kind(what, found=f"HTTP {status}", next_step=_STEPS.get(status, "Look at the relay's own messages."))
    return kind(said.pop("what", what), **said)


_STEPS: Mapping[int, str] = {
    401: "Give the relay's token: --token-file, or DELTAREFIT_TOKEN.",
    403: "Use a token whose role may do that.",
}


def _kind_of(status: int) -> type[RefitError]:
    known = next((kind for kind, code in _STATUS if code == status), None)
    if known is not None:
        return known
    passing = status in (408, 425, 429) or status >= 500
    return UnavailableError if passing else UsageError


def _fields(body: bytes) -> dict[str, str]:
    """The fields of an error that another program sent: only strings, only those known, none too long."""
    try:
        said = json.loads(body[:MOST_ERROR_BYTES])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    names = ("what", "expected", "found", "next_step")
    return {name: said[name][:1000] for name in names if isinstance(said.get(name), str)}
