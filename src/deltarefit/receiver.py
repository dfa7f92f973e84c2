"""The receiver's path: follow the log, stage, pause, write in place, verify, resume.

Read top to bottom: ``follow`` drives the pure machine of ``protocol.follower``; each ``_do_*`` carries out one of its
actions on the store and the target and answers with what came of it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from deltarefit.anchors import load_anchor
from deltarefit.codec import Delta, open_payload
from deltarefit.errors import IntegrityError, NotFoundError
from deltarefit.events import Emit, Event, ignore
from deltarefit.manifest import Header, PayloadRef, State
from deltarefit.ports import Store, Target
from deltarefit.protocol import messages as m
from deltarefit.protocol.follower import Follower, Phase
from deltarefit.runlog import RunLog, payload_prefix
from deltarefit.weights import Weights

KEPT_BYTES = 128 << 20
"""Decoded payloads kept between staging and writing, so that the pause does not pay for decoding them again."""

VALUES = ".5e7"
"""Ending of the spool entry that holds a payload's absolute values (spool names are hex: read it as "set")."""


STOPS = (m.ReadAttempt, m.AwaitAttempt, m.FindAnchor, m.LoadAnchor, m.Stage)
"""Actions before which ``follow`` may stop: never between a pause and its resume, unless there is nothing to use."""


class Receiver:
    """Keeps one target at the head of one run. Not thread-safe; one receiver per target.

    ``poll_s`` is the wait between looks at the log. ``prove`` has the whole target read once at the start, and taken
    for
    lost if its bits are not those that its header claims.
    """

    def __init__(
        self,
        store: Store,
        target: Target,
        *,
        emit: Emit = ignore,
        threads: int | None = None,
        poll_s: float = 1.0,
        prove: bool = True,
    ) -> None:
        self.log = RunLog.open(store)
        self.target = target
        self.poll_s = poll_s
        self.prove = prove
        self._emit = emit
        self._pool = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="refit")
        self._weights = Weights(target, self.log.run, self.log.catalog, self._pool)
        self._kept: dict[str, list[Delta]] = {}
        self._stop: Callable[[], bool] = lambda: False
        self._machine = self._new_machine()
        self._started = False
        self._queue: deque[m.Action] = deque()
        self._timings: dict[str, float] = {}
        self._paused_at = 0.0
        self._diverged = 0

    @property
    def version(self) -> int:
        """The version that the target holds (0: none)."""
        return self._machine.version

    def follow(self, *, once: bool = False, stop: Callable[[], bool] = lambda: False) -> int:
        """Follow the log until ``stop()``, or with ``once`` until the head is reached; the version then held.

        Raises ``NotFoundError`` (once) if the log has nothing to start from, ``IntegrityError`` and ``BaseMismatch``
        for what no retry cures, ``UnavailableError`` where calling again may help. After any of them the target is as
        recoverable as after a crash, and calling again goes on.
        """
        self._stop = stop
        try:
            self._begin()
            while self._queue and not (isinstance(self._queue[0], STOPS) and stop()):
                action = self._queue.popleft()
                if once and isinstance(action, m.AwaitAttempt):
                    self._queue.appendleft(action)
                    break
                if (event := self._do(action)) is not None:
                    self._feed(event)
        except BaseException:
            self.restart()
            raise
        if once and self._machine.phase is Phase.LOST:
            raise NotFoundError("nothing to start from: the run has no committed version with an anchor")
        return self.version

    def restart(self) -> None:
        """Forget what is in memory, as a crash would: the next ``follow`` starts from the header (and proves it). Users
        may go on where the weights are still whole."""
        self._machine, self._started = self._new_machine(), False
        self._queue.clear()
        self._kept.clear()
        header = self._read_header()
        if header is not None and header.state is State.CLEAN:
            self.target.resume()

    def close(self) -> None:
        """Let go of the threads. The target is left as it is."""
        self._pool.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------------------------ driving

    def _begin(self) -> None:
        """Start from the header, or go on where an earlier ``follow`` ended: with a fresh look instead of a wait."""
        if not self._started:
            self._feed(m.HeaderRead(self._believable_header()))
            self._started = True
        if self._queue and isinstance(waiting := self._queue[0], m.AwaitAttempt):
            self._queue[0] = m.ReadAttempt(waiting.number)

    def _new_machine(self) -> Follower:
        return Follower(self.log.run, self.log.catalog.identity, secrets.token_hex(8))

    def _feed(self, event: m.Event) -> None:
        before = self._machine
        self._machine, actions = before.on(event)
        self._queue.extend(actions)
        if self._machine.phase is Phase.LOST and before.phase not in (Phase.BOOT, Phase.LOST):
            self._refuse_twice(before)
            self._say(
                "diverged", version=before.version, text="live bits are of no known version: starting from an anchor"
            )

    def _refuse_twice(self, before: Follower) -> None:
        """Bits that come from an anchor are right: if the same version diverges again, the log is wrong, and a third
        load would not help either. The target stays CLEAN at that version."""
        if before.version == self._diverged and before.phase in (Phase.CLEAN, Phase.STAGING):
            raise IntegrityError(
                f"the version after {before.version} does not apply to its bits, which come from an anchor",
                next_step="The publisher's baseline was wrong. Start a new run in another store.",
            )
        self._diverged = before.version

    def _read_header(self) -> Header | None:
        """The header; None, as on first start, if it is damaged."""
        try:
            return self.target.read_header()
        except IntegrityError as error:
            self._say("diverged", text=str(error))
            return None

    def _believable_header(self) -> Header | None:
        header = self._read_header()
        ours = (self.log.run, self.log.catalog.identity)
        if header is None or header.state is not State.CLEAN or (header.run, header.catalog) != ours or not self.prove:
            return header
        started = time.perf_counter()
        found = self._weights.digest()
        self._say("proven", "prove", header.version, seconds=time.perf_counter() - started)
        if found == header.digest:
            return header
        self._say("diverged", version=header.version, text="live bits differ from the header's digest")
        return None

    def _say(self, type_: str, phase: str = "", version: int = 0, **rest: object) -> None:
        self._emit(Event(type_, phase, version, **rest))  # type: ignore[arg-type]

    def _timed(self, phase: str, version: int, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        work()
        self._timings[phase] = seconds = time.perf_counter() - started
        self._say("phase", phase, version, seconds=seconds)

    # ------------------------------------------------------------------------------------ actions

    def _do(self, action: m.Action) -> m.Event | None:
        name = "_do_" + type(action).__name__
        answer: m.Event | None = getattr(self, name)(action)
        return answer

    def _do_ReadAttempt(self, action: m.ReadAttempt) -> m.Event:  # noqa: N802
        return m.AttemptRead(self.log.attempt(action.number))

    def _do_AwaitAttempt(self, action: m.AwaitAttempt) -> m.Event:  # noqa: N802
        deadline = time.monotonic() + self.poll_s
        while (left := deadline - time.monotonic()) > 0 and not self._stop():
            time.sleep(min(left, 0.05))
        return m.AttemptRead(self.log.attempt(action.number))

    def _do_FindAnchor(self, action: m.FindAnchor) -> m.Event:  # noqa: N802
        found = self.log.newest_anchor()
        if found is None or found[1].outcome is None:
            return m.NoAnchor()
        return m.AnchorFound(found[0], found[1].outcome.digest)

    def _do_LoadAnchor(self, action: m.LoadAnchor) -> m.Event:  # noqa: N802
        anchor = action.anchor
        self._timed("seed", anchor.version, lambda: load_anchor(self.log, anchor, self._weights, self._emit))
        digest = self._weights.digest()
        return m.AnchorLoaded(digest)

    def _do_FinishSeed(self, action: m.FinishSeed) -> None:  # noqa: N802
        self.target.finish_seed()

    def _do_WriteHeader(self, action: m.WriteHeader) -> None:  # noqa: N802
        self.target.write_header(action.header)
        if action.header.state is State.CLEAN:
            self._say("clean", version=action.header.version, fields=dict(self._timings))
            self._timings.clear()

    def _do_Pause(self, action: m.Pause) -> None:  # noqa: N802
        self._paused_at = time.perf_counter()
        self.target.pause()

    def _do_Resume(self, action: m.Resume) -> None:  # noqa: N802
        self.target.resume()
        if self._paused_at:
            self._say("resumed", "pause", self.version, seconds=time.perf_counter() - self._paused_at)
        self._paused_at = 0.0

    def _do_DropStage(self, action: m.DropStage) -> None:  # noqa: N802
        self._kept.clear()
        self.target.spool.clear()

    def _do_Stage(self, action: m.Stage) -> m.Event:  # noqa: N802
        started = time.perf_counter()
        refs = self._refs(action.attempt)
        total = sum(ref.size for ref in refs)
        sums, done = [], 0
        for ref in refs:
            sums.append(self._stage_payload(action.attempt.number, ref))
            done += ref.size
            self._say("progress", "stage", action.attempt.number, done=done, total=total)
        self._timings["stage"] = time.perf_counter() - started
        self._say("phase", "stage", action.attempt.number, seconds=self._timings["stage"])
        return m.Staged(tuple(sums))

    def _stage_payload(self, attempt: int, ref: PayloadRef) -> m.Sums:
        """Fetch and check one payload; spool it with its absolute values, which are what a torn write is set to."""
        deltas, data = self._fetch(attempt, ref)
        pre, post, values = self._weights.preview(deltas)
        self.target.spool.put(ref.sha256, data)
        self.target.spool.put(ref.sha256 + VALUES, values)
        if sum(d.nbytes for kept in self._kept.values() for d in kept) + sum(d.nbytes for d in deltas) <= KEPT_BYTES:
            self._kept[ref.sha256] = deltas
        return m.Sums(pre, post)

    def _fetch(self, attempt: int, ref: PayloadRef) -> tuple[list[Delta], bytes]:
        """A payload from the store, fetched a second time if the first copy is damaged (F15)."""
        return self.log.fetch(
            payload_prefix(attempt) + ref.sha256,
            lambda data: (open_payload(data, ref, self.log.catalog), data),
            lambda error: self._say("refetch", "stage", attempt, text=str(error)),
        )

    def _do_Classify(self, action: m.Classify) -> m.Event:  # noqa: N802
        number = action.attempt.number
        live = [self._weights.sums(self._deltas(number, ref)) for ref in self._refs(action.attempt)]
        return m.Classified(tuple(live))

    def _do_Write(self, action: m.Write) -> m.Event:  # noqa: N802
        number, refs = action.attempt.number, self._refs(action.attempt)
        for ref, op in zip(refs, action.ops, strict=True):
            if op is m.Op.SET and self._values(number, ref) is None:
                return m.ValuesLost()
        self._timed("write", number, lambda: self._write(number, refs, action.ops))
        live: list[object] = []
        self._timed("verify", number, lambda: live.extend(self._weights.sums(self._deltas(number, r)) for r in refs))
        return m.Written(tuple(live))  # type: ignore[arg-type]

    def _write(self, attempt: int, refs: tuple[PayloadRef, ...], ops: tuple[m.Op, ...]) -> None:
        for ref, op in zip(refs, ops, strict=True):
            if op is m.Op.APPLY:
                self._weights.apply(self._deltas(attempt, ref))
            elif op is m.Op.SET:
                self._say("torn", "write", attempt, text=f"payload {ref.sha256[:12]} was torn: setting absolute values")
                self._weights.set(self._deltas(attempt, ref), self._values(attempt, ref) or b"")
        self.target.flush()

    def _values(self, attempt: int, ref: PayloadRef) -> bytes | None:
        """The absolute values of a staged payload, or None if the spool does not have them whole."""
        values = self.target.spool.get(ref.sha256 + VALUES)
        size = sum(delta.count * delta.width for delta in self._deltas(attempt, ref))
        return values if values is not None and len(values) == size else None

    def _deltas(self, attempt: int, ref: PayloadRef) -> list[Delta]:
        """A staged payload: from memory, else from the spool, else from the store."""
        if (kept := self._kept.get(ref.sha256)) is not None:
            return kept
        data = self.target.spool.get(ref.sha256)
        if data is not None:
            try:
                return open_payload(data, ref, self.log.catalog)
            except IntegrityError as error:
                self._say("refetch", "write", attempt, text=f"damaged in the spool: {error}")
        return self._fetch(attempt, ref)[0]

    @staticmethod
    def _refs(attempt: m.Attempt) -> tuple[PayloadRef, ...]:
        return attempt.manifest.payloads if attempt.manifest else ()
