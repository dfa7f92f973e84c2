"""A safetensors file, or a Hugging Face checkpoint directory, as a source of bits."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltarefit import safetensors_layout as layout
from deltarefit.elements import Elements
from deltarefit.errors import FormatError, IntegrityError, NotFoundError, UsageError
from deltarefit.exchange import WholeTensors
from deltarefit.localfiles import disk_errors, mapped
from deltarefit.manifest import Catalog

MAX_FILE_BYTES = 64 << 20
"""Most bytes of one side file."""
SIDE_FILES = (
    "config.json", "*_config.json", "configuration.json", "tokenizer*", "tekken.json", "vocab*", "merges*",
    "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.jinja", "*.model", "*.tiktoken",
    layout.INDEX_FILE,
)  # fmt: skip
"""Names of the side files an anchor carries, if they also end in one of ``safetensors_layout.FILE_SUFFIXES``.
A list of what is known to be public and needed: a checkpoint directory may hold anything."""


@dataclass(frozen=True)
class _Identity:
    """What changes when someone writes or replaces a file."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, state: os.stat_result) -> _Identity:
        return cls(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)


@dataclass(frozen=True)
class _WeightFile:
    path: Path
    layout: layout.FileLayout
    identity: _Identity


class CheckpointSource(WholeTensors):
    """``ports.Source`` over finished safetensors files, read through memory maps. Thread-safe; holds no
    file open.

    ``path`` is a ``.safetensors`` file, or a directory with ``model.safetensors``, with an index and its
    shards, or with any ``*.safetensors``. Headers are parsed strictly (``FormatError``). A file that
    changes after this was made is an ``IntegrityError`` when it is next read; a file cut short under a
    running read kills the process (SIGBUS), so write checkpoints elsewhere and rename them.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        with disk_errors(f"cannot read {self._path}"):
            directory = stat.S_ISDIR(self._path.stat().st_mode)
            self._sides = _side_files(self._path) if directory else {}
            names = self._names() if directory else (layout.check_weight_name(self._path.name),)
            root = self._path if directory else self._path.parent
            self._files = {name: _open(root / layout.check_weight_name(name)) for name in names}
        layouts = {name: file.layout for name, file in self._files.items()}
        if layout.INDEX_FILE in self._sides:
            layout.check_index(_read_side(self._sides[layout.INDEX_FILE]), layouts)
        self._catalog = layout.catalog_of_files(layouts)
        self._places = layout.places(self._catalog, layouts)

    def _names(self) -> tuple[str, ...]:
        index = self._sides.get(layout.INDEX_FILE)
        every = [path.name for path in self._path.iterdir()]
        return layout.choose_weight_files(every, _read_side(index) if index else None)

    @property
    def catalog(self) -> Catalog:
        """All tensors of all weight files, sorted by name. Files hold no ties, so there are no aliases."""
        return self._catalog

    def files(self) -> Mapping[str, bytes]:
        """Side files of the directory (``SIDE_FILES``), and the verbatim header of every weight file as
        ``<weight file>.header``: with the bits they make a byte-identical directory. A single file has its
        header only."""
        found = {name: _read_side(path) for name, path in self._sides.items()}
        found.update({name + layout.HEADER_SUFFIX: file.layout.header for name, file in self._files.items()})
        return found

    @contextmanager
    def read(self, tensor: int, start: int, stop: int) -> Iterator[Elements]:
        """Elements [start, stop) as a read-only flat array, mapped (or copied where the file holds them
        unaligned).

        Memory is bounded by the range and given back at the end of the block. ``IntegrityError`` if the
        file is not the one that was opened, before the block or after it.
        """
        entry, place = self._catalog.tensors[tensor], self._places[tensor]
        if not 0 <= start <= stop <= entry.numel:
            raise UsageError(
                f"no range of {entry.name}", expected=f"within [0, {entry.numel})", found=f"[{start}, {stop})"
            )
        file = self._files[place.file]
        handle = _reopen(file)
        try:
            _check_unchanged(file, os.fstat(handle))
            with mapped(handle, place.offset + start * entry.width, stop - start, entry.width) as elements:
                yield elements
            _check_unchanged(file, os.fstat(handle))
        finally:
            os.close(handle)


def _open(path: Path) -> _WeightFile:
    with path.open("rb") as file:
        identity = _Identity.of(os.fstat(file.fileno()))
        start = file.read(layout.LENGTH_BYTES)
        header = start + file.read(layout.header_bytes(start, str(path)) - layout.LENGTH_BYTES)
    parsed = layout.parse_header(header, str(path))
    if parsed.size != identity.size:
        raise FormatError(
            f"{path}: wrong size for its header",
            expected=f"{parsed.size} bytes",
            found=f"{identity.size} bytes",
            next_step="It is truncated or still being written: copy or save it again.",
        )
    return _WeightFile(path, parsed, identity)


def _reopen(file: _WeightFile) -> int:
    try:
        with disk_errors(f"cannot read {file.path}"):
            return os.open(file.path, os.O_RDONLY)
    except NotFoundError as error:
        raise _changed(file, "no file there") from error


def _check_unchanged(file: _WeightFile, state: os.stat_result) -> None:
    if (found := _Identity.of(state)) != file.identity:
        raise _changed(file, found)


def _changed(file: _WeightFile, found: object) -> IntegrityError:
    return IntegrityError(
        f"{file.path} changed after it was opened",
        expected=file.identity,
        found=found,
        next_step="Publish from files that no one writes: save to a new directory, then open that.",
    )


def _side_files(directory: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(directory.iterdir()) if _wanted(path.name) and path.is_file()}


def _wanted(name: str) -> bool:
    if name.startswith(".") or Path(name).suffix not in layout.FILE_SUFFIXES:
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SIDE_FILES)


def _read_side(path: Path) -> bytes:
    layout.check_file_name(path.name)
    with disk_errors(f"cannot read {path}"), path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(
            f"side file {path} is too large",
            expected=f"<= {MAX_FILE_BYTES} bytes",
            next_step="Move it out of the checkpoint directory if the model does not need it.",
        )
    return data
