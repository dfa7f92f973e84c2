"""Signatures, trust and key files one by one: what fits, what does not, and what may sign what."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import hmac
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit import records, signing
from deltarefit.errors import FormatError, IntegrityError, RefitError, SignatureError, UsageError
from deltarefit.keyfiles import new_key, read_signer, read_trust
from deltarefit.manifest import (
    Anchor,
    Batch,
    Catalog,
    Decision,
    Hint,
    Intent,
    Mode,
    Outcome,
    PayloadRef,
    ProducerManifest,
    Run,
    TensorEntry,
)
from deltarefit.notary import Notary, signer_of
from deltarefit.records import Digest, Record, split_signature
from deltarefit.signing import Kind, Secret, Signature, Signer, message
from deltarefit.stores import wrappers
from deltarefit.stores.wrappers import Fault, Faulty
from deltarefit.trust import Role, Trust, merged, parse_trust
from tests import helpers as h
from tests.signed import KINDS, new_signer, trust_in, trusted

RUN_ID, SHA, NONCE = "0123456789abcdef" * 2, "ab" * 32, "cd" * 16
ZERO = Digest()
CATALOG = Catalog(tuple(TensorEntry(f"layer.{n}.weight", "BF16", (8,)) for n in range(8)))


def ref(first: int = 0, last: int = 0) -> PayloadRef:
    return PayloadRef(SHA, 100, {"table": 80}, 1, 1, first, last, ZERO, ZERO)


def manifest(producer: int = 0, *refs: PayloadRef) -> ProducerManifest:
    return ProducerManifest(RUN_ID, 7, 5, producer, 42, ZERO, SHA, refs or (ref(),))


INTENT = Intent(RUN_ID, 7, 5, ZERO, Mode.STAGE, NONCE)
COMMIT = Outcome(RUN_ID, 7, Decision.COMMIT, 5, ZERO, (SHA,), 1, NONCE)
ABORT = Outcome(RUN_ID, 7, Decision.ABORT, 5, ZERO, (), 0, NONCE, "disk full")
END = Batch(RUN_ID, 7, 3, 2, (), True, NONCE)
PLACES: list[tuple[str, Record]] = [
    ("run", Run(RUN_ID, SHA)),
    ("a/0000000007/intent", INTENT),
    ("a/0000000007/p/3", manifest(3)),
    ("a/0000000007/b/3/2", Batch(RUN_ID, 7, 3, 2, (ref(),), False, NONCE)),
    ("a/0000000007/outcome", COMMIT),
    ("a/0000000007/outcome", ABORT),
    ("anchor/0000000007/anchor", Anchor(RUN_ID, 7, ZERO, (ref(),), ())),
]
IDS = ["run", "intent", "manifest", "batch", "commit", "abort", "anchor"]


def seal(signer: Signer, place: str, record: Record) -> bytes:
    return Notary(signer).bytes_of(record, "" if place == "run" else RUN_ID, place)


def read(trust: Trust | None, place: str, kind: type[Record], data: bytes, run: str = RUN_ID) -> Record:
    store = h.new_store()
    store.put(place, data)
    return Notary(trust=trust).read(store, kind, place, "" if place == "run" else run, CATALOG)


# ------------------------------------------------------------------------------------------ signatures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("place", "record"), PLACES, ids=IDS)
def test_what_was_signed_is_read(kind: Kind, place: str, record: Record) -> None:
    signer = new_signer(kind)
    data = seal(signer, place, record)
    assert data.startswith(record.to_bytes()), "a signature changes nothing of the record"
    assert data.count(b"\n") == 3
    assert seal(signer, place, record) == data
    for trust in (trust_in(signer), None):
        assert read(trust, place, type(record), data) == record


@pytest.mark.parametrize("record", [r for _, r in PLACES], ids=IDS)
def test_without_a_key_records_are_what_they_were(record: Record) -> None:
    assert Notary().bytes_of(record, RUN_ID, "a/0000000007/intent") == record.to_bytes()


def test_hints_and_catalogs_are_never_signed() -> None:
    for record in (Hint(7, 1), CATALOG):
        assert Notary(new_signer()).bytes_of(record, RUN_ID, "head") == record.to_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("place", "record"), PLACES, ids=IDS)
def test_a_record_fits_one_place_in_one_run_only(kind: Kind, place: str, record: Record) -> None:
    signer = new_signer(kind)
    trust, data = trust_in(signer), seal(signer, place, record)
    elsewhere = [other for other, _ in PLACES if other != place and other != "run"]
    for other in [*elsewhere, place.replace("0000000007", "0000000008"), place + "0"]:
        if other != place:
            with pytest.raises(SignatureError, match="does not fit"):
                read(trust, other, type(record), data)
    if place != "run":
        with pytest.raises(SignatureError, match="does not fit"):
            read(trust, place, type(record), data, run="f" * 32)


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_and_every_cut_of_a_signed_manifest_is_refused(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is parsed: the parser is gone."""
    signer, place = new_signer(kind), "a/0000000007/p/3"
    data = seal(signer, place, manifest(3, *(ref(n, n) for n in range(6))))
    assert 1900 < len(data) < 2600
    trust, store = trust_in(signer), h.new_store()
    monkeypatch.setattr(records.json, "loads", lambda *a, **k: pytest.fail("parsed"))
    notary, refused = Notary(trust=trust), 0
    for damaged in [*_flips(data), *(data[:length] for length in range(len(data))), data + b"\n", data + data]:
        store.put(place, damaged)
        with pytest.raises((SignatureError, FormatError)):
            notary.read(store, ProducerManifest, place, RUN_ID, CATALOG)
        refused += 1
    assert refused == 9 * len(data) + 2


def _flips(data: bytes) -> Any:
    for bit in range(8 * len(data)):
        yield data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_that_are_none(kind: Kind) -> None:
    signer, other = new_signer(kind), new_signer(kind, "other")
    impostor = new_signer(kind)  # the name of the trusted key, another secret
    place, trust = "a/0000000007/intent", trust_in(signer)
    good = seal(signer, place, INTENT)
    plain, line = split_signature(good, place)
    body = bytes(plain)
    cases: dict[str, bytes] = {
        "is not signed": body,
        "unknown key": seal(other, place, INTENT),
        "does not fit": seal(impostor, place, INTENT),
        "more than a record and one signature": good + line,
        "is no signature": body + b"signature/2" + line[11:],
        "no signature": body + line.replace(b"\n", b" \n"),
        "wrong length": body + line[:-3] + b"\n",
    }
    for match, data in cases.items():
        with pytest.raises((SignatureError, FormatError), match=match):
            read(trust, place, Intent, data)
    assert read(trust, place, Intent, good) == INTENT


def test_a_key_is_of_one_kind() -> None:
    """Algorithm confusion: the public key as an HMAC secret, and the name of an HMAC key below an ed25519 signature."""
    signer = new_signer(Kind.ED25519)
    place, body = "a/0000000007/intent", INTENT.to_bytes()
    forger = Signer(Kind.HMAC, signer.key, Secret(signer.public()))
    forged = forger.sign(RUN_ID, place, body)
    relabelled = Signature(Kind.ED25519, signer.key, forged.value * 2)
    shared = new_signer(Kind.HMAC)
    as_public = Signer(Kind.ED25519, shared.key, shared.secret).sign(RUN_ID, place, body)
    for trust, signature in (
        (trust_in(signer), forged),
        (trust_in(signer), relabelled),
        (trust_in(shared), as_public),
    ):
        with pytest.raises(SignatureError, match="does not fit"):
            read(trust, place, Intent, body + signature.to_line())


@settings(max_examples=200, deadline=None)
@given(st.tuples(*[st.sampled_from(["", "a", "ab", "b", "\x01", "a/b"])] * 3), st.binary(max_size=3))
def test_no_two_messages_are_the_same(parts: tuple[str, str, str], record: bytes) -> None:
    """What is signed can be taken apart in one way only."""
    made = message(Kind.HMAC, *parts, record)
    head = made[:-32]
    assert made[-32:] == hashlib.sha256(record).digest()
    assert head.decode().split("\0") == ["deltarefit/1 signature/1", "hmac-sha256", *parts, ""]


GOLDEN = (
    '{"attempt":7,"base":5,"base_digest":"00000000000000090000000000000008","format":"deltarefit/1","mode":"stage",'
    '"nonce":"abababababababababababababababab","producers":1,"run":"0123456789abcdef0123456789abcdef","type":"Intent"}\n'
)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (
            Kind.ED25519,
            "c31d6a94d6e9d73cc83ec85d2a82cccd846aeed75c61324f8265b961f2154666"
            "d58c38d7625e613329e28c10fcc557fab6d0cfab3f1ec66f463e06e8d4262308",
        ),
        (Kind.HMAC, "2206d710981f33f2c407e5ad08c11c880dcaa23ecee19eff57b7961a5f76d8a8"),
    ],
)
def test_golden_signatures(kind: Kind, value: str) -> None:
    """Bytes that every version must write and accept, put together by hand (docs/format.md §2.1)."""
    record = (GOLDEN + hashlib.sha256(GOLDEN[:-1].encode()).hexdigest() + "\n").encode()
    signer, place = Signer(kind, "golden", Secret(bytes(range(32)))), "a/0000000007/intent"
    line = f"signature/1 {kind.value} golden {value}\n".encode()
    assert signer.sign(RUN_ID, place, record).to_line() == line
    assert read(trust_in(signer), place, Intent, record + line).to_bytes() == record
    head = "\0".join(["deltarefit/1 signature/1", kind.value, "golden", RUN_ID, place, ""])
    signed = head.encode() + hashlib.sha256(record).digest()
    if kind is Kind.HMAC:
        assert hmac.new(bytes(range(32)), signed, "sha256").hexdigest() == value
    else:
        assert signing.fits_ed25519(signer.public(), signed, bytes.fromhex(value))


def test_ed25519_as_the_standard_says() -> None:
    """RFC 8032, 7.1, test 1: secret, public key, and the signature of no bytes."""
    secret = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    value = bytes.fromhex(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
        "655141438e7a100b"
    )
    assert Signer(Kind.ED25519, "k", Secret(secret)).public().hex() == public
    assert signing.fits_ed25519(bytes.fromhex(public), b"", value)
    assert not signing.fits_ed25519(bytes.fromhex(public), b"x", value)
    assert not signing.fits_ed25519(b"\xff" * 32, b"", value)


def test_ed25519_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """HMAC needs nothing; ed25519 says what to install."""
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    shared = new_signer(Kind.HMAC)
    assert read(trust_in(shared), "a/0000000007/intent", Intent, seal(shared, "a/0000000007/intent", INTENT)) == INTENT
    with pytest.raises(UsageError, match=r"deltarefit\[sign\]"):
        seal(new_signer(), "a/0000000007/intent", INTENT)


# ------------------------------------------------------------------------------------------ who may what


@pytest.mark.parametrize(("place", "record"), PLACES, ids=IDS)
@pytest.mark.parametrize("role", [*Role, None])
def test_roles(place: str, record: Record, role: Role | None) -> None:
    """Any trusted key may ABORT; everything else needs its role."""
    signer = new_signer()
    trust = trust_in(trusted(signer, frozenset({role} if role else ())))
    allowed = {
        "run": {Role.COORDINATOR},
        "intent": {Role.COORDINATOR},
        "manifest": {Role.PRODUCER},
        "batch": {Role.PRODUCER},
        "commit": {Role.COORDINATOR},
        "abort": {*Role, None},
        "anchor": {Role.COORDINATOR, Role.ANCHOR},
    }[IDS[PLACES.index((place, record))]]
    data = seal(signer, place, record)
    if role in allowed:
        assert read(trust, place, type(record), data) == record
    else:
        with pytest.raises(SignatureError, match="may not sign this"):
            read(trust, place, type(record), data)


def test_a_coordinator_may_end_a_list_and_announce_nothing() -> None:
    signer, place = new_signer(), "a/0000000007/b/3/2"
    trust = trust_in(trusted(signer, frozenset({Role.COORDINATOR})))
    assert read(trust, place, Batch, seal(signer, place, END)) == END
    for bad in (dataclasses.replace(END, end=False), dataclasses.replace(END, payloads=(ref(),))):
        with pytest.raises(SignatureError, match="may not sign this"):
            read(trust, place, Batch, seal(signer, place, bad))


@dataclasses.dataclass(frozen=True)
class Unheard(Record):
    """A kind of record that a later version might have."""

    run: str


def test_what_nobody_is_known_to_sign_is_refused() -> None:
    """A new kind of record needs a rule before anybody may sign it."""
    signer, place = new_signer(), "a/0000000007/new"
    with pytest.raises(SignatureError, match="may not sign this"):
        read(trust_in(signer), place, Unheard, seal(signer, place, Unheard(RUN_ID)))


def test_a_producer_keeps_to_its_numbers() -> None:
    signer = new_signer()
    trust = trust_in(trusted(signer, frozenset({Role.PRODUCER}), producers=frozenset({3, 5})))
    for producer in range(7):
        place, record = f"a/0000000007/p/{producer}", manifest(producer)
        if producer in (3, 5):
            assert read(trust, place, ProducerManifest, seal(signer, place, record)) == record
        else:
            with pytest.raises(SignatureError, match="may not sign this"):
                read(trust, place, ProducerManifest, seal(signer, place, record))


@pytest.mark.parametrize(("tensors", "allowed"), [((2, 4), {2, 3, 4}), ("layer.3", {3}), ("layer.", set(range(8)))])
def test_a_producer_keeps_to_its_tensors(tensors: Any, allowed: set[int]) -> None:
    """Held against an oracle that looks at every tensor of every payload."""
    signer = new_signer()
    trust, place = trust_in(trusted(signer, tensors=tensors)), "a/0000000007/p/3"
    for first in range(8):
        for last in range(first, 9):  # 8 is beyond the catalog
            record = manifest(3, ref(first, last))
            if set(range(first, last + 1)) <= allowed:
                assert read(trust, place, ProducerManifest, seal(signer, place, record)) == record
            else:
                with pytest.raises(SignatureError, match="may not change these tensors"):
                    read(trust, place, ProducerManifest, seal(signer, place, record))


def test_names_without_a_catalog_allow_nothing() -> None:
    signer, place = new_signer(), "a/0000000007/p/3"
    data, store = seal(signer, place, manifest(3)), h.new_store()
    store.put(place, data)
    with pytest.raises(SignatureError, match="may not change these tensors"):
        Notary(trust=trust_in(trusted(signer, tensors="layer."))).read(store, ProducerManifest, place, RUN_ID)


def test_a_look_at_a_damaged_record_is_repeated() -> None:
    signed = seal(new_signer(), "run", Run(RUN_ID, SHA))
    for data, expected in ((signed, True), (Run(RUN_ID, SHA).to_bytes(), False)):
        store = h.new_store()
        store.put("run", data)
        assert bool(signer_of(Faulty(store, [Fault(wrappers.Kind.TRUNCATE, "get")]), "run")) is expected


def test_the_first_bad_payload_of_many_is_found() -> None:
    signer, place = new_signer(), "a/0000000007/p/3"
    trust, record = trust_in(trusted(signer, tensors=(0, 3))), manifest(3, ref(0, 1), ref(2, 3), ref(3, 4))
    with pytest.raises(SignatureError, match="tensors 3 to 4"):
        read(trust, place, ProducerManifest, seal(signer, place, record))


def test_rotation_by_attempt_numbers() -> None:
    """``old`` signs up to 9, ``new`` from 8 on: clocks play no part. The run itself counts as attempt 1."""
    old, new = new_signer(name="old"), new_signer(name="new")
    trust = trust_in(trusted(old, last_attempt=9), trusted(new, first_attempt=8))
    for number in range(6, 12):
        place = f"a/{number:010d}/intent"
        record = dataclasses.replace(INTENT, attempt=number)
        for signer, allowed in ((old, number <= 9), (new, number >= 8)):
            if allowed:
                assert read(trust, place, Intent, seal(signer, place, record)) == record
            else:
                with pytest.raises(SignatureError, match=f"may not sign for attempt {number}"):
                    read(trust, place, Intent, seal(signer, place, record))
    run = Run(RUN_ID, SHA)
    assert read(trust, "run", Run, seal(old, "run", run)) == run
    with pytest.raises(SignatureError, match="attempt 1"):
        read(trust, "run", Run, seal(new, "run", run))


def test_a_revoked_key_signs_nothing() -> None:
    signer = new_signer()
    for place, record in PLACES:
        with pytest.raises(SignatureError, match="revoked"):
            read(trust_in(trusted(signer, revoked=True)), place, type(record), seal(signer, place, record))


def test_a_trusted_run() -> None:
    signer = new_signer()
    data = seal(signer, "run", Run(RUN_ID, SHA))
    keys = (trusted(signer),)
    assert read(Trust(keys, RUN_ID), "run", Run, data) == Run(RUN_ID, SHA)
    with pytest.raises(SignatureError, match="not the trusted one"):
        read(Trust(keys, "f" * 32), "run", Run, data)


def test_the_error_says_what_to_do_and_ends_with_code_4() -> None:
    with pytest.raises(SignatureError) as caught:
        read(trust_in(new_signer()), "a/0000000007/intent", Intent, INTENT.to_bytes())
    assert isinstance(caught.value, IntegrityError)
    assert (caught.value.exit_code, caught.value.retryable) == (4, False)
    assert caught.value.next_step
    assert "trainer" in str(caught.value)


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("kind", KINDS)
def test_key_and_trust_files(kind: Kind, tmp_path: Path) -> None:
    key, trust_file = new_key(tmp_path / "keys", kind, "r-1")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    signer, trust = read_signer(key), read_trust([trust_file])
    assert trust is not None
    for place, record in PLACES:
        assert read(trust, place, type(record), seal(signer, place, record)) == record
    with pytest.raises(UsageError, match="is there already"):
        new_key(tmp_path / "keys", kind, "r-1")
    assert read_signer(key).secret.reveal() == signer.secret.reveal()


def test_no_trust_file_is_no_trust() -> None:
    assert read_trust([]) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o601, 0o644, 0o666])
def test_a_key_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    key, trust_file = new_key(tmp_path, Kind.HMAC, "k")
    key.chmod(mode)
    for use in (lambda: read_signer(key), lambda: read_trust([trust_file])):
        with pytest.raises(UsageError, match="chmod 600"):
            use()
    key.chmod(0o400)
    assert read_signer(key).key == "k"


def test_a_trust_file_that_anybody_may_change_is_refused(tmp_path: Path) -> None:
    trust_file = new_key(tmp_path, Kind.ED25519, "k")[1]
    trust_file.chmod(0o646)
    with pytest.raises(UsageError, match="others may change"):
        read_trust([trust_file])


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, data in {
        "empty": b"",
        "list": b"[]",
        "deep": b"[" * 60_000,
        "other": b'{"format":"deltarefit-key/1"}',
        "binary": os.urandom(100),
        "large": b" " * (1 << 17),
        "kind": json.dumps({"format": "deltarefit-key/1", "id": "a", "kind": "rsa", "secret": "00"}).encode(),
        "short": json.dumps({"format": "deltarefit-key/1", "id": "a", "kind": "ed25519", "secret": "0011"}).encode(),
        "secret": json.dumps({"format": "deltarefit-key/1", "id": "a", "kind": "ed25519", "secret": 7}).encode(),
        "name": json.dumps(
            {"format": "deltarefit-key/1", "id": "../a", "kind": "ed25519", "secret": "00" * 32}
        ).encode(),
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(UsageError):
            read_signer(path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(UsageError, match="is not a file"):
        read_signer(fifo)  # and does not wait for ever
    with pytest.raises(RefitError, match="cannot read"):
        read_signer(tmp_path / "none")


GOOD: dict[str, Any] = {"id": "k", "kind": "ed25519", "public": "00" * 32}


def test_trust_files_that_say_all_there_is_to_say() -> None:
    limits = {"roles": ["producer"], "producers": [0, 4], "tensors": [2, 9], "first_attempt": 3, "last_attempt": 8}
    key = _parsed([GOOD | limits | {"revoked": True}]).keys[0]
    assert (key.roles, key.producers, key.tensors) == ({Role.PRODUCER}, {0, 4}, (2, 9))
    assert (key.first_attempt, key.last_attempt, key.revoked) == (3, 8, True)
    assert _parsed([GOOD | {"tensors": "model.layers.1."}]).keys[0].tensors == "model.layers.1."
    assert _parsed([GOOD]).keys[0].roles == set(Role)
    assert _parsed([GOOD], run=RUN_ID).run == RUN_ID


def _parsed(keys: Any, **more: Any) -> Trust:
    text = json.dumps({"format": "deltarefit-trust/1", "keys": keys, **more})
    return parse_trust(text, lambda _: Secret(b"s" * 32), "trust file")


@pytest.mark.parametrize(
    "change",
    [
        {"id": "a/b"}, {"id": ""}, {"id": 1}, {"kind": "rsa"}, {"kind": "hmac-sha256"}, {"public": "00"},
        {"public": "zz" * 32}, {"public": 7}, {"secret_file": "x"}, {"roles": ["root"]}, {"roles": "producer"},
        {"producers": [-1]}, {"producers": [True]}, {"producers": 3}, {"tensors": [1]}, {"tensors": [4, 2]},
        {"tensors": [1, 2, 3]}, {"tensors": {"a": 1}}, {"first_attempt": "1"}, {"last_attempt": 1.5},
        {"revoked": "no"}, {"revoked": 0}, {"unknown": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_trust_file_with_a_mistake_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        _parsed([GOOD | change])


def test_trust_files_as_a_whole() -> None:
    for keys, more in (([], {}), ([GOOD, GOOD], {}), ({}, {}), ([GOOD], {"more": 1}), ([GOOD], {"run": 7})):
        with pytest.raises(UsageError):
            _parsed(keys, **more)
    for text in ("", "[]", '{"format":"deltarefit-trust/2","keys":[]}', "[" * 100_000):
        with pytest.raises(UsageError):
            parse_trust(text, lambda _: Secret(b""), "trust file")
    one, other = _parsed([GOOD], run="a"), _parsed([GOOD | {"id": "l"}])
    assert merged([one, other]).run == "a"
    assert [key.key for key in merged([one, other]).keys] == ["k", "l"]
    with pytest.raises(UsageError, match="different runs"):
        merged([one, _parsed([GOOD | {"id": "l"}], run="b")])


# ------------------------------------------------------------------------------------------ secrets


def test_nothing_prints_a_secret() -> None:
    value = b"CANARY-0123456789-0123456789-xyz"
    secret = Secret(value)
    signer = Signer(Kind.HMAC, "k", secret)
    holders: list[Any] = [secret, signer, Notary(signer), trust_in(signer), trusted(signer), [secret], {"a": signer}]
    for holder in holders:
        for text in (str(holder), repr(holder), f"{holder}", f"{holder!r}"):
            assert "CANARY" not in text
            assert value.hex() not in text
    assert str(secret) == "***"
    for serialize in (copy.deepcopy, lambda s: s.__reduce_ex__(2)):
        with pytest.raises(TypeError):
            serialize(secret)
    with pytest.raises(TypeError):
        json.dumps({"secret": secret})
