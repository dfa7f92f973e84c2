"""Every single-bit flip and every truncation of a 4 KiB payload and of a 4 KiB manifest, and every swap of two objects,
is refused. The product finds each by hash, so that no case reaches a decoder; ``test_codec_damage`` looks beneath.

``check_all`` is what the release run repeats with other seeds.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from deltarefit import records, runlog
from deltarefit.codec import PayloadBuilder, encode_delta, open_payload
from deltarefit.elements import Elements
from deltarefit.errors import FormatError, IntegrityError
from deltarefit.manifest import Catalog, PayloadRef, ProducerManifest, TensorEntry
from deltarefit.pieces import whole
from deltarefit.records import Digest
from deltarefit.runlog import RunLog
from tests import helpers as h

SIZE = 4096
CASES = 65_000
ENTRIES = tuple(TensorEntry(f"t{number}", dtype, (9000,)) for number, dtype in enumerate(("BF16", "F32", "U8", "I64")))
CATALOG = Catalog(ENTRIES)
Payload = tuple[bytes, PayloadRef]


def payload(seed: int, size: int) -> Payload:
    """Of ``size`` bytes, give or take a few."""
    rng = np.random.default_rng(seed)
    for count in itertools.count(40, 4):
        data, ref = small_payload(rng, count)
        if abs(len(data) - size) < 8:
            return data, ref
        if len(data) > size + 200:
            break
    raise AssertionError("no payload of that size")


def small_payload(rng: np.random.Generator, changes: int) -> Payload:
    builder = PayloadBuilder()
    for number, entry in enumerate(CATALOG.tensors):
        old: Elements = rng.integers(0, 200, entry.numel, dtype=f"u{entry.width}")
        new = old.copy()
        new[rng.choice(entry.numel, changes, replace=False)] ^= 1 + number
        encoded = encode_delta(whole(number, entry.numel), old, new, 0, 99 + number)
        assert encoded is not None
        builder.add(encoded)
    return builder.build()


def manifest(size: int) -> bytes:
    """Of ``size`` bytes or a little more."""
    refs: list[PayloadRef] = []
    rng = np.random.default_rng(size)
    while True:
        made = ProducerManifest("ab" * 16, 9, 8, 0, 3, Digest(1, 2), "cd" * 32, tuple(refs), 5).to_bytes()
        if len(made) >= size:
            return made
        refs.append(small_payload(rng, 3)[1])


def damaged(data: bytes) -> Iterator[bytes | bytearray]:
    """Each flip of one bit, each truncation, each of a few extensions. Flips share one buffer: look at it at once."""
    flipped = bytearray(data)
    for place in range(len(data)):
        for bit in range(8):
            flipped[place] ^= 1 << bit
            yield flipped
            flipped[place] ^= 1 << bit
    yield from (data[:length] for length in range(len(data)))
    yield from (data + more for more in (b"\0", b"\n", data))


def refused(data: bytes, read: Callable[[bytes], object], error: type[Exception]) -> int:
    """How many damaged copies there were; ``AssertionError`` if one was read."""
    count = 0
    for count, bad in enumerate(damaged(data), 1):
        try:
            read(bytes(bad))
        except error:
            continue
        raise AssertionError(f"damaged copy {count} of {len(data)} bytes was read")
    return count


def check_all(seed: int) -> int:
    """How many cases were refused."""
    data, ref = payload(seed, SIZE)
    open_payload(data, ref, CATALOG)
    cases = refused(data, lambda bad: open_payload(bad, ref, CATALOG), IntegrityError)
    record = manifest(SIZE)
    ProducerManifest.from_bytes(record)
    return cases + refused(record, ProducerManifest.from_bytes, FormatError)


def test_every_flip_and_every_length_of_4_kib_is_refused() -> None:
    assert check_all(1) >= CASES


def test_that_a_reader_without_a_hash_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltarefit.codec.check_object", lambda *arguments: None)
    with pytest.raises(AssertionError, match="was read"):
        check_all(1)


def test_every_pairwise_swap_of_payloads_is_refused() -> None:
    rng = np.random.default_rng(3)
    made = [small_payload(rng, 4 + number % 3) for number in range(12)]
    for (_, ref), (data, _) in itertools.permutations(made, 2):
        with pytest.raises(IntegrityError):
            open_payload(data, ref, CATALOG)


@pytest.fixture(scope="module")
def chain() -> h.Chain:
    return h.publish_chain(np.random.default_rng(4), ("some", "block", "many"))


def test_every_swap_of_objects_of_a_run_is_refused_by_a_receiver(chain: h.Chain) -> None:
    """Each record and payload in the place of each other one of its kind: a receiver refuses or does not need it, and
    in any case holds only bits of a version."""
    keys = [key for key, _ in chain.store.list() if key.startswith(("a/", "anchor/"))]
    kinds = {key: [part for part in key.split("/") if not part.isdigit() and len(part) < 64][-1] for key in keys}
    swaps = [(a, b) for a, b in itertools.combinations(keys, 2) if kinds[a] == kinds[b]]
    assert len(swaps) > 100
    silent = 0
    for one, other in swaps[:: max(1, len(swaps) // 150)]:
        store = h.copy_store(chain.store)
        store.put(one, chain.store.get(other))
        store.put(other, chain.store.get(one))
        target = h.strict_target(store)
        try:
            version = h.followed(store, target)
        except IntegrityError:
            continue
        silent += 1
        assert h.bits(target) == chain.history[version], f"{one} and {other} swapped"
    assert silent == 0, "every swap is between objects that a new receiver needs"


def test_swapped_manifests_of_one_attempt_do_not_add_up(chain: h.Chain) -> None:
    """Manifests are named by hash in the outcome: those of two attempts, exchanged, are refused before any payload."""
    log = RunLog.open(chain.store)
    two, three = log.version(2), log.version(3)
    assert two.outcome is not None
    swapped = type(two)(two.number, two.intent, three.manifests, two.outcome)
    with pytest.raises(IntegrityError):
        runlog.check_attempt(swapped)


def test_the_hash_is_what_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record whose line is changed and hashed again is read: nothing else stands between."""
    line = manifest(500)[:-66].replace(b'"step":3', b'"step":4')
    assert ProducerManifest.from_bytes(sealed(line)).step == 4
    assert records.FORMAT.encode() in line


def sealed(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"
