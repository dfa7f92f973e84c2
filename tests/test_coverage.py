"""Coverage of a catalog by pieces, and what two pieces share, against slow counting."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deltarefit.affine import check_coverage, check_segments, coverage, disjoint, fit, probe, restrict, rows_of, shard
from deltarefit.affine.coverage import contains, cut
from deltarefit.errors import FormatError, IntegrityError, RefitError, UsageError
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import Piece, whole
from tests.boxes_oracle import elements


def catalog_of(*numels: int) -> Catalog:
    return Catalog(tuple(TensorEntry(f"t{i}", "BF16", (n,)) for i, n in enumerate(numels)))


@st.composite
def pieces(draw: st.DrawFn, most: int = 5) -> Piece:
    """Small pieces of tensor 0; sometimes with everything a multiple of two or four."""
    unit, step = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 1, 2, 3]))
    run, rows = unit * draw(st.integers(1, most)), draw(st.integers(1, most))
    least = (run - 1) * step + 1
    pitch = unit * (-(-least // unit) + draw(st.integers(0, 5))) if rows > 1 else draw(st.integers(0, 3))
    return Piece(0, unit * draw(st.integers(0, 30)), run * rows, run, step, pitch)


def owned_by(labels: np.ndarray, ranks: int) -> list[list[Piece]]:
    """Pieces of a tensor whose elements have owners ``labels``."""
    table = probe(labels.shape)
    owned = []
    for rank in range(ranks):
        boxes = fit(np.where(labels == rank, table, -1), limit=labels.size)
        owned.append([Piece(0, *span) for box in boxes for span, _ in rows_of(box)])
    return owned


@st.composite
def layouts(draw: st.DrawFn) -> np.ndarray:
    """Owners of a [rows, columns] tensor: columns, rows, interleaved, cut anywhere, or several of these."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    flat = np.arange(rows * columns).reshape(rows, columns)
    labels = np.zeros_like(flat)
    for _ in range(draw(st.integers(1, 2))):
        part = draw(st.sampled_from(["columns", "rows", "turns", "anywhere"]))
        if part == "columns":
            labels = labels * 2 + (flat % columns >= draw(st.integers(0, columns)))
        elif part == "rows":
            labels = labels * 2 + (flat // columns >= draw(st.integers(0, rows)))
        elif part == "turns":
            labels = labels * 2 + flat // draw(st.integers(1, 3)) % 2
        else:
            labels = labels * 2 + (flat >= draw(st.integers(0, flat.size)))
    return labels


def verdict(numel: int, owned: Sequence[Sequence[Piece]]) -> str | None:
    """By counting: None, or how the error must go on after the tensor's name."""
    counts = np.zeros(numel, int)
    for ranked in owned:
        for piece in ranked:
            np.add.at(counts, elements(piece), 1)
    wrong = np.flatnonzero(counts != 1)
    if not len(wrong):
        return None
    at = int(wrong[0])
    owners = [f"rank {r}" for r, ranked in enumerate(owned) for piece in ranked if at in elements(piece)]
    return f"element {at} is owned {counts[at]} times; expected * ; found {', '.join(owners[:8]) or 'no owner'}"


def assert_verdict(numel: int, owned: Sequence[Sequence[Piece]]) -> None:
    expected = verdict(numel, owned)
    if expected is None:
        check_coverage(catalog_of(numel), owned)
        return
    with pytest.raises(UsageError) as caught:
        check_coverage(catalog_of(numel), owned)
    first, last = expected.split(" expected * ; ")
    assert str(caught.value).startswith(f"t0: {first}")
    assert str(caught.value).endswith(last)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_layouts_are_covered(labels: np.ndarray) -> None:
    owned = owned_by(labels, 4)
    assert verdict(labels.size, owned) is None
    check_coverage(catalog_of(labels.size), owned)


@settings(max_examples=200, deadline=None)
@given(layouts(), st.data())
def test_one_wrong_piece_is_found(labels: np.ndarray, data: st.DataObject) -> None:
    owned = owned_by(labels, 4)
    rank = data.draw(st.sampled_from([r for r in range(4) if owned[r]]))
    number = data.draw(st.integers(0, len(owned[rank]) - 1))
    piece = owned[rank][number]
    change = data.draw(st.sampled_from(["lost", "twice", "moved", "shorter", "wider", "narrower"]))
    if change == "twice":
        owned[data.draw(st.integers(0, 3))].append(piece)
    else:
        changed = {
            "lost": None,
            "moved": replace(piece, offset=piece.offset + data.draw(st.sampled_from([-1, 1]))),
            "shorter": replace(piece, length=piece.length - piece.run),
            "wider": replace(piece, pitch=piece.pitch + 1),
            "narrower": replace(piece, run=piece.run - 1, length=piece.length // piece.run * (piece.run - 1)),
        }[change]
        owned[rank][number : number + 1] = [changed] if changed and changed.length else []
        ends = (changed.offset, changed.position(changed.length - 1)) if changed and changed.length else (0, 0)
        assume(0 <= ends[0] <= ends[1] < labels.size)
    assert_verdict(labels.size, owned)


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces(), max_size=5), st.sampled_from([1, 4]))
def test_any_pieces(few: list[Piece], unit: int) -> None:
    numel = 1 + max((piece.position(piece.length - 1) for piece in few), default=3)
    numel += -numel % unit
    assert_verdict(numel, [[piece] for piece in few])


@settings(max_examples=100, deadline=None)
@given(st.lists(pieces(), max_size=5), st.integers(1, 40))
def test_marking_agrees_in_chunks_of_any_size(few: list[Piece], chunk: int) -> None:
    numel = 1 + max((piece.position(piece.length - 1) for piece in few), default=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "_CHUNK", chunk)
        assert_verdict(numel, [few])


def test_rows_of_another_pitch_are_tiles_too() -> None:
    """Two ranks share the columns of four experts; a third owns the biases between, one row for each expert."""
    expert = 1 << 12
    owned = [
        [Piece(0, e * (expert + 64) + half * 32, expert // 2, 32, 1, 64) for e in range(4)] for half in range(2)
    ]  # fmt: skip
    owned.append([Piece(0, expert, 4 * 64, 64, 1, expert + 64)])
    numel = 4 * (expert + 64)
    check_coverage(catalog_of(numel), owned)
    assert_verdict(numel, owned[:2])
    assert_verdict(numel, [*owned, [whole(0, 1)]])


def test_many_owners_of_one_element_are_counted() -> None:
    """More than a byte can count."""
    with pytest.raises(UsageError, match=r"t0: element 2 is owned 257 times.*found rank 0, rank 1,"):
        check_coverage(catalog_of(8), [[Piece(0, 0, 8, 8)]] + [[Piece(0, 2, 1, 1)]] * 256)


def test_the_first_wrong_tensor_is_named() -> None:
    catalog = catalog_of(4, 0, 6)
    check_coverage(catalog, [[whole(0, 4)], [whole(1, 0), whole(2, 6)]])
    with pytest.raises(UsageError, match=r"t2: element 3 is owned 2 times; .* found rank 0, rank 1"):
        check_coverage(catalog, [[whole(0, 4), Piece(2, 0, 4, 4)], [Piece(2, 3, 3, 3)]])
    with pytest.raises(UsageError, match=r"t0: element 0 is owned 0 times; .* found no owner"):
        check_coverage(catalog, [[whole(2, 6)]])
    with pytest.raises(UsageError, match="t1: element 4 is owned 0 times"):
        check_coverage(catalog_of(4, 6), [[whole(0, 4), whole(1, 4)]])


@pytest.mark.parametrize(
    "shape",
    [
        (0, 0, 9, 9), (0, 7, 2, 2), (0, -1, 2, 2), (0, 0, 4, 3), (0, 0, 4, 0), (0, 0, 4, 4, 0), (0, 0, 4, 2, 1, 1),
        (0, 0, 4, 2, 2, 2), (0, 0, 4, 2, 1, 7), (0, 0, 4, -2), (1, 0, 1, 1), (-1, 0, 1, 1),
    ],
)  # fmt: skip
def test_malformed_pieces_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="rank 1: a piece"):
        check_coverage(catalog_of(8), [[whole(0, 8)], [Piece(*shape)]])


@given(pieces(), st.integers(0, 25), st.integers(0, 25))
def test_cut_is_the_slice(piece: Piece, start: int, stop: int) -> None:
    stop = min(stop, piece.length)
    parts = list(cut(piece, start, stop))
    assert [p for part in parts for p in elements(part)] == elements(piece)[start:stop]
    assert len(parts) <= 3


@given(pieces(), st.integers(0, 200))
def test_contains(piece: Piece, position: int) -> None:
    assert contains(piece, position) == (position in elements(piece))


@settings(max_examples=200, deadline=None)
@given(layouts(), st.data())
def test_segments_of_pieces_in_any_order(labels: np.ndarray, data: st.DataObject) -> None:
    parts = []
    for piece in (piece for ranked in owned_by(labels, 4) for piece in ranked):
        at = data.draw(st.lists(st.integers(1, max(1, piece.length - 1)), max_size=3))
        ends = [0, *sorted({n for n in at if n < piece.length}), piece.length]
        parts += [(piece, first, stop) for first, stop in pairwise(ends)]
    parts = data.draw(st.permutations(parts))
    catalog = catalog_of(labels.size)
    check_segments(catalog, parts)
    lost, first, stop = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
    with pytest.raises(IntegrityError, match=f"t0: element {lost.position(first)} is owned 0 times.*no owner"):
        check_segments(catalog, parts)
    again = data.draw(st.integers(first, stop - 1))
    parts += [(lost, first, stop), (lost, again, again + 1)]
    with pytest.raises(FormatError, match=f"t0: element {lost.position(again)} is owned 2 times.*segment"):
        check_segments(catalog, parts, FormatError)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 9)])
@pytest.mark.parametrize("error", [FormatError, UsageError])
def test_segments_outside_their_piece_are_refused(start: int, stop: int, error: type[RefitError]) -> None:
    with pytest.raises(error, match="a segment is outside its piece"):
        check_segments(catalog_of(8), [(whole(0, 8), start, stop)], error)


@settings(max_examples=1000, deadline=None)
@given(pieces(), pieces())
def test_disjoint_is_exact(a: Piece, b: Piece) -> None:
    assert disjoint(a, b) == (not set(elements(a)) & set(elements(b)))
    assert disjoint(b, a) == disjoint(a, b)


def test_pieces_of_two_tensors_are_disjoint() -> None:
    assert disjoint(whole(0, 4), whole(1, 4))
    assert not disjoint(whole(0, 4), whole(0, 4))


def test_disjoint_of_pieces_too_large_to_enumerate() -> None:
    rows, width = 1 << 22, 1 << 20
    left = Piece(0, 0, rows * width // 2, width // 2, 1, width)
    right = Piece(0, width // 2, rows * width // 2, width // 2, 1, width)
    assert disjoint(left, right)
    assert not disjoint(left, replace(right, offset=right.offset - 1))
    evens = Piece(0, 0, rows * width // 2, 1, 1, 2)
    assert disjoint(evens, replace(evens, offset=1))
    assert not disjoint(evens, right)


def test_radices_that_do_not_align_are_compared_one_by_one_if_few() -> None:
    sixes, odd_fours = Piece(0, 0, 1 << 30, 1, 1, 6), Piece(0, 1, 1 << 16, 1, 1, 4)
    assert disjoint(sixes, odd_fours)
    assert not disjoint(sixes, replace(odd_fours, offset=2))
    assert not disjoint(sixes, replace(odd_fours, length=1 << 30)), "too many: must not be called disjoint"


def ranks_of_a_matrix(rows: int, columns: int, tensors: int, across: int, along: int) -> list[list[Piece]]:
    """``across`` ranks share the columns; ``along`` ranks share each of their shards, cut anywhere."""
    width = columns // across
    owned = []
    for t in range(across):
        m = shard("w", (rows, columns), (0, t * width), (rows, width))
        for d in range(along):
            first, stop = rows * width * d // along, rows * width * (d + 1) // along
            spans = [span for _, box in restrict(m, first, stop).boxes for span, _ in rows_of(box)]
            owned.append([Piece(tensor, *span) for tensor in range(tensors) for span in spans])
    return owned


def test_large_models_are_checked_in_little_memory() -> None:
    """40 matrices of 0.87 G elements on 8 × 63 ranks, cut inside rows: 60 000 pieces."""
    shape, tensors = (16384, 53248), 40
    owned = ranks_of_a_matrix(*shape, tensors, 8, 63)
    catalog = Catalog(tuple(TensorEntry(f"t{i:02}", "BF16", shape) for i in range(tensors)))
    tracemalloc.start()
    check_coverage(catalog, owned)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    lost = owned[100].pop()
    with pytest.raises(UsageError, match=f"t39: element {lost.offset} is owned 0 times"):
        check_coverage(catalog, owned)


def test_a_hundred_million_elements_of_two_pitches_are_marked_in_little_memory() -> None:
    """Many rows each: no table has both as rectangles."""
    numel = 96 << 20
    owned = [[Piece(0, 0, numel // 32 * 15, 15, 1, 32)]]
    owned += [[Piece(0, start, numel // 64 * 17, 17, 1, 64)] for start in (15, 47)]
    tracemalloc.start()
    check_coverage(catalog_of(numel), owned)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    owned[2] = [replace(owned[2][0], length=owned[2][0].length - 17)]
    with pytest.raises(UsageError, match=f"t0: element {numel - 17} is owned 0 times"):
        check_coverage(catalog_of(numel), owned)


@pytest.mark.parametrize("across", [1, 4])
def test_usual_layouts_need_no_marking(across: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns, ranges and every other column, cut anywhere: 2^33 elements."""
    rows, width = 1 << 20, 1 << 13
    monkeypatch.setattr(coverage, "_first_fault_by_marking", None)
    check_coverage(catalog_of(rows * width), ranks_of_a_matrix(rows, width, 1, across, 7))
    part = width // across
    sides = [Piece(0, t * part + side, rows * part // 2, part // 2, 2, width) for t in range(across) for side in (0, 1)]
    cuts = [sorted({0, n * 12345 % sides[0].length, sides[0].length}) for n in range(len(sides))]
    owned = [
        list(cut(side, first, stop)) for side, ends in zip(sides, cuts, strict=True) for first, stop in pairwise(ends)
    ]
    check_coverage(catalog_of(rows * width), owned)
    check_segments(catalog_of(rows * width), [(piece, 0, piece.length) for ranked in owned for piece in ranked])
