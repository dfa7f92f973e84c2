"""Deltas and payloads: encode, build, open, validate (docs/format.md §4).

A ``Delta`` is the changed bits of one range of one canonical tensor. A payload is one immutable object that holds many
deltas: like pieces of all deltas stand together in one stream, and each stream is one zstd frame in a safetensors file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import zstandard

from deltarefit import _kernel
from deltarefit.elements import Elements
from deltarefit.errors import FormatError, IntegrityError
from deltarefit.manifest import MAX_PAYLOAD_BYTES, MAX_STREAM_BYTES, Catalog, PayloadRef
from deltarefit.records import Digest

XOR, ADD, SET = 0, 1, 2
GAPS, RUNS, ALL = 0, 1, 2
COLUMNS = 10
PAYLOAD_TAG = "payload/1"
TABLE = "table"
ZSTD_LEVEL = 1

_Piece = bytes | memoryview
DeltaRecord = tuple[int, int, int, int, int, int, int, int, int]
"""start, length, count, code, runs, gap_chain, run_chain, value_chain, escapes: columns 1-9 of the table."""
Row = tuple[int, int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Delta:
    """Changed bits of elements [start, start + length) of catalog tensor ``tensor``.

    ``record`` is columns 1-9 of the payload's table, ``slices`` its pieces in stream order (kernel ``pieces``).
    """

    tensor: int
    record: DeltaRecord
    slices: tuple[_Piece, ...]

    @property
    def start(self) -> int:
        return self.record[0]

    @property
    def stop(self) -> int:
        return self.record[0] + self.record[1]

    @property
    def count(self) -> int:
        return self.record[2]

    @property
    def width(self) -> int:
        return 1 << ((self.record[3] >> 17) & 3)

    @property
    def operation(self) -> int:
        return (self.record[3] >> 10) & 3

    @property
    def nbytes(self) -> int:
        return sum(len(piece) for piece in self.slices)


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """A delta with its stream names and digest sums, on its way into a payload."""

    delta: Delta
    streams: tuple[str, ...]
    pre: Digest
    post: Digest


def encode_delta(tensor: int, old: Elements, new: Elements, start: int, key: int) -> EncodedDelta | None:
    """The delta from ``old`` to ``new`` (one shape, elements from position ``start``); None if no bit differs."""
    return _encoded(tensor, _kernel.encode(old, new, start, key))


def encode_full(tensor: int, new: Elements, start: int, key: int) -> EncodedDelta:
    """A delta that sets every element, for anchors; its ``pre`` is meaningless (there is no base) and zero."""
    encoded = _encoded(tensor, _kernel.encode(new, new, start, key, kind=ALL, operation=SET, packing=0))
    if encoded is None:
        raise ValueError("an empty range has no delta")
    return EncodedDelta(encoded.delta, encoded.streams, Digest(), encoded.post)


def _encoded(tensor: int, result: Any) -> EncodedDelta | None:
    if result is None:
        return None
    record, streams, pre, post = result
    delta = Delta(tensor, record, tuple(data for _, data in streams))
    return EncodedDelta(delta, tuple(name for name, _ in streams), Digest(*pre), Digest(*post))


@dataclass
class PayloadBuilder:
    """Collects deltas in (tensor, start) order; ``build`` makes the object and its reference, once, giving the
    memory of each stream back as soon as it is compressed."""

    rows: list[Row] = field(default_factory=list)
    streams: dict[str, list[_Piece]] = field(default_factory=dict)
    pre: Digest = field(default_factory=Digest)
    post: Digest = field(default_factory=Digest)
    nbytes: int = 0

    def add(self, encoded: EncodedDelta) -> None:
        delta = encoded.delta
        self.rows.append((delta.tensor, *delta.record))
        for name, piece in zip(encoded.streams, delta.slices, strict=True):
            self.streams.setdefault(name, []).append(piece)
        self.pre += encoded.pre
        self.post += encoded.post
        self.nbytes += delta.nbytes + COLUMNS * 8

    def build(self) -> tuple[bytes, PayloadRef]:
        """The payload's bytes and the reference that a manifest carries."""
        sizes, packed = {}, {}
        for name in [*sorted(self.streams), TABLE]:
            raw = _pack_table(self.rows) if name == TABLE else b"".join(self.streams.pop(name))
            if raw:
                sizes[name], packed[name] = len(raw), np.frombuffer(_compress(raw), np.uint8)
        data = safetensors.numpy.save(packed, {"deltarefit": PAYLOAD_TAG})
        return data, PayloadRef(
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            streams=sizes,
            deltas=len(self.rows),
            changed=sum(row[3] for row in self.rows),
            pre=self.pre,
            post=self.post,
        )


def _compress(data: bytes) -> bytes:
    packed: bytes = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False).compress(data)
    return packed


def _pack_table(rows: list[Row]) -> bytes:
    """Columns of byte planes: nearly all planes are constant, so the table costs a few bytes per delta."""
    table = np.array(rows, dtype="<u8").reshape(len(rows), COLUMNS)
    packed: bytes = table.T.copy().view(np.uint8).reshape(COLUMNS, len(rows), 8).transpose(0, 2, 1).tobytes()
    return packed


def _unpack_table(data: bytes, deltas: int) -> list[Row]:
    planes = np.frombuffer(data, np.uint8).reshape(COLUMNS, 8, deltas)
    columns = planes.transpose(0, 2, 1).copy().view("<u8").reshape(COLUMNS, deltas)
    return list(zip(*columns.tolist(), strict=True))


def open_payload(data: bytes, ref: PayloadRef, catalog: Catalog) -> list[Delta]:
    """All deltas of a payload, after every check of format §4.6; nothing of it needs to be checked again.

    Raises ``IntegrityError`` if the bytes are not those that ``ref`` names, ``FormatError`` if they break the format.
    """
    where = f"payload {ref.sha256[:12]}"
    check_object(data, ref.sha256, ref.size, where)
    streams = _streams(data, ref, where)
    table = streams.pop(TABLE)
    if len(table) != COLUMNS * 8 * ref.deltas:
        raise FormatError(f"{where}: table size", expected=COLUMNS * 8 * ref.deltas, found=len(table))
    rows = _unpack_table(table, ref.deltas)
    _check_rows(rows, ref, catalog, where)
    return list(_cut(rows, streams, where))


def check_object(data: bytes, sha256: str, size: int, where: str) -> None:
    """Length and SHA-256 of a stored object against the record that names it."""
    if len(data) != size:
        raise IntegrityError(f"{where} has the wrong length", expected=size, found=len(data))
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise IntegrityError(f"{where} is corrupt", expected=sha256, found=found, next_step="Fetch it again.")


def _streams(data: bytes, ref: PayloadRef, where: str) -> dict[str, bytes]:
    if len(data) > MAX_PAYLOAD_BYTES or sum(ref.streams.values()) > MAX_STREAM_BYTES:
        raise FormatError(f"{where} exceeds the size limits of the format")
    try:
        packed = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise FormatError(f"{where} is not a safetensors file: {error}") from error
    if sorted(packed) != sorted(ref.streams) or TABLE not in packed:
        raise FormatError(f"{where}: wrong streams", expected=sorted(ref.streams), found=sorted(packed))
    return {name: _decompress(packed[name], ref.streams[name], f"{where}: {name}") for name in packed}


def _decompress(tensor: dict[str, Any], size: int, where: str) -> bytes:
    if tensor["dtype"] != "U8" or len(tensor["shape"]) != 1:
        raise FormatError(f"{where} is not a byte stream")
    if not size:
        raise FormatError(f"{where}: a stream without bytes is left out")
    frame = bytes(tensor["data"])
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != size:
            raise FormatError(f"{where}: wrong size", expected=size, found=declared)
        raw = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{where}: {error}") from error
    if len(raw) != size:
        raise FormatError(f"{where}: wrong size", expected=size, found=len(raw))
    return bytes(raw)


def _check_rows(rows: list[Row], ref: PayloadRef, catalog: Catalog, where: str) -> None:
    """The table against the catalog: known tensors, widths, bounds, order, no overlap, the stated count."""
    last_tensor, last_stop = -1, 0
    for tensor, start, length, _, code, *_ in rows:
        if tensor >= len(catalog.tensors):
            raise FormatError(f"{where}: tensor id", expected=f"< {len(catalog.tensors)}", found=tensor)
        entry = catalog.tensors[tensor]
        if 1 << ((code >> 17) & 3) != entry.width:
            raise FormatError(f"{where}: element width of {entry.name}", expected=entry.width, found=code)
        if start + length > entry.numel:
            raise FormatError(f"{where}: range of {entry.name}", expected=entry.numel, found=start + length)
        if tensor < last_tensor or (tensor == last_tensor and start < last_stop):
            raise FormatError(f"{where}: deltas out of order at {entry.name}")
        last_tensor, last_stop = tensor, start + length
    if (changed := sum(row[3] for row in rows)) != ref.changed:
        raise FormatError(f"{where}: number of changes", expected=ref.changed, found=changed)


def _cut(rows: Iterable[Row], streams: dict[str, bytes], where: str) -> Iterator[Delta]:
    """Cut each delta's pieces off the streams, validated; the streams must be used up exactly."""
    views = {name: memoryview(data) for name, data in streams.items()}
    used = dict.fromkeys(streams, 0)
    for row in rows:
        record = row[1:]
        try:
            pieces = _kernel.pieces(record)
            slices = tuple(_take(views, used, name, size) for name, size in pieces)
            _kernel.validate(record, slices)
        except ValueError as error:
            raise FormatError(f"{where}: delta of tensor {row[0]} at {row[1]}: {error}") from error
        yield Delta(row[0], record, slices)
    if left := [name for name, view in views.items() if used[name] != len(view)]:
        raise FormatError(f"{where}: bytes left over in streams", found=left)


def _take(views: dict[str, memoryview], used: dict[str, int], name: str, size: int) -> memoryview:
    start = used.get(name, 0)
    if size and (name not in views or start + size > len(views[name])):
        raise ValueError(f"stream {name} is too short")
    if not size:
        return memoryview(b"")
    used[name] = start + size
    return views[name][start : start + size]
