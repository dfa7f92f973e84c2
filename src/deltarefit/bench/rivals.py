"""The field's encodings, written anew in plain NumPy and zstd, to compare with on one machine.

They are as quick as plain NumPy allows and run in one thread; the systems that use them run them on GPUs or in
many threads, so compare sizes freely and times with that in mind (a mapping may be split and its parts encoded in
threads). Names and shapes travel apart and count for none of them. All compare bits, never floats, and compress
at zstd level 1 where the original does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from deltarefit.errors import FormatError, UsageError

Bits = npt.NDArray[np.unsignedinteger[Any]]
Pair = Mapping[str, tuple[Bits, Bits]]
Targets = Mapping[str, Bits]
Part = bytes | memoryview

PAYLOAD_BYTES = 512 << 20
"""Dense bytes whose changes one gap payload carries: as NeMo RL's 482 payloads of a 247 GB model."""
_LEVEL = 1
_POSITION = np.dtype("<u8")


@dataclass(frozen=True)
class Rival:
    """``encode(pair)`` gives the parts to send; ``apply(parts, targets)`` turns old bits into new ones in place.

    A pair maps names to (old, new), targets map the same names in the same order to writable copies of old. All
    arrays are C-contiguous unsigned integers (``UsageError`` otherwise). Parts may share memory with new.
    """

    name: str
    encode: Callable[[Pair], list[Part]]
    apply: Callable[[Sequence[Part], Targets], None]


def changed_positions(old: Bits, new: Bits) -> npt.NDArray[np.int64]:
    """Row-major positions that differ, ascending."""
    return np.flatnonzero(_flat(old) != _flat(new))


def _flat(array: Bits) -> Bits:
    if not array.flags.c_contiguous:
        raise UsageError("rival encodings take C-contiguous arrays", found=f"strides {array.strides}")
    return array.reshape(-1)


def _bytes(flat: npt.NDArray[Any]) -> memoryview:
    return flat.view(np.uint8).data


def _pack(data: Part) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _unpack(part: Part, size: int) -> bytes:
    if (found := zstandard.frame_content_size(part)) != size:
        raise FormatError("compressed part", expected=f"{size} bytes", found=found)
    return zstandard.ZstdDecompressor().decompress(part)


def _encode_copy(pair: Pair) -> list[Part]:
    """The new tensors as they are: no work, no copy."""
    return [_bytes(_flat(new)) for _, new in pair.values()]


def _apply_copy(parts: Sequence[Part], targets: Targets) -> None:
    for part, target in zip(parts, targets.values(), strict=True):
        flat = _flat(target)
        flat[:] = np.frombuffer(part, flat.dtype)


def _encode_indices(pair: Pair) -> list[Part]:
    """Per tensor its changed positions as 32-bit integers, then their new values; nothing compressed."""
    parts: list[Part] = []
    for old, new in pair.values():
        if old.size > 1 << 31:
            raise UsageError("tensor too large for 32-bit positions", expected="<= 2^31", found=old.size)
        positions = changed_positions(old, new)
        parts += [_bytes(positions.astype("<i4")), _bytes(_flat(new)[positions])]
    return parts


def _apply_indices(parts: Sequence[Part], targets: Targets) -> None:
    for positions, values, target in zip(parts[::2], parts[1::2], targets.values(), strict=True):
        flat = _flat(target)
        flat[np.frombuffer(positions, "<i4")] = np.frombuffer(values, flat.dtype)


def _encode_xor(pair: Pair) -> list[Part]:
    """Per tensor the XOR of all its bits, compressed."""
    return [_pack(_bytes(np.bitwise_xor(_flat(old), _flat(new)))) for old, new in pair.values()]


def _apply_xor(parts: Sequence[Part], targets: Targets) -> None:
    for part, target in zip(parts, targets.values(), strict=True):
        flat = _flat(target)
        flat ^= np.frombuffer(_unpack(part, flat.nbytes), flat.dtype)


@dataclass(frozen=True)
class _Gaps:
    """One tensor's changes: gaps between positions in ``width`` bytes (0: a range, only its start), XOR values."""

    width: int
    count: int
    gaps: bytes
    values: bytes


def _encode_gaps(pair: Pair) -> list[Part]:
    """Per payload two parts: a table of gap widths and counts, and all gaps, then all XOR values, compressed."""
    parts: list[Part] = []
    for names in _payloads(pair, [old.nbytes for old, _ in pair.values()]):
        changes = [_gaps(*pair[name]) for name in names]
        widths = np.array([c.width for c in changes], np.uint8)
        counts = np.array([c.count for c in changes], _POSITION)
        parts.append(widths.tobytes() + counts.tobytes())
        parts.append(_pack(b"".join([*(c.gaps for c in changes), *(c.values for c in changes)])))
    return parts


def _payloads(names: Mapping[str, object], sizes: Sequence[int]) -> Iterator[list[str]]:
    """Consecutive names whose dense sizes add up to ``PAYLOAD_BYTES``, or one that is larger."""
    group: list[str] = []
    total = 0
    for name, size in zip(names, sizes, strict=True):
        if group and total + size > PAYLOAD_BYTES:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def _gaps(old: Bits, new: Bits) -> _Gaps:
    positions = changed_positions(old, new)
    if positions.size == 0:
        return _Gaps(0, 0, b"", b"")
    values = (_flat(old)[positions] ^ _flat(new)[positions]).tobytes()
    if positions[-1] - positions[0] == positions.size - 1:
        return _Gaps(0, positions.size, positions[:1].astype(_POSITION).tobytes(), values)
    gaps = np.diff(positions, prepend=0)
    width = gap_width(int(gaps.max()))
    return _Gaps(width, positions.size, gaps.astype(f"<u{width}").tobytes(), values)


def gap_width(largest: int) -> int:
    """Bytes of every gap of a tensor whose largest is ``largest``: 2, 4 or 8."""
    return next(width for width in (2, 4, 8) if largest < 1 << (8 * width))


def _apply_gaps(parts: Sequence[Part], targets: Targets) -> None:
    groups = _payloads(targets, [target.nbytes for target in targets.values()])
    for head, packed, names in zip(parts[::2], parts[1::2], groups, strict=True):
        _apply_payload(head, packed, [_flat(targets[name]) for name in names])


def _apply_payload(head: Part, packed: Part, flats: Sequence[Bits]) -> None:
    widths = np.frombuffer(head, np.uint8, len(flats)).tolist()
    counts = np.frombuffer(head, _POSITION, len(flats), offset=len(flats)).tolist()
    gap_sizes = [_gap_bytes(width, count) for width, count in zip(widths, counts, strict=True)]
    value_sizes = [count * flat.itemsize for count, flat in zip(counts, flats, strict=True)]
    data = memoryview(_unpack(packed, sum(gap_sizes) + sum(value_sizes)))
    gap_at, value_at = 0, sum(gap_sizes)
    for width, flat, gap_size, value_size in zip(widths, flats, gap_sizes, value_sizes, strict=True):
        if value_size:
            values = np.frombuffer(data[value_at : value_at + value_size], flat.dtype)
            flat[_places(data[gap_at : gap_at + gap_size], width, values.size)] ^= values
        gap_at, value_at = gap_at + gap_size, value_at + value_size


def _gap_bytes(width: int, count: int) -> int:
    return count * width if width or not count else _POSITION.itemsize


def _places(gaps: memoryview, width: int, count: int) -> slice | npt.NDArray[np.int64]:
    if width == 0:
        start = int.from_bytes(gaps, "little")
        return slice(start, start + count)
    return np.cumsum(np.frombuffer(gaps, f"<u{width}"), dtype=np.int64)


RIVALS: tuple[Rival, ...] = (
    Rival("full copy", _encode_copy, _apply_copy),
    Rival("int32 index + value (verl, vLLM)", _encode_indices, _apply_indices),
    Rival("dense XOR + zstd-1 (slime, miles)", _encode_xor, _apply_xor),
    Rival("16-bit gap + XOR + zstd-1 (NeMo RL)", _encode_gaps, _apply_gaps),
)
