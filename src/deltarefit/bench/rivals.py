"""The field's encodings, written anew in plain NumPy and zstd, to compare with on one machine.

They are as quick as plain NumPy allows and work on one tensor each; systems that use them run them on GPUs or
many threads, so compare sizes freely and times with that in mind. Names and shapes travel apart and count for
none of them. All compare bits, never floats, and compress at zstd level 1 where the original does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from deltarefit.errors import FormatError, UsageError

Bits = npt.NDArray[np.unsignedinteger[Any]]
Part = bytes | memoryview
_LEVEL = 1
_GAP_TYPES = (np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8"))
_WORD = 8


@dataclass(frozen=True)
class Rival:
    """``encode(old, new)`` gives the parts to send; ``apply(parts, target)`` turns old bits into new ones.

    Arrays are C-contiguous unsigned integers of one shape and width; the target is changed in place. Both may
    run in many threads. Parts may share memory with ``new``.
    """

    name: str
    encode: Callable[[Bits, Bits], list[Part]]
    apply: Callable[[Sequence[Part], Bits], None]


def changed_positions(old: Bits, new: Bits) -> npt.NDArray[np.int64]:
    """Row-major positions that differ, ascending. Compares 8 bytes at a time first: few words differ."""
    one, two = _flat(old), _flat(new)
    each = _WORD // one.itemsize
    whole = one.size - one.size % each
    words = np.flatnonzero(one[:whole].view(np.uint64) != two[:whole].view(np.uint64))
    if words.size * 8 > whole:  # dense: looking at every element is cheaper than collecting words
        return np.flatnonzero(one != two)
    places = (words[:, None] * each + np.arange(each)).reshape(-1)
    tail = np.arange(whole, one.size)
    candidates = np.concatenate([places, tail])
    found: npt.NDArray[np.int64] = candidates[one[candidates] != two[candidates]]
    return found


def _flat(array: Bits) -> Bits:
    if not array.flags.c_contiguous:
        raise UsageError("rival encodings take C-contiguous arrays", found=f"strides {array.strides}")
    return array.reshape(-1)


def _bytes(flat: npt.NDArray[Any]) -> memoryview:
    return flat.view(np.uint8).data


def _pack(data: Any) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _unpack(part: Part, size: int) -> bytes:
    if zstandard.frame_content_size(part) != size:
        raise FormatError("compressed part", expected=f"{size} bytes", found=zstandard.frame_content_size(part))
    return zstandard.ZstdDecompressor().decompress(part)


def _encode_xor(old: Bits, new: Bits) -> list[Part]:
    """The whole tensor's XOR, compressed."""
    return [_pack(_bytes(np.bitwise_xor(_flat(old), _flat(new))))]


def _apply_xor(parts: Sequence[Part], target: Bits) -> None:
    flat = _flat(target)
    flat ^= np.frombuffer(_unpack(parts[0], flat.nbytes), flat.dtype)


def _encode_gaps(old: Bits, new: Bits) -> list[Part]:
    """Gaps between sorted positions in the narrowest of 2, 4, 8 bytes, then new values, compressed as one.

    The first part (9 bytes: gap width, count) is 0 wide for a contiguous range, whose only gap is its start.
    """
    positions = changed_positions(old, new)
    if positions.size == 0:
        return []
    gaps, width = _gaps(positions)
    head = bytes([width]) + positions.size.to_bytes(8, "little")
    return [head, _pack(gaps.tobytes() + _flat(new)[positions].tobytes())]


def _gaps(positions: npt.NDArray[np.int64]) -> tuple[Bits, int]:
    if positions[-1] - positions[0] == positions.size - 1:
        return positions[:1].astype("<u8"), 0
    gaps = np.diff(positions, prepend=0)
    largest = int(gaps.max())
    narrowest = next(dtype for dtype in _GAP_TYPES if largest <= np.iinfo(dtype).max)
    return gaps.astype(narrowest), narrowest.itemsize


def _apply_gaps(parts: Sequence[Part], target: Bits) -> None:
    if not parts:
        return
    flat = _flat(target)
    width, count = parts[0][0], int.from_bytes(parts[0][1:], "little")
    split = count * width or 8
    data = _unpack(parts[1], split + count * flat.itemsize)
    values = np.frombuffer(data, flat.dtype, offset=split)
    if width == 0:
        start = int.from_bytes(data[:split], "little")
        flat[start : start + count] = values
    else:
        flat[np.cumsum(np.frombuffer(data, f"<u{width}", count), dtype=np.int64)] = values


def _encode_indices(old: Bits, new: Bits) -> list[Part]:
    """Positions as 32-bit integers and new values, nothing compressed."""
    if old.size > 1 << 31:
        raise UsageError("tensor too large for 32-bit positions", expected="<= 2^31 elements", found=old.size)
    positions = changed_positions(old, new)
    return [_bytes(positions.astype("<i4")), _bytes(_flat(new)[positions])]


def _apply_indices(parts: Sequence[Part], target: Bits) -> None:
    flat = _flat(target)
    flat[np.frombuffer(parts[0], "<i4")] = np.frombuffer(parts[1], flat.dtype)


def _encode_copy(old: Bits, new: Bits) -> list[Part]:
    """The new tensor as it is: no work, no copy."""
    return [_bytes(_flat(new))]


def _apply_copy(parts: Sequence[Part], target: Bits) -> None:
    flat = _flat(target)
    flat[:] = np.frombuffer(parts[0], flat.dtype)


RIVALS: tuple[Rival, ...] = (
    Rival("full copy", _encode_copy, _apply_copy),
    Rival("int32 index + value (verl, vLLM)", _encode_indices, _apply_indices),
    Rival("dense XOR + zstd-1 (slime, miles)", _encode_xor, _apply_xor),
    Rival("16-bit gap + value + zstd-1 (NeMo RL)", _encode_gaps, _apply_gaps),
)
"""Largest first, as things stand."""
