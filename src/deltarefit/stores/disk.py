"""Small durable steps on a file system. Used by the directory store only."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from deltarefit.errors import UnavailableError
from deltarefit.localfiles import disk_error, fsync_directory

_PLACE_TRIES = 100
"""How often a concurrent ``delete`` may remove an empty directory between its making and its use."""


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn every ``OSError`` but ``FileNotFoundError`` into an error of ours that starts with ``what``.

    Read-only and forbidden places are ``UsageError``: no retry cures them. Anything unknown (EIO, ESTALE,
    ETIMEDOUT ...) is ``UnavailableError``.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as err:
        raise disk_error(what, err) from err


def make_directories(path: Path) -> None:
    """``mkdir -p``. ``NotADirectoryError`` if a file is in the way, ``FileNotFoundError`` if one vanished."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as err:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{path} is a file") from err
        raise FileNotFoundError(errno.ENOENT, f"{path} was removed") from err


def make_root(path: Path) -> None:
    """``make_directories``, and durable: every new name, and the last one in any case, is fsynced."""
    made = [parent for parent in (path, *path.parents) if not parent.exists()]
    make_directories(path)
    for parent in {path.parent, *(child.parent for child in made)}:
        fsync_directory(parent)


def place(path: Path, step: Callable[[], None]) -> None:
    """Make the directories of ``path`` and run ``step``, which names it; again if they vanish between."""
    for _ in range(_PLACE_TRIES):
        with contextlib.suppress(FileNotFoundError):
            make_directories(path.parent)
            step()
            return
    raise UnavailableError(
        f"cannot place {path}",
        found=f"its directory vanished {_PLACE_TRIES} times",
        next_step="Something else removes directories below this store: stop it.",
    )


def read_range(path: Path, start: int, length: int | None) -> tuple[bytes, int]:
    """The bytes of a range, as far as they exist, and how many names the file has."""
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        rest = max(0, state.st_size - start)
        file.seek(min(start, state.st_size))
        return file.read(rest if length is None else min(length, rest)), state.st_nlink


def file_size(path: Path) -> int:
    """Bytes of a regular file. ``FileNotFoundError`` for anything else, a directory above all."""
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise FileNotFoundError(errno.ENOENT, f"{path} is no file")
    return state.st_size
