"""Affine maps against slow enumeration, and every kind of trainer layout against index arithmetic of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit.affine import (
    AffineMap,
    Box,
    NotAffineError,
    compose,
    derive,
    fit,
    invert,
    probe,
    restrict,
    rows_of,
    shard,
)
from deltarefit.errors import UsageError
from tests.boxes_oracle import ROOM, Positions, both, boxes, painted, pairs, places


@dataclass(frozen=True)
class Kind:
    """A layout: the local tensor's shape, and for each canonical tensor its local positions, by arithmetic."""

    shape: tuple[int, ...]
    outputs: dict[str, Positions]
    most: int
    """Boxes that each canonical tensor may need."""


def grid(*shape: int) -> list[Positions]:
    return list(np.indices(shape, dtype=np.int64))


def dim_k_shard(width: int) -> Kind:
    """Elements [2, 5) of the middle dimension of [4, 7, width]."""
    a, b, c = grid(4, 7, width)
    local = (a * 3 + (b - 2)) * width + c
    return Kind((4, 3, width), {"w": np.where((b >= 2) & (b < 5), local, -1)}, 1)


def column_shard(width: int) -> Kind:
    r, c = grid(9, 2 * width)
    return Kind((9, width), {"w": np.where(c >= width, r * width + c - width, -1)}, 1)


def vocabulary(width: int) -> Kind:
    """Rows [8, 16) of a table padded to 16; the canonical one has 13."""
    r, c = grid(13, width)
    return Kind((8, width), {"embed": np.where(r >= 8, (r - 8) * width + c, -1)}, 1)


def query_groups(width: int, gate: bool = False) -> Kind:
    """Groups of [queries, (gates,) key, value]; with gates, q_proj holds [query, gate] head by head."""
    groups, heads, dim = 3, 4, 2
    per, kinds = heads * (1 + gate) + 2, 1 + gate
    r, c = grid(groups * heads * kinds * dim, width)
    group, head, kind, row = r // (heads * kinds * dim), r // (kinds * dim) % heads, r // dim % kinds, r % dim
    out = {"q": ((group * per + kind * heads + head) * dim + row) * width + c}
    r, c = grid(groups * dim, width)
    for number, name in enumerate(("k", "v")):
        out[name] = ((r // dim * per + heads * kinds + number) * dim + r % dim) * width + c
    return Kind((groups * per * dim, width), out, 1)


def qkv_concatenated(width: int) -> Kind:
    """The same groups to one tensor [all queries, all keys, all values]."""
    parts = query_groups(width).outputs
    return Kind((36, width), {"qkv": np.concatenate(list(parts.values()))}, 2)


def gate_up(width: int) -> Kind:
    r, c = grid(6, width)
    return Kind((12, width), {"gate": r * width + c, "up": (6 + r) * width + c}, 1)


def gate_up_interleaved(width: int, block: int = 4) -> Kind:
    """Blocks of rows alternate between gate and up, expert by expert; canonical has halves."""
    experts, half = 3, 3 * block
    e, r, c = grid(experts, 2 * half, width)
    side, row = r // half, r % half
    local = e * 2 * half + (row // block * 2 + side) * block + row % block
    return Kind((experts * 2 * half, width), {"gate_up": local * width + c}, 1)


def experts_apart(width: int) -> Kind:
    """One stacked local tensor, one canonical tensor for each expert and half."""
    r, c = grid(5, width)
    out = {f"{e}.{name}": ((e * 2 + k) * 5 + r) * width + c for e in range(3) for k, name in enumerate(("gate", "up"))}
    return Kind((3, 10, width), out, 1)


def expert_of_stack(width: int) -> Kind:
    """One expert's local tensor, one stacked canonical tensor."""
    e, r, c = grid(4, 10, width)
    return Kind((10, width), {"stack": np.where(e == 2, r * width + c, -1)}, 1)


def experts_transposed(width: int) -> Kind:
    """Canonical [experts, width, 2·5] with gate and up in turn; local [experts, (5 of gate, 5 of up), width]."""
    e, h, i = grid(3, width, 10)
    return Kind((3, 10, width), {"gate_up": (e * 10 + i % 2 * 5 + i // 2) * width + h}, 1)


def gate_of_experts_transposed(width: int) -> Kind:
    e, h, i = grid(3, width, 10)
    return Kind((3, 5, width), {"gate_up": np.where(i % 2 == 0, (e * 5 + i // 2) * width + h, -1)}, 1)


def conv1d(width: int) -> Kind:
    r, c = grid(7, width)
    return Kind((width, 7), {"w": c * 7 + r}, 1)


def square(width: int) -> Kind:
    r, c = grid(width, width)
    return Kind((width, width), {"w": c * width + r}, 1)


def rotary(width: int) -> Kind:
    """Local rows [head, half, 2], canonical rows [head, 2, half]."""
    heads, half = 3, 4
    r, c = grid(heads * 2 * half, width)
    head, side, row = r // (2 * half), r // half % 2, r % half
    return Kind((heads * 2 * half, width), {"q": ((head * half + row) * 2 + side) * width + c}, 1)


def rotary_back(width: int) -> Kind:
    heads, half = 3, 4
    r, c = grid(heads * 2 * half, width)
    head, row, side = r // (2 * half), r // 2 % half, r % 2
    return Kind((heads * 2 * half, width), {"q": ((head * 2 + side) * half + row) * width + c}, 1)


def linear_attention(width: int, value: int = 4) -> Kind:
    """Local [q, k, v, z, b, a] of all heads; canonical rows [q, k, v, z] and [b, a] by key head, two values each."""
    heads, key = 3, 2
    per = 2 * key + 2 * value
    starts = [0, heads * key, 2 * heads * key, 2 * heads * key + heads * value, 2 * heads * (key + value)]
    r, c = grid(heads * per, width)
    head, row = r // per, r % per
    local = np.select(
        [row < key, row < 2 * key, row < 2 * key + value],
        [
            starts[0] + head * key + row,
            starts[1] + head * key + row - key,
            starts[2] + head * value + row - 2 * key,
        ],
        starts[3] + head * value + row - 2 * key - value,
    )
    out = {"qkvz": local * width + c}
    r, c = grid(heads * 4, width)
    head, side, row = r // 4, r // 2 % 2, r % 2
    out["ba"] = (starts[4] + side * heads * 2 + head * 2 + row) * width + c
    return Kind((starts[4] + heads * 4, width), out, 2)


def mamba_in(width: int) -> Kind:
    """Rank 1 of 2 of [z, x, B, C, dt], each split by rows, to one tensor."""
    sizes = [12, 12, 4, 4, 6]
    r, c = grid(sum(sizes), width)
    local, first, done = np.full(r.shape, -1), 0, 0
    for size in sizes:
        mine = (r >= first + size // 2) & (r < first + size)
        local = np.where(mine, (done + r - first - size // 2) * width + c, local)
        first, done = first + size, done + size // 2
    return Kind((sum(sizes) // 2, width), {"in_proj": local}, 5)


def conv_in(width: int) -> Kind:
    """Rank 0 of 2 of [x, B, C] of a convolution [rows, 1, 4]."""
    sizes = [12, 4, 6]
    r, _, c = grid(sum(sizes), 1, 4)
    local, first, done = np.full(r.shape, -1), 0, 0
    for size in sizes:
        mine = (r >= first) & (r < first + size // 2)
        local = np.where(mine, (done + r - first) * 4 + c, local)
        first, done = first + size, done + size // 2
    return Kind((sum(sizes) // 2, 1, 4), {"conv": local}, 3)


def halves_swapped(width: int) -> Kind:
    r, c = grid(5, 2 * width)
    return Kind((5, 2 * width), {"eh": r * 2 * width + (c + width) % (2 * width)}, 2)


KINDS: dict[str, Callable[[int], Kind]] = {
    "dim_k": dim_k_shard,
    "column": column_shard,
    "vocabulary": vocabulary,
    "qkv": query_groups,
    "gated_qkv": lambda width: query_groups(width, gate=True),
    "qkv_concatenated": qkv_concatenated,
    "gate_up": gate_up,
    "gate_up_interleaved": gate_up_interleaved,
    "experts_apart": experts_apart,
    "expert_of_stack": expert_of_stack,
    "experts_transposed": experts_transposed,
    "gate_of_experts_transposed": gate_of_experts_transposed,
    "conv1d": conv1d,
    "square": square,
    "rotary": rotary,
    "rotary_back": rotary_back,
    "linear_attention": linear_attention,
    "linear_attention_2": lambda width: linear_attention(width, 2),
    "linear_attention_3": lambda width: linear_attention(width, 3),
    "mamba_in": mamba_in,
    "conv_in": conv_in,
    "halves_swapped": halves_swapped,
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
widths = pytest.mark.parametrize("width", [1, 5, 24])


def assert_tidy(box: Box) -> None:
    """What ``fit`` promises: canonical strides positive, descending and ascending strictly; local ones not negative."""
    assert min(box.local_strides, default=0) >= 0
    assert list(box.strides) == sorted(box.strides, reverse=True)
    assert (np.diff(places(box)[1]) > 0).all()
    assert all(type(n) is int for n in (box.local, box.canonical, *box.sizes, *box.local_strides, *box.strides))


@kinds
@widths
def test_every_kind_is_a_few_boxes(kind: Callable[[int], Kind], width: int) -> None:
    layout = kind(width)
    m = derive(layout.shape, layout.outputs)
    assert m.shape == layout.shape
    for name, positions in layout.outputs.items():
        assert (painted(m, name, positions.shape) == positions).all()
        assert 1 <= len(m.of(name)) <= layout.most
        for box in m.of(name):
            assert_tidy(box)


def row_cuts(rows: int) -> list[tuple[int, int]]:
    """Row ranges: a step through all starts, and pseudo-random ones."""
    rng = np.random.default_rng(rows)
    return [tuple(sorted(rng.choice(rows + 1, 2, replace=False).tolist())) for _ in range(24)]


@kinds
@widths
def test_every_kind_cut_at_rows_stays_a_few_boxes(kind: Callable[[int], Kind], width: int) -> None:
    layout = kind(width)
    m = derive(layout.shape, layout.outputs)
    unit = layout.shape[-1]
    for first, stop in row_cuts(int(np.prod(layout.shape[:-1]))):
        mine = restrict(m, first * unit, stop * unit)
        for name, positions in layout.outputs.items():
            left = np.where((positions >= first * unit) & (positions < stop * unit), positions, -1)
            assert (painted(mine, name, left.shape) == left).all()
            most = sum(2 * max(len(box.sizes), 1) - 1 for box in m.of(name))
            assert len(mine.of(name)) <= most
            assert len(fit(left)) <= 6


@kinds
@widths
def test_rows_of_every_kind_are_a_few_boxes(kind: Callable[[int], Kind], width: int) -> None:
    for positions in kind(width).outputs.values():
        table = positions.reshape(-1, positions.shape[-1])
        for first, stop in row_cuts(len(table)):
            found = AffineMap((), tuple(("w", box) for box in fit(table[first:stop])))
            assert (painted(found, "w", (stop - first, table.shape[1])) == table[first:stop]).all()
            assert len(found.boxes) <= 9


@st.composite
def tables(draw: st.DrawFn) -> Positions:
    """Canonical tensors made of digits in any order, cut, masked, shifted; most of them affine."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    digits = probe(sizes, draw(st.integers(0, 9))).transpose(draw(st.permutations(range(len(sizes)))))
    flat = np.tile(digits.reshape(-1), draw(st.integers(1, 2)))
    columns = draw(st.sampled_from([1, 2, 3, 4, 16, 20]))
    flat = np.resize(flat, -(-len(flat) // columns) * columns)
    low, high = draw(st.integers(0, len(flat))), draw(st.integers(0, len(flat)))
    flat = np.where((flat >= low) & (flat < high), flat, -1) if low < high else flat
    for _ in range(draw(st.integers(0, 2))):
        flat[draw(st.integers(0, len(flat) - 1))] = draw(st.integers(-1, 99))
    return flat.reshape(-1, columns)


@settings(max_examples=300, deadline=None)
@given(tables())
def test_fit_is_exact(positions: Positions) -> None:
    found = fit(positions, limit=positions.size)
    m = AffineMap((), tuple(("w", box) for box in found))
    assert (painted(m, "w", positions.shape) == positions).all()
    for box in found:
        assert_tidy(box)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-1, 30), max_size=200))
def test_fit_of_noise_is_exact(values: list[int]) -> None:
    positions = np.array(values, np.int64)
    m = AffineMap((), tuple(("w", box) for box in fit(positions, limit=200)))
    assert (painted(m, "w", positions.shape) == positions).all()


@pytest.mark.parametrize("width", [5, 24])
@pytest.mark.parametrize(("first", "stop"), [(0, 50), (3, 50), (7, 11), (13, 71), (1, 72)])
def test_a_range_cut_inside_rows_is_one_box(width: int, first: int, stop: int) -> None:
    flat = np.where((probe((120,)) >= first) & (probe((120,)) < stop), probe((120,)) - first, -1)
    assert fit(flat.reshape(-1, width)) == (Box((stop - first,), 0, (1,), first, (1,)),)


def test_what_does_not_fit_is_counted_and_placed() -> None:
    positions = probe((100, 20))
    shuffled = np.random.default_rng(1).permutation(positions[40:].reshape(-1))
    mixed = np.concatenate([positions[:40].reshape(-1), shuffled]).reshape(100, 20)
    with pytest.raises(
        NotAffineError, match=r"w: 1\d{3} of 2000 positions do not fit into 64 boxes, the first of them at "
    ):
        derive((100, 20), {"w": mixed})


def test_the_limit_of_boxes_is_kept() -> None:
    positions = np.array([0, 50, 7, 30, 21, 4], np.int64)
    assert len(fit(positions, limit=6)) <= 6
    with pytest.raises(NotAffineError, match="do not fit into 1 boxes"):
        fit(positions, limit=1)


def test_fit_takes_positions_only_as_int64() -> None:
    with pytest.raises(UsageError, match="not int64"):
        fit(np.zeros(3, np.int32))  # type: ignore[arg-type]


def test_a_position_outside_the_local_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="w: a position is outside"):
        derive((2, 3), {"w": probe((2, 3), 1)})


def test_nothing_maps_to_nothing() -> None:
    assert derive((3,), {"w": np.full((4, 5), -1), "v": np.zeros((0, 7), np.int64)}).boxes == ()
    assert shard("w", (4, 3), (4, 0), (0, 3)).boxes == ()
    assert restrict(shard("w", (4, 3), (0, 0), (4, 3)), 5, 5).boxes == ()


def test_a_scalar_is_one_element() -> None:
    m = shard("w", (), (), ())
    assert m == AffineMap((), (("w", Box((), 0, (), 0, ())),))
    assert rows_of(m.boxes[0][1]) == (((0, 1, 1, 1, 0), m.boxes[0][1]),)
    assert fit(np.array(0)) == (m.boxes[0][1],)


@given(st.data())
def test_a_shard_is_its_slice(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    starts = [data.draw(st.integers(0, n)) for n in shape]
    sizes = [data.draw(st.integers(0, n - start)) for n, start in zip(shape, starts, strict=True)]
    m = shard("w", shape, starts, sizes)
    expected = np.full(shape, -1, np.int64)
    expected[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))] = probe(sizes)
    assert (painted(m, "w", tuple(shape)) == expected).all()
    assert len(m.boxes) <= 1


@pytest.mark.parametrize(("starts", "sizes"), [((-1, 0), (2, 2)), ((3, 0), (2, 2)), ((0, 0), (-1, 2))])
def test_a_shard_outside_its_tensor_is_refused(starts: tuple[int, int], sizes: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="w: a shard reaches outside"):
        shard("w", (4, 3), starts, sizes)


def maps(box: Box, *more: Box) -> AffineMap:
    return AffineMap((ROOM,), tuple(("w", one) for one in (box, *more)))


@settings(max_examples=400, deadline=None)
@given(boxes(), boxes())
def test_compose_is_the_join(a: Box, b: Box) -> None:
    inner, outer = AffineMap((ROOM,), (("memory", a),)), {"memory": maps(b)}
    by_place: dict[int, list[int]] = {}
    for place, canonical in both(b):
        by_place.setdefault(place, []).append(canonical)
    expected = {("w", local, canonical) for local, place in both(a) for canonical in by_place.get(place, [])}
    found = compose(inner, outer)
    assert pairs(found) == expected
    assert found.shape == inner.shape


@kinds
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_compose_of_kinds_with_shards_in_memory(kind: Callable[[int], Kind], data: st.DataObject) -> None:
    """A rank holds a block of the tensor in memory whose conversion is known."""
    layout = kind(6)
    starts = [data.draw(st.integers(0, n - 1)) for n in layout.shape]
    sizes = [data.draw(st.integers(1, n - start)) for n, start in zip(layout.shape, starts, strict=True)]
    found = compose(shard("memory", layout.shape, starts, sizes), {"memory": derive(layout.shape, layout.outputs)})
    local = np.full(layout.shape, -1, np.int64)
    local[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))] = probe(sizes)
    for name, positions in layout.outputs.items():
        expected = np.where(positions >= 0, local.reshape(-1)[positions], -1)
        assert (painted(found, name, positions.shape) == expected).all()


def test_one_element_may_go_to_several_names() -> None:
    table = probe((3, 4))
    m = derive((3, 4), {"head": table, "embed": table})
    assert m.names == ("head", "embed")
    both = compose(shard("memory", (3, 4), (1, 0), (2, 4)), {"memory": m})
    assert pairs(both) == {(name, i, i + 4) for name in ("head", "embed") for i in range(8)}


def test_copies_inside_one_tensor_are_kept() -> None:
    """Each local row stands twice in the canonical tensor."""
    m = derive((3, 4), {"w": np.repeat(probe((3, 4)), 2, axis=0)})
    assert len(m.boxes) == 1
    assert pairs(restrict(m, 4, 8)) == {("w", 4 + i, 8 + 4 * copy + i) for i in range(4) for copy in range(2)}
    with pytest.raises(NotAffineError, match="w: a local element goes to several places"):
        invert(m, "w", (6, 4))


def test_composing_with_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="a tensor has no map"):
        compose(shard("memory", (3,), (0,), (3,)), {"other": shard("w", (3,), (0,), (3,))})


def test_radices_that_do_not_align_are_enumerated_if_small() -> None:
    a = Box((4000, 3), 0, (3, 1), 0, (5, 1))
    b = Box((5000, 2), 0, (4, 1), 0, (2, 1))
    found = compose(AffineMap((12000,), (("memory", a),)), {"memory": AffineMap((20000,), (("w", b),))})
    where = dict(both(b))
    expected = {("w", local, where[place]) for local, place in both(a) if place in where}
    assert pairs(found) == expected
    large = Box((1 << 30, 3), 0, (3, 1), 0, (5, 1))
    other = Box((1 << 30, 2), 0, (4, 1), 0, (2, 1))
    with pytest.raises(NotAffineError, match="do not align"):
        compose(AffineMap((3 << 30,), (("memory", large),)), {"memory": AffineMap((4 << 30,), (("w", other),))})


@settings(max_examples=300, deadline=None)
@given(boxes(), st.integers(0, 150), st.integers(0, 150))
def test_restrict_keeps_just_the_interval(box: Box, start: int, stop: int) -> None:
    found = restrict(maps(box), start, stop)
    assert pairs(found) == {pair for pair in pairs(maps(box)) if start <= pair[1] < stop}
    assert len(found.boxes) <= 2 * max(len(box.sizes), 1) - 1
    assert found.shape == (ROOM,)


@settings(max_examples=200, deadline=None)
@given(boxes(), boxes())
def test_invert_goes_back(box: Box, other: Box) -> None:
    m = maps(box, other)
    used = [pair[1] for one in (box, other) for pair in pairs(maps(one))]
    if len(set(used)) < len(used):
        with pytest.raises(NotAffineError):
            invert(m, "w", (ROOM,))
        return
    back = [(canonical, local) for one in (box, other) for local, canonical in both(one)]
    found = invert(m, "w", (ROOM,))
    assert found.shape == (ROOM,)
    assert found.names == ("w",)
    assert sorted(pair for one in found.of("w") for pair in both(one)) == sorted(back)


@settings(max_examples=400, deadline=None)
@given(boxes())
def test_rows_are_pieces_in_order(box: Box) -> None:
    cuts = rows_of(box)
    seen: list[tuple[int, int]] = []
    for (offset, length, run, step, pitch), part in cuts:
        local, canonical = places(part)
        p = np.arange(length)
        assert (canonical == offset + p // run * pitch + p % run * step).all()
        assert (np.diff(canonical) > 0).all()
        assert length == part.numel
        assert length % run == 0
        seen += zip(local.tolist(), canonical.tolist(), strict=True)
    assert sorted(seen) == sorted(pair[1:] for pair in pairs(maps(box)))
    assert len(cuts) <= max(1, box.numel // max(box.sizes, default=1))


@pytest.mark.parametrize(
    ("box", "pieces"),
    [
        (Box((5, 4), 0, (4, 1), 8, (4, 1)), [(8, 20, 20, 1, 0)]),  # a range
        (Box((5, 4), 0, (1, 5), 8, (4, 1)), [(8, 20, 20, 1, 0)]),  # a range in another order: two local strides
        (Box((5, 4), 0, (1, 5), 8, (8, 2)), [(8, 20, 1, 1, 2)]),  # the same of every other element
        (Box((5, 4), 0, (4, 1), 8, (9, 1)), [(8, 20, 4, 1, 9)]),  # columns
        (Box((5, 4), 0, (4, 1), 8, (9, 2)), [(8, 20, 4, 2, 9)]),  # columns with a step
        (Box((20,), 0, (1,), 3, (2,)), [(3, 20, 1, 1, 2)]),  # every other element
        (Box((2, 5, 4), 0, (20, 4, 1), 0, (45, 9, 1)), [(0, 40, 4, 1, 9)]),  # columns of a stack
        (Box((2, 5, 4), 0, (20, 4, 1), 0, (90, 9, 1)), [(0, 20, 4, 1, 9), (90, 20, 4, 1, 9)]),  # three levels
        (Box((4, 5), 7, (1, 4), 0, (1, 4)), [(0, 20, 20, 1, 0)]),  # digits in falling order
        (Box((4,), 3, (-1,), 8, (-1,)), [(5, 4, 4, 1, 0)]),  # both sides fall
    ],
)
def test_rows_of_known_boxes(box: Box, pieces: list[tuple[int, ...]]) -> None:
    assert [span for span, _ in rows_of(box)] == pieces


@pytest.mark.parametrize("strides", [(2, 1), (3, 0), (0,), (4, 3)])
def test_rows_that_meet_are_refused(strides: tuple[int, ...]) -> None:
    with pytest.raises(NotAffineError, match="meet or overlap"):
        rows_of(Box((3,) * len(strides), 0, strides, 0, strides))


def test_a_box_of_too_many_pieces_is_refused() -> None:
    with pytest.raises(NotAffineError, match="too many wire pieces"):
        rows_of(Box((70_000, 3, 2), 0, (6, 2, 1), 0, (99, 9, 2)))


def test_a_box_needs_sizes_and_strides() -> None:
    with pytest.raises(UsageError, match="one local and one canonical stride"):
        Box((2, 3), 0, (1,), 0, (3, 1))
    with pytest.raises(UsageError, match="no elements"):
        Box((0,), 0, (1,), 0, (1,))


BIG = 1 << 33


def test_positions_beyond_32_bits() -> None:
    """Columns [2^20, 2^21) of 2^20 rows of 2^21, cut at odd places, composed with a rotary permutation of its rows."""
    rows, width = 1 << 20, 1 << 21
    whole = shard("memory", (rows, width), (0, width // 2), (rows, width // 2))
    assert whole.boxes[0][1].numel == 1 << 40
    start, stop = BIG * 3 + 12345, BIG * 100 + 54321
    mine = restrict(whole, start, stop)
    assert len(mine.boxes) == 3
    assert sum(box.numel for _, box in mine.boxes) == stop - start
    half = 64
    permuted = Box((rows // 128, 2, half, width), 0, (128 * width, width, 2 * width, 1), 0,
                   (128 * width, half * width, width, 1))  # fmt: skip
    found = compose(mine, {"memory": AffineMap((rows, width), (("w", permuted),))})
    assert sum(box.numel for _, box in found.boxes) == stop - start
    for local in (start, start + 1, BIG * 50 + 7, stop - 1):
        row, column = divmod(local, width // 2)
        head, line = divmod(row, 128)
        expected = (head * 128 + line % 2 * half + line // 2) * width + width // 2 + column
        assert [expected] == [p for _, box in found.boxes for p in canonical_of(box, local)]
    for _, box in found.boxes:
        assert sum(part.numel for _, part in rows_of(box)) == box.numel


def canonical_of(box: Box, local: int) -> list[int]:
    """Where a box puts one local element, digit by digit from the largest local stride."""
    rest, canonical = local - box.local, box.canonical
    for size, step, stride in sorted(box.dims, key=lambda dim: -dim[1]):
        index, rest = divmod(rest, step)
        if not 0 <= index < size:
            return []
        canonical += index * stride
    return [canonical] if rest == 0 else []


def test_fit_of_positions_beyond_32_bits() -> None:
    positions = probe((24, 32), 1 << 50).transpose(1, 0)
    assert fit(positions) == (Box((32, 24), 1 << 50, (1, 32), 0, (24, 1)),)


@pytest.mark.parametrize("turns", [1, 2, 3, 100, 1000])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1, 4)])
def test_fit_of_long_tensors_without_rows(turns: int, shape: tuple[int, ...]) -> None:
    """``turns`` local ranges, element by element in turn; whole, and cut anywhere."""
    each = 132_000 // turns
    positions = probe((turns, each)).transpose().reshape(shape)
    whole = Box((each, turns), 0, (1, each), 0, (turns, 1))
    assert fit(positions) == ((whole,) if turns > 1 else (Box((each,), 0, (1,), 0, (1,)),))
    cut = np.where((positions >= 777) & (positions < 131_001), positions, -1)
    found = AffineMap((), tuple(("w", box) for box in fit(cut)))
    assert (painted(found, "w", cut.shape) == cut).all()
    assert len(found.boxes) <= 5


@pytest.mark.parametrize("columns", [1, 64])
def test_noise_is_refused(columns: int) -> None:
    noise = np.random.default_rng(0).permutation(1 << 16).reshape(-1, columns)
    with pytest.raises(NotAffineError, match="of 65536 positions do not fit into 64 boxes"):
        fit(noise)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 2, 1), (1, 0, 2, 3)])
def test_fit_of_many_elements(order: tuple[int, ...]) -> None:
    """16 M of them: a loop over rows or elements would take minutes."""
    positions = np.ascontiguousarray(probe((4, 2, 512, 4096)).transpose(order)).reshape(4, -1, 1024)
    assert len(fit(positions)) == 1
