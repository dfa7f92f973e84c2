"""Where tensors lie in safetensors files: strict header parsing, and the layout of a checkpoint directory.
Pure.

A header here is the verbatim start of a weight file: 8 bytes little-endian length, then JSON. Parsing is
stricter than most readers: what does not describe every data byte exactly once, in known dtypes, is a
``FormatError``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deltarefit.errors import FormatError, IntegrityError, UsageError
from deltarefit.manifest import WIDTHS, Catalog, FileRef, TensorEntry
from deltarefit.records import Record

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Most bytes of JSON in a header; the limit of the safetensors library."""
WEIGHTS_SUFFIX = ".safetensors"
HEADER_SUFFIX = ".header"
"""Side file ``<weight file>.header`` holds the verbatim header of a weight file, so that it can be laid out
again."""
DEFAULT_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILE_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
"""Side files end in one of these. Nothing that any loader would run as code does."""

RESEED = "Remove the weight files and the .deltarefit directory beside them, then follow again: it is seeded anew."

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_INFO_KEYS = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """A canonical tensor and the byte in its file at which its elements start."""

    entry: TensorEntry
    offset: int


@dataclass(frozen=True)
class FileLayout:
    """One weight file: its verbatim header, its size in bytes, its tensors by offset."""

    header: bytes
    size: int
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class Place:
    """Where a tensor of a catalog lies: file name, and byte offset in that file."""

    file: str
    offset: int


@dataclass(frozen=True)
class WeightFile(Record):
    """A weight file of a directory: SHA-256 and length of its verbatim header, and its whole size in
    bytes."""

    name: str
    header: str
    header_bytes: int
    size: int


@dataclass(frozen=True)
class DirectoryLayout(Record):
    """What a seeded directory consists of: its catalog, its weight files, the names of its side files."""

    catalog: Catalog
    weights: tuple[WeightFile, ...]
    files: tuple[str, ...]


def header_bytes(start: bytes, where: str) -> int:
    """Length of a whole header (length field and JSON), from the first bytes of the file."""
    if len(start) < LENGTH_BYTES:
        raise FormatError(f"{where}: no safetensors file", expected=">= 8 bytes", found=f"{len(start)} bytes")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"{where}: header too large", expected=f"<= {MAX_HEADER_BYTES} bytes", found=length)
    return LENGTH_BYTES + length


def parse_header(header: bytes, where: str) -> FileLayout:
    """The layout that a verbatim header describes. Raises ``FormatError`` that starts with ``where``."""
    if header_bytes(header, where) != len(header):
        raise FormatError(f"{where}: truncated header", expected=header_bytes(header, where), found=len(header))
    body = _json_object(header[LENGTH_BYTES:], where)
    _check_metadata(body.pop(_METADATA, {}), where)
    ranged = sorted((_stored(name, info, where) for name, info in body.items()), key=lambda item: item[:2])
    end = 0
    for begin, stop, entry in ranged:
        if begin != end:
            raise FormatError(f"{where}: data of {entry.name!r} leaves a gap or overlaps", expected=end, found=begin)
        end = stop
    tensors = tuple(StoredTensor(entry, len(header) + begin) for begin, _, entry in ranged)
    return FileLayout(header, len(header) + end, tensors)


def _json_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        body = json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_int=_whole,
            parse_float=_refuse,
            parse_constant=_refuse,
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: header is not JSON as safetensors has it: {error}") from error
    if not isinstance(body, dict) or text[:1] != b"{":
        raise FormatError(f"{where}: header is not a JSON object")
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a name stands twice")
    for name in body:
        name.encode()  # lone surrogates have no UTF-8
    return body


def _whole(text: str) -> int:
    if len(text) > 20 or text[0] == "-" or int(text) >= 1 << 64:
        raise ValueError(f"number {text[:20]} is out of range")
    return int(text)


def _refuse(text: str) -> Any:
    raise ValueError(f"number {text[:20]} is not an integer")


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{where}: {_METADATA} is not an object of strings")


def _stored(name: str, info: Any, where: str) -> tuple[int, int, TensorEntry]:
    what = f"{where}: tensor {name[:200]!r}"
    if not isinstance(info, dict) or set(info) != _INFO_KEYS:
        raise FormatError(f"{what}: wrong fields", expected=sorted(_INFO_KEYS))
    begin, stop = _integers(info["data_offsets"], what, 2)
    entry = _entry(name, info["dtype"], _integers(info["shape"], what), what)
    if stop - begin != entry.nbytes:
        raise FormatError(f"{what}: wrong size", expected=f"{entry.nbytes} bytes", found=f"{stop - begin} bytes")
    return begin, stop, entry


def _integers(value: Any, what: str, length: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise FormatError(f"{what}: not a list of whole numbers", found=repr(value)[:80])
    if length is not None and len(value) != length:
        raise FormatError(f"{what}: wrong number of offsets", expected=length, found=len(value))
    return tuple(value)


def _entry(name: str, dtype: Any, shape: tuple[int, ...], what: str) -> TensorEntry:
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise FormatError(f"{what}: unknown dtype", expected=f"one of {', '.join(WIDTHS)}", found=repr(dtype)[:40])
    try:
        return TensorEntry(name, dtype, _byte_shape(dtype, shape))
    except ValueError as error:
        raise FormatError(f"{what}: {error}") from error


def _byte_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Catalog shape: for sub-byte dtypes the last dimension counts bytes if it fills whole ones, else one
    flat dimension counts all bytes."""
    bits = _BITS.get(dtype)
    if bits is None:
        return shape
    if shape and shape[-1] * bits % 8 == 0:
        return (*shape[:-1], shape[-1] * bits // 8)
    if (total := math.prod(shape) * bits) % 8:
        raise ValueError(f"{total} bits are not whole bytes")
    return (total // 8,)


def default_header(catalog: Catalog) -> bytes:
    """Header of one file with the whole catalog: widest elements first, so that all lie aligned, else in
    order."""
    body: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for entry in sorted(catalog.tensors, key=lambda entry: -entry.width):
        shape = _header_shape(entry)
        body[entry.name] = {"dtype": entry.dtype, "shape": shape, "data_offsets": [end, end + entry.nbytes]}
        end += entry.nbytes
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            "catalog too large for one file", expected=f"<= {MAX_HEADER_BYTES} header bytes", found=len(text)
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _header_shape(entry: TensorEntry) -> list[int]:
    bits = _BITS.get(entry.dtype)
    if bits is None:
        return list(entry.shape)
    if not entry.shape or entry.shape[-1] * 8 % bits:
        raise FormatError(f"tensor {entry.name!r}: {entry.shape} bytes hold no whole {entry.dtype} elements")
    return [*entry.shape[:-1], entry.shape[-1] * 8 // bits]


def catalog_of_files(layouts: Mapping[str, FileLayout]) -> Catalog:
    """All tensors of some weight files, by name. ``FormatError`` if two files hold one name."""
    holder: dict[str, str] = {}
    for file, layout in layouts.items():
        for tensor in layout.tensors:
            if (other := holder.setdefault(tensor.entry.name, file)) != file:
                raise FormatError(f"tensor {tensor.entry.name!r} stands in {other} and in {file}")
    entries = [tensor.entry for layout in layouts.values() for tensor in layout.tensors]
    try:
        return Catalog(tuple(sorted(entries, key=lambda entry: entry.name)))
    except ValueError as error:
        raise FormatError(f"weight files: {error}") from error


def places(catalog: Catalog, layouts: Mapping[str, FileLayout]) -> tuple[Place, ...]:
    """Where each tensor of ``catalog`` lies, in catalog order. A file may use a tied name for it.

    Raises ``FormatError`` unless the files hold exactly the catalog: names, dtypes and shapes.
    """
    found: dict[int, Place] = {}
    wrong: list[str] = []
    for file, layout in layouts.items():
        for tensor in layout.tensors:
            number = catalog.index.get(tensor.entry.name)
            if number is None or number in found or not _same(catalog.tensors[number], tensor.entry):
                wrong.append(f"{tensor.entry.name} in {file}")
            else:
                found[number] = Place(file, tensor.offset)
    wrong += [f"{entry.name} in no file" for number, entry in enumerate(catalog.tensors) if number not in found]
    if wrong:
        raise FormatError("weight files do not hold exactly the catalog", found=_listed(wrong))
    return tuple(found[number] for number in range(len(catalog.tensors)))


def _same(one: TensorEntry, other: TensorEntry) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def check_index(data: bytes, layouts: Mapping[str, FileLayout]) -> None:
    """Refuse an index file that does not name exactly the tensors of these weight files, each in its file."""
    stated = index_map(data)
    held = {tensor.entry.name: file for file, layout in layouts.items() for tensor in layout.tensors}
    wrong = sorted(name for name in {*stated, *held} if stated.get(name) != held.get(name))
    if wrong:
        raise FormatError(
            f"{INDEX_FILE} does not match the weight files",
            found=_listed(wrong),
            next_step="Save the checkpoint again, or pass a directory whose index is right.",
        )


def index_map(data: bytes) -> dict[str, str]:
    """Weight file by tensor name, of an index file's bytes."""
    try:
        body = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{INDEX_FILE}: not JSON: {error}") from error
    stated = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(stated, dict) or not all(isinstance(file, str) for file in stated.values()):
        raise FormatError(f"{INDEX_FILE}: no weight_map from names to files")
    return stated


def check_weight_name(name: str) -> str:
    """Refuse a weight file whose name cannot travel (with the header's suffix) as a side file of an
    anchor."""
    if not name.endswith(WEIGHTS_SUFFIX):
        raise FormatError("weight file with a wrong name", expected=f"*{WEIGHTS_SUFFIX}", found=repr(name)[:80])
    return _plain(name, name + HEADER_SUFFIX)


def check_file_name(name: str) -> str:
    """Refuse a side file whose name is no plain path component, or that might be run as code."""
    if not any(name.endswith(suffix) for suffix in FILE_SUFFIXES):
        raise FormatError(
            "side file of a kind that is never carried",
            expected="a name that ends in " + ", ".join(sorted(FILE_SUFFIXES)),
            found=repr(name)[:80],
        )
    return _plain(name, name)


def _plain(name: str, carried: str) -> str:
    try:
        FileRef(carried, "0" * 64, 0)
    except ValueError as error:
        raise FormatError(str(error), next_step="Rename it.") from error
    return name


def split_files(catalog: Catalog, files: Mapping[str, bytes]) -> tuple[dict[str, FileLayout], dict[str, bytes]]:
    """Weight files to lay out, and plain side files, of an anchor's side files.

    Without any ``*.header`` all tensors go into one ``model.safetensors``. Raises ``FormatError`` if names
    are not allowed, or if headers and index do not describe exactly ``catalog``.
    """
    headers = {name: data for name, data in files.items() if name.endswith(WEIGHTS_SUFFIX + HEADER_SUFFIX)}
    side = {check_file_name(name): data for name, data in files.items() if name not in headers}
    weights = {name.removesuffix(HEADER_SUFFIX): data for name, data in headers.items()}
    weights = weights or {DEFAULT_FILE: default_header(catalog)}
    layouts = {check_weight_name(name): parse_header(data, name) for name, data in sorted(weights.items())}
    places(catalog, layouts)
    if INDEX_FILE in side:
        check_index(side[INDEX_FILE], layouts)
    return layouts, side


def directory_layout(catalog: Catalog, layouts: Mapping[str, FileLayout], files: Iterable[str]) -> DirectoryLayout:
    """The record of a directory with these weight files and side files."""
    weights = [_weight_file(name, layout) for name, layout in sorted(layouts.items())]
    return DirectoryLayout(catalog, tuple(weights), tuple(sorted(files)))


def _weight_file(name: str, layout: FileLayout) -> WeightFile:
    digest = hashlib.sha256(layout.header).hexdigest()
    return WeightFile(name, digest, len(layout.header), layout.size)


def check_weight_file(recorded: WeightFile, header: bytes, size: int, where: str) -> FileLayout:
    """Refuse a weight file that is not the recorded one by size and verbatim header."""
    if size != recorded.size:
        found = f"{size} bytes"
        raise IntegrityError(f"{where}: wrong size", expected=f"{recorded.size} bytes", found=found, next_step=RESEED)
    if (digest := hashlib.sha256(header).hexdigest()) != recorded.header:
        what = f"{where}: not the weight file that was seeded"
        raise IntegrityError(what, expected=f"header {recorded.header}", found=digest, next_step=RESEED)
    return parse_header(header, where)


def choose_weight_files(names: Collection[str], index: bytes | None) -> tuple[str, ...]:
    """Which files of a Hugging Face directory hold the weights: those of the index, else
    ``model.safetensors``, else every ``*.safetensors``. ``names`` are all file names; raises ``UsageError``
    where that is ambiguous or empty."""
    if index is not None:
        chosen = tuple(sorted(set(index_map(index).values())))
        if DEFAULT_FILE in names and DEFAULT_FILE not in chosen:
            raise UsageError(f"both {DEFAULT_FILE} and {INDEX_FILE}", next_step="Remove the one that is stale.")
        return chosen
    if DEFAULT_FILE in names:
        return (DEFAULT_FILE,)
    chosen = tuple(sorted(n for n in names if n.endswith(WEIGHTS_SUFFIX) and not n.startswith(".")))
    if not chosen:
        raise UsageError(
            f"no *{WEIGHTS_SUFFIX} file there", next_step="Give a safetensors file or a checkpoint directory."
        )
    return chosen
