"""What a key may be, and how any store reads a byte range. Shared by every store so that they agree."""

from __future__ import annotations

import re

from deltarefit.errors import NotFoundError, UsageError

MAX_KEY = 900
"""Most characters of a key; object stores take 1024 bytes including the prefix of the store's URL."""
_KEY = re.compile(r"[A-Za-z0-9._-]{1,255}(?:/[A-Za-z0-9._-]{1,255})*", re.ASCII)


def is_key(key: str) -> bool:
    """Whether it is segments of ``[A-Za-z0-9._-]``, none ``.`` or ``..``, joined by single slashes."""
    return len(key) <= MAX_KEY and _KEY.fullmatch(key) is not None and not {".", ".."} & set(key.split("/"))


def check_key(key: str) -> str:
    """``key`` itself. Raises ``UsageError`` if it is none."""
    if is_key(key):
        return key
    raise UsageError(
        "bad store key",
        expected="segments of A-Z a-z 0-9 . _ - joined by single '/', none of them '.' or '..'",
        found=repr(key[:80]),
        next_step="Use another key.",
    )


def check_prefix(prefix: str) -> str:
    """``prefix`` without trailing slash; empty means everything. Raises ``UsageError`` if it is no key."""
    bare = prefix.removesuffix("/")
    return check_key(bare) if bare else ""


def check_range(start: int, length: int | None) -> None:
    """Raises ``UsageError`` for a negative start or length."""
    if start < 0 or (length is not None and length < 0):
        raise UsageError(
            "bad byte range",
            expected="start >= 0 and length >= 0",
            found=f"start {start}, length {length}",
            next_step="Ask for bytes inside the object.",
        )


def missing(key: str, url: str) -> NotFoundError:
    """The error for a key that is not there."""
    return NotFoundError(
        f"no object {key!r} in {url}",
        next_step="Check the store URL, and that the publisher of this run has written it.",
    )


def flat(data: bytes | memoryview) -> memoryview:
    """The same memory as single bytes. Raises ``UsageError`` if it is not contiguous."""
    view = memoryview(data)
    if view.c_contiguous:
        return view.cast("B")
    raise UsageError(
        "cannot store this buffer",
        expected="contiguous memory",
        found=f"strides {view.strides} for shape {view.shape}",
        next_step="Pass bytes or a contiguous copy.",
    )
