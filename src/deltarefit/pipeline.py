"""From canonical segments to payloads in the store: encode, pack, compress, upload, side by side.

Segments are encoded on one pool in catalog order; as soon as a payload is full it is compressed, hashed and uploaded on
another while the next is being encoded. What is in flight is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from deltarefit.codec import EncodedDelta, PayloadBuilder
from deltarefit.events import Emit, Event
from deltarefit.manifest import Catalog, PayloadRef
from deltarefit.ports import Store
from deltarefit.weights import Segment, segments

T = TypeVar("T")
U = TypeVar("U")

PAYLOAD_BYTES = 32 << 20
"""Payloads are cut when their streams reach this many bytes; compressed they are at most about that large."""
MOST_PAYLOAD_BYTES = 192 << 20
"""More could exceed the format's limit, with the last segment on top."""
ENCODE_AHEAD = 4
"""Segments being encoded or waiting, per thread."""
UPLOADS = 2
"""Payloads being compressed or uploaded at a time."""

EncodeSegment = Callable[[Segment], EncodedDelta | None]


@dataclass(frozen=True)
class Upload:
    """Where payloads go: ``prefix`` + hash."""

    store: Store
    prefix: str
    payload_bytes: int = PAYLOAD_BYTES


def counted(catalog: Catalog, phase: str, version: int, emit: Emit) -> Iterator[Segment]:
    """All segments of a catalog, told as progress of ``phase`` in canonical bytes as they are taken."""
    done = 0
    for tensor, start, stop in segments(catalog):
        yield tensor, start, stop
        done += (stop - start) * catalog.tensors[tensor].width
        emit(Event("progress", phase, version, done=done, total=catalog.dense_bytes))


def upload_segments(
    segments: Iterable[Segment], encode: EncodeSegment, upload: Upload, threads: int
) -> tuple[PayloadRef, ...]:
    """Encode all segments and upload them as payloads; their references in order. The first error is raised, after
    what was in flight has ended."""
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="encode") as encoders,
        ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload") as uploaders,
    ):
        encoded = _ahead(encoders, encode, segments, ENCODE_AHEAD * threads)
        builders = _fill(encoded, upload.payload_bytes)
        return tuple(_ahead(uploaders, lambda builder: _seal(builder, upload), builders, UPLOADS))


def _ahead(pool: ThreadPoolExecutor, work: Callable[[T], U], items: Iterable[T], ahead: int) -> Iterator[U]:
    """``map`` in order with at most ``ahead`` items begun and not yet taken."""
    waiting: deque[Future[U]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _fill(encoded: Iterable[EncodedDelta | None], payload_bytes: int) -> Iterator[PayloadBuilder]:
    builder = PayloadBuilder()
    for delta in encoded:
        if delta is None:
            continue
        builder.add(delta)
        if builder.nbytes >= payload_bytes:
            yield builder
            builder = PayloadBuilder()
    if builder.rows:
        yield builder


def _seal(builder: PayloadBuilder, upload: Upload) -> PayloadRef:
    data, ref = builder.build()
    upload.store.put(upload.prefix + ref.sha256, data)
    return ref
