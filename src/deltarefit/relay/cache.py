"""A bounded directory of content-named objects, whole ones and those that are arriving.

Files are named by their SHA-256 and by nothing that came over a network. A whole one survives a restart, and is proven
again before it is served: nobody knows what happened to it meanwhile. A directory belongs to one relay at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import OrderedDict
from pathlib import Path

from deltarefit.errors import UnavailableError, UsageError
from deltarefit.localfiles import disk_errors, take_lock
from deltarefit.relay.arriving import Arrival

_NAME = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PART = ".part"
UNREAD_S = 120.0
"""How long an object that was fetched ahead is kept for those who have not read it yet."""


class Cache:
    """At most ``limit`` bytes below ``directory``, which is made. Least recently used objects go first. Raises
    ``UsageError`` if the directory is another relay's or holds what no relay put there. Used by one event loop only."""

    def __init__(self, directory: Path, limit: int, chunk_bytes: int) -> None:
        self.limit, self._directory, self._chunk_bytes = limit, directory, chunk_bytes
        self._objects: OrderedDict[str, Arrival] = OrderedDict()
        self._since: dict[str, float] = {}
        self.used = 0
        with disk_errors(f"cannot use {directory} as a cache"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_ours()
            self._lock = take_lock(directory / "lock", directory)
            self._take_over()

    def close(self) -> None:
        """Let go of the directory; whole objects stay."""
        os.close(self._lock)

    def get(self, sha256: str) -> Arrival | None:
        """The object, whole or arriving."""
        arrival = self._objects.get(sha256)
        if arrival is not None:
            self._objects.move_to_end(sha256)
        return arrival

    def begin(self, sha256: str, size: int, *, wanted: bool) -> Arrival | None:
        """An object that is about to arrive, with its room taken; None if there is no room. For one that is ``wanted``
        now any whole object makes room; for one fetched ahead only those
        that were read, or that nobody has read for long."""
        if not self._make_room(size, wanted=wanted):
            return None
        path = self._directory / f"{sha256}-{os.urandom(4).hex()}{_PART}"  # its own: an older one may still be written
        with disk_errors(f"cannot keep an object of {size} bytes in {self._directory}"):
            _claim(path, size)
        arrival = Arrival(sha256, size, path, self._chunk_bytes)
        self._add(arrival)
        return arrival

    def keep(self, arrival: Arrival) -> None:
        """It is proven: give it its name. One that was dropped meanwhile is gone."""
        if self._objects.get(arrival.sha256) is not arrival:
            raise UnavailableError("the relay's copy has just gone", next_step="Fetch it again.")
        path = self._directory / arrival.sha256
        if arrival.path != path:
            arrival.path.replace(path)
            arrival.path = path
        arrival.prove()

    def adopt(self, sha256: str, size: int, path: Path) -> None:
        """Take a proven file of the same file system as an object, if there is room; it is renamed."""
        if sha256 in self._objects or not self._make_room(size, wanted=False):
            return
        arrival = Arrival.kept(sha256, size, path)
        self._add(arrival)
        self.keep(arrival)

    def drop(self, arrival: Arrival) -> None:
        """Forget it. Those who have its file open may read on."""
        if self._objects.get(arrival.sha256) is arrival:
            del self._objects[arrival.sha256], self._since[arrival.sha256]
            self.used -= arrival.size
        with contextlib.suppress(OSError):
            arrival.path.unlink(missing_ok=True)

    def spool(self) -> Path:
        """A name for a file that is being uploaded."""
        return self._directory / f"upload-{os.urandom(8).hex()}{_PART}"

    def _add(self, arrival: Arrival) -> None:
        self._objects[arrival.sha256], self._since[arrival.sha256] = arrival, time.monotonic()
        self.used += arrival.size

    def _make_room(self, size: int, *, wanted: bool) -> bool:
        idle = [held for held in self._objects.values() if not held.filling]
        old = time.monotonic() - UNREAD_S
        may_go = [held for held in idle if wanted or held.read or self._since[held.sha256] < old]
        missing = self.used + size - self.limit
        chosen: list[Arrival] = []
        for held in may_go:
            if missing <= 0:
                break
            chosen.append(held)
            missing -= held.size
        if missing > 0:
            return False
        for held in chosen:
            self.drop(held)
        return True

    def _take_over(self) -> None:
        """Whole objects that an earlier relay left, oldest first, as far as they fit; what was arriving is lost."""
        for path in sorted(self._directory.iterdir(), key=lambda path: path.stat().st_mtime):
            if _NAME.fullmatch(path.name) and self._make_room(size := path.stat().st_size, wanted=True):
                self._add(Arrival.kept(path.name, size, path))
            elif path.name != "lock":
                path.unlink()

    def _check_ours(self) -> None:
        strange = [path.name for path in self._directory.iterdir() if not _ours(path.name)]
        if strange:
            raise UsageError(
                f"{self._directory} is no cache of a relay",
                expected="an empty or new directory",
                found=strange[0][:80],
                next_step="Give another --dir.",
            )


def _ours(name: str) -> bool:
    return name == "lock" or name.endswith(_PART) or _NAME.fullmatch(name) is not None


def _claim(path: Path, size: int) -> None:
    """A new file with all its space: a full disk is found now and not in the middle (F37)."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if size:
            os.posix_fallocate(handle, 0, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
