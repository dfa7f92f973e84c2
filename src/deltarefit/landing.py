"""Where a payload lands: one small set of operations for windowed targets and for live ones.

``Windows`` does everything itself, through windows and spool of a ``ports.Target``; ``Live`` hands payloads to a
``ports.LiveTarget``, which does the same where the weights are. What may be done when is the protocol's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol

from deltarefit.codec import Delta, check_object, open_payload
from deltarefit.errors import DigestMismatch, IntegrityError, NotFoundError
from deltarefit.manifest import PayloadRef
from deltarefit.ports import LiveTarget, Target
from deltarefit.protocol.messages import Op, Sums
from deltarefit.records import Digest
from deltarefit.runlog import RunLog
from deltarefit.weights import Weights

KEPT_BYTES = 128 << 20
"""Decoded payloads kept between staging and writing, so that the pause does not pay for decoding them again."""
VALUES = ".5e7"
"""Ending of the spool entry that holds a payload's absolute values (spool names are hex: read it as "set")."""

Again = Callable[[PayloadRef, str], tuple[bytes, list[Delta]]]
"""Fetches a payload of the attempt at hand from the store once more, checked; the text, if any, says why."""


class Landing(Protocol):
    """Payload operations on the weights of one target."""

    def opened(self, ref: PayloadRef, data: bytes) -> list[Delta]:
        """What it wants of a payload's deltas; ``IntegrityError`` if ``data`` is not what ``ref`` names."""

    def stage(self, ref: PayloadRef, data: bytes, deltas: list[Delta]) -> Sums:
        """Keep an opened payload with all that its write needs; sums of the live bits now and as they will be. Weights
        are only read."""

    def live(self, ref: PayloadRef) -> Digest:
        """Sums of the live bits at its positions."""

    def can_set(self, ref: PayloadRef) -> bool:
        """Whether what ``Op.SET`` needs is still kept."""

    def write(self, ref: PayloadRef, op: Op) -> None:
        """Carry it out in place."""

    def fill(self, ref: PayloadRef, data: bytes, deltas: Sequence[Delta]) -> None:
        """Set all elements of an anchor's payload; ``deltas`` are ``data`` opened."""

    def flush(self) -> None:
        """All that was written is as durable as the weights."""

    def digest(self) -> Digest:
        """Digest of all live bits."""

    def forget(self) -> None:
        """Drop what this process keeps of staged payloads; what lives as long as the weights stays."""

    def drop(self) -> None:
        """Drop all that is kept of staged payloads."""


def landing_on(target: Target | LiveTarget, log: RunLog, pool: Executor, again: Again) -> Landing:
    """The one that fits ``target``."""
    if isinstance(target, LiveTarget):
        return Live(target, again)
    return Windows(Weights(target, log.run, log.catalog, pool), again)


class Windows:
    """A windowed target: payloads and absolute values are in its spool, decoded payloads in memory as far as there is
    room."""

    def __init__(self, weights: Weights, again: Again) -> None:
        self.weights = weights
        self._again = again
        self._spool = weights.target.spool
        self._kept: dict[str, list[Delta]] = {}
        self._room = KEPT_BYTES

    def opened(self, ref: PayloadRef, data: bytes) -> list[Delta]:
        return open_payload(data, ref, self.weights.catalog)

    def stage(self, ref: PayloadRef, data: bytes, deltas: list[Delta]) -> Sums:
        pre, post, values = self.weights.preview(deltas)
        self._spool.put(ref.sha256, data)
        self._spool.put(ref.sha256 + VALUES, values)
        size = sum(delta.nbytes for delta in deltas)
        if size <= self._room:
            self._room -= size
            self._kept[ref.sha256] = deltas
        return Sums(pre, post)

    def live(self, ref: PayloadRef) -> Digest:
        return self.weights.sums(self._deltas(ref))

    def can_set(self, ref: PayloadRef) -> bool:
        return self._values(ref) is not None

    def write(self, ref: PayloadRef, op: Op) -> None:
        if op is Op.APPLY:
            self.weights.apply(self._deltas(ref))
        elif op is Op.SET:
            values = self._values(ref) or b""
            self.weights.set(self._deltas(ref), values)

    def fill(self, ref: PayloadRef, data: bytes, deltas: Sequence[Delta]) -> None:
        self.weights.apply(deltas)

    def flush(self) -> None:
        self.weights.target.flush()

    def digest(self) -> Digest:
        return self.weights.digest()

    def forget(self) -> None:
        self._kept.clear()
        self._room = KEPT_BYTES

    def drop(self) -> None:
        self.forget()
        self._spool.clear()

    def _values(self, ref: PayloadRef) -> bytes | None:
        """The absolute values of a staged payload, or None if the spool does not have them whole."""
        values = self._spool.get(ref.sha256 + VALUES)
        if values is None:
            return None
        size = sum(delta.count * delta.width for delta in self._deltas(ref))
        return values if len(values) == size else None

    def _deltas(self, ref: PayloadRef) -> list[Delta]:
        """A staged payload: from memory, else from the spool, else from the store."""
        if (kept := self._kept.get(ref.sha256)) is not None:
            return kept
        damage = ""
        if (data := self._spool.get(ref.sha256)) is not None:
            try:
                return self.opened(ref, data)
            except IntegrityError as error:
                damage = f"damaged in the spool: {error}"
        return self._again(ref, damage)[1]


class Live:
    """A live target, which keeps staged payloads itself.

    Copies that do not agree, and bits that no version can have, are torn: neither what was before a payload nor what is
    after it. A payload that the target does not keep any more is staged anew; its present bits then say nothing about
    what a torn write should have led to, so that it can no longer be set.
    """

    def __init__(self, target: LiveTarget, again: Again) -> None:
        self.target = target
        self._again = again
        self._late: set[str] = set()

    def opened(self, ref: PayloadRef, data: bytes) -> list[Delta]:
        check_object(data, ref.sha256, ref.size, f"payload {ref.sha256[:12]}")  # the target opens it
        return []

    def stage(self, ref: PayloadRef, data: bytes, deltas: list[Delta]) -> Sums:
        try:
            sums = Sums(*self.target.stage(ref, data))
        except DigestMismatch:
            return Sums(torn(ref), torn(ref))
        if sums.pre == ref.pre:  # nothing of it was written: it is as good as staged in time
            self._late.discard(ref.sha256)
        return sums

    def live(self, ref: PayloadRef) -> Digest:
        try:
            return self.target.live(ref)
        except IntegrityError:
            return torn(ref)
        except NotFoundError:
            self._late.add(ref.sha256)
            data, deltas = self._again(ref, "not kept beside the weights any more")
            return self.stage(ref, data, deltas).pre

    def can_set(self, ref: PayloadRef) -> bool:
        return ref.sha256 not in self._late and self.target.staged(ref)

    def write(self, ref: PayloadRef, op: Op) -> None:
        self.target.write(ref, op)

    def fill(self, ref: PayloadRef, data: bytes, deltas: Sequence[Delta]) -> None:
        self.target.fill(ref, data)

    def flush(self) -> None:
        """Memory is as durable as the header that lives in it."""

    def digest(self) -> Digest:
        return self.target.digest()

    def forget(self) -> None:
        """Nothing is kept here. What was staged late stays so until it is dropped: the target keeps it."""

    def drop(self) -> None:
        self._late.clear()
        self.target.drop()


def torn(ref: PayloadRef) -> Digest:
    """Sums that stand for bits which are neither before nor after a payload."""
    return next(sums for k in (1, 2, 3) if (sums := ref.post + Digest(k)) not in (ref.pre, ref.post))
