"""A Hugging Face checkpoint directory as a target: safetensors files that are written in place.

State lives beside the weights, in ``DIR/.deltarefit/``, and shares their fate::

    header    the state header (docs/format.md)
    layout    which files are ours, their sizes and safetensors headers; written once their space is claimed
    lock      flock of the one process that uses the directory, with its pid
    spool/    see ports.Spool
    seed/     files that users do not see yet; ``finish_seed`` renames them into DIR
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltarefit import safetensors_layout as layouts
from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch, IntegrityError, NotFoundError, UsageError
from deltarefit.localfiles import (
    disk_error,
    disk_errors,
    fsync_directory,
    mapped,
    remove_leftovers,
    take_lock,
    write_durably,
)
from deltarefit.manifest import Catalog, Header
from deltarefit.targets.directory_state import DirectorySpool, claim, refuse_foreign, remove_tree

STATE_DIRECTORY = ".deltarefit"


@dataclass(frozen=True)
class _WeightFile:
    """An open weight file. The descriptor survives the rename of ``finish_seed``."""

    handle: int
    device: int
    inode: int
    size: int
    layout: layouts.FileLayout


class CheckpointTarget:
    """``ports.Target`` over a directory that this object alone uses until ``close`` (or until it is
    collected).

    A new or empty directory is seeded; one that we seeded is opened again, each weight file checked by size
    and header (``IntegrityError`` if truncated or replaced). One that holds weights of anyone else is a
    ``UsageError``, one that another process uses an ``UnavailableError``. ``on_pause`` and ``on_resume``
    tell users of the files to stop reading and to load again; both may be called twice. Not for use in a
    forked child.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        on_pause: Callable[[], None] | None = None,
        on_resume: Callable[[], None] | None = None,
    ) -> None:
        self._root = Path(directory)
        self._state = self._root / STATE_DIRECTORY
        self._seed = self._state / "seed"
        self._on_pause, self._on_resume = on_pause, on_resume
        self._layout: layouts.DirectoryLayout | None = None
        self._weights: dict[str, _WeightFile] = {}
        self._places: tuple[layouts.Place, ...] = ()
        self._written: set[str] = set()
        self._written_lock = threading.Lock()
        self._lost: OSError | None = None
        self._stack = ExitStack()
        self.close = weakref.finalize(self, self._stack.close)
        """Give the directory back; idempotent. Nothing else may be called afterwards."""
        try:
            with disk_errors(f"cannot use {self._root}"):
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        if not self._state.exists():
            refuse_foreign(self._root)
        (self._state / "spool").mkdir(parents=True, exist_ok=True)
        self._stack.callback(os.close, take_lock(self._state / "lock", self._state.parent))
        for directory in (self._state, self._state / "spool"):
            remove_leftovers(directory)
        fsync_directory(self._state)
        fsync_directory(self._root)
        self._load_layout()

    def _load_layout(self) -> None:
        try:
            data = (self._state / "layout").read_bytes()
        except FileNotFoundError:
            refuse_foreign(self._root)
            remove_tree(self._seed)  # claimed by a seed that did not get as far as its layout: nobody's
            return
        self._adopt(layouts.DirectoryLayout.from_bytes(data, str(self._state / "layout")))

    def _adopt(self, layout: layouts.DirectoryLayout) -> None:
        self._weights = {recorded.name: self._open_weights(recorded) for recorded in layout.weights}
        self._places = layouts.places(layout.catalog, {name: w.layout for name, w in self._weights.items()})
        self._layout = layout
        self._written = set(self._weights)  # a process that was killed may have written and not flushed

    def _open_weights(self, recorded: layouts.WeightFile) -> _WeightFile:
        path = self._path(layouts.check_weight_name(recorded.name))
        handle = os.open(path, os.O_RDWR)
        self._stack.callback(os.close, handle)
        state = os.fstat(handle)
        header = os.pread(handle, recorded.header_bytes, 0)
        parsed = layouts.check_weight_file(recorded, header, state.st_size, str(path))
        return _WeightFile(handle, state.st_dev, state.st_ino, state.st_size, parsed)

    def _path(self, name: str) -> Path:
        """Where a file of ours is now: seen by users, or still being seeded."""
        for directory in (self._root, self._seed):
            if (path := directory / name).exists():
                return path
        raise IntegrityError(f"{self._root / name} is gone", next_step=layouts.RESEED)

    @property
    def catalog(self) -> Catalog | None:
        """The catalog it was seeded with, or None before ``seed``."""
        return self._layout.catalog if self._layout else None

    @property
    def spool(self) -> DirectorySpool:
        self._check_open()
        return DirectorySpool(self._state / "spool")

    def read_header(self) -> Header | None:
        path = self._state / "header"
        with disk_errors(f"cannot read {path}"):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
        return Header.from_bytes(data, str(path))

    def write_header(self, header: Header) -> None:
        self._check_open()
        with disk_errors(f"cannot write the header in {self._state}"):
            write_durably(self._state / "header", header.to_bytes())

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        """See ``ports.Target``. ``files`` may hold ``<weight file>.header`` for each weight file; without
        any, all tensors go into ``model.safetensors``. The weight files of the first seed stay: a later one
        with the same catalog refreshes the other side files, with another catalog it is a ``BaseMismatch``.

        Raises ``FormatError`` if the headers do not describe the catalog, ``UsageError`` rather than
        replace a file that is not ours, ``StorageFullError`` with nothing left behind.
        """
        self._check_open()
        described, side = layouts.split_files(catalog, files)
        with disk_errors(f"cannot seed {self._root}"):
            if self._layout is None:
                self._seed_first(catalog, described, side)
            else:
                self._seed_again(self._layout, catalog, side)

    def _seed_first(
        self, catalog: Catalog, described: Mapping[str, layouts.FileLayout], side: Mapping[str, bytes]
    ) -> None:
        refuse_foreign(self._root, [*described, *side])
        layout = layouts.directory_layout(catalog, described, side)
        try:
            remove_tree(self._seed)
            self._seed.mkdir()
            claim(self._seed, described)
            self._hide_side_files(side)
            fsync_directory(self._state)
            write_durably(self._state / "layout", layout.to_bytes())
        except BaseException:
            if not (self._state / "layout").exists():
                remove_tree(self._seed)
            raise
        self._adopt(layout)

    def _seed_again(self, ours: layouts.DirectoryLayout, catalog: Catalog, side: Mapping[str, bytes]) -> None:
        if ours.catalog != catalog:
            raise BaseMismatch(
                f"{self._root} holds another catalog",
                expected=ours.catalog.identity,
                found=catalog.identity,
                next_step="Give each run an empty directory of its own.",
            )
        kept = {name: data for name, data in side.items() if name != layouts.INDEX_FILE}  # it belongs to our files
        refuse_foreign(self._root, set(kept) - set(ours.files), weights=False)
        self._layout = layouts.DirectoryLayout(catalog, ours.weights, tuple(sorted({*ours.files, *kept})))
        self._seed.mkdir(exist_ok=True)
        write_durably(self._state / "layout", self._layout.to_bytes())
        self._hide_side_files(kept)

    def _hide_side_files(self, side: Mapping[str, bytes]) -> None:
        for name, data in side.items():
            write_durably(self._seed / name, data)
        fsync_directory(self._seed)

    def finish_seed(self) -> None:
        """Rename all seeded files into the directory, weights first. Killed at any instant, it is called
        again."""
        self._check_open()
        if self._layout is None:
            raise UsageError(f"{self._root} is not seeded", next_step="Call seed first.")
        self.flush()
        with disk_errors(f"cannot finish the seed of {self._root}"):
            for name in (*self._weights, *self._layout.files):
                self._show(name)
            fsync_directory(self._root)
            remove_tree(self._seed)

    def _show(self, name: str) -> None:
        hidden, shown = self._seed / name, self._root / name
        if not hidden.exists():
            return
        if name in self._weights and shown.exists():
            raise UsageError(f"{shown} appeared while the directory was seeded", next_step="Move it away, then retry.")
        hidden.replace(shown)

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        """Exactly elements [start, stop), flat, mapped from the file; a written-back copy where it holds
        them unaligned.

        Raises ``IntegrityError`` if the weight file was truncated, replaced or removed since it was opened.
        A file that is cut short inside the block kills the process (SIGBUS), as with any memory map.
        """
        weights, name, offset, width = self._located(tensor, start, stop)
        self._check_file(name, weights)
        self._mark_written(name)
        try:
            with mapped(weights.handle, offset, stop - start, width, writable=True) as elements:
                yield elements, 0
        finally:
            self._mark_written(name)  # again: a flush meanwhile has not seen all that this block wrote

    def _mark_written(self, name: str) -> None:
        with self._written_lock:
            self._written.add(name)

    def _located(self, tensor: int, start: int, stop: int) -> tuple[_WeightFile, str, int, int]:
        self._check_open()
        if self._layout is None:
            raise NotFoundError(f"{self._root} is empty", next_step="Seed it first.")
        entry, place = self._layout.catalog.tensors[tensor], self._places[tensor]
        if not 0 <= start <= stop <= entry.numel:
            raise UsageError(
                f"no range of {entry.name}", expected=f"within [0, {entry.numel})", found=f"[{start}, {stop})"
            )
        return self._weights[place.file], place.file, place.offset + start * entry.width, entry.width

    def _check_file(self, name: str, weights: _WeightFile) -> None:
        try:
            state = self._path(name).stat()
        except OSError as error:
            raise disk_error(f"cannot use {self._root / name}", error) from error
        found = (state.st_dev, state.st_ino, state.st_size)
        if found != (expected := (weights.device, weights.inode, weights.size)):
            raise IntegrityError(
                f"{self._root / name} was truncated or replaced",
                expected=f"device, inode, size {expected}",
                found=found,
                next_step=layouts.RESEED,
            )

    def flush(self) -> None:
        """fdatasync of every file that had a window. After a failure bits may be lost for good, so it stays
        failed."""
        self._check_open()
        with self._written_lock:
            names, self._written = self._written, set()
        try:
            for name in names:
                os.fdatasync(self._weights[name].handle)
        except OSError as error:
            self._lost = error
        if self._lost:
            raise IntegrityError(
                f"the disk of {self._root} did not keep what was written",
                found=self._lost,
                next_step=f"Check the disk. {layouts.RESEED}",
            ) from self._lost

    def pause(self) -> None:
        if self._on_pause:
            self._on_pause()

    def resume(self) -> None:
        if self._on_resume:
            self._on_resume()

    def _check_open(self) -> None:
        if not self.close.alive:
            raise UsageError(f"{self._root} is closed", next_step="Make a new CheckpointTarget.")
