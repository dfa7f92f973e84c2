"""Payloads: round trips, against the bits themselves and against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from deltarefit import MemoryBaseline, codec
from deltarefit.codec import PayloadBuilder, encode_delta, encode_full, open_payload
from deltarefit.digest import catalog_keys
from deltarefit.errors import IntegrityError
from deltarefit.manifest import PayloadRef
from deltarefit.pieces import whole
from deltarefit.records import Digest
from deltarefit.weights import Weights
from tests import helpers as h
from tests import oracle

RUN = "ab" * 16
CATALOG = h.catalog_of(h.random_model(np.random.default_rng(0)))
KEYS = catalog_keys(RUN, CATALOG)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def flats(model: h.Model) -> list[Any]:
    return [array.reshape(-1) for _, array in sorted(model.items())]


def build(old: h.Model, new: h.Model, cut: int = 1 << 60) -> tuple[bytes, PayloadRef]:
    """One payload of all changes, tensors cut into deltas of ``cut`` elements."""
    builder = PayloadBuilder()
    for tensor, (a, b) in enumerate(zip(flats(old), flats(new), strict=True)):
        for start in range(0, a.size, cut):
            piece = whole(tensor, a.size)
            encoded = encode_delta(piece, a[start : start + cut], b[start : start + cut], start, KEYS[tensor])
            if encoded:
                builder.add(encoded)
    return builder.build()


def filled(model: h.Model) -> MemoryBaseline:
    target = MemoryBaseline()
    target.seed(CATALOG, {})
    for array, bits in zip(target._arrays, flats(model), strict=True):
        array[:] = bits
    return target


def changes(seed: int, kind: str) -> tuple[h.Model, h.Model]:
    rng = np.random.default_rng(seed)
    old = h.random_model(rng)
    new = h.copy_of(old)
    h.step(rng, new, kind, h.random_model(rng))
    return old, new


# ------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("cut", [1 << 60, 200], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", [kind for kind in h.STEPS if kind != "nothing"])
def test_round_trip(pool: ThreadPoolExecutor, kind: str, cut: int) -> None:
    for seed in range(4):
        old, new = changes(seed, kind)
        data, ref = build(old, new, cut)
        deltas = open_payload(data, ref, CATALOG)
        target = filled(old)
        weights = Weights(target, RUN, CATALOG, pool)
        assert weights.sums(deltas) == ref.pre
        pre, post, values = weights.preview(deltas)
        assert (pre, post, h.bits(target)) == (ref.pre, ref.post, h.bytes_of(old)), "preview wrote"
        weights.apply(deltas)
        assert h.bits(target) == h.bytes_of(new)
        assert weights.sums(deltas) == ref.post
        assert weights.digest() == h.digest_of(RUN, CATALOG, new)
        assert h.digest_of(RUN, CATALOG, old) + ref.post - ref.pre == h.digest_of(RUN, CATALOG, new)
        for array in target._arrays:
            array ^= array.dtype.type(1)  # torn or worse: absolute values lead to the same bits at these positions
        weights.set(deltas, values)
        assert weights.sums(deltas) == ref.post


@pytest.mark.parametrize("kind", [kind for kind in h.STEPS if kind not in ("nothing", "all")])
def test_the_oracle_reads_the_same_payload(kind: str) -> None:
    """The slow codec, written from the format page, finds the same positions, values and sums."""
    old, new = changes(5, kind)
    data, ref = build(old, new, 300)
    pre = post = Digest()
    listed = changed = 0
    for delta in open_payload(data, ref, CATALOG):
        a, b = (flats(model)[delta.tensor][delta.start : delta.stop] for model in (old, new))
        slices = [bytes(piece) for piece in delta.slices]
        record: Any = delta.record
        assert oracle.after(record, slices, a) == oracle.flat(b)
        pre += Digest(*oracle.sums(record, slices, a, KEYS[delta.tensor]))
        post += Digest(*oracle.sums(record, slices, b, KEYS[delta.tensor]))
        listed += delta.count
        changed += oracle.count_changed(a, b)
    assert (pre, post, listed) == (ref.pre, ref.post, ref.changed)
    assert changed == sum(int((a != b).sum()) for a, b in zip(flats(old), flats(new), strict=True))


@pytest.mark.parametrize("kind", ["some", "block", "nudge"])
def test_payloads_of_the_oracle_are_read(pool: ThreadPoolExecutor, kind: str) -> None:
    """Every choice of positions, operation and packing that the format allows, not only what the encoder takes."""
    old, new = changes(6, kind)
    for choice in choices():
        builder = PayloadBuilder()
        for tensor, (a, b) in enumerate(zip(flats(old), flats(new), strict=True)):
            if (made := oracle.encode(a, b, 0, KEYS[tensor], **choice)) is not None:
                builder.add(codec._encoded(tensor, made))  # type: ignore[arg-type]
        data, ref = builder.build()
        target = filled(old)
        Weights(target, RUN, CATALOG, pool).apply(open_payload(data, ref, CATALOG))
        assert h.bits(target) == h.bytes_of(new), choice


def choices() -> list[dict[str, int]]:
    kinds = [(kind, planes) for kind in (oracle.GAPS, oracle.RUNS, oracle.ALL) for planes in (1, 2, 3)]
    operations = [(oracle.XOR, 0), (oracle.ADD, 0), (oracle.ADD, 1), (oracle.SET, 0)]
    return [
        {"kind": kind, "gap_planes": planes, "run_planes": planes, "operation": operation, "packing": packing}
        for kind, planes in kinds
        for operation, packing in operations
    ]


def test_an_anchor_sets_everything(pool: ThreadPoolExecutor) -> None:
    _, new = changes(7, "all")
    builder = PayloadBuilder()
    for tensor, array in enumerate(flats(new)):
        if array.size:
            builder.add(encode_full(whole(tensor, array.size), array, 0, KEYS[tensor]))
    data, ref = builder.build()
    target = filled(h.random_model(np.random.default_rng(8)))
    Weights(target, RUN, CATALOG, pool).apply(open_payload(data, ref, CATALOG))
    assert h.bits(target) == h.bytes_of(new)
    assert (ref.pre, ref.post, ref.changed) == (Digest(), h.digest_of(RUN, CATALOG, new), CATALOG.numel)
    with pytest.raises(ValueError, match="empty"):
        encode_full(whole(5, 0), np.zeros(0, "u2"), 0, KEYS[5])


def test_no_change_has_no_delta() -> None:
    same = np.arange(10, dtype="u2")
    assert encode_delta(whole(0, 10), same, same.copy(), 0, 1) is None


def test_absolute_values_of_another_length_are_refused(pool: ThreadPoolExecutor) -> None:
    old, new = changes(9, "some")
    data, ref = build(old, new)
    target, deltas = filled(old), open_payload(data, ref, CATALOG)
    weights = Weights(target, RUN, CATALOG, pool)
    for wrong in (b"", weights.preview(deltas)[2][:-1]):
        with pytest.raises(IntegrityError, match="length"):
            weights.set(deltas, wrong)
    assert h.bits(target) == h.bytes_of(old)
