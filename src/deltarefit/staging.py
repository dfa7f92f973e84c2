"""One attempt's payloads on their way into a target: fetch, check, spool, sum, write, sum again.

While generation goes on, ``stage`` puts every payload into the spool together with the absolute values it leads to.
After COMMIT, ``write`` needs nothing but the spool: a payload that a killed agent left torn is set to those values.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltarefit.codec import Delta, open_payload
from deltarefit.errors import IntegrityError, NotFoundError
from deltarefit.events import Emit, Event
from deltarefit.manifest import PayloadRef
from deltarefit.protocol.messages import Attempt, Op, Sums
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, payload_prefix
from deltarefit.weights import Weights

KEPT_BYTES = 128 << 20
"""Decoded payloads kept between staging and writing, so that the pause does not pay for decoding them again."""
VALUES = ".5e7"
"""Ending of the spool entry that holds a payload's absolute values (spool names are hex: read it as "set")."""


class Staging:
    """Payload operations of one receiver. What may be done when is the protocol's business."""

    def __init__(self, log: RunLog, weights: Weights, emit: Emit) -> None:
        self._log, self._weights, self._emit = log, weights, emit
        self._spool = weights.target.spool
        self._kept: dict[str, list[Delta]] = {}
        self._room = KEPT_BYTES

    def stage(self, attempt: Attempt) -> tuple[Sums, ...]:
        """All payloads into the spool; per payload the sums of the live bits now and as they will be."""
        refs = attempt.payloads
        total, sums = sum(ref.size for ref in refs), []
        for number, ref in enumerate(refs, 1):
            sums.append(self._stage_one(attempt.number, ref))
            done = sum(before.size for before in refs[:number])
            self._emit(Event("progress", "stage", attempt.number, done=done, total=total))
        return tuple(sums)

    def _stage_one(self, attempt: int, ref: PayloadRef) -> Sums:
        deltas, data = self._fetch(attempt, ref)
        pre, post, values = self._weights.preview(deltas)
        self._spool.put(ref.sha256, data)
        self._spool.put(ref.sha256 + VALUES, values)
        size = sum(delta.nbytes for delta in deltas)
        if size <= self._room:
            self._room -= size
            self._kept[ref.sha256] = deltas
        return Sums(pre, post)

    def live(self, attempt: Attempt) -> tuple[Digest, ...]:
        """Per payload the sums of the live bits at its positions."""
        return tuple(self._weights.sums(self._deltas(attempt.number, ref)) for ref in attempt.payloads)

    def can_write(self, attempt: Attempt, ops: Sequence[Op]) -> bool:
        """Whether the spool has the absolute values of every payload that must be set."""
        pairs = zip(attempt.payloads, ops, strict=True)
        return all(op is not Op.SET or self._values(attempt.number, ref) is not None for ref, op in pairs)

    def write(self, attempt: Attempt, ops: Sequence[Op]) -> None:
        """Apply, skip or set each payload; all of it is durable on return."""
        for ref, op in zip(attempt.payloads, ops, strict=True):
            if op is Op.APPLY:
                self._weights.apply(self._deltas(attempt.number, ref))
            elif op is Op.SET:
                self._say("torn", attempt.number, f"payload {ref.sha256[:12]} was torn: setting absolute values")
                values = self._values(attempt.number, ref) or b""
                self._weights.set(self._deltas(attempt.number, ref), values)
        self._weights.target.flush()

    def forget(self) -> None:
        """Drop what is kept in memory; the spool stays."""
        self._kept.clear()
        self._room = KEPT_BYTES

    def drop(self) -> None:
        """The attempt is done with: empty the spool, too."""
        self.forget()
        self._spool.clear()

    def _values(self, attempt: int, ref: PayloadRef) -> bytes | None:
        """The absolute values of a staged payload, or None if the spool does not have them whole."""
        values = self._spool.get(ref.sha256 + VALUES)
        size = sum(delta.count * delta.width for delta in self._deltas(attempt, ref))
        return values if values is not None and len(values) == size else None

    def _deltas(self, attempt: int, ref: PayloadRef) -> list[Delta]:
        """A staged payload: from memory, else from the spool, else from the store."""
        if (kept := self._kept.get(ref.sha256)) is not None:
            return kept
        data = self._spool.get(ref.sha256)
        if data is not None:
            try:
                return open_payload(data, ref, self._log.catalog)
            except IntegrityError as error:
                self._say("refetch", attempt, f"damaged in the spool: {error}")
        return self._fetch(attempt, ref)[0]

    def _fetch(self, attempt: int, ref: PayloadRef) -> tuple[list[Delta], bytes]:
        """A payload from the store, fetched a second time if the first copy is damaged (F15)."""
        key = payload_prefix(attempt) + ref.sha256
        step = f"Restore {key}, or where a baseline holds the head: deltarefit anchor STORE."
        try:
            return self._log.fetch(
                key,
                lambda data: (open_payload(data, ref, self._log.catalog), data),
                lambda error: self._say("refetch", attempt, f"fetching again for version {attempt}: {error.what}"),
            )
        except NotFoundError as error:
            raise IntegrityError(f"version {attempt} has lost a payload", expected=key, next_step=step) from error
        except IntegrityError as error:
            what = f"version {attempt}: {error.what}"
            raise type(error)(what, expected=error.expected, found=error.found, next_step=step) from error

    def _say(self, type_: str, attempt: int, text: str) -> None:
        self._emit(Event(type_, version=attempt, text=text))
