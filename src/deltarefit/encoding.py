"""Segments of a source as deltas against the baseline, with what the publisher must know of the whole."""

from __future__ import annotations

import threading

from deltarefit import _kernel
from deltarefit.codec import EncodedDelta, encode_delta, encode_full
from deltarefit.digest import array_digest
from deltarefit.elements import Elements
from deltarefit.errors import DigestMismatch
from deltarefit.ports import Source, Target
from deltarefit.records import Digest
from deltarefit.weights import Segment, flat


def changed_elements(encoded: EncodedDelta | None, old: Elements, new: Elements) -> int:
    """How many elements of a range differ. A delta that lists the whole range may list what did not change, too."""
    listed = encoded.delta.count if encoded else 0
    return listed if listed < new.size else _kernel.count_changed(old, new)


class SegmentEncoder:
    """Encodes the segments of one publish; called from several threads.

    ``changed`` counts elements whose bits differ. With ``prove``, the digest of the source's own bits is summed beside
    the encoding, so that ``check`` can tell a delta that was taken against a wrong baseline (F4, F47), or from a source
    that changed while it was read.
    """

    def __init__(self, source: Source, baseline: Target, keys: tuple[int, ...], prove: bool) -> None:
        self._source, self._baseline, self._keys, self._prove = source, baseline, keys, prove
        self._lock = threading.Lock()
        self._digest = Digest()
        self.changed = 0

    def delta(self, segment: Segment) -> EncodedDelta | None:
        """What changed in a segment since the baseline; None if nothing did."""
        tensor, start, stop = segment
        key = self._keys[tensor]
        with (
            self._baseline.window(tensor, start, stop) as (array, first),
            self._source.read(tensor, start, stop) as new,
        ):
            old = flat(array, first, stop - start)
            encoded = encode_delta(tensor, old, new, start, key)
            self._note(changed_elements(encoded, old, new), array_digest(new, start, key) if self._prove else Digest())
            return encoded

    def whole(self, segment: Segment) -> EncodedDelta:
        """A segment that sets every element, for an anchor."""
        tensor, start, stop = segment
        with self._source.read(tensor, start, stop) as new:
            return encode_full(tensor, new, start, self._keys[tensor])

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
