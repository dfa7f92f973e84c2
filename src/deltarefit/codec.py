"""Deltas and payloads: encode, build, open, validate (docs/format.md §4).

A ``Delta`` is the changed bits of a range of one piece of one canonical tensor. A payload is one immutable object that
holds many deltas: like arrays of all deltas stand together in one stream, and each stream is one zstd frame in a
safetensors file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import zstandard

from deltarefit import _kernel
from deltarefit.apart import check_apart
from deltarefit.elements import Elements
from deltarefit.errors import FormatError, IntegrityError
from deltarefit.manifest import MAX_PAYLOAD_BYTES, MAX_STREAM_BYTES, Catalog, PayloadRef
from deltarefit.pieces import FLAT, Piece, Rows
from deltarefit.records import Digest

XOR, ADD, SET = 0, 1, 2
GAPS, RUNS, ALL = 0, 1, 2
COLUMNS = 14
PAYLOAD_TAG = "payload/1"
TABLE = "table"
ZSTD_LEVEL = 1

_Slice = bytes | memoryview
DeltaRecord = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]
"""start, length, count, code, runs, gap_chain, run_chain, value_chain, escapes, offset, run, step, pitch: columns 1-13
of the table."""
Row = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Delta:
    """Changed bits of elements [start, start + length) of one piece of catalog tensor ``tensor``.

    ``record`` is columns 1-13 of the payload's table, ``slices`` its arrays in stream order (kernel ``pieces``).
    ``start`` counts the piece's own elements as ``rows`` enumerates them; where they are ``FLAT``, the tensor's.
    """

    tensor: int
    record: DeltaRecord
    slices: tuple[_Slice, ...]

    @property
    def start(self) -> int:
        return self.record[0]

    @property
    def length(self) -> int:
        return self.record[1]

    @property
    def stop(self) -> int:
        return self.record[0] + self.record[1]

    @property
    def rows(self) -> Rows:
        return self.record[9:]

    @property
    def low(self) -> int:
        """The first position in the tensor that it covers."""
        return _position(self.rows, self.start)

    @property
    def high(self) -> int:
        """One past the last position in the tensor that it covers."""
        return _position(self.rows, self.stop - 1) + 1

    @property
    def order(self) -> tuple[int, ...]:
        """Deltas of one payload ascend by this."""
        return (self.tensor, *self.rows, self.start)

    def local(self, start: int) -> Delta:
        """The same bits as a flat range from ``start`` on: for an array that holds just a piece, in its order."""
        return Delta(self.tensor, (start, *self.record[1:9], *FLAT), self.slices)

    @property
    def count(self) -> int:
        return self.record[2]

    @property
    def width(self) -> int:
        return 1 << ((self.record[3] >> 17) & 3)

    @property
    def kind(self) -> int:
        return self.record[3] & 3

    @property
    def operation(self) -> int:
        return (self.record[3] >> 10) & 3

    @property
    def nbytes(self) -> int:
        return sum(len(data) for data in self.slices)


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """A delta with its stream names and digest sums, on its way into a payload. Those with ``overwrites`` have payloads
    of their own."""

    delta: Delta
    streams: tuple[str, ...]
    pre: Digest
    post: Digest
    overwrites: bool = False


def _position(rows: Rows, p: int) -> int:
    """Position in the tensor of element ``p`` of a piece."""
    offset, run, step, pitch = rows
    return offset + p // run * pitch + p % run * step if run else p


def encode_delta(
    piece: Piece, old: Elements, new: Elements, start: int, key: int, kind: int = -1
) -> EncodedDelta | None:
    """The delta from ``old`` to ``new`` (one shape, the piece's elements from ``start`` on; ``key`` is the tensor's);
    None if no bit differs. ``kind`` is of its positions; -1: the shortest, which may list what does not differ."""
    operation = SET if piece.overwrite else -1
    made = _kernel.encode(old, new, piece.origin + start, key, kind=kind, operation=operation, rows=piece.rows)
    return _encoded(piece.tensor, made)


def encode_full(piece: Piece, new: Elements, start: int, key: int) -> EncodedDelta:
    """A delta that sets every element, for anchors; its ``pre`` is meaningless (there is no base) and zero."""
    first, rows = piece.origin + start, piece.rows
    encoded = _encoded(
        piece.tensor, _kernel.encode(new, new, first, key, kind=ALL, operation=SET, packing=0, rows=rows)
    )
    if encoded is None:
        raise ValueError("an empty range has no delta")
    return EncodedDelta(encoded.delta, encoded.streams, Digest(), encoded.post)


def encode_overwrite(
    piece: Piece, old: Elements, new: Elements, index: npt.NDArray[np.int64], start: int, key: int
) -> EncodedDelta:
    """A delta that sets elements ``index`` of ``new`` and no others, whether or not they differ from ``old``; arrays as
    in ``encode_delta``. Its ``pre`` is of ``old``."""
    other, before = new.copy(), new.copy()
    other[index] = ~new[index]
    before[index] = old[index]
    first, rows, kind = piece.origin + start, piece.rows, ALL if index.size == new.size else GAPS
    encoded = _encoded(piece.tensor, _kernel.encode(other, new, first, key, kind=kind, operation=SET, rows=rows))
    if encoded is None:
        raise ValueError("nothing to overwrite")
    shift = Digest(*_kernel.digest(new, first, key, rows)) - Digest(*_kernel.digest(before, first, key, rows))
    return EncodedDelta(encoded.delta, encoded.streams, encoded.post - shift, encoded.post, overwrites=True)


def _encoded(tensor: int, result: Any) -> EncodedDelta | None:
    if result is None:
        return None
    record, streams, pre, post = result
    delta = Delta(tensor, record, tuple(data for _, data in streams))
    return EncodedDelta(delta, tuple(name for name, _ in streams), Digest(*pre), Digest(*post))


@dataclass
class PayloadBuilder:
    """Collects deltas in any order; ``build`` makes the object and its reference, once, giving the memory of each
    stream back as soon as it is compressed."""

    encoded: list[EncodedDelta] = field(default_factory=list)
    nbytes: int = 0
    overwrites: bool = False

    def add(self, encoded: EncodedDelta) -> None:
        self.encoded.append(encoded)
        self.nbytes += encoded.delta.nbytes + COLUMNS * 8

    @property
    def rows(self) -> list[Row]:
        """The table so far."""
        return [(e.delta.tensor, *e.delta.record) for e in self.encoded]

    def build(self) -> tuple[bytes, PayloadRef]:
        """The payload's bytes and the reference that a manifest carries. ``FormatError`` if no reader would take it:
        pieces overlap, or too many interleave."""
        self.encoded.sort(key=lambda encoded: encoded.delta.order)
        check_apart([encoded.delta for encoded in self.encoded], "new payload")
        rows = self.rows
        pre, post = sum((e.pre for e in self.encoded), Digest()), sum((e.post for e in self.encoded), Digest())
        streams = self._take_streams()
        streams[TABLE] = [_pack_table(rows)]
        sizes, frames = {}, {}
        for name in sorted(streams):
            if size := sum(len(data) for data in streams[name]):
                sizes[name], frames[name] = size, _compress(streams.pop(name), size)
        data = _safetensors(frames)
        return data, PayloadRef(
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            streams=sizes,
            deltas=len(rows),
            changed=sum(row[3] for row in rows),
            first=rows[0][0],
            last=rows[-1][0],
            pre=pre,
            post=post,
            overwrites=self.overwrites,
        )

    def _take_streams(self) -> dict[str, list[_Slice]]:
        """The arrays of all deltas by stream, in the order of the table; nothing else holds them any more."""
        streams: dict[str, list[_Slice]] = {}
        for encoded in self.encoded:
            for name, data in zip(encoded.streams, encoded.delta.slices, strict=True):
                streams.setdefault(name, []).append(data)
        self.encoded.clear()
        return streams


def _compress(slices: list[_Slice], size: int) -> list[bytes]:
    """One frame, in parts; uses the slices up, so that no copy of the whole is ever held."""
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False).compressobj(size=size)
    slices.reverse()
    parts = []
    while slices:
        parts.append(frame.compress(slices.pop()))
    return [*parts, frame.flush()]


def _safetensors(frames: dict[str, list[bytes]]) -> bytes:
    """A safetensors file of one U8 tensor per frame, by name, as the library writes it; without its copies."""
    header: dict[str, object] = {"__metadata__": {"deltarefit": PAYLOAD_TAG}}
    end = 0
    for name, parts in sorted(frames.items()):
        start, end = end, end + sum(len(part) for part in parts)
        header[name] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(part for _, parts in sorted(frames.items()) for part in parts)]
    )


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
    listed = [Delta(row[0], row[1:], ()) for row in _unpack_table(table, ref.deltas)]
    _check_table(listed, ref, catalog, where)
    deltas = list(_with_slices(listed, streams, where))
    check_apart(deltas, where)
    return deltas


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


def _check_table(deltas: Sequence[Delta], ref: PayloadRef, catalog: Catalog, where: str) -> None:
    """The table against the catalog and the reference: known tensors, widths, bounds, order, the stated count."""
    for delta in deltas:
        if delta.tensor >= len(catalog.tensors):
            raise FormatError(f"{where}: tensor id", expected=f"< {len(catalog.tensors)}", found=delta.tensor)
        entry = catalog.tensors[delta.tensor]
        if delta.width != entry.width:
            raise FormatError(f"{where}: element width of {entry.name}", expected=entry.width, found=delta.width)
        if delta.high > entry.numel:
            raise FormatError(f"{where}: range of {entry.name}", expected=entry.numel, found=delta.high)
    for one, two in pairwise(deltas):
        if two.order <= one.order:
            raise FormatError(f"{where}: deltas out of order at {catalog.tensors[two.tensor].name}")
    if ref.overwrites and any(delta.operation != SET for delta in deltas):
        raise FormatError(f"{where}: a difference among what overwrites")
    if (changed := sum(delta.count for delta in deltas)) != ref.changed:
        raise FormatError(f"{where}: number of changes", expected=ref.changed, found=changed)
    ends = (deltas[0].tensor, deltas[-1].tensor) if deltas else (0, 0)
    if ends != (ref.first, ref.last):
        raise FormatError(f"{where}: first and last tensor", expected=(ref.first, ref.last), found=ends)


def _with_slices(deltas: Iterable[Delta], streams: dict[str, bytes], where: str) -> Iterator[Delta]:
    """Cut each delta's arrays off the streams, validated; the streams must be used up exactly."""
    views = {name: memoryview(data) for name, data in streams.items()}
    used = dict.fromkeys(streams, 0)
    for delta in deltas:
        try:
            slices = tuple(_take(views, used, name, size) for name, size in _kernel.pieces(delta.record))
            _kernel.validate(delta.record, slices)
        except ValueError as error:
            raise FormatError(f"{where}: delta of tensor {delta.tensor} at {delta.start}: {error}") from error
        yield Delta(delta.tensor, delta.record, slices)
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
