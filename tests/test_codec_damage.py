"""Payloads that are damaged, above and beneath the hash, and payloads that a hostile publisher could write."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import zstandard

from deltarefit import _kernel, codec
from deltarefit.codec import Delta, PayloadBuilder, open_payload
from deltarefit.errors import FormatError, IntegrityError
from deltarefit.manifest import Catalog, PayloadRef
from deltarefit.pieces import FLAT, whole
from tests import test_codec_pieces as pieces
from tests.test_codec import CATALOG, KEYS, build, changes

# ------------------------------------------------------------------------------------------ above the hash


@pytest.fixture(scope="module")
def small() -> tuple[bytes, PayloadRef]:
    """Several deltas of every width, below 4 KiB; half of them of pieces."""
    old, new = changes(10, "some")
    of_shards = [piece for piece in pieces.PIECES if piece.tensor in (0, 8)]
    others = [whole(number, CATALOG.tensors[number].numel) for number in (1, 2, 3, 4)]
    data, ref = pieces.build(pieces.encoded(old, new, of_shards) + pieces.encoded(old, new, others, cut=100))
    assert 600 < len(data) <= 4096
    assert sum(delta.rows == FLAT for delta in open_payload(data, ref, CATALOG)) > 5
    assert sum(delta.rows != FLAT for delta in open_payload(data, ref, CATALOG)) > 5
    return data, ref


def test_every_flipped_bit_is_refused(small: tuple[bytes, PayloadRef]) -> None:
    data, ref = small
    damaged = bytearray(data)
    for bit in range(len(data) * 8):
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError, match="corrupt"):
            open_payload(bytes(damaged), ref, CATALOG)
        damaged[bit // 8] ^= 1 << bit % 8


def test_every_other_length_is_refused(small: tuple[bytes, PayloadRef]) -> None:
    data, ref = small
    for length in range(len(data)):
        with pytest.raises(IntegrityError, match="length"):
            open_payload(data[:length], ref, CATALOG)
    with pytest.raises(IntegrityError, match="length"):
        open_payload(data + b"\0", ref, CATALOG)


def test_swapped_payloads_are_refused(small: tuple[bytes, PayloadRef]) -> None:
    other, other_ref = build(*changes(11, "some"))
    for data, ref in ((small[0], other_ref), (other, small[1])):
        with pytest.raises(IntegrityError):
            open_payload(data, ref, CATALOG)
        with pytest.raises(IntegrityError, match="corrupt"):
            open_payload(data, replace(ref, size=len(data)), CATALOG)


# ------------------------------------------------------------------------------------------ beneath the hash


def named(data: bytes, ref: PayloadRef, **fields: Any) -> PayloadRef:
    """``ref`` as whoever damaged the bytes would have written it."""
    return replace(ref, sha256=hashlib.sha256(data).hexdigest(), size=len(data), **fields)


def check_refused_or_harmless(data: bytes, ref: PayloadRef) -> bool:
    """True if refused. What is let through stays within its bounds: guard zones around every window are untouched."""
    try:
        deltas = open_payload(data, ref, CATALOG)
    except IntegrityError:
        return True
    seen = [np.zeros(entry.numel, np.uint8) for entry in CATALOG.tensors]
    for delta in deltas:
        entry = CATALOG.tensors[delta.tensor]
        assert delta.high <= entry.numel
        seen[delta.tensor][delta.low + check_in_bounds(delta, entry.width)] += 1
    assert all(bool((marks <= 1).all()) for marks in seen)
    assert [delta.order for delta in deltas] == sorted(delta.order for delta in deltas)
    assert sum(delta.count for delta in deltas) == ref.changed
    return False


def check_in_bounds(delta: Delta, width: int) -> Any:
    """The listed positions, from the first covered."""
    record: Any = delta.record
    positions, _ = _kernel.decode(record, delta.slices)
    assert positions.size == delta.count
    assert int(positions[-1]) < delta.high - delta.low
    assert bool((np.diff(positions.astype("i8")) > 0).all())
    guarded = np.full(delta.high - delta.low + 128, 0x5A, f"u{width}")
    _kernel.apply(record, delta.slices, guarded[64:-64])
    assert bool((guarded[:64] == 0x5A).all() and (guarded[-64:] == 0x5A).all())
    return positions.astype("i8")


def test_every_bit_flipped_beneath_the_hash_is_refused_or_harmless(small: tuple[bytes, PayloadRef]) -> None:
    data, ref = small
    damaged, refused = bytearray(data), 0
    for bit in range(len(data) * 8):
        damaged[bit // 8] ^= 1 << bit % 8
        refused += check_refused_or_harmless(bytes(damaged), named(bytes(damaged), ref))
        damaged[bit // 8] ^= 1 << bit % 8
    assert refused > len(data) * 4


def compress(data: bytes) -> bytes:
    """One frame, as a payload has it."""
    return b"".join(codec._compress([data], len(data)))


@dataclass
class Parts:
    """A payload taken apart: raw streams, which a test changes before it is put together again."""

    streams: dict[str, bytes]
    ref: PayloadRef

    def frames(self) -> dict[str, bytes]:
        return {name: compress(data) for name, data in self.streams.items()}

    def build(self, frames: dict[str, bytes] | None = None, **fields: Any) -> tuple[bytes, PayloadRef]:
        packed = {name: np.frombuffer(data, np.uint8) for name, data in (frames or self.frames()).items()}
        data = safetensors.numpy.save(packed, {"deltarefit": codec.PAYLOAD_TAG})
        sizes = {name: len(stream) for name, stream in self.streams.items()}
        return data, named(data, self.ref, **{"streams": sizes, **fields})

    def refuses(self, says: str, frames: dict[str, bytes] | None = None, **fields: Any) -> None:
        with pytest.raises(FormatError, match=says):
            open_payload(*self.build(frames, **fields), CATALOG)

    @property
    def rows(self) -> list[list[int]]:
        return [list(row) for row in codec._unpack_table(self.streams["table"], self.ref.deltas)]

    @rows.setter
    def rows(self, rows: list[list[int]]) -> None:
        self.streams["table"] = codec._pack_table([tuple(row) for row in rows])  # type: ignore[misc]
        self.ref = replace(self.ref, deltas=len(rows))


@pytest.fixture
def parts(small: tuple[bytes, PayloadRef]) -> Parts:
    return take_apart(*small)


def take_apart(data: bytes, ref: PayloadRef) -> Parts:
    return Parts(codec._streams(data, ref, "payload"), ref)


def test_put_together_again_it_is_read(parts: Parts, small: tuple[bytes, PayloadRef]) -> None:
    assert open_payload(*parts.build(), CATALOG) == open_payload(*small, CATALOG)
    parts.rows = parts.rows
    assert open_payload(*parts.build(), CATALOG) == open_payload(*small, CATALOG)


def test_every_bit_flipped_beneath_the_compression_is_refused_or_harmless(parts: Parts) -> None:
    """What a hostile publisher could write: whole frames, right sizes, any bytes."""
    let_through = 0
    for name, stream in parts.streams.items():
        bits = range(len(stream) * 8) if name != "table" else range(0, len(stream) * 8, 3)
        for bit in bits:
            damaged = bytearray(stream)
            damaged[bit // 8] ^= 1 << bit % 8
            other = Parts({**parts.streams, name: bytes(damaged)}, parts.ref)
            let_through += not check_refused_or_harmless(*other.build())
    assert let_through > 0, "other values are no less valid than these"


EVIDENCE = {"runs": "run", "two": "two", "all": "add"}


@pytest.mark.parametrize("kind", EVIDENCE)
def test_other_encodings_beneath_the_compression(kind: str) -> None:
    rng = np.random.default_rng(12)
    old = np.arange(120, dtype="u2")
    new = old + rng.choice(np.array([0, 1, 1, 2, 900], "u2"), 120)
    forced = {
        "runs": {"kind": 1},
        "two": {"kind": 0, "operation": 1, "packing": 1},
        "all": {"kind": 2, "operation": 1, "packing": 0},
    }
    builder = PayloadBuilder()
    encoded = codec._encoded(0, _kernel.encode(old, new, 0, KEYS[0], **forced[kind]))
    assert encoded is not None
    builder.add(encoded)
    parts = take_apart(*builder.build())
    assert any(name.startswith(EVIDENCE[kind]) for name in parts.streams), sorted(parts.streams)
    for name, stream in parts.streams.items():
        for bit in range(len(stream) * 8):
            damaged = bytearray(stream)
            damaged[bit // 8] ^= 1 << bit % 8
            check_refused_or_harmless(*Parts({**parts.streams, name: bytes(damaged)}, parts.ref).build())


EXTREMES = (0, 1, 2, 255, 2**16, 2**31, 2**32 - 1, 2**48, 2**48 + 1, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.mark.parametrize("column", range(codec.COLUMNS))
def test_extreme_numbers_in_the_table(parts: Parts, column: int) -> None:
    rows, refused = parts.rows, 0
    for row in range(len(rows)):
        for value in EXTREMES:
            changed = [list(r) for r in rows]
            changed[row][column] = value
            other = Parts(dict(parts.streams), parts.ref)
            other.rows = changed
            total = sum(r[3] for r in changed)
            for claimed in {parts.ref.changed, min(total, 2**64 - 1)}:
                refused += check_refused_or_harmless(*other.build(changed=claimed))
    assert refused > len(rows) * 8


def test_every_shorter_and_longer_stream_is_refused(parts: Parts) -> None:
    for name, stream in parts.streams.items():
        for other in (stream[:-1], stream[:1], stream + b"\0", stream + stream):
            data, ref = Parts({**parts.streams, name: other}, parts.ref).build()
            with pytest.raises(FormatError):
                open_payload(data, ref, CATALOG)


# ------------------------------------------------------------------------------------------ one rule each


def test_extra_and_missing_streams(parts: Parts) -> None:
    sizes = {name: len(stream) for name, stream in parts.streams.items()}
    first = next(name for name in sizes if name != "table")
    parts.refuses("wrong streams", {**parts.frames(), "more": compress(b"x")})
    parts.refuses("wrong streams", {name: f for name, f in parts.frames().items() if name != first})
    parts.refuses("wrong streams", {name: f for name, f in parts.frames().items() if name != "table"})
    parts.refuses("wrong streams", streams={**sizes, "more": 1})
    Parts({**parts.streams, "more": b"x"}, parts.ref).refuses("left over")
    Parts({**parts.streams, "more": b""}, parts.ref).refuses("without bytes")
    Parts({n: s for n, s in parts.streams.items() if n != first}, parts.ref).refuses("too short")
    Parts({n: s for n, s in parts.streams.items() if n != "table"}, parts.ref).refuses("wrong streams")


def each_frame(parts: Parts, change: Callable[[bytes], bytes], says: str) -> None:
    for name, frame in parts.frames().items():
        parts.refuses(says, {**parts.frames(), name: change(frame)})


def streamed(data: bytes) -> bytes:
    """A frame without content size."""
    writer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return writer.compress(data) + writer.flush()


def test_bytes_after_a_frame(parts: Parts) -> None:
    each_frame(parts, lambda frame: frame + b"\0", r"table|\.[0-9]|two")
    each_frame(parts, lambda frame: frame + compress(b"more"), r"table|\.[0-9]|two")
    each_frame(parts, lambda frame: frame + compress(b""), r"table|\.[0-9]|two")
    each_frame(parts, lambda frame: frame + b"\x50\x2a\x4d\x18\x04\0\0\0more", r"table|\.[0-9]|two")
    each_frame(parts, lambda frame: b"\x50\x2a\x4d\x18\x04\0\0\0more" + frame, r"table|\.[0-9]|two")


def test_frames_of_another_size(parts: Parts) -> None:
    raw = parts.streams
    for name in raw:
        wrong = {"short": raw[name][:-1], "long": raw[name] + b"\0", "bomb": bytes(64 << 20), "none": b""}
        for data in wrong.values():
            parts.refuses("wrong size", {**parts.frames(), name: compress(data)})
        parts.refuses("wrong size", {**parts.frames(), name: streamed(raw[name])})
        parts.refuses(name, {**parts.frames(), name: raw[name]})
        parts.refuses(name, {**parts.frames(), name: parts.frames()[name][:-1]})


def test_a_frame_that_holds_more_than_it_declares(parts: Parts) -> None:
    """The header says 200 bytes, the blocks give 64 MiB."""
    bomb = bytearray(compress(bytes(64 << 20)))
    flags = bomb[4]
    window, field = (0 if flags & 32 else 1), {0: flags >> 5 & 1, 1: 2, 2: 4, 3: 8}[flags >> 6]
    assert field >= 2
    size = 256 + 200 if field == 2 else 200
    bomb[5 + window : 5 + window + field] = struct.pack("<Q", size - (256 if field == 2 else 0))[:field]
    assert zstandard.frame_content_size(bytes(bomb)) == size
    name = next(name for name in parts.streams if name != "table")
    sizes = {n: len(s) for n, s in parts.streams.items()}
    parts.refuses(name, {**parts.frames(), name: bytes(bomb)}, streams={**sizes, name: size})


def test_declared_sizes_have_a_limit(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    data, ref = parts.build()
    with pytest.raises(ValueError, match="too large"):
        replace(ref, streams={**ref.streams, "more": 1 << 30})
    with pytest.raises(ValueError, match="bytes"):
        replace(ref, size=(256 << 20) + 1)
    monkeypatch.setattr(codec, "MAX_STREAM_BYTES", sum(ref.streams.values()) - 1)
    with pytest.raises(FormatError, match="limits"):
        open_payload(data, ref, CATALOG)
    monkeypatch.setattr(codec, "MAX_STREAM_BYTES", 1 << 30)
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", len(data) - 1)
    with pytest.raises(FormatError, match="limits"):
        open_payload(data, ref, CATALOG)


def test_not_a_safetensors_file_of_bytes(parts: Parts) -> None:
    for junk in (b"", b"\0" * 8, b"x" * 200, struct.pack("<Q", 1 << 62) + b"{}", b"PK\x03\x04" + bytes(100)):
        with pytest.raises(FormatError, match="safetensors"):
            open_payload(junk, named(junk, parts.ref), CATALOG)
    frames = {name: np.frombuffer(frame, np.uint8) for name, frame in parts.frames().items()}
    for wrong in (frames["table"].view(np.int8), frames["table"].reshape(1, -1)):
        data = safetensors.numpy.save({**frames, "table": wrong})
        with pytest.raises(FormatError, match="not a byte stream"):
            open_payload(data, named(data, parts.ref), CATALOG)


def test_table_rules(parts: Parts) -> None:
    rows = parts.rows

    def refused(says: str, change: Callable[[list[list[int]]], object], **fields: Any) -> None:
        changed = [list(row) for row in rows]
        result = change(changed)
        other = Parts(dict(parts.streams), parts.ref)
        other.rows = result if isinstance(result, list) else changed
        other.refuses(says, **fields)

    last = len(rows) - 1
    refused("tensor id", lambda r: r[last].__setitem__(0, len(CATALOG.tensors)))
    refused("out of order", lambda r: r[::-1])
    refused("out of order", lambda r: [r[0], r[0], *r[1:]])
    refused("element width", lambda r: r[0].__setitem__(4, r[0][4] ^ 1 << 17))
    refused("range of", lambda r: r[0].__setitem__(2, 1 << 40))
    refused("range of", lambda r: r[last].__setitem__(1, 1 << 40))
    refused("number of changes", lambda r: None, changed=parts.ref.changed + 1)
    refused("number of changes", lambda r: r[0].__setitem__(3, r[0][3] + 1))
    refused("delta of tensor", lambda r: r[0].__setitem__(4, r[0][4] | 1 << 19))
    refused("delta of tensor", lambda r: r[0].__setitem__(5, r[0][5] + 1))
    parts.refuses("table size", deltas=parts.ref.deltas + 1)
    parts.refuses("table size", deltas=0)


def test_overlapping_deltas(parts: Parts) -> None:
    rows = parts.rows
    pair = next(i for i in range(len(rows) - 1) if rows[i][0] == rows[i + 1][0] and rows[i + 1][1])
    rows[pair + 1][1] -= 1
    parts.rows = rows
    parts.refuses("deltas of tensor 2 overlap")


def test_overlapping_pieces(parts: Parts) -> None:
    rows = parts.rows
    first = next(i for i in range(len(rows) - 1) if rows[i + 1][10] > 1)
    rows[first + 1][10] -= 1  # its offset: into the columns of the piece before
    parts.rows = rows
    parts.refuses("pieces of tensor 0 overlap")


def test_a_payload_for_another_catalog_is_refused(small: tuple[bytes, PayloadRef]) -> None:
    data, ref = small
    shorter = tuple(replace(entry, shape=(1,)) for entry in CATALOG.tensors)
    wider = tuple(replace(entry, dtype="F64") for entry in CATALOG.tensors)
    for entries in (shorter, wider, CATALOG.tensors[:2]):
        with pytest.raises(FormatError):
            open_payload(data, ref, Catalog(entries))
