"""Segments of a source as deltas against the baseline, with what the publisher must know of the whole."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from deltarefit import _kernel
from deltarefit.codec import GAPS, EncodedDelta, encode_delta, encode_full, encode_overwrite
from deltarefit.digest import catalog_keys
from deltarefit.elements import Elements
from deltarefit.errors import DigestMismatch
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece
from deltarefit.ports import Baseline, Source
from deltarefit.publishing.touched import Touched
from deltarefit.records import Digest
from deltarefit.weights import Segment

MOST_TOUCHED = 0.5
"""Share of a segment that failed attempts may have written; beyond it the segment is overwritten as a whole."""


def changed_elements(encoded: Sequence[EncodedDelta], old: Elements, new: Elements) -> int:
    """How many elements of a range differ. A delta that lists the whole range, or overwrites, may list what did not
    change, too."""
    listed = sum(one.delta.count for one in encoded)
    exact = listed < new.size and not any(one.overwrites for one in encoded)
    return listed if exact else _kernel.count_changed(old, new)


class SegmentEncoder:
    """Encodes the segments of one producer in one publish; called from several threads.

    ``changed`` counts elements whose bits differ. With ``prove``, the digest of the source's own bits is summed beside
    the encoding, so that ``check`` can tell a delta that was taken against a wrong baseline (F4, F47). What ``touched``
    says that failed attempts may have written is overwritten.
    """

    def __init__(
        self, run: str, catalog: Catalog, source: Source, baseline: Baseline, prove: bool, touched: Touched
    ) -> None:
        self._source, self._baseline, self._prove, self._touched = source, baseline, prove, touched
        self._pieces, self._keys = source.pieces, catalog_keys(run, catalog)
        self._lock = threading.Lock()
        self._digest = Digest()
        self.changed = 0

    def delta(self, segment: Segment) -> Sequence[EncodedDelta]:
        """What changed in a segment since the baseline, and what must be overwritten there; nothing if neither."""
        number, start, stop = segment
        piece = self._pieces[number]
        with self._baseline.read(number, start, stop) as old, self._source.read(number, start, stop) as new:
            encoded = self._encoded(number, start, old, new)
            self._note(changed_elements(encoded, old, new), self._sum(piece, new, start))
            return encoded

    def _encoded(self, number: int, start: int, old: Elements, new: Elements) -> Sequence[EncodedDelta]:
        piece, index = self._pieces[number], self._touched.within(number, start, start + new.size)
        key = self._keys[piece.tensor]
        if not index.size:
            return _some(encode_delta(piece, old, new, start, key))
        if index.size > new.size * MOST_TOUCHED:
            index = np.arange(new.size)
        rest = old.copy()
        rest[index] = new[index]
        overwrite = encode_overwrite(piece, old, new, index, start, key)
        # listed one by one: no element may be in both
        return (overwrite, *_some(encode_delta(piece, rest, new, start, key, kind=GAPS)))

    def whole(self, segment: Segment) -> Sequence[EncodedDelta]:
        """A segment that sets every element, for an anchor; the baseline takes the same bits."""
        number, start, stop = segment
        piece = self._pieces[number]
        with self._source.read(number, start, stop) as new:
            encoded = encode_full(piece, new, start, self._keys[piece.tensor])
            self._baseline.take(number, start, new)
            self._note(new.size, encoded.post)
            return (encoded,)

    def _sum(self, piece: Piece, new: Elements, start: int) -> Digest:
        if not self._prove:
            return Digest()
        origin = piece.origin
        return Digest(*_kernel.digest(new, origin + start, self._keys[piece.tensor], piece.rows))

    def _note(self, changed: int, digest: Digest) -> None:
        with self._lock:
            self.changed += changed
            self._digest += digest

    def check(self, expected: Digest) -> None:
        """``DigestMismatch`` unless base and changes lead to the source's bits; always passes without ``prove``."""
        if self._prove and self._digest != expected:
            raise DigestMismatch(
                "base and changes do not lead to the source's bits: the baseline was damaged, or the source changed",
                expected=self._digest,
                found=expected,
                next_step="Nothing was committed. Publish again: the baseline is proven first, and rebuilt if wrong.",
            )


def _some(encoded: EncodedDelta | None) -> Sequence[EncodedDelta]:
    return () if encoded is None else (encoded,)
