"""The C++ kernel against the oracle, both ways, at every instruction level.

``KERNEL_MODULE`` names another build of the module to test (test_kernel_asan.py), ``KERNEL_EXAMPLES``
how many examples hypothesis tries.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle

Array = npt.NDArray[np.unsignedinteger[Any]]
EXAMPLES = int(os.environ.get("KERNEL_EXAMPLES", "150"))
KEY = 0x0123_4567_89AB_CDEF
TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
LAYOUTS = ["contiguous", "transposed", "reversed", "sliced", "padded", "misaligned", "flat"]
CHOICES = [
    {},
    *({"kind": kind, "operation": op} for kind in (0, 1, 2) for op in (0, 1, 2)),
    *({"kind": kind, "packing": 1} for kind in (0, 1, 2)),
    {"kind": 0, "gap_planes": 2},
    {"kind": 1, "gap_planes": 3},
    {"kind": 0, "gap_planes": 8},
]


def _load() -> Any:
    if path := os.environ.get("KERNEL_MODULE"):
        spec = importlib.util.spec_from_file_location("_native", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    from deltarefit import _kernel

    return _kernel


kernel = _load()
every_level = pytest.mark.parametrize("level", kernel.levels())


def lay_out(values: Any, shape: tuple[int, ...], layout: str) -> Any:
    """An array of this shape and content whose memory is arranged in one of several ways."""
    content = values.reshape(shape)
    if layout == "transposed":
        return np.ascontiguousarray(content.T).T
    if layout == "reversed":
        everything = (slice(None, None, -1),) * content.ndim
        return np.ascontiguousarray(content[everything])[everything]
    if layout in ("sliced", "padded"):
        step = 3 if layout == "sliced" else 1
        room = np.full([size * step + 2 for size in shape], 7, values.dtype)
        view = room[tuple(slice(1, 1 + size * step, step) for size in shape)]
        view[...] = content
        return view
    if layout == "misaligned":
        raw = np.zeros(values.nbytes + 1, np.uint8)
        odd = np.frombuffer(raw.data, values.dtype, values.size, offset=1).reshape(shape)
        odd[...] = content
        return odd
    return values.copy() if layout == "flat" else content.copy()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Array, Array]:
    """Two arrays of one shape in any layouts, with few, many, clustered or all elements changed."""
    dtype = TYPES[draw(st.sampled_from([1, 2, 4, 8]))]
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    if draw(st.booleans()):
        shape = (draw(st.integers(1, 5)) * 67,)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = np.iinfo(dtype).max
    old = rng.integers(0, top, int(np.prod(shape)), dtype, endpoint=True)
    small = draw(st.booleans())
    step = rng.integers(1, 6 if small else top, old.size, dtype, endpoint=True)
    step = np.where(rng.random(old.size) < 0.5, step, (0 - step).astype(dtype)).astype(dtype)
    changed = rng.random(old.size) < draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.9, 1.0]))
    if draw(st.booleans()):
        changed = np.repeat(changed, 7)[: old.size]
    new = np.where(changed, old + step, old).astype(dtype)
    one, two = (draw(st.sampled_from(LAYOUTS if len(shape) > 1 else LAYOUTS[:-1])) for _ in "ab")
    if "flat" in (one, two):
        shape = (old.size,)
    return lay_out(old, shape, one), lay_out(new, shape, two)


def check_use(made: Any, old: Array, new: Array) -> None:
    """Everything that is done with an encoded delta from ``old`` to ``new``."""
    record, pieces, pre, post = made
    slices = [data for _, data in pieces]
    positions, values = kernel.decode(record, slices)
    assert (positions.dtype, values.dtype) == (np.uint64, old.dtype)
    assert (positions.tolist(), values.tolist()) == oracle.decode(record, slices)
    kernel.validate(record, slices)
    assert kernel.sums(record, slices, old, KEY) == pre
    assert kernel.sums(record, slices, new, KEY) == post
    assert kernel.gather(record, slices, old).tolist() == oracle.gather(record, slices, old)
    news = kernel.gather(record, slices, new)
    before, after, coming = kernel.preview(record, slices, old, KEY)
    assert (before, after, coming.tolist()) == (pre, post, news.tolist())
    saved = old.copy()
    kernel.apply(record, slices, old)
    assert old.tobytes() == new.tobytes()
    old[...] = saved
    kernel.apply_values(record, slices, old, np.repeat(news, 2)[::2])
    assert old.tobytes() == new.tobytes()
    old[...] = saved


@every_level
@settings(max_examples=EXAMPLES, deadline=None)
@given(pair=pairs(), start=st.integers(0, 2**47), choice=st.sampled_from(CHOICES))
def test_encode_writes_what_the_oracle_writes(
    level: str, pair: tuple[Array, Array], start: int, choice: dict[str, int]
) -> None:
    kernel.use_level(level)
    old, new = pair
    result = kernel.encode(old, new, start, KEY, **choice)
    if result is None:
        assert old.tobytes() == new.tobytes()
        assert old.size == 0 or (choice.get("kind"), choice.get("operation")) != (2, 2)
        return
    record, pieces, pre, post = result
    c = oracle.unpack_code(record[3])
    forced = {name: c["wg" if name == "gap_planes" else name] for name in choice}
    assert forced == ({**choice, "gap_planes": 0} if "gap_planes" in choice and c["kind"] == 2 else choice)
    args = (c["kind"], c["wg"], c["operation"], c["packing"], c["wv"] or None, c["wr"])
    assert oracle.encode(old, new, start, KEY, *args) == (record, pieces, pre, post)
    assert kernel.pieces(record) == [(name, len(data)) for name, data in pieces] == oracle.pieces(record)
    check_use(result, old, new)


@every_level
@settings(max_examples=EXAMPLES, deadline=None)
@given(pair=pairs(), start=st.integers(0, 2**47), data=st.data())
def test_every_encoding_of_the_oracle_is_understood(
    level: str, pair: tuple[Array, Array], start: int, data: st.DataObject
) -> None:
    kernel.use_level(level)
    old, new = pair
    width = old.dtype.itemsize
    kind, operation = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    packing = data.draw(st.integers(0, 1)) if operation == 1 else 0
    # Fewer value planes than bytes only for 16 bits: a chain of larger quotients would be too long.
    least = max(1, width - 1) if width <= 2 else width
    planes = [data.draw(st.integers(low, 8)) for low in (1, least, 1)]
    made = oracle.encode(old, new, start, KEY, kind, planes[0], operation, packing, planes[1], planes[2])
    if made is not None:
        check_use(made, old, new)


@every_level
@settings(max_examples=EXAMPLES, deadline=None)
@given(pair=pairs(), start=st.integers(0, 2**63), key=st.integers(0, 2**64 - 1))
def test_scan_and_digest(level: str, pair: tuple[Array, Array], start: int, key: int) -> None:
    kernel.use_level(level)
    old, new = pair
    assert kernel.count_changed(old, new) == oracle.count_changed(old, new)
    found = kernel.extract(old, new)
    assert tuple(part.tolist() for part in found) == oracle.extract(old, new)
    assert [part.dtype for part in found] == [np.uint64, old.dtype, old.dtype]
    assert kernel.digest(new, start, key) == oracle.digest(new, start, key)


@every_level
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, 9001])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_sizes_around_block_boundaries(level: str, size: int, width: int) -> None:
    kernel.use_level(level)
    rng = np.random.default_rng(size)
    for density, choice in itertools.product((0.004, 0.2, 1.0), ({}, {"kind": 1}, {"packing": 1})):
        old = rng.integers(0, 200, size, TYPES[width])
        new = np.where(rng.random(size) < density, old + rng.integers(1, 5, size, TYPES[width]), old)
        new[-1] = old[-1] + 1
        record, pieces, pre, post = kernel.encode(old, new, 3, KEY, **choice)
        slices = [piece for _, piece in pieces]
        assert tuple(part.tolist() for part in kernel.decode(record, slices)) == oracle.decode(record, slices)
        assert kernel.count_changed(old, new) == np.count_nonzero(old != new)
        assert kernel.preview(record, slices, old, KEY)[:2] == (pre, post)
        total = np.array([kernel.digest(new, 3, KEY), pre, kernel.digest(old, 3, KEY), post], np.uint64)
        assert (total[0] + total[1] == total[2] + total[3]).all()
        kernel.apply(record, slices, old)
        assert old.tobytes() == new.tobytes()


@every_level
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize(
    ("width", "layout"),
    [(1, "contiguous"), (2, "contiguous"), (4, "reversed"), (8, "padded"), (2, "reversed"), (2, "sliced")],
)
def test_large_arrays_of_any_strides(level: str, width: int, order: tuple[int, ...], layout: str) -> None:
    """Against the contiguous form, which the tests above compare with the oracle."""
    kernel.use_level(level)
    rng = np.random.default_rng(width)
    plain = rng.integers(0, 250, (37, 45, 70), TYPES[width])
    changed = np.where(rng.random(plain.shape) < 0.05, plain + np.array(3, plain.dtype), plain)
    old, new = (lay_out(array.ravel(), array.shape, layout).transpose(order) for array in (plain, changed))
    flat_old, flat_new = old.ravel(), new.ravel()
    assert kernel.digest(new, 5, KEY) == kernel.digest(flat_new, 5, KEY)
    assert kernel.count_changed(old, new) == kernel.count_changed(flat_old, new.copy().ravel())
    made = kernel.encode(old, new, 5, KEY)
    assert made == kernel.encode(flat_old, flat_new, 5, KEY)
    slices = [piece for _, piece in made[1]]
    assert kernel.preview(made[0], slices, old, KEY)[:2] == made[2:]
    assert kernel.gather(made[0], slices, old).tolist() == flat_old[flat_old != flat_new].tolist()
    kernel.apply(made[0], slices, old)
    assert old.tobytes() == new.tobytes()


@every_level
@pytest.mark.parametrize("operation", [0, 1, 2])
@pytest.mark.parametrize("base", [0, 1, 0x3F80, 0x7FFF, 0x8000, 0xFFFF])
def test_all_16_bit_patterns(level: str, operation: int, base: int) -> None:
    kernel.use_level(level)
    every = np.arange(65536, dtype=np.uint16)
    for old, new in ((np.full_like(every, base), every), (every, every[::-1] ^ (base >> 1))):
        for kind, packing in itertools.product((0, 1, 2), (0, 1) if operation == 1 else (0,)):
            result = kernel.encode(old, new, 0, KEY, kind=kind, operation=operation, packing=packing)
            record, pieces = result[:2]
            target = old.copy()
            kernel.apply(record, [piece for _, piece in pieces], target)
            assert target.tobytes() == new.tobytes()


@every_level
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "reversed", "sliced", "padded", "misaligned"])
def test_a_delta_in_the_middle_of_an_array(level: str, layout: str) -> None:
    kernel.use_level(level)
    rng = np.random.default_rng(4)
    plain = rng.integers(0, 65536, 60 * 90, np.uint16)
    first, stop = 333, 4321
    changed = plain.copy()
    changed[first:stop] += (rng.random(stop - first) < 0.1).astype(np.uint16)
    record, pieces, pre, post = kernel.encode(plain[first:stop], changed[first:stop], 777, KEY)
    slices = [piece for _, piece in pieces]
    target = lay_out(plain, (60, 90), layout)
    assert kernel.sums(record, slices, target, KEY, first) == pre
    before, after, coming = kernel.preview(record, slices, target, KEY, first)
    assert (before, after, coming.tolist()) == (pre, post, changed[plain != changed].tolist())
    assert kernel.gather(record, slices, target, first).tolist() == plain[plain != changed].tolist()
    kernel.apply(record, slices, target, first)
    assert target.tobytes() == changed.tobytes()
    kernel.apply_values(record, slices, target, plain[plain != changed], first)
    assert target.tobytes() == plain.tobytes()


def far_delta(kind: int) -> tuple[oracle.Record, list[bytes], list[int]]:
    """A hand-made delta of three positions with gaps above 2**32 in 2**40 elements."""
    positions = [5, 2**33 + 1, 2**40 - 1]
    gaps = oracle.to_gaps(positions) if kind == 0 else oracle.to_runs(positions)[0]
    slices = oracle.write_planes(gaps, 5)
    sizes = [3, len(slices[-1]), 0]
    code = kind | 5 << 2 | 1 << 13 | 1 << 17
    if kind == 1:
        slices += oracle.write_planes([0, 0, 0], 1)
        sizes[0:3], code = [3, len(slices[4]), 3], code | 1 << 6
    record = (2**46, 2**40, 3, code, 3 if kind else 0, sizes[1], sizes[2], 3, 0, *oracle.FLAT)
    return record, [*slices, b"\x01\x02\x04"], positions


@every_level
@pytest.mark.parametrize("kind", [0, 1])
def test_positions_beyond_32_bits(level: str, kind: int) -> None:
    kernel.use_level(level)
    record, slices, positions = far_delta(kind)
    assert oracle.decode(record, slices)[0] == positions
    assert kernel.decode(record, slices)[0].tolist() == positions
    element = np.array([0x4000], np.uint16)
    endless = np.lib.stride_tricks.as_strided(element, (2**20, 2**10, 2**10 + 1), (0, 0, 0))
    first = 2**30
    elements = [(2**46 + position, 0x4000) for position in positions]
    assert kernel.sums(record, slices, endless, KEY, first) == oracle.digest_of(elements, KEY)
    assert kernel.gather(record, slices, endless, first).tolist() == [0x4000] * 3
    kernel.apply(record, slices, endless, first)
    assert element[0] == 0x4007
    with pytest.raises(ValueError, match="range"):
        kernel.apply(record, slices, endless, first + 1)
    shorter = (record[0], record[1] - 1, *record[2:])
    with pytest.raises(ValueError, match="beyond"):
        kernel.validate(shorter, slices)


@pytest.mark.slow
def test_encode_more_than_32_bits_of_elements() -> None:
    size = 2**32 + 10_000
    new = np.zeros(size, np.uint8)  # never written pages cost no memory
    old = np.broadcast_to(np.zeros(1, np.uint8), (size,))
    places = [7, size - 1]
    new[places] = 1
    record, pieces, pre, post = kernel.encode(old, new, 2**40, KEY, operation=0)
    assert oracle.decode(record, [piece for _, piece in pieces]) == (places, [1, 1])
    assert pre == oracle.digest_of([(2**40 + place, 0) for place in places], KEY)
    assert post == oracle.digest_of([(2**40 + place, 1) for place in places], KEY)
    assert kernel.extract(old, new)[0].tolist() == places


def test_a_thread_does_not_see_another_threads_scratch() -> None:
    rng = np.random.default_rng(5)
    old = rng.integers(0, 65536, 300_000, np.uint16)
    news = [np.where(rng.random(old.size) < 0.03, old + np.uint16(step), old) for step in range(1, 5)]
    alone = [kernel.encode(old, new, 0, KEY) for new in news]
    together: list[list[Any]] = [[] for _ in news]

    def work(number: int) -> None:
        together[number] = [kernel.encode(old, news[number], 0, KEY) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(news))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert together == [[result] * 10 for result in alone]


def test_choice_is_good_and_the_same_at_every_level() -> None:
    """Order-0 cost of the chosen encoding against every forced one, on three kinds of change."""
    rng = np.random.default_rng(0)
    old = rng.integers(0x3C00, 0x3F00, 200_000, np.uint16)
    few = np.where(rng.random(old.size) < 0.03, old + rng.choice([1, -1, 2], old.size).astype(np.uint16), old)
    rows = np.where(np.repeat(rng.random(200) < 0.1, 1000), rng.integers(0, 65536, old.size, np.uint16), old)
    rare = np.where(rng.random(old.size) < 0.0005, old ^ np.uint16(1), old)
    for new in (few, rows, rare):
        cost = {str(choice): _cost(kernel.encode(old, new, 0, KEY, **choice)) for choice in CHOICES}
        assert cost["{}"] < 1.03 * min(cost.values()) + 64, cost
        made = []
        for level in kernel.levels():
            kernel.use_level(level)
            made.append(kernel.encode(old, new, 0, KEY))
        assert made[1:] == made[:-1]


def _cost(result: Any) -> float:
    """Bytes of the pieces at their order-0 entropy."""
    total = 0.0
    for _, piece in result[1]:
        counts = np.bincount(np.frombuffer(piece, np.uint8))
        counts = counts[counts > 0]
        total -= float((counts * np.log2(counts / counts.sum())).sum()) / 8
    return total
