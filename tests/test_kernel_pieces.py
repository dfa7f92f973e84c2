"""Deltas of pieces: rows of elements, apart in a tensor and one behind the other in the delta (docs/format.md §4.1)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.test_kernel import CHOICES, EXAMPLES, KEY, LAYOUTS, TYPES, every_level, kernel, lay_out, pairs
from tests.test_kernel_malformed import DELTAS, check_refused, verdict

Array = npt.NDArray[np.unsignedinteger[Any]]
RUNS = [1, 2, 5, 63, 64, 65, 700, 5000]


@st.composite
def geometries(draw: st.DrawFn, most: int = 40) -> oracle.Rows:
    """Rows of every kind in the one form that the format allows."""
    offset, run = draw(st.integers(0, most)), draw(st.integers(1, 9))
    if run == 1:
        return offset, 1, 1, draw(st.integers(2, 9))
    step = draw(st.integers(1, 3))
    beyond = draw(st.integers(1, 20).filter(lambda beyond: beyond != step))
    return offset, run, step, (run - 1) * step + beyond


def window_of(record: oracle.Record, elements: Array, before: int, after: int, layout: str) -> tuple[Array, list[int]]:
    """(an array that holds ``elements`` where the delta's lie, with others between and around; their flat indices)."""
    places = [before + oracle.position(record[9:], record[0] + p) - oracle.low(record) for p in range(record[1])]
    flat = np.arange(before + oracle.span(record) + after).astype(elements.dtype)
    flat[places] = elements.reshape(-1)
    across = next(n for n in (7, 5, 3, 2, 1) if flat.size % n == 0)
    shape = (flat.size,) if layout == "flat" else (flat.size // across, across)
    return lay_out(flat, shape, layout), places


@every_level
@settings(max_examples=EXAMPLES, deadline=None)
@given(pair=pairs(), rows=geometries(), start=st.integers(0, 100), choice=st.sampled_from(CHOICES), data=st.data())
def test_everything_that_is_done_with_a_piece(
    level: str, pair: tuple[Array, Array], rows: oracle.Rows, start: int, choice: dict[str, int], data: st.DataObject
) -> None:
    kernel.use_level(level)
    old, new = pair
    made = kernel.encode(old, new, start, KEY, **choice, rows=rows)
    assert kernel.digest(new, start, KEY, rows) == oracle.digest(new, start, KEY, rows)
    if made is None:
        assert kernel.encode(old, new, start, KEY, **choice) is None
        return
    record, pieces, pre, post = made
    c = oracle.unpack_code(record[3])
    args = (c["kind"], c["wg"], c["operation"], c["packing"], c["wv"] or None, c["wr"])
    assert made == oracle.encode(old, new, start, KEY, *args, rows)
    before, after = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    layout = data.draw(st.sampled_from(LAYOUTS))
    check_use(record, [piece for _, piece in pieces], (old, new), (pre, post), (before, after, layout))


def check_use(record: Any, slices: Any, pair: tuple[Array, Array], sums: Any, place: tuple[int, int, str]) -> None:
    """Reads, writes and previews in a window of any strides; what lies between and around keeps its bits."""
    before, _, layout = place
    target, places = window_of(record, pair[0], *place)
    goal, _ = window_of(record, pair[1], *place)
    assert tuple(part.tolist() for part in kernel.decode(record, slices)) == oracle.decode(record, slices)
    assert (
        kernel.sums(record, slices, target, KEY, before) == sums[0] == oracle.sums(record, slices, target, KEY, before)
    )
    assert kernel.sums(record, slices, goal, KEY, before) == sums[1]
    assert kernel.gather(record, slices, target, before).tolist() == oracle.gather(record, slices, target, before)
    news = kernel.gather(record, slices, goal, before)
    pre, post, coming = kernel.preview(record, slices, target, KEY, before)
    assert (pre, post, coming.tolist()) == (*sums, news.tolist())
    saved = target.copy()
    assert oracle.after(record, slices, target, before) == oracle.flat(goal)
    kernel.apply(record, slices, target, before)
    assert target.tobytes() == goal.tobytes(), layout
    target[...] = saved
    kernel.apply_values(record, slices, target, np.repeat(news, 2)[::2], before)
    assert target.tobytes() == goal.tobytes(), layout
    alone: Any = (0, *record[1:9], *oracle.FLAT)
    in_order = np.array([target.reshape(-1)[p] for p in places])
    flat = pair[0].copy().reshape(-1)
    kernel.apply(alone, slices, flat)
    assert flat.tobytes() == in_order.tobytes(), "the same bits in an array that holds just the piece"


@every_level
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("width", "step"), [(1, 1), (2, 3), (4, 1), (8, 2)])
def test_long_pieces(level: str, width: int, run: int, step: int) -> None:
    """Many blocks, rows and parts of rows, against NumPy and against flat deltas of the whole tensor."""
    kernel.use_level(level)
    rng = np.random.default_rng(run)
    rows = (11, 1, 1, step + 1) if run == 1 else (11, run, step, run * step + 3)
    start, length = 3 * run // 2, 9001
    places = [oracle.position(rows, p) for p in range(start, start + length)]
    old = rng.integers(0, 200, places[-1] + 9, TYPES[width])
    for density, choice in itertools.product((0.004, 0.3, 1.0), ({}, {"kind": 1}, {"packing": 1}, {"operation": 2})):
        new = old.copy()
        listed = np.array(places)[rng.random(length) < density]
        new[listed] += rng.integers(1, 5, listed.size, TYPES[width])
        record, pieces, pre, post = kernel.encode(old[places], new[places], start, KEY, **choice, rows=rows)
        slices = [piece for _, piece in pieces]
        assert sub(post, pre) == sub(kernel.digest(new, 0, KEY), kernel.digest(old, 0, KEY))
        new_piece, old_piece = (kernel.digest(a[places], start, KEY, rows) for a in (new, old))
        assert sub(new_piece, old_piece) == sub(post, pre)
        if density == 1.0:
            assert (old_piece, new_piece) == (pre, post)
        assert kernel.preview(record, slices, old, KEY, places[0])[:2] == (pre, post)
        assert (kernel.decode(record, slices)[0] + places[0]).tolist() == np.flatnonzero(old != new).tolist()
        wide = np.zeros((old.size, 2), old.dtype)[:, 1]
        wide[:] = old
        for target in (old.copy(), wide):
            kernel.apply(record, slices, target, places[0])
            assert target.tobytes() == new.tobytes()


def sub(a: oracle.Lanes, b: oracle.Lanes) -> oracle.Lanes:
    return (a[0] - b[0]) % 2**64, (a[1] - b[1]) % 2**64


@every_level
def test_a_piece_adds_up_over_any_cutting(level: str) -> None:
    kernel.use_level(level)
    array = np.random.default_rng(1).integers(0, 65536, 3000, np.uint16)
    for rows in ((7, 70, 1, 200), (7, 6, 2, 50), (7, 1, 1, 9)):
        for cut in (1, 69, 70, 71, 1111, 2999):
            parts = [kernel.digest(array[a:b], a, KEY, rows) for a, b in ((0, cut), (cut, 3000))]
            total = tuple(sum(lanes) % 2**64 for lanes in zip(*parts, strict=True))
            assert total == kernel.digest(array, 0, KEY, rows) == kernel.digest(array.reshape(50, -1), 0, KEY, rows)


def far_piece() -> tuple[oracle.Record, list[bytes]]:
    """A delta of three elements that lie 2^40 apart, the last one in the last place of the largest tensor."""
    pitch = 2**40 - 1
    rows = (2**48 - 1 - 2 * pitch, 1, 1, pitch)
    made = oracle.encode(np.array([1, 2, 3], np.uint16), np.array([2, 4, 7], np.uint16), 0, KEY, rows=rows)
    assert made is not None
    return made[0], [piece for _, piece in made[1]]


@every_level
def test_positions_beyond_32_bits(level: str) -> None:
    kernel.use_level(level)
    record, slices = far_piece()
    assert oracle.low(record) + oracle.span(record) == 2**48
    assert kernel.decode(record, slices)[0].tolist() == oracle.decode(record, slices)[0] == [0, 2**40 - 1, 2**41 - 2]
    element = np.array([8], np.uint16)
    endless = np.lib.stride_tricks.as_strided(element, (2**10, 2**10, 2**21), (0, 0, 0))
    positions = [oracle.low(record) + p for p in oracle.decode(record, slices)[0]]
    assert kernel.sums(record, slices, endless, KEY) == oracle.digest_of([(p, 8) for p in positions], KEY)
    first = 2**41 - oracle.span(record)
    kernel.gather(record, slices, endless, first)
    with pytest.raises(ValueError, match="range"):
        kernel.gather(record, slices, endless, first + 1)
    beyond: Any = (*record[:9], record[9] + 1, *record[10:])
    with pytest.raises(ValueError, match="beyond the largest tensor"):
        kernel.decode(beyond, slices)


# ------------------------------------------------------------------------------------------ what is refused

NUMBERS = (0, 1, 2, 3, 11, 2**24, 2**47, 2**48 - 1, 2**48, 2**64 - 1)


def test_extreme_geometries() -> None:
    """The kernel takes just what the oracle takes; what it refuses, or what lies beyond the array, is not written."""
    record, slices = next(d for d in DELTAS if d[0][9] == 5)
    array = np.zeros(99, f"u{oracle.unpack_code(record[3])['width']}")
    taken = 0
    for start, rows in itertools.product((9, 2**40), itertools.product(NUMBERS, repeat=4)):
        broken: Any = (start, *record[1:9], *rows)
        good = verdict(oracle.decode, broken, slices)
        assert verdict(kernel.decode, broken, slices) == good
        if good is None or oracle.span(broken) > array.size:
            saved = array.tobytes()
            with pytest.raises(ValueError, match=r"."):
                kernel.apply(broken, slices, array)
            assert array.tobytes() == saved
        taken += good is not None
    assert taken > 300


@every_level
def test_a_bad_geometry_is_refused_by_name(level: str) -> None:
    kernel.use_level(level)
    record, slices = next(d for d in DELTAS if d[0][9] == 5)
    array = np.zeros(999, f"u{oracle.unpack_code(record[3])['width']}")
    bad = {
        (5, 3, 2, 4): "overlap",
        (5, 3, 2, 0): "overlap",
        (5, 3, 0, 9): "step",
        (5, 0, 0, 0): "without elements",
        (0, 0, 1, 0): "without elements",
        (5, 1, 1, 1): "simpler",
        (5, 1, 2, 9): "simpler",
        (5, 3, 2, 6): "simpler",
        (5, 3, 1, 3): "simpler",
        (2**48, 3, 2, 9): "beyond",
        (5, 2**48 - 1, 2**47, 2**48 - 1): "overlap",
        (5, 2**33 + 1, 2**31, 9): "overlap",
        (5, 2, 1, 2**47): "beyond",
        (2**48 - 4, 3, 2, 11): "beyond",
    }
    for rows, says in bad.items():
        broken: Any = (*record[:9], *rows)
        check_refused(broken, slices, array, match=says)
        with pytest.raises(ValueError, match=says):
            kernel.encode(array, array, 9, KEY, rows=rows)
        with pytest.raises(ValueError, match=says):
            kernel.digest(array, 9, KEY, rows)
        with pytest.raises(ValueError, match=says):
            kernel.pieces(broken)
    for rows_of_another_type in ((1, 2, 3), [5, 3, 2, 11], "rows", (5, 3, 2, -1), (5, 3, 2, 2**64)):
        with pytest.raises(ValueError, match="4 integers"):
            kernel.digest(array, 0, KEY, rows_of_another_type)
    for start in (2**48 - 998, 2**63, 2**64 - 999, 2**64 - 1):
        with pytest.raises(ValueError, match="start"):
            kernel.digest(array, start, KEY, (0, 1, 1, 2))


def test_each_enumeration_has_one_form() -> None:
    seen: dict[tuple[int, ...], oracle.Rows] = {}
    for rows in itertools.product(range(3), range(8), range(8), range(15)):
        record: Any = (0, 60, 1, 1 << 2 | 1 << 13, 0, 1, 0, 1, 0, *rows)
        try:
            kernel.pieces(record)
        except ValueError:
            continue
        sequence = tuple(oracle.position(rows, p) for p in range(60))
        assert sequence not in seen, (rows, seen[sequence])
        assert all(a < b for a, b in itertools.pairwise(sequence))
        seen[sequence] = rows
    assert len(seen) > 500
