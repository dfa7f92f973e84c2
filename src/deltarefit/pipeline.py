"""From segments to payloads in the store: read, encode, pack, compress, upload, side by side.

Segments are read and encoded on one pool in order; as soon as a payload is full it is compressed, hashed and uploaded
on another while the next is being encoded. What is in flight is bounded in bytes. After the first error nothing begins.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from deltarefit import runtime
from deltarefit.codec import EncodedDelta, PayloadBuilder
from deltarefit.events import Emit, Event
from deltarefit.manifest import Catalog, PayloadRef
from deltarefit.ports import Store
from deltarefit.weights import Segment, cut

T = TypeVar("T")
U = TypeVar("U")

PAYLOAD_BYTES = 16 << 20
"""Payloads are cut when their streams reach this many bytes; compressed they are at most about that large."""
MOST_PAYLOAD_BYTES = 192 << 20
"""More could exceed the format's limit, with the last segment on top."""
AHEAD_BYTES = 64 << 20
"""Bytes of finished payloads that may wait for the store before encoding stops and waits, too."""
ENCODE_AHEAD = 4
"""Segments that may wait, encoded or not, beside one for each thread: room for threads that are quicker than others."""
UPLOADS = 4
"""Payloads being compressed or uploaded at a time."""

EncodeSegment = Callable[[Segment], Sequence[EncodedDelta]]
Extents = Sequence[tuple[int, int]]
"""(elements, element width in bytes) of the arrays that segments are cut from."""


@dataclass(frozen=True)
class Upload:
    """Where payloads go: ``prefix`` + hash."""

    store: Store
    prefix: str
    payload_bytes: int = PAYLOAD_BYTES
    ahead_bytes: int = AHEAD_BYTES
    stored: Callable[[], None] = lambda: None
    """Called whenever the store has taken a payload; what it raises ends the upload."""
    announce: Callable[[PayloadRef], None] = lambda ref: None
    """Called with each payload in order, once the store has it and all before it; what it raises ends the upload."""


def extents_of(catalog: Catalog) -> Extents:
    """Of whole tensors."""
    return [(entry.numel, entry.width) for entry in catalog.tensors]


def counted(extents: Extents, phase: str, version: int, emit: Emit) -> Iterator[Segment]:
    """All segments of some arrays, told as progress of ``phase`` in canonical bytes as they are taken."""
    done, total = 0, sum(numel * width for numel, width in extents)
    for index, start, stop in cut(extents):
        yield index, start, stop
        done += (stop - start) * extents[index][1]
        emit(Event("progress", phase, version, done=done, total=total))


def upload_segments(
    segments: Iterable[Segment],
    encode: EncodeSegment,
    upload: Upload,
    threads: int,
    taken: Callable[[], None] = lambda: None,
) -> tuple[PayloadRef, ...]:
    """Encode all segments and upload them as payloads; their references in order. The first error of any thread is
    raised, after what was in flight has ended. ``taken`` is called once every segment is encoded: nothing is read any
    more."""
    fuse = _Fuse()
    with (
        runtime.executor(threads, "encode") as encoders,
        runtime.executor(UPLOADS, "upload") as uploaders,
    ):
        encoded = _ahead(encoders, fuse.guard(encode), segments, threads + ENCODE_AHEAD)
        seal = fuse.guard(partial(_seal, upload=upload))
        try:
            refs = _uploaded(uploaders, seal, _fill(encoded, upload.payload_bytes), upload.ahead_bytes, taken)
            return tuple(_announced(refs, upload))
        except BaseException as error:
            if (first := fuse.blow(error)) is error:
                raise
            raise first from None


class _Fuse:
    """Blown by the first error of any thread: guarded work that has not begun then is skipped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def blow(self, error: BaseException) -> BaseException:
        """The first error, which may be an earlier one."""
        with self._lock:
            if self._error is None:
                self._error = error
            return self._error

    def guard(self, work: Callable[[T], U]) -> Callable[[T], U]:
        def guarded(item: T) -> U:
            if self._error is not None:
                raise CancelledError
            try:
                return work(item)
            except BaseException as error:
                self.blow(error)
                raise

        return guarded


def _ahead(pool: Executor, work: Callable[[T], U], items: Iterable[T], ahead: int) -> Iterator[U]:
    """``map`` in order with at most ``ahead`` items begun and not yet taken."""
    waiting: deque[Future[U]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _fill(encoded: Iterable[Sequence[EncodedDelta]], payload_bytes: int) -> Iterator[PayloadBuilder]:
    """Payloads of deltas that overwrite, and payloads of the others."""
    builders: dict[bool, PayloadBuilder] = {}
    for deltas in encoded:
        for delta in deltas:
            kind = delta.overwrites
            builder = builders.setdefault(kind, PayloadBuilder(overwrites=kind))
            builder.add(delta)
            if builder.nbytes >= payload_bytes:
                yield builders.pop(kind)
    yield from builders.values()


def _announced(refs: Iterable[PayloadRef], upload: Upload) -> Iterator[PayloadRef]:
    for ref in refs:
        upload.announce(ref)
        yield ref


def _uploaded(
    pool: Executor,
    seal: Callable[[PayloadBuilder], PayloadRef],
    builders: Iterable[PayloadBuilder],
    ahead_bytes: int,
    taken: Callable[[], None],
) -> Iterator[PayloadRef]:
    """References in order. At most ``ahead_bytes`` wait beside the payload that is being filled."""
    waiting: deque[tuple[Future[PayloadRef], int]] = deque()
    flying = 0
    for builder in builders:
        nbytes = builder.nbytes
        while waiting and (flying + nbytes > ahead_bytes or waiting[0][0].done()):
            future, size = waiting.popleft()
            yield future.result()
            flying -= size
        waiting.append((pool.submit(seal, builder), nbytes))
        flying += nbytes
    taken()
    while waiting:
        yield waiting.popleft()[0].result()


def _seal(builder: PayloadBuilder, upload: Upload) -> PayloadRef:
    data, ref = builder.build()
    runtime.point("payload put")
    upload.store.put(upload.prefix + ref.sha256, data)
    upload.stored()
    return ref
