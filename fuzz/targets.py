"""What is fuzzed in Python: each parser of bytes that come from elsewhere.

A target takes bytes and raises nothing; what it is fed with is partly the bytes themselves and partly edits of valid
examples behind hashes that are right, so that a fuzzer gets past them. ``seeds`` are inputs to begin with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests import signed, test_codec, test_codec_damage, test_composition, test_records
from tests import test_codec_pieces as pieces
from tests.test_codec import CATALOG

from deltarefit import _kernel, codec, composition, manifest, safetensors_layout
from deltarefit.codec import Delta, open_payload
from deltarefit.errors import FormatError, IntegrityError, RefitError
from deltarefit.manifest import PayloadRef
from deltarefit.notary import UNSIGNED, Notary
from deltarefit.records import Record
from deltarefit.safetensors_layout import (
    DirectoryLayout,
    choose_weight_files,
    header_bytes,
    index_map,
    parse_header,
    split_files,
)
from deltarefit.signing import Kind, Secret, Signer
from deltarefit.targets import agent_wire
from deltarefit.targets.agent_client import AgentClient
from deltarefit.trust import parse_trust
from fuzz.feed import Feed

Target = Callable[[bytes], None]
MOST_STREAM_BYTES = 1 << 20
"""What a payload may declare here: the memory of a reader is bounded by what is declared."""


# ------------------------------------------------------------------------------------------ records


def _kinds() -> list[type[Record]]:
    found = {
        value for room in (manifest, safetensors_layout) for value in vars(room).values() if isinstance(value, type)
    }
    return sorted((kind for kind in found if issubclass(kind, Record) and kind is not Record), key=lambda k: k.__name__)


KINDS = _kinds()
EXAMPLES: list[Record] = [
    *test_records.EXAMPLES,
    safetensors_layout.directory_layout(
        CATALOG, {"m.safetensors": parse_header(safetensors_layout.default_header(CATALOG), "m")}, ["config.json"]
    ),
]
BODIES = [json.loads(example.to_bytes().split(b"\n")[0]) for example in EXAMPLES]


def sealed(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def record(data: bytes) -> None:
    """Any record class reads any bytes, any sealed line, and any edited example: what it reads it writes alike."""
    feed = Feed(data)
    way = feed.below(3)
    if way == 2:
        number = feed.below(len(EXAMPLES))
        line = json.dumps(feed.edited(BODIES[number]), sort_keys=True, separators=(",", ":")).encode()
        read_record(type(EXAMPLES[number]), sealed(line))
        return
    kind, rest = KINDS[feed.below(len(KINDS))], feed.rest()
    read_record(kind, sealed(rest) if way else rest)


def read_record(kind: type[Record], data: bytes) -> None:
    try:
        found = kind.from_bytes(data)
    except FormatError:
        return
    assert found.to_bytes() == data, "not written as it was read"
    assert kind.from_bytes(data) == found
    hash(found.content_hash())


def record_seeds() -> list[bytes]:
    lines = [(KINDS.index(type(example)), example.to_bytes()) for example in EXAMPLES]
    raw = [bytes([0, kind]) + data for kind, data in lines]
    return raw + [bytes([1, kind]) + data.split(b"\n")[0] for kind, data in lines] + edits(2, len(EXAMPLES))


def edits(way: int, count: int) -> list[bytes]:
    """Inputs that edit each of some examples, in a few ways."""
    rng = np.random.default_rng(way)
    return [bytes([way, number]) + rng.bytes(40) for number in range(count) for _ in range(3)]


# ------------------------------------------------------------------------------------------ signatures


SIGNER = Signer(Kind.HMAC, "trainer", Secret(bytes(range(32))))
TRUST = signed.trust_in(SIGNER)
PLACE, RUN = "a/0000000007/intent", "ab" * 16
GOOD = [Notary(signer=SIGNER).bytes_of(example, RUN, PLACE) for example in test_records.EXAMPLES]
TRUST_BODY = {
    "format": "deltarefit/1",
    "keys": [
        {"id": "a", "kind": "ed25519", "public": "5a" * 32, "roles": ["trainer"], "producers": [0], "tensors": [0, 9]},
        {"id": "b", "kind": "hmac-sha256", "secret_file": "key", "first_attempt": 2, "revoked": True},
    ],
}


class OneObject:
    """All of a store that a reader of one record needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._data if length is None else self._data[start : start + length]


def signature(data: bytes) -> None:
    """A damaged signed record is refused, whoever reads it; one that is read is the one that was signed."""
    feed = Feed(data)
    number = feed.below(len(GOOD))
    bad = feed.damaged(GOOD[number]) if feed.below(3) else feed.rest()
    kind, store = type(test_records.EXAMPLES[number]), OneObject(bad)
    allowed(lambda: Notary().read(store, kind, PLACE, RUN))  # type: ignore[arg-type]
    try:
        Notary(trust=TRUST).read(store, kind, PLACE, RUN, CATALOG)  # type: ignore[arg-type]
    except RefitError:
        return
    assert bad == GOOD[number] or kind in UNSIGNED, "a record was read that nobody signed"


def trust(data: bytes) -> None:
    """Any text in the place of a trust file."""
    feed = Feed(data)
    text = json.dumps(feed.edited(TRUST_BODY)) if feed.below(2) else feed.rest().decode("utf-8", "replace")
    allowed(lambda: parse_trust(text, lambda name: Secret(bytes(32)), "fuzzed"))


def signature_seeds() -> list[bytes]:
    rng = np.random.default_rng(10)
    return [bytes([number, 1]) + rng.bytes(20) for number in range(len(GOOD))] + [
        bytes([number, 0]) + data for number, data in enumerate(GOOD)
    ]


# ------------------------------------------------------------------------------------------ payloads


def _payloads() -> list[tuple[bytes, PayloadRef]]:
    made = [
        test_codec.build(*test_codec.changes(seed, kind), cut=300)
        for seed, kind in enumerate(("few", "some", "nudge", "all"))
    ]
    old, new = test_codec.changes(10, "some")
    return [*made, pieces.build(pieces.encoded(old, new, pieces.PIECES))]


PAYLOADS = _payloads()
ARRAYS = [np.zeros(entry.numel + 128, f"u{entry.width}") for entry in CATALOG.tensors]
"""Live bits of each tensor between two guard zones."""


def payload(data: bytes) -> None:
    """Bytes in the place of a payload whose length and hash are right."""
    feed = Feed(data)
    good, ref = PAYLOADS[feed.below(len(PAYLOADS))]
    bad = feed.rest() if feed.below(2) else feed.damaged(good)
    check_payload(bad, test_codec_damage.named(bad, ref))


def streams(data: bytes) -> None:
    """What a hostile publisher could write: whole frames of the sizes that the reference tells, any bytes in them."""
    feed = Feed(data)
    parts = test_codec_damage.take_apart(*PAYLOADS[feed.below(len(PAYLOADS))])
    rows = parts.rows
    for _ in range(feed.below(4)):
        row = rows[feed.below(len(rows))]
        row[feed.below(codec.COLUMNS)] = feed.integer() % 2**64
    parts.rows = rows
    for _ in range(feed.below(4)):
        name = sorted(parts.streams)[feed.below(len(parts.streams))]
        if name != codec.TABLE:
            parts.streams[name] = feed.damaged(parts.streams[name])
    parts.streams = {name: stream for name, stream in parts.streams.items() if stream}
    changed = sum(row[3] for row in rows) % 2**64
    first, last = sorted((rows[0][0], rows[-1][0]))
    check_payload(*parts.build(changed=changed, first=first, last=last))


def reference(data: bytes) -> None:
    """A payload under the reference of another, or an edited one."""
    feed = Feed(data)
    good, ref = PAYLOADS[feed.below(len(PAYLOADS))]
    body = json.loads(ref.to_bytes().split(b"\n")[0])
    for field in ("sha256", "size"):
        body.pop(field)
    edited = feed.edited(body) | {"sha256": ref.sha256, "size": ref.size}
    try:
        other = PayloadRef.from_bytes(sealed(json.dumps(edited, sort_keys=True, separators=(",", ":")).encode()))
    except FormatError:
        return
    check_payload(good, other)


def check_payload(data: bytes, ref: PayloadRef) -> None:
    if sum(ref.streams.values()) > MOST_STREAM_BYTES:
        return
    try:
        deltas = open_payload(data, ref, CATALOG)
    except IntegrityError:
        return
    assert sum(delta.count for delta in deltas) == ref.changed
    for delta in deltas:
        carry_out(delta)


def carry_out(delta: Delta) -> None:
    """Sums, preview and apply stay between the guards, and keep to the delta's own range."""
    guarded = ARRAYS[delta.tensor]
    guarded[:] = 0x5A
    live = guarded[64:-64]
    made: Any = delta.record
    pre, post, values = _kernel.preview(made, delta.slices, live, 7, delta.low)
    assert _kernel.sums(made, delta.slices, live, 7, delta.low) == pre
    _kernel.apply(made, delta.slices, live, delta.low)
    assert _kernel.sums(made, delta.slices, live, 7, delta.low) == post
    assert len(values) == delta.count
    for untouched in (guarded[:64], guarded[-64:], live[: delta.low], live[delta.high :]):
        assert (untouched == 0x5A).all()


def payload_seeds() -> list[bytes]:
    raw = [bytes([number, 1]) + data for number, (data, _) in enumerate(PAYLOADS)]
    rng = np.random.default_rng(5)
    return raw + [bytes([number]) + rng.bytes(30) for number in range(len(PAYLOADS)) for _ in range(4)]


# ------------------------------------------------------------------------------------------ safetensors


HEADER = safetensors_layout.default_header(CATALOG)
HEADER_BODY = json.loads(HEADER[8:])
NAMES = (
    "model.safetensors",
    "a-1.safetensors",
    "../b.safetensors",
    "config.json",
    "x.py",
    safetensors_layout.INDEX_FILE,
)


def header(data: bytes) -> None:
    """The start of a weight file, with a right or any length: what is read describes every byte once."""
    feed = Feed(data)
    way = feed.below(3)
    if way == 2:
        text = json.dumps(feed.edited(HEADER_BODY), separators=(",", ":"), ensure_ascii=False).encode(
            "utf-8", "replace"
        )
    else:
        text = feed.rest()
    start = text if way == 0 else len(text).to_bytes(8, "little") + text
    try:
        header_bytes(start, "fuzzed")
        layout = parse_header(start, "fuzzed")
    except FormatError:
        return
    end = len(start)
    for tensor in sorted(layout.tensors, key=lambda tensor: (tensor.offset, tensor.entry.nbytes)):
        assert tensor.offset == end
        end += tensor.entry.nbytes
    assert end == layout.size


def layout(data: bytes) -> None:
    """Side files of an anchor, an index, names of files in a directory."""
    feed = Feed(data)
    files = {
        NAMES[feed.below(len(NAMES))] + ".header" * feed.below(2): feed.take(feed.below(200))
        for _ in range(feed.below(3))
    }
    if feed.below(2):
        files["model.safetensors.header"] = HEADER
    index = {"weight_map": {entry.name: "model.safetensors" for entry in CATALOG.tensors}}
    text = json.dumps(feed.edited(index)).encode() if feed.below(2) else feed.rest()
    if feed.below(2):
        files[safetensors_layout.INDEX_FILE] = text
    for work in (
        lambda: split_files(CATALOG, files),
        lambda: index_map(text),
        lambda: choose_weight_files(list(files), text),
        lambda: choose_weight_files(list(files), None),
        lambda: DirectoryLayout.from_bytes(text),
    ):
        allowed(work)


def allowed(work: Callable[[], object]) -> None:
    """Errors of this package, and none other."""
    with contextlib.suppress(RefitError):
        work()


def header_seeds() -> list[bytes]:
    rng = np.random.default_rng(6)
    return [b"\0" + HEADER, b"\1" + HEADER[8:], *(b"\2" + rng.bytes(30) for _ in range(20))]


def layout_seeds() -> list[bytes]:
    rng = np.random.default_rng(7)
    return [rng.bytes(60) for _ in range(30)]


# ------------------------------------------------------------------------------------------ agents


REPLIES: list[Any] = [
    {"ok": None},
    {"ok": {"3": "0" * 32}},
    {"ok": {"3": ["0" * 32, "1" * 32]}},
    {"ok": {"plan": {"a": 1}, "identity": "x"}},
    {"ok": "0" * 32},
    agent_wire.error_message(IntegrityError("bad", expected=1, found=2)),
]
REF = PAYLOADS[0][1]


def frame(data: bytes) -> None:
    """What comes in on an agent's socket: a message, the end, ``FormatError``, or an error of the socket."""
    here, there = socket.socketpair()
    with here, there:
        there.settimeout(1.0)
        there.send(data[:60_000])
        there.shutdown(socket.SHUT_WR)
        try:
            while (message := agent_wire.receive(here, 1.0)) is not None:
                assert isinstance(message, dict)
        except (FormatError, OSError):
            pass


CALLS: list[Callable[[AgentClient], object]] = [
    lambda client: client.hello(),
    lambda client: client.attach("ab" * 16, CATALOG),
    lambda client: client.header(),
    lambda client: client.stage(REF, Path("payload")),
    lambda client: client.live(REF),
    lambda client: client.digest(),
    lambda client: client.proof(),
    lambda client: client.staged(REF),
]


class Client(AgentClient):
    """The other end of a connection that is there already."""

    def __init__(self, connection: socket.socket) -> None:
        self._given = connection
        super().__init__("fuzzed")

    def _connected(self, deadline_s: float) -> socket.socket:
        return self._given


def reply(data: bytes) -> None:
    """Whatever an agent answers, a follower gets a value or an error of this package."""
    feed = Feed(data)
    call = CALLS[feed.below(len(CALLS))]
    if feed.below(2):
        answer = json.dumps(feed.edited(REPLIES[feed.below(len(REPLIES))])).encode()
    else:
        answer = feed.rest()[:60_000]
    here, there = socket.socketpair()
    with here, there:
        there.send(struct.pack("<I", len(answer)) + answer)
        there.shutdown(socket.SHUT_WR)
        client = Client(here)
        allowed(lambda: call(client))


def frame_seeds() -> list[bytes]:
    texts = [json.dumps(message).encode() for message in [*REPLIES, {"op": "hello"}]]
    return [struct.pack("<I", len(text)) + text for text in texts]


def reply_seeds() -> list[bytes]:
    rng = np.random.default_rng(8)
    return [bytes([call, 1, number]) + rng.bytes(20) for call in range(len(CALLS)) for number in range(len(REPLIES))]


# ------------------------------------------------------------------------------------------ composition


def compose(data: bytes) -> None:
    """Two changes of one tensor as one: the same as one after the other, and as the slow oracle says."""
    feed = Feed(data)
    width = 1 << feed.below(4)
    most = (1 << 8 * width) - 1
    base = [feed.integer() & most for _ in range(ELEMENTS)]
    slow = [_changes(feed, most) for _ in range(2)]
    first, second = (test_composition.fast(change, width) for change in slow)
    live = np.array(base, f"<u{width}")
    found = composition.compose(first, second, live)
    assert test_composition.plain(found) == test_composition.slow_compose(slow[0], slow[1], base, 8 * width)
    once, each = live.copy(), live.copy()
    found.apply(once)
    first.apply(each)
    second.apply(each)
    assert once.tobytes() == each.tobytes()


def _changes(feed: Feed, most: int) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for _ in range(feed.below(ELEMENTS)):
        position, operation, value = feed.below(ELEMENTS), feed.below(3), feed.integer() & most
        if value or operation == codec.SET:
            found[position] = (operation, value)
    return found


def deltas_composed(data: bytes) -> None:
    """Whatever a payload may hold, its deltas of one tensor are one change."""
    feed = Feed(data)
    good, ref = PAYLOADS[feed.below(len(PAYLOADS))]
    bad = feed.damaged(good)
    try:
        deltas = open_payload(bad, test_codec_damage.named(bad, ref), CATALOG)
    except IntegrityError:
        return
    for tensor in {delta.tensor for delta in deltas}:
        mine = [delta for delta in deltas if delta.tensor == tensor]
        change = composition.Change.of(mine)
        once = np.full(CATALOG.tensors[tensor].numel, 0x5A, f"<u{CATALOG.tensors[tensor].width}")
        each = once.copy()
        change.apply(once)
        for delta in mine:
            made: Any = delta.record
            _kernel.apply(made, delta.slices, each, delta.low)
        assert once.tobytes() == each.tobytes()


ELEMENTS = 8


def compose_seeds() -> list[bytes]:
    rng = np.random.default_rng(9)
    return [rng.bytes(250) for _ in range(30)]


def one_of(*parts: tuple[Target, Callable[[], list[bytes]]]) -> tuple[Target, Callable[[], list[bytes]]]:
    """One target of several, which the first byte chooses."""

    def run(data: bytes) -> None:
        parts[data[0] % len(parts) if data else 0][0](data[1:])

    def seeds() -> list[bytes]:
        return [bytes([number]) + seed for number, (_, made) in enumerate(parts) for seed in made()]

    return run, seeds


TARGETS: dict[str, tuple[Target, Callable[[], list[bytes]]]] = {
    "record": one_of((record, record_seeds), (signature, signature_seeds), (trust, layout_seeds)),
    "payload": one_of((payload, payload_seeds), (reference, payload_seeds)),
    "streams": (streams, payload_seeds),
    "compose": one_of((compose, compose_seeds), (deltas_composed, payload_seeds)),
    "layout": one_of((header, header_seeds), (layout, layout_seeds)),
    "agent": one_of((frame, frame_seeds), (reply, reply_seeds)),
}
