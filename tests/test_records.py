"""Records: canonical bytes, strict reading, every flipped bit and every cut length refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.errors import FormatError
from deltarefit.manifest import (
    MAX_PRODUCERS,
    Anchor,
    Catalog,
    Decision,
    FileRef,
    Header,
    Hint,
    Intent,
    Mode,
    Outcome,
    PayloadRef,
    ProducerManifest,
    Run,
    State,
    TensorEntry,
)
from deltarefit.records import Digest, Record

RUN_ID = "0123456789abcdef" * 2
SHA = hashlib.sha256(b"x").hexdigest()
REF = PayloadRef(SHA, 1234, {"gap1.0": 77, "table": 80, "two": 20}, 1, 77, 3, 5, Digest(1, 2), Digest(3, 2**64 - 1))
EXAMPLES: list[Record] = [
    Catalog((TensorEntry("a", "BF16", (3, 4), ("z",)), TensorEntry("b", "BOOL", ()))),
    Run(RUN_ID, SHA),
    Intent(RUN_ID, 7, 5, Digest(9, 8), Mode.STAGE, "ab" * 16),
    Intent(RUN_ID, 7, 5, Digest(9, 8), Mode.STAGE, "ab" * 16, 64),
    ProducerManifest(RUN_ID, 7, 5, 0, 42, Digest(4, 5), SHA, (REF,)),
    ProducerManifest(RUN_ID, 7, 5, 63, 42, Digest(), SHA, ()),
    Outcome(RUN_ID, 7, Decision.COMMIT, 5, Digest(9, 8), (SHA,), 1, "ab" * 16),
    Outcome(RUN_ID, 7, Decision.ABORT, 5, Digest(), (), 0, "ab" * 16, "disk full: é\n"),
    Anchor(RUN_ID, 7, Digest(1, 1), (REF,), (FileRef("config.json", SHA, 10),)),
    Hint(7, 1),
    Header(RUN_ID, SHA, State.DIRTY, 5, 7, Digest(1, 1), 0, "cd" * 8),
]
IDS = [f"{type(r).__name__}{i}" for i, r in enumerate(EXAMPLES)]


@pytest.mark.parametrize("record", EXAMPLES, ids=IDS)
def test_round_trip(record: Record) -> None:
    data = record.to_bytes()
    assert type(record).from_bytes(data) == record
    assert record.content_hash() == hashlib.sha256(data).hexdigest()
    assert json.loads(data.split(b"\n")[0])["type"] == type(record).__name__


@pytest.mark.parametrize("record", EXAMPLES, ids=IDS)
def test_every_flipped_bit_is_refused(record: Record) -> None:
    data = bytearray(record.to_bytes())
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            type(record).from_bytes(bytes(data))
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("record", EXAMPLES, ids=IDS)
def test_every_truncation_and_extension_is_refused(record: Record) -> None:
    data = record.to_bytes()
    for length in range(len(data)):
        with pytest.raises(FormatError):
            type(record).from_bytes(data[:length])
    for extra in (b"\n", b"x", data):
        with pytest.raises(FormatError):
            type(record).from_bytes(data + extra)


@pytest.mark.parametrize("record", EXAMPLES, ids=IDS)
def test_another_type_is_refused(record: Record) -> None:
    for other in EXAMPLES:
        if type(other) is not type(record):
            with pytest.raises(FormatError, match="wrong record"):
                type(other).from_bytes(record.to_bytes())


def sealed(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace('"head":7', '"head":7,"more":1'),
        lambda t: t.replace('"head":7', '"head":7.0'),
        lambda t: t.replace('"head":7', '"head":true'),
        lambda t: t.replace('"head":7', '"head":-1'),
        lambda t: t.replace('"head":7', f'"head":{2**64}'),
        lambda t: t.replace('"head":7', '"head":7,"head":7'),
        lambda t: t.replace('"head":7', '"head": 7'),
        lambda t: t.replace('"head":7', '"head":NaN'),
        lambda t: t.replace('"head":7,', ""),
        lambda t: t.replace("deltarefit/1", "deltarefit/2"),
        lambda t: "[" * 100_000,
        lambda t: "[]",
        lambda t: "{",
    ],
)
def test_well_hashed_nonsense_is_refused(change) -> None:  # type: ignore[no-untyped-def]
    line = Hint(7, 1).to_bytes().split(b"\n")[0].decode()
    with pytest.raises(FormatError):
        Hint.from_bytes(sealed(change(line).encode()))


def test_unsafe_fields_are_refused() -> None:
    for name in ("../x", "a/b", "", ".hidden", "x\0", "a" * 300):
        with pytest.raises(ValueError, match="unsafe"):
            FileRef(name, SHA, 1)
    with pytest.raises(ValueError, match="sorted"):
        Catalog((TensorEntry("b", "U8", (1,)), TensorEntry("a", "U8", (1,))))
    with pytest.raises(ValueError, match="twice"):
        Catalog((TensorEntry("a", "U8", (1,)), TensorEntry("b", "U8", (1,), ("a",))))
    with pytest.raises(ValueError, match="dtype"):
        TensorEntry("a", "BF17", (1,))
    with pytest.raises(ValueError, match="large"):
        TensorEntry("a", "U8", (1 << 40, 1 << 40))
    with pytest.raises(ValueError, match="base"):
        Intent(RUN_ID, 5, 5, Digest(), Mode.STAGE, "n")
    with pytest.raises(ValueError, match="large"):
        dataclasses.replace(REF, streams={"table": 1 << 40})
    with pytest.raises(ValueError, match="payload of tensors 6 to 5"):
        dataclasses.replace(REF, first=6)
    for producers in (0, MAX_PRODUCERS + 1):
        with pytest.raises(ValueError, match="producers"):
            Intent(RUN_ID, 7, 5, Digest(), Mode.STAGE, "n", producers)
    with pytest.raises(ValueError, match="producer 65536"):
        ProducerManifest(RUN_ID, 7, 5, MAX_PRODUCERS, 42, Digest(), SHA, ())
    with pytest.raises(ValueError, match="layout"):
        ProducerManifest(RUN_ID, 7, 5, 0, 42, Digest(), "5a" * 31, ())


def test_a_manifest_sums_up_its_payloads() -> None:
    other = dataclasses.replace(REF, size=66, changed=3, pre=Digest(0, 1), post=Digest(10, 0))
    manifest = ProducerManifest(RUN_ID, 7, 5, 0, 42, Digest(), SHA, (REF, other))
    assert (manifest.listed, manifest.payload_bytes) == (80, 1300)
    assert manifest.shift == Digest(2 + 10, 2**64 - 1 - 2 - 1)
    assert ProducerManifest(RUN_ID, 7, 5, 0, 42, Digest(), SHA, ()).shift == Digest()


@given(st.text(max_size=50).filter(lambda s: s.isprintable() and s), st.lists(st.integers(0, 2**20), max_size=4))
def test_any_name_and_shape_round_trips(name: str, shape: list[int]) -> None:
    try:
        catalog = Catalog((TensorEntry(name, "F32", tuple(shape)),))
    except ValueError:
        return
    assert Catalog.from_bytes(catalog.to_bytes()) == catalog


def test_digest_arithmetic_wraps() -> None:
    assert Digest(2**64 - 1, 1) + Digest(1, 1) == Digest(0, 2)
    assert Digest(0, 0) - Digest(1, 2) == Digest(2**64 - 1, 2**64 - 2)
    assert Digest.parse(str(Digest(5, 2**63))) == Digest(5, 2**63)
