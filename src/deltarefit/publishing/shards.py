"""Bits of the pieces that one producer owns, with a header that shares their fate: in memory, or in one mapped file.

Only storage: what is written when is ``shard_baseline``'s business.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from deltarefit.elements import Elements
from deltarefit.errors import FormatError, StorageFullError
from deltarefit.localfiles import disk_errors, take_lock, write_durably
from deltarefit.manifest import Header, State

Extents = Sequence[tuple[int, int]]
"""(elements, element width in bytes) of each piece."""
_ALIGN = 64


class ShardBits(Protocol):
    """One array per piece, and a header."""

    def claim(self, extents: Extents) -> None:
        """Make room for all pieces, at once and for good: ``StorageFullError`` now, not SIGBUS later. Content that is
        there for the same extents stays."""

    def array(self, piece: int) -> Elements:
        """The piece's elements, writable, one dimension."""

    def read_header(self) -> Header | None:
        """The header, or None if there is none or it is damaged."""

    def write_header(self, header: Header) -> None:
        """Atomic and durable on return; what a CLEAN header speaks of is durable before it."""

    def close(self) -> None:
        """Let go of memory or file."""


class MemoryBits:
    """``ShardBits`` in memory: gone with the process."""

    def __init__(self) -> None:
        self._arrays: list[Elements] = []
        self._header: Header | None = None

    def claim(self, extents: Extents) -> None:
        if [(a.size, a.itemsize) for a in self._arrays] == list(extents):
            return
        try:
            self._arrays = [np.zeros(numel, f"<u{width}") for numel, width in extents]
        except MemoryError as error:
            total = sum(numel * width for numel, width in extents)
            raise StorageFullError("no memory for the baseline", expected=f"{total} bytes") from error

    def array(self, piece: int) -> Elements:
        return self._arrays[piece]

    def read_header(self) -> Header | None:
        return self._header

    def write_header(self, header: Header) -> None:
        self._header = header

    def close(self) -> None:
        self._arrays = []


class FileBits:
    """``ShardBits`` in ``directory``/``name``.bits, mapped, with the header in a file beside it. One process at a time
    may have it open; another one is refused with ``UnavailableError``."""

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        self._path = Path(directory) / f"{name}.bits"
        self._header_path = Path(directory) / f"{name}.header"
        self._arrays: list[Elements] = []
        self._pages: mmap.mmap | None = None
        with disk_errors(f"cannot open the baseline {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = take_lock(self._path.with_suffix(".lock"), self._path)
        self._unlock = weakref.finalize(self, os.close, lock)  # once, also if nobody closes this

    def claim(self, extents: Extents) -> None:
        offsets, total = _offsets(extents)
        with disk_errors(f"cannot make room for the baseline {self._path}"):
            if self._pages is None or len(self._pages) != total:
                self._map(total)
        raw = np.frombuffer(self._pages, np.uint8) if self._pages is not None else np.empty(0, np.uint8)
        self._arrays = [
            raw[offset : offset + numel * width].view(f"<u{width}")
            for (numel, width), offset in zip(extents, offsets, strict=True)
        ]

    def _map(self, total: int) -> None:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if os.fstat(handle).st_size != total:
                self._header_path.unlink(missing_ok=True)
                os.ftruncate(handle, 0)
            os.posix_fallocate(handle, 0, total)
            self._pages = mmap.mmap(handle, total, mmap.MAP_SHARED)
        finally:
            os.close(handle)

    def array(self, piece: int) -> Elements:
        return self._arrays[piece]

    def read_header(self) -> Header | None:
        with disk_errors(f"cannot read the header of the baseline {self._path}"):
            try:
                return Header.from_bytes(self._header_path.read_bytes(), str(self._header_path))
            except (FileNotFoundError, FormatError):
                return None

    def write_header(self, header: Header) -> None:
        with disk_errors(f"cannot write the header of the baseline {self._path}"):
            if self._pages is not None and header.state is State.CLEAN:
                self._pages.flush()
            write_durably(self._header_path, header.to_bytes())

    def close(self) -> None:
        self._arrays, self._pages = [], None
        self._unlock()


def _offsets(extents: Extents) -> tuple[list[int], int]:
    offsets, end = [], 0
    for numel, width in extents:
        offsets.append(end)
        end += -(-numel * width // _ALIGN) * _ALIGN
    return offsets, max(end, 1)
