"""Golden vectors: bytes that every version must read, and records that every version must write (tests/golden/)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import MemoryBaseline, _kernel
from deltarefit.codec import open_payload
from deltarefit.digest import array_digest, tensor_key
from deltarefit.manifest import Catalog, PayloadRef, ProducerManifest
from deltarefit.pieces import FLAT
from deltarefit.records import Digest
from deltarefit.weights import Weights
from tests import helpers as h
from tests import oracle
from tests.golden import make

HERE = Path(make.__file__).parent
VECTORS: dict[str, Any] = json.loads((HERE / "vectors.json").read_text())
RUN = make.RUN


def arrays(which: str) -> list[Any]:
    catalog = stored_catalog()
    return [np.frombuffer(bytes.fromhex(VECTORS[which][e.name]), f"<u{e.width}") for e in catalog.tensors]


def stored_catalog() -> Catalog:
    return Catalog.from_bytes(VECTORS["records"]["catalog"].encode())


def stored_ref() -> PayloadRef:
    (ref,) = ProducerManifest.from_bytes((HERE / "payload.manifest").read_bytes()).payloads
    return ref


@pytest.mark.parametrize("name", make.RECORDS)
def test_records_are_written_and_read_byte_for_byte(name: str) -> None:
    data, record = VECTORS["records"][name].encode(), make.RECORDS[name]
    assert record.to_bytes() == data
    assert type(record).from_bytes(data) == record


def test_one_record_in_full() -> None:
    """Readable here, so that a change of the vectors by mistake is seen in review."""
    assert VECTORS["records"]["hint"] == (
        '{"anchor":1,"format":"deltarefit/1","head":12,"type":"Hint"}\n'
        "f572d4229b71245606038fa524860e88eeec6e2a2240739195e3f2dbdbd8ada5\n"
    )


def test_keys_and_digests() -> None:
    for entry, array in zip(stored_catalog().tensors, arrays("old"), strict=True):
        key = tensor_key(RUN, entry.name)
        assert f"{key:016x}" == VECTORS["keys"][entry.name]
        assert str(array_digest(array, 0, key)) == VECTORS["digests"][entry.name]


def test_one_digest_in_full() -> None:
    assert Digest(*_kernel.digest(np.array([1, 2, 3], "u2"), 5, 7)) == Digest.parse("f35e140c11db3c804d0a04bd51ac7fe9")


def test_one_piece_digest_in_full() -> None:
    """Elements 1 and 2 of rows of 2, 10 apart: positions 4 and 13."""
    found = Digest(*_kernel.digest(np.array([7, 8], "u2"), 1, 7, (3, 2, 1, 10)))
    assert found == Digest(*oracle.digest_of([(4, 7), (13, 8)], 7)) == Digest.parse("fa40c2e51df97080cdfb3448f5733894")


def test_the_payload_leads_from_the_known_old_bits_to_the_known_new_ones() -> None:
    ref, catalog, old, new = stored_ref(), stored_catalog(), arrays("old"), arrays("new")
    deltas = open_payload((HERE / "payload.bin").read_bytes(), ref, catalog)
    target = MemoryBaseline()
    target.seed(catalog, {})
    for array, bits in zip(target._arrays, old, strict=True):
        array[:] = bits
    with ThreadPoolExecutor(1) as pool:
        weights = Weights(target, RUN, catalog, pool)
        assert weights.sums(deltas) == ref.pre
        weights.apply(deltas)
        assert weights.sums(deltas) == ref.post
    assert h.bits(target) == [array.tobytes() for array in new]


def test_the_oracle_agrees_on_the_payload() -> None:
    now, new = arrays("old"), arrays("new")
    for delta in open_payload((HERE / "payload.bin").read_bytes(), stored_ref(), stored_catalog()):
        slices = [bytes(piece) for piece in delta.slices]
        after = oracle.after(delta.record, slices, now[delta.tensor], oracle.low(delta.record))
        now[delta.tensor] = np.array(after, now[delta.tensor].dtype)
    assert [array.tobytes() for array in now] == [array.tobytes() for array in new]


def test_the_payload_covers_the_format() -> None:
    """Each kind of positions, operation and packing; gap arrays of one and two planes; escapes in both places."""
    deltas = open_payload((HERE / "payload.bin").read_bytes(), stored_ref(), stored_catalog())
    codes = [oracle.unpack_code(delta.record[3]) for delta in deltas]
    for field, values in {
        "kind": {0, 1, 2}, "operation": {0, 1, 2}, "packing": {0, 1}, "width": {1, 2, 4, 8}, "wg": {0, 1, 2},
    }.items():  # fmt: skip
        assert {code[field] for code in codes} == values, field
    assert any(delta.record[8] for delta in deltas), "no two-bit escapes"
    assert any(delta.record[5] > delta.count for delta in deltas), "no chain with a byte of 255"
    assert any(delta.start for delta in deltas), "no delta that begins inside a tensor"
    rows = {delta.rows for delta in deltas} - {FLAT}
    assert {(run > 1, step > 1) for _, run, step, _ in rows} == {(False, False), (True, False), (True, True)}
    assert any(delta.start % delta.rows[1] for delta in deltas if delta.rows != FLAT), (
        "no delta that begins inside a row"
    )


def test_the_generator_still_makes_these_vectors() -> None:
    assert make.vectors() == VECTORS
    _, ref = make.payload()
    stored = stored_ref()
    assert (ref.streams, ref.deltas, ref.changed, ref.pre, ref.post) == (
        stored.streams, stored.deltas, stored.changed, stored.pre, stored.post,
    )  # fmt: skip
