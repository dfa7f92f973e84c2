"""A slow codec of docs/format.md §4-5 with the API of the kernel, written from that page alone.

Plain Python integers, one element at a time; nothing here is shared with the C++ code. ``encode`` takes every
choice from its caller instead of estimating sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.unsignedinteger[Any]]
Record = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]
Rows = tuple[int, int, int, int]
Lanes = tuple[int, int]

GAPS, RUNS, ALL = 0, 1, 2
XOR, ADD, SET = 0, 1, 2
PLANES, TWO_BIT = 0, 1
FLAT = (0, 0, 0, 0)
MASK = (1 << 64) - 1
MOST_ELEMENTS = 1 << 48
MOST_PIECE_BYTES = 1 << 30


def _need(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


def flat(array: Array) -> list[int]:
    """Elements in canonical (row-major) order."""
    return [int(value) for value in array.ravel(order="C")]


# --- pieces, §4.1


def position(rows: Rows, p: int) -> int:
    """Position in the tensor of element ``p`` of a piece."""
    offset, run, step, pitch = rows
    return p if run == 0 else offset + p // run * pitch + p % run * step


def check_rows(rows: Rows, last: int) -> None:
    """Elements up to ``last`` lie in ascending order within the largest tensor, and the form is the only one."""
    _, run, step, pitch = rows
    if run == 0:
        _need(rows == FLAT, "rows without elements")
        return
    _need(all(number < MOST_ELEMENTS for number in rows) and step >= 1, "rows out of range")
    _need(pitch > (run - 1) * step, "rows overlap")
    _need(pitch > 1 and step == 1 if run == 1 else pitch != run * step, "rows have a simpler form")
    _need(position(rows, last) < MOST_ELEMENTS, "rows beyond the largest tensor")


def low(record: Record) -> int:
    """The first position that a delta covers."""
    return position(record[9:], record[0])


def span(record: Record) -> int:
    """Positions from the first to the last that a delta covers."""
    return position(record[9:], record[0] + record[1] - 1) - low(record) + 1


# --- digest, §5


def element_digest(position: int, value: int, key: int) -> Lanes:
    s = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    t = s ^ value
    u = ((t ^ (t >> 32)) * 0xD6E8FEB86659FD93) & MASK
    u ^= u >> 29
    a0 = (u * 0xBF58476D1CE4E5B9) & MASK
    a1 = (u * 0x94D049BB133111EB) & MASK
    return a0 ^ (a0 >> 32), a1 ^ (a1 >> 32)


def digest_of(elements: list[tuple[int, int]], key: int) -> Lanes:
    """Sum over (position in the tensor, value)."""
    parts = [element_digest(position, value, key) for position, value in elements]
    return sum(part[0] for part in parts) & MASK, sum(part[1] for part in parts) & MASK


def digest(array: Array, start: int, key: int, rows: Rows = FLAT) -> Lanes:
    return digest_of([(position(rows, start + index), value) for index, value in enumerate(flat(array))], key)


# --- integer arrays, §4.2


def write_planes(numbers: list[int], planes: int) -> list[bytes]:
    low = [bytes(number >> (8 * plane) & 255 for number in numbers) for plane in range(planes - 1)]
    chain = bytearray()
    for number in numbers:
        quotient = number >> (8 * (planes - 1))
        chain += b"\xff" * (quotient // 255) + bytes([quotient % 255])
    return [*low, bytes(chain)]


def read_planes(pieces: list[bytes], n: int) -> list[int]:
    quotients, current = [], 0
    for byte in pieces[-1]:
        current += byte
        if byte != 255:
            quotients.append(current)
            current = 0
    _need(pieces[-1][-1] != 255, "chain ends in the middle of a number")
    _need(len(quotients) == n, "chain holds another number of integers")
    low = pieces[:-1]
    return [
        sum(plane[i] << (8 * j) for j, plane in enumerate(low)) + (quotient << (8 * len(low)))
        for i, quotient in enumerate(quotients)
    ]


# --- positions, §4.3


def to_gaps(positions: list[int]) -> list[int]:
    before = [-1, *positions[:-1]]
    return [position - previous - 1 for position, previous in zip(positions, before, strict=True)]


def from_gaps(gaps: list[int]) -> list[int]:
    positions: list[int] = []
    for gap in gaps:
        positions.append((positions[-1] + 1 if positions else 0) + gap)
    return positions


def to_runs(positions: list[int]) -> tuple[list[int], list[int]]:
    """(gaps, lengths minus one)."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1][1] += 1
        else:
            runs.append([position, position + 1])
    gaps = [run[0] - (runs[i - 1][1] + 1 if i else 0) for i, run in enumerate(runs)]
    return gaps, [stop - start - 1 for start, stop in runs]


def from_runs(gaps: list[int], lengths: list[int], most: int) -> list[int]:
    positions: list[int] = []
    for i, (gap, length) in enumerate(zip(gaps, lengths, strict=True)):
        start = gap if i == 0 else positions[-1] + 2 + gap
        _need(len(positions) + length + 1 <= most, "runs list more positions than count")
        positions.extend(range(start, start + length + 1))
    return positions


# --- values, §4.4


def to_stored(old: int, new: int, operation: int, sparse: bool, bits: int) -> int:
    if operation == XOR:
        return old ^ new
    if operation == SET:
        return new
    difference = (new - old) % (1 << bits)
    if difference >= 1 << (bits - 1):
        difference -= 1 << bits
    z = 2 * difference if difference >= 0 else -2 * difference - 1
    return z - 1 if sparse else z


def from_stored(stored: int, operation: int, sparse: bool, bits: int) -> int:
    """XOR mask, modular difference or new value."""
    if operation == ADD:
        z = stored + 1 if sparse else stored
        _need(z < 1 << bits, "difference does not fit")
        return (z // 2 if z % 2 == 0 else -(z + 1) // 2) % (1 << bits)
    _need(stored < 1 << bits, "value does not fit")
    _need(operation == SET or not sparse or stored != 0, "XOR mask is zero")
    return stored


def write_two_bit(stored: list[int]) -> tuple[bytes, list[int]]:
    """(codes, escapes)."""
    codes = [min(value, 3) for value in stored]
    codes += [0] * (-len(codes) % 4)
    packed = bytes(a | b << 2 | c << 4 | d << 6 for a, b, c, d in zip(*[iter(codes)] * 4, strict=True))
    return packed, [value - 3 for value in stored if value >= 3]


def read_two_bit(packed: bytes, n: int, escapes: list[int]) -> list[int]:
    codes = [byte >> shift & 3 for byte in packed for shift in (0, 2, 4, 6)]
    _need(not any(codes[n:]), "padding is not zero")
    _need(codes[:n].count(3) == len(escapes), "another number of escapes than codes 3")
    rest = iter(escapes)
    return [3 + next(rest) if code == 3 else code for code in codes[:n]]


# --- records and pieces, §4.1 and §4.5


def unpack_code(code: int) -> dict[str, int]:
    _need(0 <= code < 1 << 19, "reserved code bits")
    return {
        "kind": code & 3,
        "wg": code >> 2 & 15,
        "wr": code >> 6 & 15,
        "operation": code >> 10 & 3,
        "packing": code >> 12 & 1,
        "wv": code >> 13 & 15,
        "width": 1 << (code >> 17 & 3),
    }


def _array_pieces(role: str, n: int, planes: int, chain: int) -> list[tuple[str, int]]:
    if n == 0:
        _need(planes == 0 and chain == 0, f"{role}: planes or chain of an array that does not apply")
        return []
    _need(1 <= planes <= 8, f"{role}: {planes} planes")
    _need(n <= chain <= MOST_PIECE_BYTES, f"{role}: chain of {chain} bytes")
    return [(f"{role}{planes}.{j}", n if j < planes - 1 else chain) for j in range(planes)]


def pieces(record: Record) -> list[tuple[str, int]]:
    start, length, count, code, runs, gap_chain, run_chain, value_chain, escapes, *_ = record
    _need(all(0 <= number <= MASK for number in record), "not 64-bit numbers")
    c = unpack_code(code)
    _need(c["kind"] != 3 and c["operation"] != 3, "reserved kind or operation")
    _need(1 <= count <= length and start + length <= MOST_ELEMENTS, "count, length or start")
    check_rows(record[9:], start + length - 1)
    _need(c["kind"] != ALL or count == length, "kind all lists everything")
    _need(1 <= runs <= count if c["kind"] == RUNS else runs == 0, "runs")
    _need(c["packing"] == PLANES or c["operation"] == ADD, "two-bit is for ADD")
    _need(escapes <= count if c["packing"] == TWO_BIT else escapes == 0, "escapes")
    gaps = {GAPS: count, RUNS: runs, ALL: 0}[c["kind"]]
    found = _array_pieces("gap", gaps, c["wg"], gap_chain) + _array_pieces("run", runs, c["wr"], run_chain)
    if c["packing"] == TWO_BIT:
        return [*found, ("two", -(-count // 4)), *_array_pieces("esc", escapes, c["wv"], value_chain)]
    role = {XOR: "xor", ADD: "add", SET: "set"}[c["operation"]]
    return found + _array_pieces(role, count, c["wv"], value_chain)


def decode(record: Record, slices: list[bytes]) -> tuple[list[int], list[int]]:
    """(positions from the first that the delta covers, values), after every check of §4.6 on one delta."""
    expected = pieces(record)
    _need([size for _, size in expected] == [len(piece) for piece in slices], "slices of other sizes")
    start, length, count, code, runs, _, _, _, escapes = record[:9]
    c = unpack_code(code)
    rest = [bytes(piece) for piece in slices]
    gaps, rest = rest[: c["wg"]], rest[c["wg"] :]
    lengths, rest = rest[: c["wr"]], rest[c["wr"] :]
    if c["kind"] == GAPS:
        positions = from_gaps(read_planes(gaps, count))
    elif c["kind"] == RUNS:
        positions = from_runs(read_planes(gaps, runs), read_planes(lengths, runs), count)
    else:
        positions = list(range(length))
    _need(len(positions) == count, "runs do not add up to count")
    _need(positions[-1] < length, "position beyond the delta")
    if c["packing"] == TWO_BIT:
        stored = read_two_bit(rest[0], count, read_planes(rest[1:], escapes) if escapes else [])
    else:
        stored = read_planes(rest, count)
    sparse = c["kind"] != ALL
    positions = [position(record[9:], start + p) - low(record) for p in positions]
    return positions, [from_stored(value, c["operation"], sparse, 8 * c["width"]) for value in stored]


def validate(record: Record, slices: list[bytes]) -> None:
    decode(record, slices)


# --- encode


def encode(
    old: Array,
    new: Array,
    start: int,
    key: int,
    kind: int = GAPS,
    gap_planes: int = 1,
    operation: int = XOR,
    packing: int = PLANES,
    value_planes: int | None = None,
    run_planes: int = 1,
    rows: Rows = FLAT,
) -> tuple[Record, list[tuple[str, bytes]], Lanes, Lanes] | None:
    olds, news = flat(old), flat(new)
    listed = [p for p in range(len(olds)) if kind == ALL or olds[p] != news[p]]
    if not listed or (olds == news and (kind, operation) != (ALL, SET)):
        return None
    values = [(olds[p], news[p]) for p in listed]
    width = old.dtype.itemsize
    code = kind | operation << 10 | packing << 12 | (width.bit_length() - 1) << 17
    found: list[tuple[str, bytes]] = []
    runs = gap_chain = run_chain = escapes = value_chain = 0

    def add(role: str, numbers: list[int], planes: int) -> int:
        arrays = write_planes(numbers, planes)
        found.extend((f"{role}{planes}.{j}", data) for j, data in enumerate(arrays))
        return len(arrays[-1])

    if kind == GAPS:
        code |= gap_planes << 2
        gap_chain = add("gap", to_gaps(listed), gap_planes)
    if kind == RUNS:
        code |= gap_planes << 2 | run_planes << 6
        starts, spans = to_runs(listed)
        runs = len(starts)
        gap_chain = add("gap", starts, gap_planes)
        run_chain = add("run", spans, run_planes)
    stored = [to_stored(a, b, operation, kind != ALL, 8 * width) for a, b in values]
    role = {XOR: "xor", ADD: "add", SET: "set"}[operation]
    if packing == TWO_BIT:
        packed, stored = write_two_bit(stored)
        found.append(("two", packed))
        escapes, role = len(stored), "esc"
    if stored:
        planes = value_planes or width
        code |= planes << 13
        value_chain = add(role, stored, planes)
    record = (start, len(olds), len(listed), code, runs, gap_chain, run_chain, value_chain, escapes, *rows)
    pre = digest_of([(position(rows, start + p), olds[p]) for p in listed], key)
    post = digest_of([(position(rows, start + p), news[p]) for p in listed], key)
    return record, found, pre, post


# --- use of a delta


def count_changed(old: Array, new: Array) -> int:
    return sum(a != b for a, b in zip(flat(old), flat(new), strict=True))


def extract(old: Array, new: Array) -> tuple[list[int], list[int], list[int]]:
    olds, news = flat(old), flat(new)
    positions = [p for p in range(len(olds)) if olds[p] != news[p]]
    return positions, [olds[p] for p in positions], [news[p] for p in positions]


def after(record: Record, slices: list[bytes], array: Array, first: int = 0) -> list[int]:
    """All elements of ``array`` as they will be."""
    values = flat(array)
    c = unpack_code(record[3])
    _need(array.dtype.itemsize == c["width"] and first + span(record) <= len(values), "array does not fit")
    bits = 8 * c["width"]
    for position, value in zip(*decode(record, slices), strict=True):
        live = values[first + position]
        updated = {XOR: live ^ value, ADD: (live + value) % (1 << bits), SET: value}[c["operation"]]
        values[first + position] = updated
    return values


def gather(record: Record, slices: list[bytes], array: Array, first: int = 0) -> list[int]:
    values = flat(array)
    return [values[first + position] for position in decode(record, slices)[0]]


def sums(record: Record, slices: list[bytes], array: Array, key: int, first: int = 0) -> Lanes:
    live = gather(record, slices, array, first)
    listed = decode(record, slices)[0]
    return digest_of([(low(record) + p, v) for p, v in zip(listed, live, strict=True)], key)
