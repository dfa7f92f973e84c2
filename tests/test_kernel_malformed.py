"""Bytes that break the format: the kernel refuses just what the oracle refuses, and then writes nothing."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.test_kernel import EXAMPLES, KEY, every_level, far_delta, kernel

Delta = tuple[oracle.Record, list[bytes]]


GEOMETRIES: list[oracle.Rows] = [oracle.FLAT, (5, 3, 2, 11), oracle.FLAT, (4, 1, 1, 3), (0, 4, 1, 9)]


def small_deltas() -> list[Delta]:
    """One delta of every kind, operation and packing, a few widths and plane counts, flat ones and of pieces with and
    without long rows; a dozen bytes each."""
    deltas = []
    cases = itertools.product((1, 2, 8), (0, 1, 2), ((0, 0), (1, 0), (1, 1), (2, 0)))
    for (width, kind, (operation, packing)), rows in zip(cases, itertools.cycle(GEOMETRIES), strict=False):
        size = 11 if kind < 2 else 6
        old = np.arange(size).astype(f"u{width}") * 20
        new = old.copy()
        new[[1, 2, 5]] += np.array([1, 3, -2]).astype(old.dtype)
        if kind < 2:
            new[10] += np.array(97).astype(old.dtype)
        for gap_planes, value_planes in ((1, width), (2, 8 if width == 1 else width - 1)):
            if width == 8 and value_planes < 8 and operation == 0 and packing == 0:
                continue  # a chain of 2**56 bytes
            args = (kind, gap_planes, operation, packing, value_planes, gap_planes, rows)
            made = oracle.encode(old, new, 9, KEY, *args)
            assert made is not None
            deltas.append((made[0], [data for _, data in made[1]]))
    return deltas


DELTAS = small_deltas()


def verdict(decode: Callable[..., Any], record: oracle.Record, slices: list[bytes]) -> Any:
    """(positions, values), or None when refused."""
    try:
        positions, values = decode(record, slices)
    except ValueError:
        return None
    return [int(p) for p in positions], [int(v) for v in values]


def compare(record: oracle.Record, slices: list[bytes]) -> bool:
    """Both give one verdict; whether it is a good one."""
    found = verdict(kernel.decode, record, slices)
    assert found == verdict(oracle.decode, record, slices), (record, slices)
    if found is None:
        with pytest.raises(ValueError, match=r"."):
            kernel.validate(record, slices)
        return False
    positions = found[0]
    assert all(a < b for a, b in itertools.pairwise([*positions, oracle.span(record)]))
    kernel.validate(record, slices)
    return True


def changed_bytes(slices: list[bytes]) -> Iterator[list[bytes]]:
    for number, data in enumerate(slices):
        for at, value in itertools.product(range(len(data)), (0, 1, 3, 4, 64, 127, 128, 252, 253, 254, 255)):
            if data[at] != value:
                broken = data[:at] + bytes([value]) + data[at + 1 :]
                yield [*slices[:number], broken, *slices[number + 1 :]]


@every_level
def test_any_changed_byte_of_a_slice(level: str) -> None:
    kernel.use_level(level)
    good = [compare(record, slices) for record, old in DELTAS for slices in changed_bytes(old)]
    assert 1000 < sum(good) < len(good) - 1000, "both verdicts are exercised"


def test_any_changed_byte_of_a_record() -> None:
    for record, slices in DELTAS:
        for column, byte, flip in itertools.product(range(13), range(8), (1, 2, 0x80, 0xFF)):
            broken = list(record)
            broken[column] ^= flip << (8 * byte)
            compare(tuple(broken), slices)  # type: ignore[arg-type]


def test_any_changed_code() -> None:
    for record, slices in DELTAS[::3]:
        for code in range(0, 1 << 20, 211):
            broken = (*record[:3], code, *record[4:])
            try:
                expected = oracle.pieces(broken)
            except ValueError:
                with pytest.raises(ValueError, match=r"."):
                    kernel.pieces(broken)
                continue
            assert kernel.pieces(broken) == expected
            compare(broken, slices)


@every_level
@settings(max_examples=EXAMPLES * 2, deadline=None)
@given(delta=st.sampled_from(DELTAS), data=st.data())
def test_random_slices_and_sizes(level: str, delta: Delta, data: st.DataObject) -> None:
    kernel.use_level(level)
    record, slices = delta
    column = data.draw(st.sampled_from([1, 2, 4, 5, 6, 7, 8]))
    numbers = list(record)
    numbers[column] = data.draw(st.integers(0, 14))
    changed: Any = tuple(numbers)
    try:
        sizes = [size for _, size in oracle.pieces(changed)]
    except ValueError:
        changed, sizes = record, [len(piece) for piece in slices]
    byte = st.sampled_from([0, 1, 2, 3, 27, 254, 255])
    compare(changed, [bytes(data.draw(st.lists(byte, min_size=n, max_size=n))) for n in sizes])


@every_level
def test_missing_and_additional_bytes(level: str) -> None:
    kernel.use_level(level)
    for record, slices in DELTAS:
        wrong = [slices[:-1], [*slices, b""], [*slices, b"\0"], [*slices[::-1], b""], [b""] * 40]
        for number, data in enumerate(slices):
            others = (data[:-1], data + b"\0")
            wrong += [[*slices[:number], other, *slices[number + 1 :]] for other in others]
        for broken in wrong:
            with pytest.raises(ValueError, match="slice"):
                kernel.validate(record, broken)


@every_level
def test_many_blocks_and_one_wrong_byte(level: str) -> None:
    """An error in the last of several blocks: nothing of the first ones may have been written."""
    kernel.use_level(level)
    rng = np.random.default_rng(2)
    old = rng.integers(0, 65536, 9000, np.uint16)
    new = old + rng.integers(1, 9, old.size, np.uint16)
    for choice in ({"kind": 0, "operation": 0}, {"kind": 0, "packing": 1}, {"kind": 1, "operation": 1}):
        record, pieces, _, _ = kernel.encode(old, new, 0, KEY, **choice)
        slices = [data for _, data in pieces]
        for number, data in enumerate(slices):
            broken = [*slices[:number], data[:-1] + b"\xff", *slices[number + 1 :]]
            if verdict(oracle.decode, record, broken) is None:
                check_refused(record, broken, old)


def test_slices_and_arrays_that_change_during_the_call() -> None:
    """Another thread may spoil results; the sanitizers (test_kernel_asan.py) must find no stray access."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 65536, 200_000, np.uint16)
    new = np.where(rng.random(old.size) < 0.3, old + rng.integers(1, 9, old.size, np.uint16), old)
    record, pieces, _, _ = kernel.encode(old, new, 0, KEY, kind=0, packing=1)
    slices = [np.frombuffer(data, np.uint8).copy() for _, data in pieces]
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            for data in (*slices, old.view(np.uint8)):
                data[rng.integers(0, data.size, 20)] = rng.integers(0, 256, 20, np.uint8)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(60):
            for choice in ({}, {"kind": 2, "operation": 2}):
                with contextlib.suppress(ValueError):
                    kernel.encode(old, new, 0, KEY, **choice)
            for use in (kernel.apply, kernel.gather):
                with contextlib.suppress(ValueError):
                    use(record, slices, new)
    finally:
        stop.set()
        thread.join(timeout=60)


def check_refused(record: Any, slices: Any, array: Any, *args: Any, match: str = r".") -> None:
    """Each function refuses; the array keeps its bytes."""
    saved = array.tobytes()
    values = np.zeros(record[2], f"u{oracle.unpack_code(record[3])['width']}")
    with pytest.raises(ValueError, match=match):
        kernel.apply(record, slices, array, *args)
    with pytest.raises(ValueError, match=match):
        kernel.apply_values(record, slices, array, values, *args)
    with pytest.raises(ValueError, match=match):
        kernel.gather(record, slices, array, *args)
    with pytest.raises(ValueError, match=match):
        kernel.sums(record, slices, array, KEY, *args)
    with pytest.raises(ValueError, match=match):
        kernel.preview(record, slices, array, KEY, *args)
    assert array.tobytes() == saved


@every_level
def test_arrays_that_do_not_fit(level: str) -> None:
    kernel.use_level(level)
    for record, slices in DELTAS:
        dtype = f"u{oracle.unpack_code(record[3])['width']}"
        fitting = np.arange(oracle.span(record) + 4).astype(dtype)
        check_refused(record, slices, fitting[: oracle.span(record) - 1], match="range")
        check_refused(record, slices, fitting, 5, match="range")
        check_refused(record, slices, fitting, 2**63, match="range")
        check_refused(record, slices, fitting[:0], match="range")
        check_refused(record, slices, fitting.astype("u4"), match="width")
        check_refused(record, slices, fitting.view(f"i{dtype[1]}"), match="unsigned")
        check_refused(record, slices, np.zeros(20), match="unsigned")
        if dtype != "u1":
            check_refused(record, slices, fitting.astype(">" + dtype), match="unsigned")
        kernel.apply(record, slices, fitting, 4)
        for count in (record[2] - 1, record[2] + 1):
            with pytest.raises(ValueError, match="number of values"):
                kernel.apply_values(record, slices, fitting, np.zeros(count, dtype))
        with pytest.raises(ValueError, match="width"):
            kernel.apply_values(record, slices, fitting, np.zeros(record[2], "u4"))


def test_read_only_arrays() -> None:
    record, slices = DELTAS[0]
    array = np.zeros(oracle.span(record), f"u{oracle.unpack_code(record[3])['width']}")
    array.flags.writeable = False
    saved = array.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        kernel.apply(record, slices, array)
    with pytest.raises(ValueError, match="read-only"):
        kernel.apply_values(record, slices, array, np.zeros(record[2], array.dtype))
    kernel.gather(record, slices, array)
    assert array.tobytes() == saved


@pytest.mark.parametrize("kind", [0, 1])
def test_gaps_that_overflow_64_bits(kind: int) -> None:
    record, _, _ = far_delta(kind)
    for gap in (2**64 - 1, 2**63, 2**52, 2**48):
        slices = oracle.write_planes([1, gap, gap], 8)
        code = record[3] & ~(15 << 2) | 8 << 2
        broken: Any = (*record[:3], code, record[4], len(slices[-1]), *record[6:])
        rest = [b"\0\0\0"] * kind + [b"\1\2\4"]
        check_refused(broken, [*slices, *rest], np.zeros(4, np.uint16), match=r".")
        with pytest.raises(ValueError, match="beyond"):
            kernel.validate(broken, [*slices, *rest])


def test_records_and_arguments_of_other_types() -> None:
    record = DELTAS[0][0]
    wrong: list[Any] = [record[:-1], (*record, 0), [*record], (*record[:-1], -1), (*record[:-1], 2**64)]
    wrong += [(*record[:-1], "x"), "record", 7]
    for broken in wrong:
        with pytest.raises(ValueError, match="13 integers"):
            kernel.pieces(broken)
    with pytest.raises(TypeError):
        kernel.validate(record, [1, 2])
    old = np.zeros(4, np.uint16)
    for new in (np.zeros(5, np.uint16), np.zeros((2, 2), np.uint16), np.zeros(4, np.uint8)):
        for use in (kernel.count_changed, kernel.extract, lambda a, b: kernel.encode(a, b, 0, KEY)):
            with pytest.raises(ValueError, match="different"):
                use(old, new)
    for choice in ({"kind": 3}, {"kind": -2}, {"gap_planes": 0}, {"gap_planes": 9}, {"operation": 3}):
        with pytest.raises(ValueError, match="not -1"):
            kernel.encode(old, old + np.uint16(1), 0, KEY, **choice)
    with pytest.raises(ValueError, match="ADD only"):
        kernel.encode(old, old, 0, KEY, operation=0, packing=1)
    with pytest.raises(ValueError, match="largest tensor"):
        kernel.encode(old, old, 2**48, KEY)
    with pytest.raises(ValueError, match="level"):
        kernel.use_level("none")


def test_a_forced_choice_that_would_be_too_large() -> None:
    old, new = np.zeros(2, np.uint64), np.array([0, 2**63], np.uint64)
    assert kernel.encode(old, new, 0, KEY) is not None
    endless = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (0, 2**40), (0, 0))
    assert kernel.encode(endless, endless, 0, KEY) is None
