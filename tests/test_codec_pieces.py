"""Payloads of pieces: shards as ranks own them, from the encoder to any target, against the bits and the oracle."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit import MemoryBaseline, _kernel, codec
from deltarefit.codec import EncodedDelta, PayloadBuilder, encode_delta, open_payload
from deltarefit.digest import catalog_keys
from deltarefit.elements import Elements
from deltarefit.manifest import Catalog, PayloadRef, TensorEntry
from deltarefit.pieces import Piece, whole
from deltarefit.records import Digest
from deltarefit.weights import Weights
from tests import helpers as h
from tests import oracle
from tests.test_codec import CATALOG, KEYS, RUN, changes, filled, flats
from tests.test_kernel import LAYOUTS, TYPES, lay_out

DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def places(piece: Piece) -> list[int]:
    return [piece.position(p) for p in range(piece.length)]


def shards(tensor: int, entry: TensorEntry) -> list[Piece]:
    """What several ranks could own of a tensor: columns, every other element, a range, the rest."""
    n = entry.numel
    if len(entry.shape) == 2 and n and entry.shape[1] > 8:
        rows, width = entry.shape
        return [Piece(tensor, at, rows * 8, 8, 1, width) for at in range(0, width - 7, 8)] + [
            Piece(tensor, width - width % 8, rows * (width % 8), width % 8, 1, width)
        ] * (width % 8 > 0)
    if n >= 100:
        return [
            Piece(tensor, 10, n // 2 - 10, n // 2 - 10, 2),
            Piece(tensor, 11, n // 2 - 10, n // 2 - 10, 2),
            Piece(tensor, 0, 10, 10),
            Piece(tensor, n // 2 * 2 - 10, n - (n // 2 * 2 - 10), n - (n // 2 * 2 - 10)),
        ]
    return [whole(tensor, n)] if n else []


PIECES = [piece for number, entry in enumerate(CATALOG.tensors) for piece in shards(number, entry)]


def test_the_shards_of_these_tests_cover_the_catalog() -> None:
    for number, entry in enumerate(CATALOG.tensors):
        owned = sorted(place for piece in PIECES if piece.tensor == number for place in places(piece))
        assert owned == list(range(entry.numel))
    assert len({piece.rows for piece in PIECES}) > 5


def encoded(old: h.Model, new: h.Model, pieces: list[Piece] = PIECES, cut: int = 1 << 60) -> list[EncodedDelta]:
    found = []
    for piece in pieces:
        a, b = (flats(model)[piece.tensor][places(piece)] for model in (old, new))
        for start in range(0, piece.length, cut):
            delta = encode_delta(piece, a[start : start + cut], b[start : start + cut], start, KEYS[piece.tensor])
            found += [delta] if delta else []
    return found


def build(deltas: list[EncodedDelta]) -> tuple[bytes, PayloadRef]:
    builder = PayloadBuilder()
    for delta in deltas:
        builder.add(delta)
    return builder.build()


class Strided(MemoryBaseline):
    """Gives whole tensors of two dimensions with any strides, as live models have them."""

    layout = "transposed"

    def seed(self, catalog: Catalog, files: Any) -> None:
        super().seed(catalog, files)
        shapes = [
            (a.size // n, n) for a in self._arrays for n in (next(n for n in (7, 5, 3, 2, 1) if a.size % n == 0),)
        ]
        self._wide = [lay_out(a, shape, self.layout) for a, shape in zip(self._arrays, shapes, strict=True)]

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        yield self._wide[tensor], start

    def fill(self, arrays: list[Any]) -> None:
        for wide, array in zip(self._wide, arrays, strict=True):
            wide[...] = array.reshape(wide.shape)

    def all_bits(self) -> list[bytes]:
        return [wide.tobytes() for wide in self._wide]


# ------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("cut", [1 << 60, 37], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", [kind for kind in h.STEPS if kind != "nothing"])
def test_round_trip(pool: ThreadPoolExecutor, kind: str, cut: int) -> None:
    for seed in range(3):
        old, new = changes(seed, kind)
        data, ref = build(encoded(old, new, cut=cut))
        deltas = open_payload(data, ref, CATALOG)
        target = filled(old)
        weights = Weights(target, RUN, CATALOG, pool)
        assert weights.sums(deltas) == ref.pre
        pre, post, values = weights.preview(deltas)
        assert (pre, post, h.bits(target)) == (ref.pre, ref.post, h.bytes_of(old)), "preview wrote"
        weights.apply(deltas)
        assert h.bits(target) == h.bytes_of(new)
        assert weights.sums(deltas) == ref.post
        assert h.digest_of(RUN, CATALOG, old) + ref.post - ref.pre == h.digest_of(RUN, CATALOG, new)
        for array in target._arrays:
            array ^= array.dtype.type(1)
        weights.set(deltas, values)
        assert weights.sums(deltas) == ref.post
        strided = Strided()
        strided.seed(CATALOG, {})
        strided.fill(flats(old))
        Weights(strided, RUN, CATALOG, pool).apply(deltas)
        assert strided.all_bits() == h.bytes_of(new)


@st.composite
def pieces_of(draw: st.DrawFn, numel: int) -> Piece:
    """Any piece of a tensor, also in forms that the wire has a simpler one for."""
    run, step = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    pitch = (run - 1) * step + draw(st.integers(1, 9))
    offset = draw(st.integers(0, 20))
    most = max(1, (numel - offset - (run - 1) * step - 1) // pitch + 1)
    count = draw(st.integers(1, min(most, 30)))
    return Piece(
        0, offset, count * run, run, step, pitch if count > 1 or draw(st.booleans()) else 0, draw(st.booleans())
    )


@pytest.mark.parametrize("level", _kernel.levels())
@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 2**32))
def test_any_piece_of_any_array(level: str, data: st.DataObject, width: int, seed: int) -> None:
    """Encoded, built, opened and used in a strided window, at every level, as the oracle says."""
    before_level = _kernel.level()
    _kernel.use_level(level)
    try:
        check_any_piece(data, width, np.random.default_rng(seed))
    finally:
        _kernel.use_level(before_level)


def check_any_piece(data: st.DataObject, width: int, rng: np.random.Generator) -> None:
    piece = data.draw(pieces_of(400))
    where = places(piece)
    numel = where[-1] + 1 + data.draw(st.integers(0, 9))
    catalog = Catalog((TensorEntry("w", DTYPES[width], (numel,)),))
    (key,) = catalog_keys(RUN, catalog)
    start = data.draw(st.integers(0, piece.length - 1))
    stop = data.draw(st.integers(start + 1, piece.length))
    old = rng.integers(0, 250, numel, TYPES[width])
    new = old.copy()
    new[where[start:stop]] += rng.integers(0, 3, stop - start, TYPES[width])
    made = encode_delta(piece, old[where[start:stop]], new[where[start:stop]], start, key)
    if made is None:
        assert old.tobytes() == new.tobytes()
        return
    assert not piece.overwrite or made.delta.operation == codec.SET
    payload, ref = build([made])
    (delta,) = open_payload(payload, ref, catalog)
    record, slices = delta.record, [bytes(part) for part in delta.slices]
    assert (delta.low, delta.high) == (where[start], where[stop - 1] + 1)
    layout = data.draw(st.sampled_from(LAYOUTS))
    window = lay_out(old.copy(), (numel,) if layout == "flat" else (1, numel), layout)
    exact = old.copy()[delta.low : delta.high]
    for array, first in ((window, delta.low), (exact, 0)):
        assert _kernel.sums(record, delta.slices, array, key, first) == oracle.sums(record, slices, array, key, first)
        assert _kernel.gather(record, delta.slices, array, first).tolist() == oracle.gather(
            record, slices, array, first
        )
        pre, post, values = _kernel.preview(record, delta.slices, array, key, first)
        assert (Digest(*pre), Digest(*post)) == (ref.pre, ref.post) == (made.pre, made.post)
        goal = oracle.after(record, slices, array, first)
        saved = array.copy()
        _kernel.apply(record, delta.slices, array, first)
        assert oracle.flat(array) == goal
        array[...] = saved
        _kernel.apply_values(record, delta.slices, array, values, first)
        assert oracle.flat(array) == goal
    assert window.tobytes() == new.tobytes()
    own = old[where]
    local = delta.local(start)
    _kernel.apply(local.record, local.slices, own, start)
    assert own.tobytes() == new[where].tobytes()


def test_pieces_that_say_the_same_are_written_alike() -> None:
    rng = np.random.default_rng(3)
    old, new = rng.integers(0, 99, (2, 12), np.uint16)
    groups = [
        [whole(0, 12), Piece(0, 0, 12, 4, 1, 4), Piece(0, 0, 12, 1, 1, 1), Piece(0, 0, 12, 1, 7, 1)],
        [Piece(0, 3, 12, 12, 2), Piece(0, 3, 12, 4, 2, 8), Piece(0, 3, 12, 1, 1, 2), Piece(0, 3, 12, 1, 9, 2)],
        [Piece(0, 5, 12, 12), Piece(0, 5, 12, 3, 1, 3)],
    ]
    for group in groups:
        made = [encode_delta(piece, old, new, 0, 7) for piece in group]
        assert made[1:] == made[:-1]
        assert len({tuple(places(piece)) for piece in group}) == 1
    assert Piece(0, 5, 1, 1, 3).rows == Piece(0, 5, 1, 1, 1, 9).rows == whole(0, 1).rows


def test_an_overwriting_piece_carries_values() -> None:
    old, new = changes(3, "some")
    pieces = [replace(piece, overwrite=True) for piece in PIECES]
    deltas = open_payload(*build(encoded(old, new, pieces)), CATALOG)
    assert {delta.operation for delta in deltas} == {codec.SET}
    for delta in deltas:
        positions, values = _kernel.decode(delta.record, delta.slices)
        assert (flats(new)[delta.tensor][positions + np.uint64(delta.low)] == values).all()


def test_the_order_of_adding_does_not_matter() -> None:
    old, new = changes(4, "many")
    deltas = encoded(old, new, cut=100)
    expected = build(deltas)
    for seed in range(3):
        random.Random(seed).shuffle(deltas)
        assert build(deltas) == expected
    assert (expected[1].first, expected[1].last) == (deltas[0].delta.tensor * 0, max(d.delta.tensor for d in deltas))


# ------------------------------------------------------------------------------------------ writing side by side


class Copying(MemoryBaseline):
    """Gives copies that are written back whole, as a file does whose elements are not aligned; slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._open = 0
        self._lock = threading.Lock()

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        with self._lock:
            self._open += 1
            self.most = max(self.most, self._open)
        copy = self._arrays[tensor][start:stop].copy()
        yield copy, 0
        time.sleep(0.01)
        self._arrays[tensor][start:stop] = copy
        with self._lock:
            self._open -= 1


def test_interleaved_pieces_do_not_undo_each_other(pool: ThreadPoolExecutor) -> None:
    old, new = changes(6, "many")
    deltas = open_payload(*build(encoded(old, new, cut=300)), CATALOG)
    target = Copying()
    target.seed(CATALOG, {})
    for array, bits in zip(target._arrays, flats(old), strict=True):
        array[:] = bits
    weights = Weights(target, RUN, CATALOG, pool)
    values = weights.preview(deltas)[2]
    weights.apply(deltas)
    assert h.bits(target) == h.bytes_of(new)
    for array, bits in zip(target._arrays, flats(old), strict=True):
        array[:] = bits
    target.most = 0
    weights.set(deltas, values)
    assert h.bits(target) == h.bytes_of(new)
    assert target.most > 1, "what does not interleave is still written side by side"
