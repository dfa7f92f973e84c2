"""Drives one rank's machine through one attempt: carries out its actions and answers with what came of them.

The coordinator (rank 0) and every other producer go through here; which one it is only the machine knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar, cast

from deltarefit import runtime
from deltarefit.anchors import seal_anchor
from deltarefit.errors import AttemptLostError, IntegrityError, NotFoundError, UnavailableError
from deltarefit.events import Event
from deltarefit.manifest import Held, Intent, Mode
from deltarefit.protocol import coordinator, producer
from deltarefit.protocol import messages as m
from deltarefit.protocol.votes import Policy, TooFew
from deltarefit.publishing.creating import create_record
from deltarefit.publishing.polling import Ballot, Roll
from deltarefit.publishing.share import Share
from deltarefit.publishing.touched import end_lists
from deltarefit.publishing.trainers import Closing, Report, Trainers
from deltarefit.records import Digest, Record
from deltarefit.runlog import RunLog, attempt_key

Machine = TypeVar("Machine", coordinator.Coordinator, producer.Producer)
LOOK_S = 1.0
"""Between two looks at the register while something else is waited for."""
TELL_S = 2.0
"""After so long it is said that receivers are waited for."""
POLL_S = 0.2
"""Longest time between two looks at the receivers' votes."""
MAY_FAIL = (m.Encode, m.CreateManifest, m.ReadManifest, m.Gather, m.Poll, m.AwaitOutcome)
"""Actions whose errors close the attempt with ABORT; the error is raised afterwards."""


class Driver:
    """One attempt of one rank. ``reports`` are what was gathered (rank 0), or this rank's own; ``intent`` once all
    have been told of an attempt; ``wire_bytes`` are those of the records written here."""

    def __init__(
        self,
        log: RunLog,
        trainers: Trainers,
        share: Share,
        taken: Callable[[], None],
        roll: Roll,
        policy: Policy | None,
    ) -> None:
        self._log, self._trainers, self._share, self._taken = log, trainers, share, taken
        self._roll, self._policy = roll, policy
        self.step = 0
        self._looked_at = 0.0
        self.reports: list[Report] = []
        self.intent: Intent | None = None
        self.wire_bytes = 0

    def run(self, machine: Machine) -> Machine:
        """The machine in its last phase. Raises the error that ended the attempt, once the attempt is closed, and
        ``UnavailableError`` if its outcome could not be learnt."""
        machine, actions = machine.start()
        queue: deque[m.Action] = deque(actions)
        error: Exception | None = None
        while queue:
            action = queue.popleft()
            try:
                runtime.point(f"trainer {type(action).__name__}")
                event = self._do(action)
                runtime.point(f"trainer {type(action).__name__} done")
            except Exception as failure:
                if machine.phase is coordinator.Phase.COMMITTING:
                    raise _unknown(machine.number, failure) from failure
                if error is not None:
                    raise error from failure  # closing the attempt failed too: the next publish does it
                if not isinstance(action, MAY_FAIL):
                    raise
                error, event = failure, m.EncodeFailed(f"{type(failure).__name__}: {failure}"[:1000])
            machine, actions = machine.on(event)
            queue.extend(actions)
        if error is not None and machine.phase is not producer.Phase.COMMITTED:
            raise error
        return machine

    # ------------------------------------------------------------------------------------ actions

    def _do(self, action: m.Action) -> m.Event:
        self._trainers.beat()
        if isinstance(action, m.ReadAttempt):
            return m.AttemptRead(self._log.attempt(action.number))
        if isinstance(action, m.ReadManifest):
            return m.ManifestRead(self._log.manifest(action.number, action.producer))
        if isinstance(action, m.EndLists):
            for number in action.numbers:
                self._trainers.beat()
                end_lists(self._log, number, runtime.token())
            return m.Created()
        if isinstance(action, m.CreateIntent):
            return self._create(action.intent.attempt, "intent", action.intent)
        if isinstance(action, m.CreateManifest):
            name = f"p/{action.manifest.producer}"  # its bytes are in the report
            return create_record(self._log, action.manifest.attempt, name, action.manifest)
        if isinstance(action, m.CreateOutcome):
            return self._create(action.outcome.attempt, "outcome", action.outcome)
        if isinstance(action, m.Encode):
            return self._encode(action.intent)
        if isinstance(action, m.Gather):
            return self._gather(action.intent)
        if isinstance(action, m.Poll):
            return self._poll(action)
        if isinstance(action, m.AwaitOutcome):
            return self._await_outcome(action.number)
        raise IntegrityError(f"the machine asked for {type(action).__name__}")

    def _create(self, number: int, name: str, record: Record) -> m.Event:
        self.wire_bytes += len(record.to_bytes())
        return create_record(self._log, number, name, record)

    def _encode(self, intent: Intent) -> m.Event:
        if self._trainers.rank == 0:
            self._trainers.open(intent)
            if self._policy is not None and intent.base:
                self._roll.look()  # who is silent from here on has been so all the while
        self.intent = intent
        self._share.watch = lambda: self._stop_if_decided(intent.attempt)
        self.reports = [self._share.make(intent, self.step, self._taken)]
        return m.Encoded(self.reports[0].manifest)

    def _gather(self, intent: Intent) -> m.Event:
        """Rank 0: what the others made, then the anchor if this is one."""
        del self.reports[1:]
        for rank in range(1, self._trainers.size):
            found = self._report_of(rank, intent.attempt)
            if isinstance(found, m.AttemptRead):
                return found
            self.reports.append(found)
        self._log.check_sealed(intent.attempt, [report.manifest for report in self.reports])
        anchor = self._seal_anchor(intent) if intent.base == 0 else self._newest_anchor()
        batches = self._log.attempt(intent.attempt).batches if intent.mode is Mode.STREAM else ()
        return m.Gathered(tuple(report.manifest for report in self.reports), anchor, batches)

    def _poll(self, action: m.Poll) -> m.Event:
        """Rank 0: wait until the policy is content, or the deadline of all waits is over."""
        number, policy = action.intent.attempt, self._policy
        if policy is None:
            return m.Polled((), ())
        held = Held.APPLIED if action.intent.mode is Mode.STREAM else Held.STAGED
        ballot = Ballot(self._log, self._roll, number, action.manifests, held)
        until = runtime.now() + self._trainers.deadline_s
        started, pause, told = runtime.now(), POLL_S / 10, False
        while (found := ballot.count(policy, expired=runtime.now() >= until)) is None:
            self._trainers.beat()
            if decided := self._decided(number):
                return decided
            if not told and runtime.now() - started > TELL_S:
                told = True
                self._share.emit(Event("waiting", "votes", number, text=_waiting(number, until - runtime.now())))
            runtime.sleep(pause)
            pause = min(1.5 * pause, POLL_S)
        self._share.seconds["votes"] = runtime.now() - started
        if isinstance(found, TooFew):
            return m.EncodeFailed(found.reason)
        self._roll.clear(found.evicted)
        return m.Polled(found.members, found.evicted)

    def _report_of(self, rank: int, number: int) -> Report | m.AttemptRead:
        def ready() -> Report | m.AttemptRead | None:
            return self._trainers.reported(rank) or self._decided(number)

        what = f"the manifest of rank {rank} for attempt {number}"
        return cast("Report | m.AttemptRead", self._trainers.wait(ready, rank, what))

    def _seal_anchor(self, intent: Intent) -> int:
        refs = [ref for report in self.reports for ref in report.anchored]
        digest = sum((report.manifest.part for report in self.reports), Digest())
        anchor = seal_anchor(self._log, intent.attempt, digest, refs, self._share.source.files())
        self.wire_bytes += len(anchor.to_bytes()) + sum(file.size for file in anchor.files)
        return intent.attempt

    def _newest_anchor(self) -> int:
        found = self._log.newest_anchor()
        return found[0].version if found else 0

    def _await_outcome(self, number: int) -> m.Event:
        """Other ranks: sealed is said to rank 0, and its word that it is done is awaited; the register is looked at now
        and then all the same, for anyone may have closed the attempt."""
        self._trainers.report(self.reports[0])

        def ready() -> Closing | m.AttemptRead | None:
            return self._trainers.closed() or self._decided(number)

        found = self._trainers.wait(ready, 0, f"the outcome of attempt {number}")
        if isinstance(found, m.AttemptRead):
            return found
        read = m.AttemptRead(self._log.attempt(number))
        if read.attempt.outcome is None:
            raise UnavailableError(f"rank 0 gave attempt {number} up", next_step="Look at its log, then publish again.")
        return read

    # ------------------------------------------------------------------------------------ the register

    def _decided(self, number: int) -> m.AttemptRead | None:
        """The attempt, if somebody decided it; looked at once in ``LOOK_S``."""
        if runtime.now() - self._looked_at < LOOK_S:
            return None
        self._looked_at = runtime.now()
        try:
            self._log.store.size(attempt_key(number, "outcome"))
        except (NotFoundError, UnavailableError):
            return None
        return m.AttemptRead(self._log.attempt(number))

    def _stop_if_decided(self, number: int) -> None:
        """Encoding for an attempt that is over helps nobody."""
        self._trainers.beat()
        if self._trainers.size > 1 and (found := self._decided(number)) and found.attempt.outcome:
            reason = found.attempt.outcome.reason or "decided by another publisher"
            raise lost(f"attempt {number} ended meanwhile", reason)


def _waiting(number: int, left_s: float) -> str:
    return f"waiting for receivers to hold attempt {number}; this gives up in {max(0.0, left_s):.0f} s at the latest"


def lost(what: str, reason: str) -> AttemptLostError:
    """The reason of an attempt's end is the text of some error, which often says what to do next: a full sentence."""
    return AttemptLostError(f"{what}: {reason}", next_step=None if reason.endswith(".") else "Publish again.")


def _unknown(number: int, failure: Exception) -> UnavailableError:
    return UnavailableError(
        f"the outcome of attempt {number} is unknown: {failure}",
        next_step="Publish again: the next publish finds out what became of it.",
    )
