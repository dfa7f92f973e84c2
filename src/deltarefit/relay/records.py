"""Create-once records that were read whole, kept in memory: their bytes never change (docs/format.md §1).

Only what is a record whole in itself is kept, so a damaged answer is not remembered. They belong to one run: if ``run``
turns out to be another, everything is forgotten.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from deltarefit.errors import FormatError
from deltarefit.records import split_signature
from deltarefit.relay_api import is_record

LIMIT_BYTES = 64 << 20
MOST_RECORD_BYTES = 16 << 20
_RUN = "run"


class Records:
    """At most ``LIMIT_BYTES``; the least recently used go first. Used by one event loop only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._used = 0
        self._run = b""

    def get(self, key: str) -> bytes | None:
        """The whole record, if it is kept."""
        data = self._kept.get(key)
        if data is not None:
            self._kept.move_to_end(key)
        return data

    def saw(self, key: str, data: bytes) -> None:
        """An object was read as a whole."""
        if key == _RUN and data != self._run:
            self._kept.clear()
            self._used, self._run = 0, data
        if key in self._kept or not is_record(key) or len(data) > MOST_RECORD_BYTES or not _is_whole(data):
            return
        self._kept[key] = data
        self._used += len(data)
        while self._used > LIMIT_BYTES:
            self._used -= len(self._kept.popitem(last=False)[1])

    def forget(self, key: str) -> None:
        """It was deleted, or somebody doubts it."""
        self._used -= len(self._kept.pop(key, b""))


def _is_whole(data: bytes) -> bool:
    """Whether the hash line of a record is that of its first line."""
    try:
        lines = bytes(split_signature(data, "record")[0])
    except FormatError:
        return False
    return hashlib.sha256(lines[:-66]).hexdigest().encode() == lines[-65:-1]
