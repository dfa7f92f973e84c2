"""Two checkpoints, bit by bit: which tensors differ, by how much, and what publishing the second would send.

Bits are compared as unsigned integers. The estimate is no model: deltas are really encoded and packed, then
dropped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltarefit.codec import EncodedDelta, encode_delta
from deltarefit.errors import UsageError
from deltarefit.events import Emit, ignore
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import whole
from deltarefit.pipeline import PAYLOAD_BYTES, Upload, counted, extents_of, upload_segments
from deltarefit.ports import Source
from deltarefit.publishing.encoding import changed_elements
from deltarefit.weights import Segment


@dataclass(frozen=True)
class TensorChange:
    """A tensor and how many of its elements changed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    changed: int

    @classmethod
    def of(cls, entry: TensorEntry, changed: int) -> TensorChange:
        return cls(entry.name, entry.dtype, entry.shape, entry.numel, changed)

    @property
    def density(self) -> float:
        return self.changed / self.numel if self.numel else 0.0


@dataclass(frozen=True)
class Misfit:
    """A name that stands for tensors of another dtype or shape on the two sides."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class Comparison:
    """``tensors`` are those that both sides have alike, in catalog order, changed or not; bytes and elements
    count only them. ``wire_bytes`` is the size of the payloads that would carry ``first`` to ``second``."""

    tensors: tuple[TensorChange, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    misfits: tuple[Misfit, ...]
    dense_bytes: int
    wire_bytes: int
    payloads: int

    @property
    def same_model(self) -> bool:
        """One run can hold both: the same tensors, dtypes and shapes."""
        return not (self.only_first or self.only_second or self.misfits)

    @property
    def equal(self) -> bool:
        return self.same_model and self.changed == 0

    @property
    def numel(self) -> int:
        return sum(change.numel for change in self.tensors)

    @property
    def changed(self) -> int:
        return sum(change.changed for change in self.tensors)

    @property
    def density(self) -> float:
        return self.changed / self.numel if self.numel else 0.0


def compare(
    first: Source,
    second: Source,
    *,
    threads: int | None = None,
    payload_bytes: int = PAYLOAD_BYTES,
    emit: Emit = ignore,
) -> Comparison:
    """Compare all tensors of two sources in bounded memory."""
    ours, theirs = first.catalog, second.catalog
    a, b = ({entry.name: entry for entry in catalog.tensors} for catalog in (ours, theirs))
    shared = sorted(a.keys() & b.keys())
    alike = Catalog(tuple(TensorEntry(n, a[n].dtype, a[n].shape) for n in shared if _kind(a[n]) == _kind(b[n])))
    encoder = _Encoder(alike, first, second)
    refs = upload_segments(
        counted(extents_of(alike), "compare", 0, emit),
        encoder,
        Upload(_Nowhere(), "", payload_bytes),
        threads or os.cpu_count() or 1,
    )
    return Comparison(
        tensors=tuple(TensorChange.of(e, n) for e, n in zip(alike.tensors, encoder.changed, strict=True)),
        only_first=tuple(sorted(a.keys() - b.keys())),
        only_second=tuple(sorted(b.keys() - a.keys())),
        misfits=tuple(Misfit(n, _kind(a[n]), _kind(b[n])) for n in shared if _kind(a[n]) != _kind(b[n])),
        dense_bytes=alike.dense_bytes,
        wire_bytes=sum(ref.size for ref in refs),
        payloads=len(refs),
    )


def _kind(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


class _Encoder:
    """Encodes segments of the tensors in ``alike``, by their index there, and counts changes per tensor."""

    def __init__(self, alike: Catalog, first: Source, second: Source) -> None:
        self.changed = [0] * len(alike.tensors)
        self._ids = [(first.catalog.index[e.name], second.catalog.index[e.name]) for e in alike.tensors]
        self._pieces = [whole(number, entry.numel) for number, entry in enumerate(alike.tensors)]
        self._first, self._second = first, second
        self._lock = threading.Lock()

    def __call__(self, segment: Segment) -> Sequence[EncodedDelta]:
        tensor, start, stop = segment
        old_id, new_id = self._ids[tensor]
        with self._first.read(old_id, start, stop) as old, self._second.read(new_id, start, stop) as new:
            found = encode_delta(self._pieces[tensor], old, new, start, key=0)
            encoded = () if found is None else (found,)
            changed = changed_elements(encoded, old, new)
        with self._lock:
            self.changed[tensor] += changed
        return encoded


class _Nowhere:
    """A store that payloads can be put into and nothing can be got out of."""

    url = "nowhere:"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Drop it."""

    def create(self, key: str, data: bytes) -> None:
        raise _nothing_here(key)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        raise _nothing_here(key)

    def size(self, key: str) -> int:
        raise _nothing_here(key)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        raise _nothing_here(prefix)

    def delete(self, key: str) -> None:
        raise _nothing_here(key)


def _nothing_here(key: str) -> UsageError:
    return UsageError(f"a comparison keeps no objects, {key!r} was asked for")
