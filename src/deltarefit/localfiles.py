"""Local files for adapters: durable small writes, mapped windows of large files, errno in our words. No
policy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltarefit.elements import Elements
from deltarefit.errors import NotFoundError, RefitError, StorageFullError, UnavailableError, UsageError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
_LEFTOVER = "~"
"""Last character of the name of a file that is still being written."""


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an ``OSError`` into an error of this package that starts with ``what``."""
    try:
        yield
    except OSError as error:
        raise disk_error(what, error) from error


def disk_error(what: str, error: OSError) -> RefitError:
    """The error of this package that says what ``error`` says; only what a retry may cure is retryable."""
    found = f"{errno.errorcode.get(error.errno or 0, 'an error')}: {error.strerror or error}"
    if error.errno in FULL:
        return StorageFullError(what, found=found, next_step="Make room (or raise the quota), then run it again.")
    if error.errno in _REFUSED:
        return UsageError(
            what, found=found, next_step="Make it readable and writable for this user, or give another path."
        )
    if error.errno == errno.ENOENT:
        return NotFoundError(what, found=found, next_step="Check the path.")
    return UnavailableError(what, found=found, next_step="Check the disk or mount, then run it again.")


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync directories; nothing more can be done
            raise
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Replace the file as a whole: after a crash at any instant it has the old bytes or the new ones."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_LEFTOVER}")
    try:
        write_new(temporary, memoryview(data).cast("B"))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_new(path: Path, data: memoryview) -> None:
    """Write flat bytes to a new file and fsync it. Its name is not durable yet."""
    with path.open("xb", buffering=0) as file:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())


def remove_leftovers(directory: Path) -> None:
    """Remove what an interrupted ``write_durably`` left. Only for the one process that owns the directory."""
    for path in directory.iterdir():
        if path.name.endswith(_LEFTOVER):
            path.unlink()


def take_lock(path: Path, what: Path) -> int:
    """Lock the file, which guards ``what``, and write our pid into it; the lock lives as long as the descriptor that is
    returned.

    Raises ``UnavailableError`` that names the owner's pid. Never waits.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(handle, 20, 0).decode(errors="replace") or "unknown"
        os.close(handle)
        raise UnavailableError(
            f"{what} is in use",
            found=f"process {owner}, or a child it forked",
            next_step="Stop it, or give another directory.",
        ) from error
    except OSError:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def mapped(handle: int, offset: int, count: int, width: int, *, writable: bool = False) -> Iterator[Elements]:
    """Map just the pages that hold ``count`` elements of ``width`` bytes at byte ``offset`` of an open file.

    Gives a flat view, writable if asked for (writes go to the file). The pages leave this process's memory
    when the block ends, even if the caller still holds the view. Where ``offset`` is no multiple of
    ``width`` the view is an aligned copy, written back at the end of the block if it changed. The file must
    be as long as it takes.
    """
    if count == 0:
        empty = np.empty(0, f"u{width}")
        empty.flags.writeable = writable
        yield empty
        return
    skip = offset % mmap.ALLOCATIONGRANULARITY
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        pages = mmap.mmap(handle, skip + count * width, mmap.MAP_SHARED, protection, offset=offset - skip)
    except OSError as error:
        raise disk_error("cannot map a file", error) from error
    try:
        if offset % width:
            with _bounced(np.frombuffer(pages, "u1", count * width, skip), width) as copy:
                yield copy
        else:
            yield np.frombuffer(pages, f"u{width}", count, skip)
    finally:
        _release(pages)


@contextlib.contextmanager
def _bounced(raw: npt.NDArray[np.uint8], width: int) -> Iterator[Elements]:
    copy = raw.copy()
    view = copy.view(f"u{width}")
    view.flags.writeable = raw.flags.writeable
    try:
        yield view
    finally:
        # a window that only read must dirty no page
        if raw.flags.writeable and not np.array_equal(raw, copy):
            raw[:] = copy


def _release(pages: mmap.mmap) -> None:
    """Unmap; if a view is still held, drop the pages now and let the last view unmap the range."""
    pages.madvise(mmap.MADV_DONTNEED)
    with contextlib.suppress(BufferError):
        pages.close()
