"""Targets that fuzz payloads: bytes, streams beneath the hash, references, and what composes of their deltas."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tests import test_codec, test_codec_damage, test_composition
from tests import test_codec_pieces as pieces
from tests.test_codec import CATALOG

from deltarefit import _kernel, codec, composition
from deltarefit.codec import Delta, open_payload
from deltarefit.errors import FormatError, IntegrityError
from deltarefit.manifest import PayloadRef
from fuzz.feed import Feed, sealed

MOST_STREAM_BYTES = 1 << 20
"""What a payload may declare here: the memory of a reader is bounded by what is declared."""


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
