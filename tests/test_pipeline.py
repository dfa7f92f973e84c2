"""Segments to payloads to the store: side by side, bounded, in order, and still when something breaks.

Nothing here depends on timing: every wait is for an event that a right pipeline brings about, and ``WAIT_S`` only ends
tests of a wrong one.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from deltarefit import pipeline
from deltarefit.codec import EncodedDelta, PayloadBuilder, encode_full
from deltarefit.pieces import whole
from deltarefit.pipeline import Upload, upload_segments
from deltarefit.weights import Segment

WAIT_S = 10.0
NUMEL = 1000
"""Elements of a segment: as bytes that nothing compresses, so every payload is about as large as its segments."""
SIZE = NUMEL + 200


class Stop(Exception):
    """What goes wrong."""


class Encoder:
    """Encodes segment after segment of one tensor; counts those begun and done. ``before`` runs first in each."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self.before = before
        self.lock = threading.Lock()
        self.begun: list[int] = []
        self.done: list[int] = []

    def __call__(self, segment: Segment) -> Sequence[EncodedDelta]:
        number = segment[1] // NUMEL
        with self.lock:
            self.begun.append(number)
        self.before(number)
        delta = encoded(number)
        with self.lock:
            self.done.append(number)
        return (delta,)


class Shelf:
    """A store that only takes. ``before`` and ``after`` run in each put, with the number of the payload's segment."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self.before = before
        self.lock = threading.Lock()
        self.begun: list[int] = []
        self.there: dict[str, bytes] = {}
        self.numbers = {name_of(number): number for number in range(64)}

    def put(self, key: str, data: bytes) -> None:
        number = self.numbers[key.removeprefix("p/")]
        with self.lock:
            self.begun.append(number)
        self.before(number)
        with self.lock:
            self.there[key] = bytes(data)


def encoded(number: int) -> EncodedDelta:
    bits = np.random.default_rng(number).integers(0, 256, NUMEL, dtype=np.uint8)
    return encode_full(whole(0, 64 * NUMEL), bits, number * NUMEL, 7)


@cache
def name_of(number: int) -> str:
    """SHA-256 of the payload that holds just one segment."""
    builder = PayloadBuilder()
    builder.add(encoded(number))
    return builder.build()[1].sha256


def segments(count: int) -> Iterator[Segment]:
    return ((0, number * NUMEL, (number + 1) * NUMEL) for number in range(count))


def upload(
    count: int, encoder: Encoder, shelf: Shelf, threads: int = 1, taken: Callable[[], None] = lambda: None, **more: Any
) -> list[int]:
    """Numbers of the segments by the references that came back; each segment is a payload of its own."""
    where = Upload(shelf, "p/", **{"payload_bytes": 1, **more})  # type: ignore[arg-type]
    refs = upload_segments(segments(count), encoder, where, threads, taken)
    return [shelf.numbers[ref.sha256] for ref in refs]


def await_(event: threading.Event, what: str) -> None:
    assert event.wait(WAIT_S), what


# ------------------------------------------------------------------------------------------ side by side


def test_a_payload_is_stored_while_the_next_is_built() -> None:
    """Segment n + 1 is not encoded before payload n is in the store: only a pipeline gets on."""
    stored = [threading.Event() for _ in range(8)]
    shelf = Shelf()
    encoder = Encoder(lambda n: await_(stored[n - 1], f"payload {n - 1} waits for segment {n}") if n else None)
    upload_stored = iter(stored)
    assert upload(8, encoder, shelf, stored=lambda: next(upload_stored).set()) == list(range(8))


def test_segments_are_encoded_while_payloads_are_stored() -> None:
    """Payload n is not stored before segment n + 8 is encoded: four wait for the store all the time, and five more."""
    begun = [threading.Event() for _ in range(40)]
    encoder = Encoder(lambda n: begun[n].set())
    shelf = Shelf(lambda n: await_(begun[min(n + 8, 39)], f"segment {n + 8} waits for payload {n}"))
    assert upload(40, encoder, shelf, ahead_bytes=4 * SIZE) == list(range(40))


def test_threads_encode_side_by_side() -> None:
    """Each segment waits until three are being encoded."""
    together = threading.Barrier(3)
    assert upload(9, Encoder(lambda _: together.wait(WAIT_S) and None), Shelf(), threads=3) == list(range(9))


def test_payloads_are_stored_side_by_side_and_listed_in_order() -> None:
    """Each of four puts waits for the one of the next payload: they end in reverse."""
    stored = [threading.Event() for _ in range(5)]
    stored[4].set()

    def put(number: int) -> None:
        await_(stored[number + 1], f"payload {number} keeps the next one waiting")
        stored[number].set()

    shelf = Shelf(put)
    assert upload(4, Encoder(), shelf) == [0, 1, 2, 3]
    assert list(shelf.there) == [f"p/{name_of(number)}" for number in (3, 2, 1, 0)]


def test_segments_are_listed_in_order_whatever_ends_first() -> None:
    """Segment n is done only after n + 1, on two threads in pairs."""
    done = [threading.Event() for _ in range(8)]

    def encode(number: int) -> None:
        if number % 2 == 0:
            await_(done[number + 1], f"segment {number} keeps the next one waiting")
        done[number].set()

    assert upload(8, Encoder(encode), Shelf(), threads=2) == list(range(8))


def test_stored_is_told_when_it_is_so() -> None:
    seen: list[int] = []
    shelf = Shelf()
    upload(1, Encoder(), shelf, stored=lambda: seen.append(len(shelf.there)))
    assert seen == [1]


# ------------------------------------------------------------------------------------------ bounds


@pytest.mark.parametrize(("threads", "ahead"), [(1, 0), (1, 3), (2, 1)])
def test_what_is_in_flight_is_bounded(threads: int, ahead: int) -> None:
    """The store takes nothing until encoding has come to rest. Between the two there may be ``ahead_bytes``, one more
    payload, and the segments ahead."""
    encoder, most = Encoder(), 0

    def put(_: int) -> None:
        nonlocal most
        at_rest(encoder)
        with encoder.lock:
            most = max(most, len(encoder.begun) - len(shelf.there))

    shelf = Shelf(put)
    assert upload(40, encoder, shelf, threads, ahead_bytes=ahead * SIZE) == list(range(40))
    bound = max(ahead, 1) + 1 + threads + pipeline.ENCODE_AHEAD
    assert ahead < most <= bound


def test_more_ahead_lets_more_wait() -> None:
    """The bound is in bytes: with room for all, everything is encoded before the store takes anything."""
    encoder = Encoder()
    everything = threading.Event()
    encoder.before = lambda n: everything.set() if n == 39 else None
    shelf = Shelf(lambda _: await_(everything, "encoding waits for the store"))
    assert upload(40, encoder, shelf, ahead_bytes=40 * SIZE) == list(range(40))


def at_rest(encoder: Encoder) -> None:
    """Return once no segment has begun for a while. A right pipeline passes whatever this sees."""
    before = -1
    while before != len(encoder.begun):
        before = len(encoder.begun)
        time.sleep(0.05)


def test_payloads_are_cut_when_they_are_full() -> None:
    shelf = Shelf()
    where = Upload(shelf, "p/", payload_bytes=3 * SIZE)  # type: ignore[arg-type]
    shelf.put = lambda key, data: shelf.there.__setitem__(key, bytes(data))  # type: ignore[method-assign]
    refs = upload_segments(segments(10), Encoder(), where, 1)
    assert [ref.deltas for ref in refs] == [4, 4, 2]  # a segment is a little smaller than SIZE
    assert {f"p/{ref.sha256}": ref.size for ref in refs} == {key: len(data) for key, data in shelf.there.items()}
    assert all(hashlib.sha256(data).hexdigest() == key[2:] for key, data in shelf.there.items())


# ------------------------------------------------------------------------------------------ taken


def test_taken_is_called_once_when_all_is_encoded_and_not_when_all_is_stored() -> None:
    encoder, seen, taken = Encoder(), [], threading.Event()

    def take() -> None:
        seen.append(sorted(encoder.done))
        taken.set()

    shelf = Shelf(lambda _: await_(taken, "the trainer waits for the store"))
    assert upload(12, encoder, shelf, 2, take, ahead_bytes=12 * SIZE) == list(range(12))
    assert seen == [list(range(12))]


def test_taken_is_called_for_nothing_at_all() -> None:
    seen: list[int] = []
    assert upload(0, Encoder(), Shelf(), taken=lambda: seen.append(1)) == []
    assert seen == [1]


def test_unchanged_segments_make_no_payload() -> None:
    seen: list[int] = []
    where = Upload(Shelf(), "p/")  # type: ignore[arg-type]
    assert upload_segments(segments(5), lambda _: (), where, 2, lambda: seen.append(1)) == ()
    assert seen == [1]


# ------------------------------------------------------------------------------------------ errors


def test_an_error_while_encoding_ends_it_all() -> None:
    """No later segment begins, and the trainer does not hear that its bits were read."""
    seen: list[int] = []
    encoder = Encoder(lambda n: raise_(Stop("encode")) if n == 3 else None)
    with pytest.raises(Stop, match="encode"):
        upload(40, encoder, Shelf(), taken=lambda: seen.append(1))
    assert encoder.begun == [0, 1, 2, 3]
    assert seen == []


def test_an_error_of_the_store_ends_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "UPLOADS", 1)
    shelf = Shelf(lambda n: raise_(Stop("store")) if n == 2 else None)
    with pytest.raises(Stop, match="store"):
        upload(40, Encoder(), shelf, ahead_bytes=40 * SIZE)
    assert shelf.begun == [0, 1, 2]


def test_encoding_stops_for_an_error_of_the_store(blown: threading.Event) -> None:
    """Payload 0 fails while segment 1 is being encoded: no other one begins, though five are waiting."""
    begun = threading.Event()

    def encode(number: int) -> None:
        if number:
            begun.set()
            await_(blown, "nothing failed")

    def put(number: int) -> None:
        await_(begun, "segment 1 was not encoded")
        raise Stop("store")

    encoder = Encoder(encode)
    with pytest.raises(Stop, match="store"):
        upload(40, encoder, Shelf(put))
    assert encoder.begun == [0, 1]


def test_the_first_error_is_raised(blown: threading.Event) -> None:
    """Payload 1 fails first, then segment 4, then payload 0, which every other order would look at before."""
    begun, over = threading.Event(), threading.Event()

    def put(number: int) -> None:
        await_(begun if number else over, "segment 4 was not encoded")
        if number < 2:
            raise Stop(f"payload {number}")

    def encode(number: int) -> None:
        if number == 4:
            begun.set()
            await_(blown, "payload 1 did not fail")
            over.set()
            raise Stop("segment 4")

    with pytest.raises(Stop, match="payload 1"):
        upload(40, Encoder(encode), Shelf(put), ahead_bytes=40 * SIZE)


def test_what_was_in_flight_has_ended_when_the_error_is_raised(blown: threading.Event) -> None:
    """Segment 0 is still being stored, and ends, when encoding has failed."""
    shelf = Shelf(lambda _: await_(blown, "nothing failed"))
    stored = threading.Event()

    def encode(number: int) -> None:
        if number == 1:
            while not shelf.begun:
                time.sleep(0.001)
            raise Stop("encode")

    with pytest.raises(Stop, match="encode"):
        upload(40, Encoder(encode), shelf, stored=stored.set)
    assert stored.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("encode", "upload"))]


@pytest.mark.parametrize("what", ["segments", "taken", "stored"])
def test_errors_of_callers_come_through(what: str) -> None:
    def bad_segments() -> Iterator[Segment]:
        yield from segments(3)
        raise Stop(what)

    calls = {"stored": (lambda: raise_(Stop(what))) if what == "stored" else lambda: None}
    where = Upload(Shelf(), "p/", payload_bytes=1, **calls)  # type: ignore[arg-type]
    given = bad_segments() if what == "segments" else segments(3)
    with pytest.raises(Stop, match=what):
        upload_segments(given, Encoder(), where, 1, (lambda: raise_(Stop(what))) if what == "taken" else lambda: None)


@pytest.fixture
def blown(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the pipeline has taken note of a first error."""
    event, blow = threading.Event(), pipeline._Fuse.blow

    def noted(self: Any, error: BaseException) -> BaseException:
        first = blow(self, error)
        event.set()
        return first

    monkeypatch.setattr(pipeline._Fuse, "blow", noted)
    return event


def raise_(error: Exception) -> None:
    raise error
