"""One attempt's payloads on their way into a target: fetch, check, stage, write, sum again.

While generation goes on, ``stage`` has every payload kept where the weights are, with all that a write needs. After
COMMIT, ``write`` needs nothing else: a payload that a killed agent left torn is set to absolute values.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from deltarefit import runtime
from deltarefit.codec import Delta
from deltarefit.errors import IntegrityError, NotFoundError
from deltarefit.events import Emit, Event
from deltarefit.landing import landing_on
from deltarefit.manifest import PayloadRef
from deltarefit.ports import LiveTarget, Target
from deltarefit.protocol.attempts import Attempt
from deltarefit.protocol.messages import Op, Sums
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, payload_prefix

Refs = tuple[PayloadRef, ...]


class Staging:
    """Payload operations of one receiver. What may be done when is the protocol's business."""

    def __init__(self, log: RunLog, target: Target | LiveTarget, pool: Executor, emit: Emit) -> None:
        self._log, self._emit = log, emit
        self.landing = landing_on(target, log, pool, self._again)
        self._attempt = 0

    def stage(self, attempt: Attempt, refs: Refs) -> tuple[Sums, ...]:
        """Payloads kept beside the weights; of each the sums of the live bits now and as they will be."""
        self._attempt = attempt.number
        total, sums = sum(ref.size for ref in refs), []
        for number, ref in enumerate(refs, 1):
            runtime.point("payload stage")
            sums.append(self.landing.stage(ref, *self._fetch(ref)))
            done = sum(before.size for before in refs[:number])
            self._emit(Event("progress", "stage", attempt.number, done=done, total=total))
        return tuple(sums)

    def live(self, attempt: Attempt, refs: Refs) -> tuple[Digest, ...]:
        """Per payload the sums of the live bits at its positions."""
        self._attempt = attempt.number
        return tuple(self.landing.live(ref) for ref in refs)

    def kept(self, attempt: Attempt, refs: Refs) -> tuple[bool, ...]:
        """Whether the absolute values of each payload are kept beside the weights."""
        self._attempt = attempt.number
        return tuple(self.landing.can_set(ref) for ref in refs)

    def write(self, attempt: Attempt, refs: Refs, ops: Sequence[Op]) -> None:
        """Apply, skip or set each payload; all of it is durable on return."""
        self._attempt = attempt.number
        for ref, op in zip(refs, ops, strict=True):
            if op is Op.SET:
                self._say("torn", f"payload {ref.sha256[:12]} was torn: setting absolute values")
            runtime.point("payload write")
            self.landing.write(ref, op)
        runtime.point("payload flush")
        self.landing.flush()

    def forget(self) -> None:
        """Drop what is kept in memory; what lives as long as the weights stays."""
        self.landing.forget()

    def drop(self) -> None:
        """The attempt is done with: nothing of it is kept any more."""
        self.landing.drop()

    def _again(self, ref: PayloadRef, why: str) -> tuple[bytes, list[Delta]]:
        """``landing.Again``: a payload of the attempt at hand from the store once more."""
        if why:
            self._say("refetch", why)
        return self._fetch(ref)

    def _fetch(self, ref: PayloadRef) -> tuple[bytes, list[Delta]]:
        """A payload from the store, fetched a second time if the first copy is damaged (F15)."""
        attempt = self._attempt
        key = payload_prefix(attempt) + ref.sha256
        step = f"Restore {key}, or where a baseline holds the head: deltarefit anchor STORE."
        try:
            return self._log.fetch(
                key,
                lambda data: (data, self.landing.opened(ref, data)),
                lambda error: self._say("refetch", f"fetching again for version {attempt}: {error.what}"),
                most=ref.size,
            )
        except NotFoundError as error:
            raise IntegrityError(f"version {attempt} has lost a payload", expected=key, next_step=step) from error
        except IntegrityError as error:
            what = f"version {attempt}: {error.what}"
            raise type(error)(what, expected=error.expected, found=error.found, next_step=step) from error

    def _say(self, type_: str, text: str) -> None:
        self._emit(Event(type_, version=self._attempt, text=text))
