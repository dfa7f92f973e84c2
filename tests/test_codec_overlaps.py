"""No element twice: deltas of one payload, and the deltas of an anchor over all its payloads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deltarefit import MemoryBaseline, _kernel, apart, codec
from deltarefit.anchors import _Coverage
from deltarefit.codec import encode_full, open_payload
from deltarefit.errors import FormatError
from deltarefit.manifest import Catalog, PayloadRef, TensorEntry
from deltarefit.pieces import Piece, piece_with, whole
from deltarefit.weights import Weights
from tests.test_codec import CATALOG, RUN, changes
from tests.test_codec_pieces import PIECES, build, encoded, pieces_of, places


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


# ------------------------------------------------------------------------------------------ one element, one delta


def payload_of(*pieces: Piece | tuple[Piece, int, int], numel: int = 1000) -> tuple[bytes, PayloadRef, Catalog]:
    """A payload whose deltas set all of these pieces, or parts of them."""
    catalog = Catalog((TensorEntry("w", "U16", (numel,)),))
    deltas = []
    for item in pieces:
        piece, start, stop = item if isinstance(item, tuple) else (item, 0, item.length)
        deltas.append(encode_full(piece, np.ones(stop - start, np.uint16), start, 7))
    return *build(deltas), catalog


def refused(*pieces: Any, says: str = "(pieces|deltas) of tensor 0 overlap") -> None:
    """By the writer, and by a reader of what another writer would have written."""
    with pytest.raises(FormatError, match=f"new payload: {says}"):
        payload_of(*pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "check_apart", lambda *_: None)
        payload = payload_of(*pieces)
    with pytest.raises(FormatError, match=f"payload {payload[1].sha256[:12]}: ({says}|deltas out of order)"):
        open_payload(*payload)


COLUMNS = [Piece(0, 0, 400, 4, 1, 10), Piece(0, 4, 600, 6, 1, 10)]


@pytest.mark.parametrize(
    "pieces",
    [
        COLUMNS,
        [Piece(0, 0, 500, 500, 2), Piece(0, 1, 500, 500, 2)],
        [Piece(0, 0, 300, 3, 2, 10), Piece(0, 1, 200, 2, 2, 10), Piece(0, 5, 500, 5, 1, 10)],
        [Piece(0, 100, 80, 4, 1, 10), whole(0, 100), Piece(0, 300, 700, 700), Piece(0, 104, 120, 6, 1, 10)],
        [(COLUMNS[0], 0, 199), (COLUMNS[0], 199, 400), (COLUMNS[1], 5, 601 - 4)],
        [Piece(0, 0, 40, 4, 1, 10), Piece(0, 100, 80, 8, 1, 12)],
        [(Piece(0, 0, 400, 4, 1, 10), 0, 40), Piece(0, 100, 200, 200)],
        [COLUMNS[0], (Piece(0, 2, 400, 4, 1, 10), 398, 400)],
    ],
    ids=["columns", "halves", "three", "flat ones between", "parts", "apart", "one after the other", "half a row"],
)
def test_pieces_that_interleave_are_taken(pool: ThreadPoolExecutor, pieces: list[Any]) -> None:
    data, ref, catalog = payload_of(*pieces)
    deltas = open_payload(data, ref, catalog)
    target = MemoryBaseline()
    target.seed(catalog, {})
    Weights(target, RUN, catalog, pool).apply(deltas)
    assert int(target._arrays[0].sum()) == sum(delta.count for delta in deltas)


@pytest.mark.parametrize(
    "pieces",
    [
        [COLUMNS[0], Piece(0, 3, 700, 7, 1, 10)],
        [Piece(0, 0, 500, 500, 2), Piece(0, 501, 100, 100, 3)],
        [Piece(0, 0, 500, 500, 2), Piece(0, 40, 1, 1)],
        [COLUMNS[0], Piece(0, 395, 6, 6)],
        [(COLUMNS[0], 7, 9), Piece(0, 19, 2, 2)],
        [COLUMNS[0], (Piece(0, 2, 400, 4, 1, 10), 396, 398)],
        [Piece(0, 0, 30, 3, 1, 7), Piece(0, 1, 40, 2, 4, 11)],
        [COLUMNS[0], COLUMNS[1], whole(0, 1)],
    ],
    ids=["columns", "strides", "one element", "range", "parts", "last rows", "grids", "third"],
)
def test_pieces_that_overlap_are_refused(pieces: list[Any]) -> None:
    refused(*pieces)
    for kept in range(len(pieces)):
        others = [piece for number, piece in enumerate(pieces) if number != kept]
        if len(pieces) == 2:
            open_payload(*payload_of(*others))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_just_what_overlaps_is_refused(data: st.DataObject) -> None:
    parts, elements = [], []
    for _ in range(data.draw(st.integers(2, 3))):
        piece = replace(data.draw(pieces_of(120)), overwrite=False)
        start = data.draw(st.integers(0, piece.length - 1))
        stop = data.draw(st.integers(start + 1, piece.length))
        parts.append((piece, start, stop))
        elements += places(piece)[start:stop]
    geometries = [piece.rows for piece, _, _ in parts if not piece.flat]
    assume(len(geometries) == len(set(geometries)))
    if len(elements) == len(set(elements)):
        open_payload(*payload_of(*parts))
    else:
        refused(*parts)


def test_a_piece_counts_from_its_first_delta_to_its_last() -> None:
    """Whoever owns what lies between two of its deltas, it is not another producer's piece."""
    ends = [(COLUMNS[0], 0, 4), (COLUMNS[0], 396, 400)]
    open_payload(*payload_of(*ends))
    refused(*ends, Piece(0, 500, 2, 2))


def test_proofs_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    comb = [Piece(0, at, 100, 1, 1, 10) for at in range(10)]
    open_payload(*payload_of(*comb))
    monkeypatch.setattr(apart, "MAX_MEETINGS", 44)
    refused(*comb, says="too many pieces")
    open_payload(*payload_of(*comb[:9]))


def test_first_and_last_tensor_are_checked() -> None:
    old, new = changes(5, "many")
    data, ref = build(encoded(old, new))
    for wrong in (replace(ref, first=ref.first + 1), replace(ref, last=ref.last + 1), replace(ref, last=ref.last - 1)):
        with pytest.raises(FormatError, match="first and last"):
            open_payload(data, wrong, CATALOG)
    with pytest.raises(ValueError, match="tensors"):
        replace(ref, first=ref.last + 1)


def test_pieces_beyond_their_tensor_are_refused() -> None:
    for piece in (COLUMNS[1], Piece(0, 1, 500, 500, 2)):
        data, ref, catalog = payload_of(piece)
        open_payload(data, ref, catalog)
        with pytest.raises(FormatError, match="range of w"):
            open_payload(data, ref, Catalog((replace(catalog.tensors[0], shape=(999,)),)))


# ------------------------------------------------------------------------------------------ anchors


def parts_of(pieces: list[Piece], cut: int) -> list[tuple[Piece, int, int]]:
    return [(p, at, min(at + cut, p.length)) for p in pieces for at in range(0, p.length, cut)]


def covered(parts: list[tuple[Piece, int, int]], **forced: Any) -> None:
    """What loading an anchor of these parts checks."""
    coverage = _Coverage(CATALOG)
    for piece, start, stop in parts:
        new = np.zeros(stop - start, f"u{CATALOG.tensors[piece.tensor].width}")
        made = encode_full(piece, new, start, 7) if not forced else None
        if made is None:
            result = _kernel.encode(new, new + new.dtype.type(1), piece.origin + start, 7, rows=piece.rows, **forced)
            made = codec._encoded(piece.tensor, result)
        assert made is not None
        coverage.add([made.delta])
    coverage.finish()


@pytest.mark.parametrize("cut", [1 << 60, 37])
def test_an_anchor_is_covered_in_any_order(cut: int) -> None:
    parts = parts_of(PIECES, cut)
    for seed in range(3):
        random.Random(seed).shuffle(parts)
        covered(parts)
    covered(parts_of([whole(n, entry.numel) for n, entry in enumerate(CATALOG.tensors)], cut))


def test_an_anchor_with_holes_or_doubles_is_refused() -> None:
    parts = parts_of(PIECES, 37)
    for number in range(0, len(parts), 7):
        piece, start, stop = parts[number]
        for wrong in ([], [parts[number]] * 2, [(piece, start, stop - 1)], [(piece, start + 1, stop)]):
            with pytest.raises(FormatError, match="owned"):
                covered([*parts[:number], *[part for part in wrong if part[1] < part[2]], *parts[number + 1 :]])


def test_an_anchor_of_differences_is_refused() -> None:
    parts = parts_of(PIECES, 1 << 60)
    for forced in ({"operation": 0}, {"operation": 1}, {"operation": 2, "kind": 0}, {"operation": 2, "kind": 1}):
        with pytest.raises(FormatError, match="does not set every element"):
            covered(parts, **forced)


def test_the_piece_of_a_geometry() -> None:
    assert piece_with(3, (0, 0, 0, 0), 7) == whole(3, 7)
    assert piece_with(3, (5, 4, 1, 10), 9) == Piece(3, 5, 12, 4, 1, 10)
    assert piece_with(3, (5, 4, 1, 10), 8).length == 8
