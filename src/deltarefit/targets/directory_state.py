"""What a checkpoint directory needs beside its weights: one owner, a spool, and claimed space."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from deltarefit.errors import StorageFullError, UsageError
from deltarefit.localfiles import FULL, disk_error, disk_errors, fsync_directory, write_durably
from deltarefit.safetensors_layout import FileLayout

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_SPOOL_NAME = re.compile(r"[0-9a-f]+(\.[0-9a-f]+)*")


class DirectorySpool:
    """``ports.Spool`` as files in a directory: each written durably and as a whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, name: str, data: bytes | memoryview) -> None:
        with disk_errors(f"cannot write to the spool {self._directory}"):
            write_durably(self._path(name), data)

    def get(self, name: str) -> bytes | None:
        with disk_errors(f"cannot read the spool {self._directory}"):
            try:
                return self._path(name).read_bytes()
            except FileNotFoundError:
                return None

    def clear(self) -> None:
        with disk_errors(f"cannot clear the spool {self._directory}"):
            if not self._directory.exists():
                return
            for path in self._directory.iterdir():
                path.unlink(missing_ok=True)
            fsync_directory(self._directory)

    def _path(self, name: str) -> Path:
        if not _SPOOL_NAME.fullmatch(name):
            raise UsageError("bad spool name", expected="hex digits and dots", found=repr(name)[:80])
        return self._directory / name


def refuse_foreign(root: Path, names: Iterable[str] = (), *, weights: bool = True) -> None:
    """Refuse a directory that holds weights (of anyone), or files of these names. Raises ``UsageError``."""
    found = [path.name for path in root.iterdir() if weights and path.suffix in _WEIGHT_SUFFIXES]
    found += [name for name in names if (root / name).exists()]
    if found:
        raise UsageError(
            f"{root} holds files that deltarefit did not put there",
            found=", ".join(sorted(set(found))[:8]),
            next_step="Give an empty directory: existing files are never overwritten.",
        )


def claim(directory: Path, described: Mapping[str, FileLayout]) -> None:
    """Create all weight files at full size, with their headers, durably. ``StorageFullError`` if no room."""
    disk = os.statvfs(directory)
    needed, free = sum(layout.size for layout in described.values()), disk.f_bavail * disk.f_frsize
    if needed > free:  # asked first: filling the disk up to learn it would hurt everyone else on it
        raise _full(directory, needed, f"{free} bytes")
    for name, layout in described.items():
        with (directory / name).open("xb", buffering=0) as file:
            _allocate(file.fileno(), layout.size, directory)
            os.pwrite(file.fileno(), layout.header, 0)
            os.fsync(file.fileno())


def _allocate(handle: int, size: int, directory: Path) -> None:
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno in FULL:
            raise _full(directory, size, error.strerror) from error
        raise disk_error(f"cannot allocate {size} bytes in {directory}", error) from error


def _full(directory: Path, needed: int, found: object) -> StorageFullError:
    return StorageFullError(
        f"no room for the weights in {directory.parent.parent}",
        expected=f"{needed} bytes",
        found=found,
        next_step="Make room or give a directory on a larger disk; nothing was left behind.",
    )


def remove_tree(directory: Path) -> None:
    """Remove a directory and all in it, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)
