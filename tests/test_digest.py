"""Digests: against the oracle, additive in every way of cutting, and sensitive to what must not go unnoticed."""

from __future__ import annotations

import copy
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit import _kernel
from deltarefit.digest import array_digest, catalog_keys, tensor_key
from deltarefit.elements import Elements
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import Piece
from deltarefit.records import Digest
from tests import helpers as h
from tests import oracle

RUN = "0123456789abcdef" * 2
KEY = tensor_key(RUN, "w")


def bits(seed: int, width: int, size: int) -> Elements:
    rng, most = np.random.default_rng(seed), (1 << 8 * width) - 1
    return np.asarray(rng.integers(0, most, size, f"u{width}", endpoint=True))


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 70),
    st.integers(0, 2**48),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, deadline=None)
def test_is_what_the_format_page_says(seed: int, width: int, size: int, start: int, key: int) -> None:
    array = bits(seed, width, size)
    assert array_digest(array, start, key) == Digest(*oracle.digest(array, start, key))


def test_keys_are_what_the_format_page_says() -> None:
    text = b"deltarefit-digest/1\x00" + RUN.encode() + b"\x00" + "schön.weight".encode()
    expected = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    assert tensor_key(RUN, "schön.weight") == expected
    catalog = Catalog((TensorEntry("a", "U8", (1,)), TensorEntry("b", "U8", (1,))))
    assert catalog_keys(RUN, catalog) == (tensor_key(RUN, "a"), tensor_key(RUN, "b"))


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(0, 3000), max_size=6))
@settings(max_examples=60, deadline=None)
def test_adds_up_over_any_cutting(seed: int, width: int, cuts: list[int]) -> None:
    array = bits(seed, width, 3000)
    edges = [0, *sorted(cuts), 3000]
    pieces = [array_digest(array[a:b], 7 + a, KEY) for a, b in itertools.pairwise(edges)]
    assert sum(pieces, Digest()) == array_digest(array, 7, KEY)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_shards_add_up_to_the_whole(width: int) -> None:
    """Column shards with narrow and wide rows, interleaved halves: as ranks own them, without gathering."""
    array = bits(8, width, 60 * 130).reshape(60, 130)
    whole = array_digest(array, 0, KEY)
    for cuts in ([0, 1, 7, 130], [0, 65, 66, 130], [0, 100, 130]):
        total = Digest()
        for a, b in itertools.pairwise(cuts):
            piece = Piece(0, a, 60 * (b - a), b - a, 1, 130)
            total += Digest(*_kernel.digest(array[:, a:b], 0, KEY, piece.rows))
        assert total == whole
    for step in (2, 3, 13):
        pieces = [Piece(0, first, array.size // step, array.size // step, step) for first in range(step)]
        shards = [array.reshape(-1)[piece.offset :: step] for piece in pieces]
        lanes = [_kernel.digest(shard, 0, KEY, piece.rows) for shard, piece in zip(shards, pieces, strict=True)]
        assert sum((Digest(*pair) for pair in lanes), Digest()) == whole


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_strides_do_not_matter(width: int) -> None:
    array = bits(1, width, 40 * 30).reshape(40, 30)
    flat = array_digest(array.reshape(-1), 0, KEY)
    wide = np.zeros((40, 61), array.dtype)
    wide[:, 1::2] = array
    for same in (array, np.asfortranarray(array), wide[:, 1::2], array[::-1][::-1]):
        assert array_digest(same, 0, KEY) == flat
    assert array_digest(array.T, 0, KEY) != flat


@pytest.mark.parametrize("kind", [kind for kind in h.STEPS if kind != "nothing"])
def test_a_delta_moves_it_by_its_sums(kind: str) -> None:
    """D(new) = D(old) + post - pre, without a look at what did not change."""
    rng = np.random.default_rng(2)
    old = h.random_model(rng)
    new = h.copy_of(old)
    h.step(rng, new, kind, h.random_model(rng))
    catalog = h.catalog_of(old)
    moved = h.digest_of(RUN, catalog, old)
    for name, key in zip(sorted(old), catalog_keys(RUN, catalog), strict=True):
        made = _kernel.encode(old[name].reshape(-1), new[name].reshape(-1), 0, key)
        if made is not None:
            moved = moved + Digest(*made[3]) - Digest(*made[2])
    assert moved == h.digest_of(RUN, catalog, new)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_single_bit_counts_in_both_lanes(width: int) -> None:
    array = bits(3, width, 50)
    seen = {array_digest(array, 0, KEY)}
    for position in range(array.size):
        for bit in range(8 * width):
            array[position] ^= array.dtype.type(1 << bit)
            seen.add(array_digest(array, 0, KEY))
            array[position] ^= array.dtype.type(1 << bit)
    for lane in (0, 1):
        assert len({digest[lane] for digest in seen}) == 1 + 50 * 8 * width


def test_place_tensor_and_run_count() -> None:
    array = bits(4, 2, 100)
    digests = {array_digest(array, start, KEY) for start in range(50)}
    digests |= {array_digest(array, 0, tensor_key(RUN, name)) for name in ("a", "b", "w.")}
    digests.add(array_digest(array, 0, tensor_key(RUN[::-1], "w")))
    assert len(digests) == 54


def test_swaps_shifts_and_repetitions_are_seen() -> None:
    """What an XOR of hashes, or a sum that forgets positions, would miss."""
    array = bits(5, 2, 1000)
    whole = array_digest(array, 0, KEY)
    swapped = array.copy()
    swapped[[3, 700]] = swapped[[700, 3]]
    again = array.copy()
    again[10:20] ^= np.uint16(77)
    twice = Digest(*(2 * lane for lane in whole))
    others = {array_digest(a, 0, KEY) for a in (swapped, np.roll(array, 1), again, np.zeros_like(array))}
    assert len(others | {twice, whole, Digest()}) == 7


def test_no_two_elements_of_a_tensor_are_alike() -> None:
    """Elements of up to two bytes never collide across positions: 400 positions times some values, all different."""
    values = [0, 1, 2, 255, 256, 0x3F80, 0x8000, 0xFFFF]
    seen = {oracle.element_digest(p, v, KEY) for p in range(400) for v in values}
    assert len(seen) == 400 * len(values)


@pytest.mark.parametrize("level", _kernel.levels())
def test_every_instruction_level_gives_the_same_sums(level: str) -> None:
    before = _kernel.level()
    try:
        for width in (1, 2, 4, 8):
            array = bits(6, width, 10_007)
            _kernel.use_level("portable")
            expected = array_digest(array, 2**40 + 3, KEY)
            _kernel.use_level(level)
            assert array_digest(array, 2**40 + 3, KEY) == expected
            assert array_digest(array[1:], 2**40 + 4, KEY) == expected - array_digest(array[:1], 2**40 + 3, KEY)
    finally:
        _kernel.use_level(before)


def test_a_digest_can_be_copied() -> None:
    """As records, which hold them, are by ``copy`` and by debuggers."""
    assert copy.deepcopy(Digest(1, 2)) == copy.copy(Digest(1, 2)) == Digest(1, 2)
