"""A directory as a store: the embedded default, durable on return, with atomic create-once.

An object is a file below the root. It is written to ``~tmp/`` (no key can name that), fsynced, and put in
place by one ``rename`` (put) or ``link`` (create: fails if the name is taken, so exactly one racer wins).
Then every directory up to the root is fsynced, because any of them may be new. obstore's local store takes
the same steps without any fsync: a power loss could take back a commit that receivers acted on.

Between ``link`` and the last fsync a created object is visible but not yet durable. Its file then has two
names, so a reader who finds two makes it durable itself before it returns the bytes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deltarefit.errors import AlreadyExistsError, RefitError, UnavailableError, UsageError
from deltarefit.localfiles import fsync_directory, write_new
from deltarefit.storekeys import check_key, check_prefix, check_range, flat, is_key, missing
from deltarefit.stores.disk import (
    disk_errors,
    file_size,
    make_root,
    place,
    read_range,
)

_TMP = "~tmp"
_STALE_S = 24 * 3600.0
"""A file in ``~tmp`` older than this belongs to a writer that died."""


class DirectoryStore:
    """Files below ``root``, which is made if it is not there. Thread- and process-safe.

    Needs a file system with atomic ``link`` and ``rename``; run ``deltarefit doctor`` on a network one.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()
        self._tmp = self._root / _TMP
        with disk_errors(f"cannot use {self._root} as a store"):
            make_root(self._tmp)
            self._sweep()

    @property
    def url(self) -> str:
        """``file://`` and the absolute path."""
        return f"file://{self._root}"

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self._root)!r})"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See ``Store.put``."""
        path = self._path(key)
        with self._doing("write", key), self._written(data) as temporary:
            place(path, lambda: _rename(temporary, path))
            self._settle(path)

    def create(self, key: str, data: bytes) -> None:
        """See ``Store.create``."""
        path = self._path(key)
        with self._doing("create", key), self._written(data) as temporary:
            try:
                place(path, lambda: path.hardlink_to(temporary))
            except FileExistsError:
                raise self._taken(key, path) from None
            self._settle(path)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See ``Store.get``. Fewer bytes where the object ends before the range does."""
        path = self._path(key)
        check_range(start, length)
        with self._doing("read", key), _absent_if_not_a_file():
            data, names = read_range(path, start, length)
            if names > 1:
                self._settle(path)
            return data

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        path = self._path(key)
        with self._doing("read", key), _absent_if_not_a_file():
            return file_size(path)

    def file(self, key: str) -> Path | None:
        """See ``LocalFiles.file``."""
        path = self._path(key)
        with self._doing("read", key):
            try:
                state = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                if not self._tmp.is_dir():
                    raise
                return None
            if not stat.S_ISREG(state.st_mode):
                return None
            if state.st_nlink > 1:
                self._settle(path)
            return path

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See ``Store.list``. Objects that come or go meanwhile may or may not be listed."""
        below = check_prefix(prefix)
        with self._doing("list", below):
            return iter(sorted(self._walk(self._root / below)))

    def delete(self, key: str) -> None:
        """See ``Store.delete``. Not fsynced: a power loss may bring the object back, which harms nobody."""
        path = self._path(key)
        with self._doing("delete", key):
            with contextlib.suppress(IsADirectoryError, NotADirectoryError):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # in use again, or gone already
                for parent in self._parents(path)[:-1]:
                    parent.rmdir()

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _parents(self, path: Path) -> Sequence[Path]:
        """Directories from the one that holds ``path`` up to the root."""
        return [self._root / part for part in path.relative_to(self._root).parents]

    def _settle(self, path: Path) -> None:
        """Make the name durable. If a directory is gone, a delete took the object: nothing to keep."""
        for parent in self._parents(path):
            with contextlib.suppress(FileNotFoundError):
                fsync_directory(parent)

    def _taken(self, key: str, path: Path) -> AlreadyExistsError | UsageError:
        if path.is_dir():
            return UsageError(
                f"{key!r} in {self.url} is a directory",
                next_step="A key cannot also be the start of other keys.",
            )
        self._settle(path)  # the caller may act on this answer, so it must outlive a power loss
        return AlreadyExistsError(
            f"object {key!r} in {self.url} exists",
            next_step="Read it back: it may be your own earlier success.",
        )

    @contextlib.contextmanager
    def _written(self, data: bytes | memoryview) -> Iterator[Path]:
        """A fsynced file in ``~tmp`` with ``data``; that name is removed at the end."""
        temporary = self._tmp / secrets.token_hex(8)
        try:
            write_new(temporary, flat(data))
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _doing(self, verb: str, key: str) -> Iterator[None]:
        try:
            with disk_errors(f"cannot {verb} {key!r} in {self.url}"):
                yield
        except FileNotFoundError:
            raise self._missing(key) from None

    def _missing(self, key: str) -> RefitError:
        """Silence from a directory that is itself gone (unmounted?) must not read as "no such version"."""
        if self._tmp.is_dir():
            return missing(key, self.url)
        return UnavailableError(
            f"the directory of store {self.url} is gone", next_step="Mount or restore it, then run it again."
        )

    def _walk(self, top: Path) -> Iterator[tuple[str, int]]:
        for folder, folders, files in os.walk(top, onerror=_raise_unless_gone):
            folders[:] = filter(is_key, folders)
            for path in (Path(folder, name) for name in files if is_key(name)):
                with contextlib.suppress(FileNotFoundError):
                    yield path.relative_to(self._root).as_posix(), file_size(path)

    def _sweep(self) -> None:
        """Remove what writers that died left behind, if this user may."""
        for left in self._tmp.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()


def _rename(old: Path, new: Path) -> None:
    old.replace(new)


@contextlib.contextmanager
def _absent_if_not_a_file() -> Iterator[None]:
    """A directory, or a key below a file, is no object: the same answer as for a missing one."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError) as err:
        raise FileNotFoundError(str(err)) from err


def _raise_unless_gone(err: OSError) -> None:
    if not isinstance(err, FileNotFoundError | NotADirectoryError):
        raise err
