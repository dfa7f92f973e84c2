"""Mode stream: each payload is announced in the log as soon as the store has it (docs/format.md §1)."""

from __future__ import annotations

from deltarefit import runtime
from deltarefit.errors import AttemptLostError
from deltarefit.manifest import Batch, Intent, Mode, PayloadRef
from deltarefit.protocol import messages as m
from deltarefit.publishing.creating import create_record
from deltarefit.runlog import RunLog


class Announcing:
    """One producer's list in one attempt; in mode stage nothing is announced. Raises ``AttemptLostError`` once somebody
    else has ended the list: the attempt was aborted."""

    def __init__(self, log: RunLog, intent: Intent, producer: int) -> None:
        self._log, self._intent, self._producer = log, intent, producer
        self._nonce, self._number = runtime.token(), 0

    def add(self, ref: PayloadRef) -> None:
        """The store has ``ref``, and all before it."""
        self._say((ref,), end=False)

    def end(self) -> None:
        """There is no more: from here on the manifest may be sealed."""
        self._say((), end=True)

    def _say(self, refs: tuple[PayloadRef, ...], end: bool) -> None:
        if self._intent.mode is not Mode.STREAM:
            return
        number, attempt = self._number, self._intent.attempt
        batch = Batch(self._log.run, attempt, self._producer, number, refs, end, self._nonce)
        runtime.point("trainer announce")
        made = create_record(self._log, attempt, f"b/{self._producer}/{number}", batch)
        if not isinstance(made, m.Created) and self._log.batch(attempt, self._producer, number) != batch:
            raise AttemptLostError(f"attempt {attempt} was closed meanwhile", next_step="Publish again.")
        self._number += 1
