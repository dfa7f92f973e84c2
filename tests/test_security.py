"""A hostile store against receivers that trust keys: nothing is written, fetched or unpacked that no trusted key
signed; nothing old comes back; and whatever is declared or handed out, memory stays bounded (docs/security.md)."""

from __future__ import annotations

import hashlib
import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import pytest
import zstandard

from deltarefit import Publisher, Receiver, notary, records
from deltarefit.anchoring import write_anchor
from deltarefit.baseline import MemoryBaseline
from deltarefit.codec import open_payload
from deltarefit.errors import (
    AttemptLostError,
    BaseMismatch,
    FormatError,
    IntegrityError,
    NotFoundError,
    RefitError,
    SignatureError,
    UnavailableError,
    UsageError,
)
from deltarefit.manifest import (
    Anchor,
    Batch,
    Catalog,
    Decision,
    FileRef,
    Hint,
    Intent,
    Mode,
    Outcome,
    PayloadRef,
    ProducerManifest,
)
from deltarefit.notary import Notary
from deltarefit.pieces import Piece
from deltarefit.ports import Store
from deltarefit.records import Digest, split_signature
from deltarefit.runlog import RunLog
from deltarefit.signing import Kind, Signature, Signer
from deltarefit.trust import Role, Trust
from deltarefit.verify import Verifier, bits_of_target
from tests import helpers as h
from tests import ranks as r
from tests.signed import KINDS, Scene, Spied, new_signer, plain, publish, refused, resign, scene, trust_in, trusted

ALLOWANCE = 64 << 20
A2, A3 = "a/0000000002/", "a/0000000003/"
RECORDS = ["run", A3 + "intent", A3 + "p/0", A3 + "outcome"]
"""What a receiver that holds version 2 reads on its way to version 3."""


@pytest.fixture(scope="module", params=KINDS, ids=str)
def made(request: pytest.FixtureRequest) -> Scene:
    return scene(request.param)


@pytest.fixture(scope="module")
def one() -> Scene:
    return scene(seed=2)


def holding(made: Scene, version: int) -> h.StrictTarget:
    target = h.StrictTarget(made.run)
    assert h.followed(made.upto(version), target, trust=made.trust) == version
    return target


# ------------------------------------------------------------------------------------------ it works


def test_a_signed_run_is_followed(made: Scene) -> None:
    for trust in (made.trust, None):
        target = h.StrictTarget(made.run)
        assert h.followed(made.store, target, trust=trust) == 3
        assert h.bits(target) == made.chain.history[3]


def test_everything_that_decides_is_signed_and_nothing_else(made: Scene) -> None:
    for key, _ in made.store.list():
        lines = made.store.get(key).count(b"\n")
        decides = key == "run" or (key.startswith(("a/", "anchor/")) and "/pl/" not in key and "/file/" not in key)
        if decides:
            assert lines == 3, key
        elif key == "head" or key.startswith("catalog/"):
            assert lines == 2, key


def test_anchors_and_proofs_of_a_signed_run() -> None:
    made = scene()
    store, baseline = made.upto(3), h.StrictTarget(made.run)
    done = write_anchor(store, baseline, threads=1, sign=made.signer, trust=made.trust)
    assert (done.version, done.created) == (3, True)
    target = h.StrictTarget(made.run)
    assert h.followed(store, target, trust=made.trust) == 3
    assert h.bits(target) == made.chain.history[3]
    log = RunLog.open(store, Notary(trust=made.trust))
    assert Verifier(log, threads=1).differences(bits_of_target(target), 3) == ()


# ------------------------------------------------------------------------------------------ forgeries


@pytest.mark.parametrize("key", RECORDS)
def test_forgeries_are_refused_and_nothing_happens(made: Scene, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = holding(made, 2)
    good, body = made.store.get(key), plain(made.store, key)
    run = "" if key == "run" else made.run
    stranger, impostor = new_signer(made.signer.kind, "stranger"), new_signer(made.signer.kind, made.signer.key)
    other_kind = new_signer(next(kind for kind in KINDS if kind is not made.signer.kind), made.signer.key)
    line = good[len(body) :]
    forged = {
        "not signed": body,
        "unknown key": body + stranger.sign(run, key, body).to_line(),
        "another secret": body + impostor.sign(run, key, body).to_line(),
        "another kind of key": body + other_kind.sign(run, key, body).to_line(),
        "two signatures": good + line,
        "both keys": good + stranger.sign(run, key, body).to_line(),
        "another place": body + made.signer.sign(run, A2 + "intent", body).to_line(),
        "another run": body + made.signer.sign("f" * 32, key, body).to_line(),
        "no record": line + line,
        "empty": b"",
    }
    for name, data in forged.items():
        (
            refused(
                made.store, made.trust, target, monkeypatch, tamper=lambda spied, d=data: spied.served.update({key: d})
            ),
            name,
        )
    assert h.followed(made.store, target, trust=made.trust) == 3, "and what is right is taken afterwards"


@pytest.mark.parametrize("key", RECORDS)
def test_flipped_bits_and_cuts_stop_a_receiver(made: Scene, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample through the whole receiver; ``test_signing`` has every bit and every length."""
    target, data, rng = holding(made, 2), made.store.get(key), np.random.default_rng(len(key))
    damaged = [data[:n] for n in rng.integers(0, len(data), 15)]
    for bit in rng.integers(0, 8 * len(data), 40):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for bad in damaged:
        refused(made.store, made.trust, target, monkeypatch, tamper=lambda spied, d=bad: spied.served.update({key: d}))


def test_an_unsigned_run_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = h.publish_chain(np.random.default_rng(3), ("some",), h.SMALL)
    target = h.StrictTarget(RunLog.open(chain.store).run)
    spied = refused(chain.store, trust_in(new_signer()), target, monkeypatch, SignatureError, "run is not signed")
    assert set(spied.reads) == {"run"}, "not even the catalog was asked for"


def test_a_forged_catalog_is_not_parsed(one: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    key = next(key for key, _ in one.store.list("catalog/"))
    other = Catalog((one.chain.source.catalog.tensors[0],)).to_bytes()
    monkeypatch.setattr(Catalog, "from_bytes", lambda *a: pytest.fail("parsed"))
    target = h.StrictTarget(one.run)
    for data in (other, other + one.signer.sign(one.run, key, other).to_line()):
        refused(
            one.store, one.trust, target, monkeypatch, FormatError, tamper=lambda s, d=data: s.served.update({key: d})
        )


def test_a_forged_anchor_is_not_loaded(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    store, key = made.upto(3), "anchor/0000000001/anchor"
    resign(store, key, new_signer(made.signer.kind), made.run)
    refused(store, made.trust, h.StrictTarget(made.run), monkeypatch, SignatureError)


@pytest.mark.parametrize("who", ["anchor", "publisher", "verifier", "cache"])
def test_all_who_read_a_run_read_it_with_trust(one: Scene, who: str) -> None:
    """An anchor that a stranger signed is loaded by nobody, least of all into the baseline of a trainer."""
    store, target = one.upto(3), MemoryBaseline()
    resign(store, "anchor/0000000001/anchor", new_signer(name=one.signer.key), one.run)
    spied = Spied(store)
    log = RunLog.open(spied, Notary(trust=one.trust))
    keys = {"sign": one.signer, "trust": one.trust}
    work: dict[str, Callable[[], object]] = {
        "anchor": lambda: write_anchor(spied, target, threads=1, **keys),  # type: ignore[arg-type]
        "publisher": lambda: h.published(spied, one.chain.source, baseline=target, **keys),
        "verifier": lambda: Verifier(log, threads=1).differences(bits_of_target(holding(one, 2)), 3),
        "cache": lambda: log.over(store).anchor(1),
    }
    with pytest.raises(SignatureError, match="does not fit"):
        work[who]()
    assert spied.payloads == []
    assert target.catalog is None


def test_an_anchor_by_a_key_that_may_not_is_not_written(one: Scene) -> None:
    store, (signer, trust) = one.upto(3), insider(one, {Role.PRODUCER})
    with pytest.raises(SignatureError, match="may not sign this"):
        write_anchor(store, MemoryBaseline(), threads=1, sign=signer, trust=trust)
    assert RunLog.open(store).anchor(3) is None


def test_signatures_are_ignored_without_trust_but_must_be_some(one: Scene) -> None:
    store, key = one.upto(3), A3 + "intent"
    resign(store, key, new_signer(), one.run)
    assert h.followed(store, h.StrictTarget(one.run)) == 3
    body = plain(store, key)
    store.put(key, body)
    assert h.followed(store, h.StrictTarget(one.run)) == 3
    for line in (b"x\n", b"signature/1 rsa k 00\n", b"signature/1 ed25519 k " + b"00" * 63 + b"\n", b"\n"):
        store.put(key, body + line)
        with pytest.raises(IntegrityError):
            h.followed(store, h.StrictTarget(one.run))


# ------------------------------------------------------------------------------------------ replay


def test_old_records_at_a_new_place(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """F53: attempt 2's records where attempt 3's are expected."""
    target = holding(made, 2)
    for name in ("intent", "p/0", "outcome"):
        old = made.store.get(A2 + name)
        refused(
            made.store,
            made.trust,
            target,
            monkeypatch,
            SignatureError,
            "does not fit",
            tamper=lambda spied, n=name, o=old: spied.served.update({A3 + n: o}),
        )
    whole = {A3 + name: made.store.get(A2 + name) for name in ("intent", "p/0", "outcome")}
    refused(made.store, made.trust, target, monkeypatch, SignatureError, tamper=lambda s: s.served.update(whole))


def test_records_of_another_run_of_the_same_trainer(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs are signed by one key: only the run in the signature tells them apart."""
    other = scene(seed=9, signer=made.signer)
    target = holding(made, 2)
    for name in ("intent", "p/0", "outcome"):
        record = other.store.get(A3 + name)
        refused(
            made.store,
            made.trust,
            target,
            monkeypatch,
            SignatureError,
            "does not fit",
            tamper=lambda spied, n=name, r=record: spied.served.update({A3 + n: r}),
        )
    foreign = {key: other.store.get(key) for key in ("run", *(key for key, _ in other.store.list("catalog/")))}

    def swap(spied: Spied) -> None:
        spied.served.update(foreign)

    refused(made.store, made.trust, target, monkeypatch, BaseMismatch, tamper=swap)
    refused(made.store, made.trust, h.StrictTarget(made.run), monkeypatch, SignatureError, tamper=swap)


def test_a_whole_other_run_is_not_put_over_the_weights(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    other = scene(seed=9, signer=made.signer)
    refused(other.store, made.trust, holding(made, 2), monkeypatch, BaseMismatch, "another run")


def test_an_old_outcome_in_a_new_store(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempt 3 of a new run of the same trainer is open; the old run's COMMIT of 3 does not close it."""
    new = scene(seed=4, signer=made.signer)
    store = new.upto(3)
    store.put(A3 + "outcome", made.store.get(A3 + "outcome"))
    refused(store, new.trust, holding(new, 2), monkeypatch, SignatureError, "does not fit")


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_store_that_goes_back_in_time_takes_no_receiver_along(made: Scene, left: int) -> None:
    """F53: all that the store shows is signed and valid, and older than what is held."""
    target = holding(made, 3)
    before = h.bits(target)
    old = made.upto(left)
    assert h.followed(old, target, trust=made.trust) == 3
    assert h.bits(target) == before
    header = target.read_header()
    assert header is not None
    assert header.version == 3


def test_a_lying_hint_costs_time_only(made: Scene) -> None:
    """``head`` is not signed: it decides nothing."""
    for head, anchor in ((0, 0), (1, 1), (2, 3), (99, 99), (3, 0), (2**64 - 1, 2**64 - 1)):
        store, target = made.upto(3), h.StrictTarget(made.run)
        store.put("head", Hint(head, anchor).to_bytes())
        assert h.followed(store, target, trust=made.trust) == 3
    store = made.upto(3)
    for junk in (b"", b"{}", b"\n" * 100, b"x" * 100_000, Hint(3, 1).to_bytes() + b"signature/1 x\n"):
        store.put("head", junk)
        assert h.followed(store, h.StrictTarget(made.run), trust=made.trust) == 3


# ------------------------------------------------------------------------------------------ insiders


def insider(made: Scene, roles: set[Role], **limits: object) -> tuple[Signer, Trust]:
    """A second trusted key, with fewer rights."""
    signer = new_signer(made.signer.kind, "insider")
    return signer, trust_in(trusted(made.signer), trusted(signer, frozenset(roles), **limits))


def test_a_producer_cannot_commit(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    store = made.upto(3)
    signer, trust = insider(made, {Role.PRODUCER, Role.ANCHOR})
    for name in ("outcome", "intent"):
        good = store.get(A3 + name)
        resign(store, A3 + name, signer, made.run)
        refused(store, trust, holding(made, 2), monkeypatch, SignatureError, "may not sign this")
        store.put(A3 + name, good)
    assert h.followed(store, holding(made, 2), trust=trust) == 3


def test_a_producer_cannot_change_what_is_not_its_own(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    store = made.upto(3)
    for limits in ({"tensors": (1, 1)}, {"tensors": "b."}, {"producers": frozenset({1})}):
        signer, trust = insider(made, {Role.PRODUCER}, **limits)
        resign(store, A3 + "p/0", signer, made.run)
        refused(store, trust, holding(made, 2), monkeypatch, SignatureError, "may not")
    signer, trust = insider(made, {Role.PRODUCER}, tensors=(0, 2), producers=frozenset({0}))
    resign(store, A3 + "p/0", signer, made.run)
    assert h.followed(store, holding(made, 2), trust=trust) == 3


def test_anyone_may_abort(made: Scene) -> None:
    """An ABORT loses a publish; a run whose coordinator died must be closed by whoever is left."""
    store = made.upto(2)
    signer, trust = insider(made, set())
    log = RunLog.open(store, Notary(signer))
    intent = Intent(made.run, 3, 2, _digest(store, 2), Mode.STAGE, "ab" * 16)
    abort = Outcome(made.run, 3, Decision.ABORT, 2, Digest(), (), 0, "ab" * 16, "gone")
    store.create(A3 + "intent", Notary(made.signer).bytes_of(intent, made.run, A3 + "intent"))
    store.create(A3 + "outcome", log.bytes_of(A3 + "outcome", abort))
    target = holding(made, 2)
    assert h.followed(store, target, trust=trust) == 2
    chain = h.Chain(store, made.chain.source)
    publish(chain, made.signer, trust)
    assert h.followed(store, target, trust=trust) == 4
    with pytest.raises(SignatureError, match="unknown key"):
        h.followed(store, holding(made, 2), trust=made.trust)


def _digest(store: Store, version: int) -> Digest:
    outcome = RunLog.open(store).version(version).outcome
    assert outcome is not None
    return outcome.digest


@pytest.mark.parametrize("sealed", ["not signed", "out of range"])
def test_what_a_producer_seals_holds_nobody_up(made: Scene, sealed: str) -> None:
    """An attempt that was never committed is closed and passed, whatever stands in its producers' places."""
    store = made.upto(2)
    signer, trust = insider(made, {Role.PRODUCER}, producers=frozenset({7}))
    intent = Intent(made.run, 3, 2, _digest(store, 2), Mode.STAGE, "ab" * 16)
    manifest = ProducerManifest(made.run, 3, 2, 0, 1, Digest(), "ab" * 32, ())
    store.create(A3 + "intent", Notary(made.signer).bytes_of(intent, made.run, A3 + "intent"))
    by = Notary(signer if sealed == "out of range" else None)
    store.create(A3 + "p/0", by.bytes_of(manifest, made.run, A3 + "p/0"))
    target = holding(made, 2)
    assert h.followed(store, target, trust=trust) == 2
    publish(h.Chain(store, made.chain.source), made.signer, trust)
    assert h.followed(store, target, trust=trust) == 4
    assert h.bits(target) == h.bytes_of(made.chain.source.model)


def test_rotation_of_a_run_that_goes_on(made: Scene) -> None:
    """A second key takes over at attempt 4; the first is trusted up to 3, the run and its anchor included."""
    store, new = made.upto(3), new_signer(made.signer.kind, "new")
    trust = trust_in(trusted(made.signer, last_attempt=3), trusted(new, first_attempt=4))
    chain = h.Chain(store, made.chain.source)
    publish(chain, new, trust)
    target = h.StrictTarget(made.run)
    assert h.followed(store, target, trust=trust) == 4
    assert h.bits(target) == chain.history[4]
    with pytest.raises(SignatureError):
        publish(h.Chain(store, made.chain.source), made.signer, trust)
    resign(store, "a/0000000004/outcome", made.signer, made.run)
    with pytest.raises(SignatureError, match="may not sign for attempt 4"):
        h.followed(store, h.StrictTarget(made.run), trust=trust)


# ------------------------------------------------------------------------------------------ publishers


def test_a_run_is_signed_from_the_start_or_not_at_all(one: Scene) -> None:
    for publisher_of in (
        lambda: Publisher(one.upto(3), one.chain.source, threads=1),
        lambda: write_anchor(one.upto(3), h.StrictTarget(one.run), threads=1),
    ):
        with pytest.raises(UsageError, match="is signed"):
            publisher_of()
    chain = h.publish_chain(np.random.default_rng(3), ("some",), h.SMALL)
    with pytest.raises(UsageError, match="is not signed"):
        Publisher(chain.store, chain.source, threads=1, sign=one.signer)


def test_a_publisher_writes_nothing_that_its_readers_would_refuse(one: Scene) -> None:
    """A key that is not trusted, or not to coordinate, or no more, stops before it stands in anybody's way."""
    other = new_signer(name="other")
    cases = [
        (other, trust_in(one.signer)),
        (new_signer(name=one.signer.key), trust_in(one.signer)),
        (other, trust_in(one.signer, trusted(other, frozenset({Role.PRODUCER})))),
        (one.signer, trust_in(trusted(one.signer, last_attempt=3))),
        (other, trust_in(one.signer, trusted(other, first_attempt=5))),
    ]
    for signer, trust in cases:
        store = one.upto(3)
        before = sorted(store.list())
        with pytest.raises(SignatureError):
            publish(h.Chain(store, one.chain.source), signer, trust)
        assert [entry for entry in sorted(store.list()) if not entry[0].startswith("head")] == [
            entry for entry in before if not entry[0].startswith("head")
        ]
    empty = h.new_store()
    with pytest.raises(SignatureError):
        publish(h.Chain(empty, one.chain.source), other, trust_in(one.signer))
    assert not [key for key, _ in empty.list() if not key.startswith("catalog/")]


def test_a_publisher_commits_only_what_receivers_will_take(one: Scene) -> None:
    """A key that may coordinate and not produce: the attempt ends in ABORT, before it is too late."""
    store, keys = one.upto(3), [trusted(one.signer)]
    for number, limits in enumerate(({"producers": frozenset({1})}, {"tensors": (2, 2)}, {"tensors": "z"}), 4):
        new = new_signer(name=f"new{number}")
        keys.append(trusted(new, **limits))  # type: ignore[arg-type]
        with pytest.raises(SignatureError, match="may not"):
            publish(h.Chain(store, one.chain.source, {n: [] for n in range(number)}), new, trust_in(*keys), ("all",))
        attempt = RunLog.open(store).attempt(number)
        assert attempt.outcome is not None
        assert attempt.outcome.decision is Decision.ABORT
        head = RunLog.open(store).head()
        assert head is not None
        assert head.number == 3


# ------------------------------------------------------------------------------------------ bounds


class Endless:
    """A store that has as many bytes of everything as anybody asks for, and fails for a reader that sets no bound."""

    url = "memory://endless"

    def __init__(self, real: Store, hostile: Callable[[str], bool], most: int) -> None:
        self._real, self._hostile, self._most = real, hostile, most
        self.hit = False

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        assert length is not None, f"{key} was read without a bound"
        if not self._hostile(key):
            return self._real.get(key, start, length)
        assert length <= self._most, f"{length} bytes of {key}"
        self.hit = True
        return b"\0" * length

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


@pytest.mark.parametrize(
    ("name", "hostile", "most"),
    [
        ("run", lambda key: key == "run", 16 << 10),
        ("head", lambda key: key == "head", 16 << 10),
        ("intent", lambda key: key.endswith("intent"), 16 << 10),
        ("payload", lambda key: "a/" in key and "/pl/" in key, 16 << 10),
        ("anchored payload", lambda key: "anchor/" in key and "/pl/" in key, 16 << 10),
        ("file", lambda key: "/file/" in key, 16 << 10),
    ],
)
@pytest.mark.parametrize("with_trust", [True, False])
def test_objects_without_end(
    one: Scene, name: str, hostile: Callable[[str], bool], most: int, with_trust: bool
) -> None:
    """Every read has a bound, and what is small is bounded small."""
    store = Endless(one.upto(3), hostile, most)
    trust = one.trust if with_trust else None
    tracemalloc.start()
    try:
        if name == "head":
            assert h.followed(store, MemoryBaseline(), trust=trust) == 3  # type: ignore[arg-type]
        else:
            with pytest.raises(IntegrityError):
                h.followed(store, MemoryBaseline(), trust=trust)  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < ALLOWANCE
    finally:
        tracemalloc.stop()
    assert store.hit


@pytest.mark.parametrize("name", ["intent", "p/0", "outcome", "catalog"])
def test_the_largest_forgeries_are_not_even_copied(one: Scene, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record as large as records may be (here 32 MiB), signed or not, costs its own bytes and no more."""
    most = 32 << 20
    for module in (notary, records):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", most)
    target, key = holding(one, 2), A3 + name
    if name == "catalog":
        key = next(key for key, _ in one.store.list("catalog/"))
    line = one.signer.sign(one.run, key, b"").to_line()
    data = b"{" * most + b"\n" + b"0" * 64 + b"\n" + line
    for forged in (data, data[most // 2 :], data[: -len(line)], data[:-1], data + line):
        tracemalloc.start()
        try:
            refused(one.store, one.trust, target, monkeypatch, tamper=lambda s, f=forged: s.served.update({key: f}))
            assert tracemalloc.get_traced_memory()[1] < most + (8 << 20)
        finally:
            tracemalloc.stop()


JSON = {
    "deep": lambda n: b"[" * n,
    "deep objects": lambda n: b'{"a":' * n,
    "a long number": lambda n: b'{"attempt":' + b"9" * n + b"}",
    "an exponent": lambda n: b'{"attempt":1e' + b"9" * n + b"}",
    "one key many times": lambda n: b"{" + b",".join([b'"a":1'] * n) + b"}",
    "a long string": lambda n: b'{"run":"' + b"x" * n + b'"}',
    "not a number": lambda n: b'{"attempt":NaN' + b" " * n + b"}",
    "not ASCII": lambda n: b'{"run":"' + b"\xff" * n + b'"}',
}


@pytest.mark.parametrize("name", JSON)
def test_hostile_json(name: str) -> None:
    """1 MB of it in a record without a signature: refused, in little memory."""
    line = JSON[name](1_000_000 // (1 if "key" not in name else 6))
    data = line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"
    tracemalloc.start()
    try:
        for kind in (ProducerManifest, Anchor, Outcome):
            with pytest.raises(FormatError):
                kind.from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < ALLOWANCE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claimed", [1 << 20, 1 << 30, 1 << 40, (1 << 64) - 1])
def test_decompression_bombs(claimed: int) -> None:
    """F42: frames that hold, or claim, more than the record says. Nothing is unpacked for them."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    without_size = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    header = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", claimed)
    for frame in (bomb, without_size, header + bomb[8:], header):
        text = json.dumps({"__metadata__": {"deltarefit": "payload/1"}, "table": _tensor(frame)}).encode()
        text += b" " * (-len(text) % 8)
        data = struct.pack("<Q", len(text)) + text + frame
        ref = PayloadRef(hashlib.sha256(data).hexdigest(), len(data), {"table": 112}, 1, 1, 0, 0, Digest(), Digest())
        tracemalloc.start()
        try:
            with pytest.raises(FormatError):
                open_payload(data, ref, Catalog(()))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def _tensor(frame: bytes) -> dict[str, object]:
    return {"dtype": "U8", "shape": [len(frame)], "data_offsets": [0, len(frame)]}


def test_declared_sizes_have_limits() -> None:
    sha = "ab" * 32
    good = {"sha256": sha, "size": 9, "streams": {"table": 9}, "deltas": 1, "changed": 1, "first": 0, "last": 0}
    for change in (
        {"size": (256 << 20) + 1},
        {"streams": {"table": (1 << 30) + 1}},
        {"streams": {"table": 1 << 30, "two": 1}},
        {"deltas": (1 << 20) + 1},
        {"first": 1},
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            PayloadRef(**(good | change), pre=Digest(), post=Digest())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bytes"):
        FileRef("config.json", sha, (256 << 20) + 1)
    files = tuple(FileRef(f"file-{n}", sha, 256 << 20) for n in range(5))
    assert len(Anchor("ab" * 16, 1, Digest(), (), files[:4]).files) == 4
    with pytest.raises(ValueError, match="too large"):
        Anchor("ab" * 16, 1, Digest(), (), files)


def test_a_missing_run_is_not_an_attack() -> None:
    with pytest.raises(NotFoundError):
        Receiver(h.new_store(), h.StrictTarget(""), trust=trust_in(new_signer()))


# ------------------------------------------------------------------------------------------ several producers


class KeyedTrainer(r.Trainer):
    """Two ranks with a key each; rank 0 owns half of tensor 0 and all of 2, rank 1 the other half of 0."""

    def __init__(
        self, store: Store, model: h.Model, signers: list[Signer], trusts: Sequence[Trust | None], mode: Mode
    ) -> None:
        halves = [[Piece(0, 0, 150, 150), Piece(2, 0, 20, 20)], [Piece(0, 150, 100, 100), Piece(0, 250, 50, 50)]]
        self.board = r.Board(2)
        self.stores = [r.Forwarding(store), r.Forwarding(store)]
        catalog = h.catalog_of(model, h.SMALL)
        self.sources = [
            r.PieceSource(model, catalog, pieces, exchange)
            for pieces, exchange in zip(halves, self.board.ranks, strict=True)
        ]
        how = {"threads": 1, "deadline_s": 20.0, "payload_bytes": 60, "votes": "none", "mode": mode}
        self.publishers = self.each(
            lambda rank: Publisher(self.stores[rank], self.sources[rank], sign=signers[rank], trust=trusts[rank], **how)  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("mode", Mode, ids=str)
def test_producers_with_a_key_each(mode: Mode, kind: Kind) -> None:
    """Rank 1's key may produce for its number and its tensor, and nothing else. An attempt that fails is closed, and
    rank 1's list ended, by rank 0's key."""
    signers = [new_signer(kind, "rank0"), new_signer(kind, "rank1")]
    limits = {"roles": frozenset({Role.PRODUCER}), "producers": frozenset({1}), "tensors": "a."}
    trust = trust_in(trusted(signers[0], producers=frozenset({0})), trusted(signers[1], **limits))  # type: ignore[arg-type]
    store, model = h.new_store(), h.random_model(np.random.default_rng(5), h.SMALL)
    trainer = KeyedTrainer(store, model, signers, [trust, trust], mode)
    target = h.StrictTarget(trainer.publishers[0].log.run)
    with closing(trainer), closing(Receiver(store, target, threads=1, trust=trust)) as receiver:
        trainer.publish()
        for number in range(2, 5):
            h.step(np.random.default_rng(number), model, "all")
            if number == 3:
                fail_after(trainer.stores[1], 1)
                with pytest.raises(RefitError):
                    trainer.publish()
                vars(trainer.stores[1]).pop("put")
            trainer.publish()
            receiver.follow(once=True)
            assert h.bits(target) == h.bytes_of(model)
    by = {name: _signers_of(store, name) for name in ("/intent", "/p/0", "/p/1", "/b/0/", "/b/1/", "/outcome")}
    assert (by["/intent"], by["/p/0"], by["/p/1"]) == ({"rank0"}, {"rank0"}, {"rank1"})
    assert "rank0" in by["/outcome"]
    if mode is Mode.STREAM:
        assert (by["/b/0/"], by["/b/1/"]) == ({"rank0"}, {"rank0", "rank1"}), "one list was ended for rank 1"


@pytest.mark.parametrize("forger", ["nobody", "a stranger", "an insider", "a record of another place"])
def test_nothing_is_streamed_that_no_trusted_key_announced(
    made: Scene, forger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode stream receivers write before COMMIT: what is announced must be signed, and be its signer's."""
    store, place = made.upto(2), A3 + "b/0/0"
    signer, trust = insider(made, {Role.PRODUCER}, producers=frozenset({1}))
    intent = Intent(made.run, 3, 2, _digest(store, 2), Mode.STREAM, "ab" * 16)
    refs = RunLog.open(made.store).attempt(3).payloads
    batch = Batch(made.run, 3, 0, 0, refs, False, "ab" * 16)
    store.create(A3 + "intent", Notary(made.signer).bytes_of(intent, made.run, A3 + "intent"))
    good = Notary(made.signer).bytes_of(batch, made.run, place)
    store.put(
        place,
        {
            "nobody": batch.to_bytes(),
            "a stranger": Notary(new_signer(made.signer.kind, "stranger")).bytes_of(batch, made.run, place),
            "an insider": Notary(signer).bytes_of(batch, made.run, place),
            "a record of another place": Notary(made.signer).bytes_of(batch, made.run, A3 + "b/0/1"),
        }[forger],
    )
    target = holding(made, 2)
    refused(store, trust, target, monkeypatch, SignatureError)
    for ref in refs:
        key = f"{A3}pl/{ref.sha256}"
        store.put(key, made.store.get(key))
    store.put(place, good)
    spied, end = Spied(store), time.monotonic() + 20
    with closing(Receiver(spied, target, threads=1, poll_s=0.01, trust=trust)) as receiver:
        receiver.follow(stop=lambda: bool(spied.payloads) or time.monotonic() > end)
    assert spied.payloads, "and what is right is fetched"


def _signers_of(store: Store, part: str) -> set[str]:
    keys = [key for key, _ in store.list("a/") if part in key and "/pl/" not in key]
    return {Signature.parse(split_signature(store.get(key), key)[1], key).key for key in keys}


def fail_after(store: r.Forwarding, puts: int) -> None:
    """The store takes so many objects more."""
    left = [puts]

    def put(key: str, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise UnavailableError("gone")
        store.inner.put(key, data)

    store.put = put  # type: ignore[attr-defined]


@pytest.mark.parametrize("notices", [0, 1])
def test_a_rank_whose_key_may_not_produce_commits_nothing(notices: int) -> None:
    """It notices itself, if it knows what is trusted; else rank 0 does, before COMMIT."""
    signers = [new_signer(name="rank0"), new_signer(name="rank1")]
    trust = trust_in(trusted(signers[0]), trusted(signers[1], producers=frozenset({2})))
    model = h.random_model(np.random.default_rng(5), h.SMALL)
    trainer = KeyedTrainer(h.new_store(), model, signers, [trust, trust if notices else None], Mode.STAGE)
    with closing(trainer):
        found = trainer.outcomes(lambda rank: trainer.publishers[rank].publish())
        assert isinstance(found[notices], SignatureError)
        assert isinstance(found[1 - notices], AttemptLostError)
        assert "key rank1 may not sign this" in str(found[1 - notices])
        assert trainer.publishers[0].log.head() is None


def test_a_rank_without_a_key_takes_no_part(one: Scene) -> None:
    model = h.random_model(np.random.default_rng(5), h.SMALL)
    with pytest.raises(UsageError, match="is signed"):
        KeyedTrainer(h.new_store(), model, [one.signer, None], [None, None], Mode.STAGE)


def test_another_key_than_the_run_was_begun_with_needs_trust() -> None:
    """Receivers that trust only the first key would stop for good; whoever says whom they trust may go on."""
    store, source = h.new_store(), h.ArraySource(h.random_model(np.random.default_rng(5), h.SMALL), h.SMALL)
    first, other = new_signer(name="first"), new_signer(name="other")
    h.published(store, source, sign=first)
    with pytest.raises(UsageError, match="begun with another key"):
        h.published(store, source, sign=other)
    assert RunLog.open(store).attempt(2).intent is None
    both = trust_in(trusted(first), trusted(other))
    assert h.published(store, source, sign=other, trust=both) == 2
