"""Deltas carried into storages through tables of boxes: the kernel against the oracle, at every instruction level."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import oracle, placed_oracle
from tests.placed_oracle import (
    BAD_ROWS,
    EVERY_THIRD,
    GOOD,
    HUGE,
    LAYOUTS,
    ONE,
    RUN,
    Digits,
    Table,
    cell_arrays,
    table_of,
    tables,
    whole_box,
)
from tests.test_kernel import CHOICES, EXAMPLES, KEY, TYPES, every_level, far_delta, kernel, pairs
from tests.test_kernel_malformed import DELTAS, changed_bytes, verdict
from tests.test_kernel_pieces import geometries

Array = npt.NDArray[np.unsignedinteger[Any]]


@st.composite
def deltas(draw: st.DrawFn) -> Any:
    """(record, slices) of any kind, operation and packing, flat or of a piece; or None."""
    old, new = draw(pairs())
    rows = draw(st.one_of(st.just(oracle.FLAT), geometries()))
    made = kernel.encode(old, new, draw(st.integers(0, 60)), KEY, **draw(st.sampled_from(CHOICES)), rows=rows)
    return None if made is None else (made[0], [data for _, data in made[1]])


def storage_for(seed: int, room: int, width: int, shift: int, places: Any) -> Array:
    """Random bits; where ``places`` are those of shifted elements, their lower halves are zero."""
    dtype = TYPES[width + shift // 8]
    storage = np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, room, dtype, endpoint=True)
    listed = np.array(list(places), np.int64)
    storage[listed] = storage[listed] >> shift << shift
    return storage


DENSE = ((0, 67, 67, 13314, 0, 0, 0, 1, 1, 0, 0, 0, 0), [bytes(16) + b"\x0c", b"E"])
"""67 positions one behind the other."""
UNEVEN = (np.array([[1, 0, 2, 9, 1, 2, 6, 2, 2, 1, 4]], np.int64), 11)
"""Strides that do not divide each other: the next value of an outer digit comes before that of an inner one."""


@every_level
@settings(max_examples=EXAMPLES * 2, deadline=None)
@given(delta=deltas(), boxes=tables(), shifted=st.booleans(), seed=st.integers(0, 2**32))
@example(delta=DENSE, boxes=UNEVEN, shifted=False, seed=0)
def test_everything_that_is_done_through_boxes(
    level: str, delta: Any, boxes: tuple[Table, int], shifted: bool, seed: int
) -> None:
    kernel.use_level(level)
    if delta is None:
        return
    check_use(*delta, *boxes, shifted, seed)


def check_use(record: Any, slices: Any, table: Table, room: int, shifted: bool, seed: int) -> int:
    """Every function against the oracle, on random bits; how many listed positions the boxes hold."""
    placed_oracle.check(table, room)
    held = placed_oracle.cells(table)
    width = oracle.unpack_code(record[3])["width"]
    shift = 16 if shifted and width == 2 else 0
    storage = storage_for(seed, room, width, shift, held.values())
    hits = placed_oracle.hits(record, slices, held)
    found = kernel.place_decode(record, slices, table)
    assert [part.dtype for part in found] == [np.uint64, np.uint64, TYPES[width]]
    assert list(zip(*(part.tolist() for part in found), strict=True)) == hits
    assert kernel.place_digest(storage, table, KEY, shift) == placed_oracle.digest(storage, held, KEY, shift)
    saved = storage.copy()
    goal = placed_oracle.after(record, slices, storage, held, shift)
    now = placed_oracle.sums(record, slices, storage, held, KEY, shift)
    coming = placed_oracle.sums(record, slices, goal, held, KEY, shift)
    assert kernel.place_sums(record, slices, storage, table, KEY, shift) == now
    assert kernel.place_preview(record, slices, storage, table, KEY, shift) == (now, coming)
    assert storage.tobytes() == saved.tobytes()
    assert kernel.place_apply(record, slices, storage, table, shift) == len(hits)
    assert storage.tobytes() == goal.tobytes()
    assert kernel.place_sums(record, slices, storage, table, KEY, shift) == coming
    if oracle.unpack_code(record[3])["operation"] == oracle.XOR:
        kernel.place_apply(record, slices, storage, table, shift)
        assert storage.tobytes() == saved.tobytes(), "twice is not at all"
    return len(hits)


# --- many blocks


@every_level
@pytest.mark.parametrize("digits", [*(make() for make in LAYOUTS), RUN, EVERY_THIRD, ONE], ids=str)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_applied_through_boxes_or_to_what_was_gathered(level: str, width: int, digits: Digits) -> None:
    kernel.use_level(level)
    row = whole_box(digits, 77, 5)
    table, (positions, offsets) = table_of([row], 6), cell_arrays(row)
    rng = np.random.default_rng(width)
    dtype = TYPES[width]
    shift = 16 if width == 2 else 0
    canonical = rng.integers(0, 256**width, int(positions.max()) + 50, dtype)
    for density, choice, shifted in itertools.product((0.004, 0.3, 1.0), CHOICES[:10], {0, shift}):
        new = canonical.copy()
        changed = rng.random(new.size) < density
        changed[positions[-1]] = True
        new[changed] += rng.integers(1, 200, int(changed.sum()), dtype)
        record, pieces, _, _ = kernel.encode(canonical, new, 0, KEY, **choice)
        slices = [data for _, data in pieces]
        storage = np.full(int(offsets.max()) + 9, 0xAB, TYPES[4] if shifted else dtype)
        storage[offsets] = canonical[positions].astype(storage.dtype) << shifted
        goal = storage.copy()
        goal[offsets] = new[positions].astype(storage.dtype) << shifted
        listed = np.arange(new.size) if oracle.unpack_code(record[3])["kind"] == 2 else np.flatnonzero(changed)
        hits = int(np.isin(listed, positions).sum())
        before, after = kernel.place_preview(record, slices, storage, table, KEY, shifted)
        now = kernel.place_digest(storage, table, KEY, shifted)
        assert kernel.place_apply(record, slices, storage, table, shifted) == hits
        assert storage.tobytes() == goal.tobytes(), (density, choice, shifted)
        assert kernel.place_sums(record, slices, storage, table, KEY, shifted) == after
        then = kernel.place_digest(storage, table, KEY, shifted)
        assert sub(then, now) == sub(after, before)
        found = kernel.place_decode(record, slices, table)
        in_order = listed[np.isin(listed, positions)]
        assert found[0].tolist() == in_order.tolist()
        assert found[1].tolist() == offsets[np.searchsorted(positions, in_order)].tolist()


def sub(a: oracle.Lanes, b: oracle.Lanes) -> oracle.Lanes:
    return (a[0] - b[0]) & oracle.MASK, (a[1] - b[1]) & oracle.MASK


def padded(sizes: list[tuple[int, int]]) -> list[int]:
    """Digits of these sizes and canonical strides, none of which continues another in the storage."""
    columns, step = [], 1
    for size, stride in reversed(sizes):
        columns = [size, stride, step, *columns]
        step = step * size + 1
    return columns


@every_level
@pytest.mark.parametrize("pitch", [2**31 - 1, 2**31, 2**35 + 1])
def test_rows_far_apart(level: str, pitch: int) -> None:
    """Strides and blocks around and beyond 32 bits, boxes of every number of digits."""
    kernel.use_level(level)
    rng = np.random.default_rng(pitch)
    old = rng.integers(0, 65536, 1500, np.uint16)
    inner = [[], [(26, 1)], [(15, 2)], [(5, 6), (4, 1)], [(5, 6), (2, 3)], [(2, 15), (5, 3), (2, 1)]]
    outer = [[], [(50, pitch)], [(24, 2 * pitch)], [(5, 10 * pitch), (2, 3 * pitch)], [(4, 12 * pitch), (2, pitch)]]
    hits = []
    for density, digits in itertools.product((0.3, 1.0), itertools.product(outer, inner)):
        new = np.where(rng.random(old.size) < density, old + np.uint16(1), old)
        made = kernel.encode(old, new, 0, KEY, rows=(99, 30, 1, pitch))
        sizes = [*digits[0], *digits[1]]
        table = table_of([[99 + len(sizes), 3, *padded(sizes)]], 6)
        hits.append(check_use(made[0], [data for _, data in made[1]], table, 20_000, True, pitch))
    assert hits.count(0) < 10
    assert max(hits) == 1300


@every_level
@pytest.mark.parametrize("shift", [0, 16])
def test_parts_add_up_to_the_whole(level: str, shift: int) -> None:
    """Columns shards on three ranks, of which one keeps two interleaved halves one behind the other."""
    kernel.use_level(level)
    rows, columns = 50, 96
    tensor = np.random.default_rng(1).integers(0, 65536, (rows, columns), np.uint16)
    kept = tensor.astype(np.uint32) << 16 if shift else tensor
    first = kept[:, :32].reshape(-1).copy()
    middle = kept[:, 32:64].T.reshape(-1).copy()
    last = np.concatenate([kept[:, 64::2].reshape(-1), kept[:, 65::2].reshape(-1)])
    ranks = [
        (first, [[0, 0, rows, columns, 32, 32, 1, 1]]),
        (middle, [[32, 0, rows, columns, 1, 32, 1, rows]]),
        (last, [[64 + k, k * rows * 16, rows, columns, 16, 16, 2, 1] for k in (0, 1)]),
    ]
    lanes = [kernel.place_digest(storage, table_of(boxes, 2), KEY, shift) for storage, boxes in ranks]
    total = tuple(sum(part[k] for part in lanes) & oracle.MASK for k in (0, 1))
    assert total == kernel.digest(tensor, 0, KEY)


@every_level
@pytest.mark.parametrize("kind", [0, 1])
def test_positions_beyond_32_bits(level: str, kind: int) -> None:
    kernel.use_level(level)
    record, slices, positions = far_delta(kind)
    absolute = [2**46 + position for position in positions]
    storage = np.array([0, 0x4000, 0x8000], np.uint16)
    everything = table_of([[2**46, 1, 2**40, 1, 0]], 1)
    assert kernel.place_decode(record, slices, everything)[0].tolist() == absolute
    assert kernel.place_apply(record, slices, storage, everything) == 3
    assert storage.tolist() == [0, 0x4007, 0x8000]
    for stride in (2**33 + 1, 2**33, 3, 2**40 - 1):
        last = (2**40 - 1) // stride
        table = table_of([[2**46, 2, last + 1, stride, 0, 1, 0, 0]], 2)
        held = [position for position in absolute if (position - 2**46) % stride == 0]
        assert kernel.place_decode(record, slices, table)[0].tolist() == held, stride
        table = table_of([[2**46, 2, (last + 1) // 2, 2 * stride, 0, 2, stride, 0]], 2)
        held = [p for p in held if (p - 2**46) // stride < (last + 1) // 2 * 2]
        assert kernel.place_decode(record, slices, table)[0].tolist() == held, stride
    far_apart = table_of([[2**46 + 5, 7, 2, 2**33 - 4, 2**62]], 1)
    assert kernel.place_decode(record, slices, far_apart)[1].tolist() == [7, 7 + 2**62]


@every_level
def test_no_boxes_and_no_storage(level: str) -> None:
    kernel.use_level(level)
    record, slices = DELTAS[0]
    for columns in (2, 5, 20):
        table = np.empty((0, columns), np.int64)
        storage = np.empty(0, TYPES[oracle.unpack_code(record[3])["width"]])
        assert kernel.place_apply(record, slices, storage, table) == 0
        assert kernel.place_preview(record, slices, storage, table, KEY) == ((0, 0), (0, 0))
        assert kernel.place_digest(storage, table, KEY) == (0, 0)
        assert [part.size for part in kernel.place_decode(record, slices, table)] == [0, 0, 0]


# --- what is refused


def uses(record: Any, slices: Any, storage: Any, table: Any, shift: int = 0) -> list[Callable[[], Any]]:
    """The functions that take a delta and a storage; the first one writes."""
    return [
        lambda: kernel.place_apply(record, slices, storage, table, shift),
        lambda: kernel.place_sums(record, slices, storage, table, KEY, shift),
        lambda: kernel.place_preview(record, slices, storage, table, KEY, shift),
    ]


def check_refused(calls: list[Callable[[], Any]], storage: Array, match: str = r".") -> None:
    saved = storage.tobytes()
    for call in calls:
        with pytest.raises(ValueError, match=match):
            call()
    assert storage.tobytes() == saved


def one_delta(width: int = 2) -> tuple[Any, list[bytes], Array]:
    """A delta of positions 9 to 20, and a storage for GOOD."""
    old = np.arange(12).astype(TYPES[width])
    record, pieces, _, _ = kernel.encode(old, old + TYPES[width](3), 9, KEY, kind=0)
    return record, [data for _, data in pieces], np.arange(6).astype(TYPES[width])


def test_a_good_table_beside_the_bad_ones() -> None:
    record, slices, storage = one_delta()
    assert kernel.place_apply(record, slices, storage, table_of([GOOD], 2)) == 6
    placed_oracle.check(table_of([GOOD], 2), 6)


@pytest.mark.parametrize(("row", "match"), BAD_ROWS)
def test_tables_that_break_a_rule(row: list[int], match: str) -> None:
    record, slices, storage = one_delta()
    for rows in ([row], [[90, 0, 1, 0, 0, 1, 0, 0], row]):
        table = table_of(rows, 2)
        with pytest.raises(ValueError, match=r"."):
            placed_oracle.check(table, storage.size)
        digest = [lambda table=table: kernel.place_digest(storage, table, KEY)]
        check_refused([*uses(record, slices, storage, table), *digest], storage, match)


@every_level
@settings(max_examples=EXAMPLES * 3, deadline=None)
@given(boxes=tables(), data=st.data())
def test_any_changed_number_of_a_table(level: str, boxes: tuple[Table, int], data: st.DataObject) -> None:
    """Refused by the kernel where the oracle refuses; else every offset lies within the storage."""
    kernel.use_level(level)
    table, room = boxes
    if table.size == 0:
        return
    at = data.draw(st.integers(0, table.size - 1))
    near = table.reshape(-1)[at] + data.draw(st.integers(-3, 3))
    far = data.draw(st.sampled_from([0, 1, -1, 2**31, 2**47, 2**48 - 1, 2**48, 2**62, HUGE, -HUGE - 1]))
    table.reshape(-1)[at] = near if data.draw(st.booleans()) else far
    storage = np.zeros(room, np.uint16)
    record, slices, _ = one_delta()
    try:
        placed_oracle.check(table, room)
    except ValueError:
        check_refused(uses(record, slices, storage, table), storage)
        return
    kernel.place_apply(record, slices, storage, table)
    if all(math.prod(size for size, _, _ in placed_oracle.digits(row)) < 10**5 for row in table.tolist()):
        kernel.place_digest(storage, table, KEY)


def test_arguments_of_another_kind() -> None:
    record, slices, storage = one_delta()
    good = table_of([GOOD], 2)
    bad_tables = [
        (good.astype(np.int32), "int64"),
        (good.astype(np.uint64), "int64"),
        (good.astype(np.float64), "int64"),
        (good.astype(">i8"), "int64"),
        (good[0], "dimensions: expected 2, found 1"),
        (good[None], "dimensions: expected 2, found 3"),
        (np.repeat(good, 2, axis=1)[:, ::2], "contiguous"),
        (np.asfortranarray(np.repeat(good, 2, axis=0)), "contiguous"),
        (good[:, :7], "columns"),
        (good[:, :1], "columns"),
        (np.ones((1, 23), np.int64), "columns"),
        (np.empty((0, 3), np.int64), "columns"),
    ]
    for table, match in bad_tables:
        check_refused(uses(record, slices, storage, table), storage, match)
        with pytest.raises(ValueError, match=match):
            kernel.place_decode(record, slices, table)
        with pytest.raises(ValueError, match=match):
            kernel.place_digest(storage, table, KEY)
    read_only = storage.copy()
    read_only.flags.writeable = False
    check_refused(uses(record, slices, read_only, good)[:1], read_only, "read-only")
    for other, match in [
        (np.repeat(storage, 2)[::2], "contiguous"),
        (storage[::-1], "contiguous"),
        (storage[:, None], "dimensions"),
        (storage.astype(np.uint32), "width than the delta: expected 2, found 4"),
        (storage.astype(np.int16), "unsigned"),
    ]:
        check_refused(uses(record, slices, other, good), other, match)
    check_refused(uses(record, slices, storage, good, 8), storage, "shift is not 0 or 16")
    check_refused(uses(record, slices, storage, good, 16), storage, "shifted elements of another width")
    wide_record, wide_slices, wide = one_delta(4)
    check_refused(uses(wide_record, wide_slices, wide, good, 16), wide, "width than the delta: expected 4, found 2")


@every_level
def test_lower_halves_that_are_not_zero(level: str) -> None:
    """Refused where they are read, and nothing is written, not even to the elements before them."""
    kernel.use_level(level)
    old = np.arange(5000).astype(np.uint16)
    table = table_of([[0, 4999, 5000, 1, -1]], 1)
    for operation, place in itertools.product((0, 1, 2), (0, 4999)):
        record, pieces, _, _ = kernel.encode(old, old + np.uint16(1), 0, KEY, kind=0, operation=operation)
        slices = [data for _, data in pieces]
        storage = old[::-1].astype(np.uint32) << 16
        storage[place] += 1
        digest = [lambda storage=storage: kernel.place_digest(storage, table, KEY, 16)]
        readers = [*uses(record, slices, storage, table, 16)[operation == 2 :], *digest]
        check_refused(readers, storage, "lower half")
        if operation == 2:
            assert kernel.place_apply(record, slices, storage, table, 16) == 5000
            assert storage.tolist() == ((old[::-1] + np.uint16(1)).astype(np.uint32) << 16).tolist()
        storage[place] |= 1
        elsewhere = table_of([[0, 4998 - place % 2, 4998, 1, -1]], 1)
        assert kernel.place_apply(record, slices, storage, elsewhere, 16) == 4998, "not read, not refused"


@every_level
def test_any_changed_byte_of_a_slice(level: str) -> None:
    kernel.use_level(level)
    good = 0
    for record, whole in DELTAS:
        low, span = oracle.low(record), oracle.span(record)
        table = table_of([[low, 0, (span + 1) // 2, 2, 1], [low + 1, span, span // 2, 2, -1]], 1)
        width = oracle.unpack_code(record[3])["width"]
        for slices in itertools.islice(changed_bytes(whole), 0, None, 3):
            storage = np.arange(span + 1).astype(TYPES[width])
            if verdict(oracle.decode, record, slices) is None:
                check_refused(uses(record, slices, storage, table), storage)
                with pytest.raises(ValueError, match=r"."):
                    kernel.place_decode(record, slices, table)
                continue
            goal = placed_oracle.after(record, slices, storage, placed_oracle.cells(table))
            kernel.place_apply(record, slices, storage, table)
            assert storage.tobytes() == goal.tobytes()
            good += 1
    assert good > 300


@every_level
def test_missing_bytes_and_damage_beyond_all_boxes(level: str) -> None:
    """A delta is refused as a whole, even where the damage concerns another rank's elements."""
    kernel.use_level(level)
    old = np.zeros(9000, np.uint16)
    record, pieces, _, _ = kernel.encode(old, old + np.uint16(5), 0, KEY, kind=0, operation=0)
    slices = [data for _, data in pieces]
    storage = np.arange(100).astype(np.uint16)
    for table in (table_of([[0, 0, 100, 1, 1]], 1), table_of([[20000, 0, 100, 1, 1]], 1)):
        for number, data in enumerate(slices):
            for other in (data[:-1], data + b"\0", data[:-1] + b"\xff"):
                broken = [*slices[:number], other, *slices[number + 1 :]]
                if len(other) == len(data) and verdict(oracle.decode, record, broken) is not None:
                    continue
                check_refused(uses(record, broken, storage, table), storage)


def test_what_changes_during_the_call() -> None:
    """Another thread may spoil results; the sanitizers (test_kernel_asan.py) must find no stray access."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 65536, 100_000, np.uint16)
    new = np.where(rng.random(old.size) < 0.3, old + rng.integers(1, 9, old.size, np.uint16), old)
    record, pieces, _, _ = kernel.encode(old, new, 0, KEY, kind=0, packing=1)
    slices = [np.frombuffer(data, np.uint8).copy() for _, data in pieces]
    table = table_of([[1, 0, 900, 100, 99, 99, 1, 1], [50, 100_000, 500, 150, -100, 3, 20, 2]], 2)
    storage = np.zeros(100_005, np.uint16)
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            for data in (*slices, storage.view(np.uint8)):
                data[rng.integers(0, data.size, 20)] = rng.integers(0, 256, 20, np.uint8)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(60):
            for call in (*uses(record, slices, storage, table), lambda: kernel.place_decode(record, slices, table)):
                with contextlib.suppress(ValueError):
                    call()
    finally:
        stop.set()
        thread.join(timeout=60)


@every_level
def test_boxes_that_overlap_are_safe(level: str) -> None:
    """Wrong results, but nothing outside the storage is touched and lists do not run over."""
    kernel.use_level(level)
    old = np.arange(3000).astype(np.uint16)
    record, pieces, _, _ = kernel.encode(old, old + np.uint16(1), 0, KEY, kind=0)
    slices = [data for _, data in pieces]
    table = table_of([[0, 0, 3000, 1, 0]] * 40 + [[0, 0, 1000, 3, 1]] * 40, 1)
    storage = np.zeros(1000, np.uint16)
    for use in uses(record, slices, storage, table):
        use()
    assert kernel.place_decode(record, slices, table)[0].tolist() == list(range(3000))
