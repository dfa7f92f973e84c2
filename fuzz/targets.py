"""What is fuzzed in Python: each parser of bytes that come from elsewhere.

A target takes bytes and raises nothing; what it is fed with is partly the bytes themselves and partly edits of valid
examples behind hashes that are right, so that a fuzzer gets past them. ``seeds`` are inputs to begin with.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests import signed, test_records
from tests.test_codec import CATALOG

from deltarefit import manifest, retention, safetensors_layout
from deltarefit.errors import FormatError, IntegrityError, RefitError
from deltarefit.notary import UNSIGNED, Notary
from deltarefit.publishing import trainers
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
from fuzz.feed import Feed, sealed
from fuzz.payloads import (
    PAYLOADS,
    compose,
    compose_seeds,
    deltas_composed,
    payload,
    payload_seeds,
    reference,
    streams,
)

Target = Callable[[bytes], None]


# ------------------------------------------------------------------------------------------ records


def _kinds() -> list[type[Record]]:
    found = {
        value
        for room in (manifest, safetensors_layout, retention, trainers)
        for value in vars(room).values()
        if isinstance(value, type)
    }
    return sorted((kind for kind in found if issubclass(kind, Record) and kind is not Record), key=lambda k: k.__name__)


KINDS = _kinds()
EXAMPLES: list[Record] = [
    *test_records.EXAMPLES,
    manifest.Batch("ab" * 16, 3, 0, 1, (PAYLOADS[0][1],), False, "cd" * 16),
    manifest.Vote("ab" * 16, 3, "one", "ef" * 8, manifest.Held.STAGED, ("5a" * 32,)),
    manifest.Member("ab" * 16, "one", "ef" * 8, 7, 2),
    safetensors_layout.directory_layout(
        CATALOG, {"m.safetensors": parse_header(safetensors_layout.default_header(CATALOG), "m")}, ["config.json"]
    ),
]
BODIES = [json.loads(example.to_bytes().split(b"\n")[0]) for example in EXAMPLES]


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


# ------------------------------------------------------------------------------------------ the table


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
