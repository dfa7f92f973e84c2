"""Turns fuzzed bytes into decisions: numbers, values of every kind, edits of JSON and of payloads."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

NUMBERS = (0, 1, 2, 3, 7, 255, 256, 2**16, 2**31, 2**32 - 1, 2**48, 2**48 + 1, 2**63, 2**64 - 1, 2**64, -1)
TEXTS = ("", "a", "run", "BF16", "0" * 64, "5a" * 16, "../x", "\ud800", "é\n", "x" * 5000, "1" * 400)


class Feed:
    """Reads decisions off ``data``; once it is empty every decision is 0."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        part = self.data[self.at : self.at + size]
        self.at += size
        return part

    def rest(self) -> bytes:
        return self.take(len(self.data))

    def below(self, limit: int) -> int:
        """0 <= n < ``limit``."""
        return int.from_bytes(self.take(2 if limit > 255 else 1), "little") % max(limit, 1)

    def integer(self) -> int:
        kind = self.below(3)
        return NUMBERS[self.below(len(NUMBERS))] if kind else int.from_bytes(self.take(8), "little")

    def value(self) -> Any:
        """What JSON can hold, and no float of more than one digit."""
        kind = self.below(9)
        if kind < 3:
            return self.integer()
        if kind == 3:
            return self.take(self.below(64)).decode("latin-1")
        return (TEXTS[self.below(len(TEXTS))], None, bool(self.below(2)), [self.integer()], {"a": self.integer()})[
            kind - 4
        ]

    def edited(self, body: Any) -> Any:
        """A copy of ``body`` with up to three edits anywhere in it."""
        body = copy.deepcopy(body)
        for _ in range(self.below(4)):
            self._edit(body)
        return body

    def _edit(self, body: Any) -> None:
        """One edit: another value, one less, one more, two exchanged; then the same one level down, by chance."""
        while isinstance(body, dict | list) and body:
            keys = sorted(body, key=str) if isinstance(body, dict) else list(range(len(body)))
            key = keys[self.below(len(keys))]
            kind = self.below(8)
            if kind < 4 and isinstance(body[key], dict | list) and body[key]:
                body = body[key]
                continue
            if kind == 5:
                del body[key]
            elif kind == 6 and isinstance(body, list):
                body.insert(key, copy.deepcopy(body[key]))
            elif kind == 7:
                other = keys[self.below(len(keys))]
                body[key], body[other] = body[other], body[key]
            else:
                body[key] = self.value()
            return

    def damaged(self, data: bytes) -> bytes:
        """``data`` with up to four bytes changed, cut, doubled or put in."""
        out = bytearray(data)
        for _ in range(self.below(5)):
            at, kind = self.below(len(out) + 1), self.below(4)
            if kind == 0:
                out[at : at + 1] = self.take(1)
            elif kind == 1:
                del out[at : at + 1 + self.below(16)]
            elif kind == 2:
                out[at:at] = out[at : at + 1 + self.below(16)]
            else:
                out[at:at] = self.take(1 + self.below(8))
        return bytes(out)


def sealed(line: bytes) -> bytes:
    """A record of this line, whatever it says."""
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"
