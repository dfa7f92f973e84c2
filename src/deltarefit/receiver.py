"""The receiver's path: follow the log, stage, pause, write in place, verify, resume.

Read top to bottom: ``follow`` drives the pure machine of ``protocol.follower``; each ``_do_*`` carries out one of its
actions on the store and the target and answers with what came of it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from deltarefit import attendance, runtime
from deltarefit.anchors import AnchorSearch, check_loaded, load_anchor
from deltarefit.attendance import Attendance
from deltarefit.beginning import Beginning
from deltarefit.errors import IntegrityError, NotFoundError, RefitError, StorageFullError, UnavailableError
from deltarefit.events import Emit, Event, ignore
from deltarefit.manifest import Anchor, Header, Held, State
from deltarefit.notary import Notary
from deltarefit.pins import CatchUpPin
from deltarefit.ports import LiveTarget, Store, Target, Watched
from deltarefit.protocol import messages as m
from deltarefit.protocol.attempts import Attempt
from deltarefit.protocol.follower import Follower, Phase
from deltarefit.runlog import RunLog, attempt_key
from deltarefit.staging import Staging
from deltarefit.trust import Trust

T = TypeVar("T")
STOPS = (m.ReadAttempt, m.AwaitAttempt, m.FindAnchor, m.LoadAnchor, m.Stage)
"""Actions before which ``follow`` may stop: never between a pause and its resume, unless there is nothing to use."""
IN_PAUSE = ("quiesce", "seed", "write", "verify")
"""Phases of a refit that users of the weights wait for, before CLEAN; ``resume`` and what the target reports follow."""
STREAM_POLL_S = 0.1
"""Longest wait between looks at the log while an attempt is being written on arrival."""
TOLD_S = 0.5
"""How long a store that tells is asked at once: so long may a stop take."""
TELL_S = 10.0
"""After so long a pause in an attempt that is not decided is told of."""
WATCH_S = 1.0
"""Between looks whether a live target is still there, while there is nothing to do."""


class Receiver:
    """Keeps one target at the head of one run. Not thread-safe; one receiver per target.

    ``poll_s`` is the wait between looks at the log. ``prove`` has the whole target read once at the start, and taken
    for lost if its bits are not those that its header claims. A target that holds weights of another run is refused,
    untouched, unless ``switch_run`` says that they may be replaced. So is a live target without a header whose bits
    are neither a version of the run nor the checkpoint that it was started from. With ``trust``, records that none of
    its keys signed, or may have signed, are refused before they are parsed (``SignatureError``). ``name`` is what it is
    called among the receivers of the run, whose votes a COMMIT may wait for; by default one that nobody else has.
    """

    def __init__(
        self,
        store: Store,
        target: Target | LiveTarget,
        *,
        emit: Emit = ignore,
        threads: int | None = None,
        poll_s: float = 1.0,
        prove: bool = True,
        switch_run: bool = False,
        trust: Trust | None = None,
        name: str = "",
    ) -> None:
        self.log = RunLog.open(store, Notary(trust=trust))
        self.target = target
        self.poll_s = poll_s
        self.prove = prove
        self._switch_run = switch_run
        self._emit = emit
        self._attendance = Attendance(self.log, name or runtime.token()[:16], emit)
        self._attends = False
        self._pin = CatchUpPin(self.log, "receiver", emit)
        self._search = AnchorSearch(self.log, self._pin, emit)
        self._pool = runtime.executor(threads or os.cpu_count() or 1, "refit")
        self._staging = Staging(self.log, target, self._pool, self._hear)
        self._stop: Callable[[], bool] = lambda: False
        self._machine = self._new_machine()
        self._started = False
        self._queue: deque[m.Action] = deque()
        self._timings: dict[str, float] = {}
        self._pause_timings: dict[str, float] = {}
        self._paused_at = 0.0
        self._diverged = 0
        self._newest, self._seen_key = Attempt(0), ""
        self._refusal, self._told = "", 0

    @property
    def version(self) -> int:
        """The version that the target holds (0: none, or it is being written)."""
        return 0 if self._machine.target else self._machine.version

    def follow(self, *, once: bool = False, stop: Callable[[], bool] = lambda: False) -> int:
        """Follow the log until ``stop()``, or with ``once`` until the head is reached; the version then held.

        Raises ``NotFoundError`` (once) if the log has nothing to start from, ``IntegrityError`` and ``BaseMismatch``
        for what no retry cures, ``UnavailableError`` where calling again may help. After any of them the target is as
        recoverable as after a crash, and calling again goes on.
        """
        self._stop, self._attends = stop, not once
        self._machine = replace(self._machine, streams=self._attends)
        try:
            with runtime.pulse(self._beat_beside, attendance.BEAT_S) if self._attends else nullcontext():
                self._go_on(once)
        except BaseException as error:
            self.restart()
            if not (isinstance(error, RefitError) and error.retryable):  # else it comes back
                self._leave()
            raise
        self._leave()
        if not once and (target := self._machine.target):
            self._say("adrift", version=target, text=f"stopped while attempt {target} is partly written: follow again")
        if once and self._machine.target:
            what = f"attempt {self._machine.target} is partly written, and undecided or without a successor"
            raise UnavailableError(what, next_step="Publish again; then run this again.")
        if once and self._machine.phase is Phase.LOST and not stop():
            raise NotFoundError("nothing to start from: the run has no committed version with an anchor")
        return self.version

    def header(self) -> Header | None:
        """The header beside the weights; None if there is none, or a damaged one."""
        return self._beginning().read_header()

    def _go_on(self, once: bool) -> None:
        self._begin()
        while self._queue and not (isinstance(self._queue[0], STOPS) and self._stop()):
            action = self._queue.popleft()
            if once and isinstance(action, m.AwaitAttempt):
                self._queue.appendleft(action)
                break
            if (event := self._do(action)) is not None:
                self._feed(event)

    def restart(self) -> None:
        """Forget what is in memory, as a crash would: the next ``follow`` starts from the header (and proves it). Users
        may go on where the weights are still whole."""
        lost = self._machine.phase is Phase.LOST  # proven wrong, though the header may not say so yet
        self._machine, self._started = self._new_machine(), False
        self._queue.clear()
        self._search.retry()
        self._staging.forget()
        self._timings.clear()
        self._pause_timings.clear()
        self._paused_at = 0.0
        try:
            header = self.header()
            if header is not None and header.state is State.CLEAN and not lost:
                self.target.resume()
        except UnavailableError:
            if not isinstance(self.target, LiveTarget):
                raise
            # Its weights are gone, or out of reach: nothing to resume, and what led here says more.

    def _leave(self) -> None:
        if self._attends:
            self._attendance.leave()

    def close(self) -> None:
        """Let go of the threads and of what is pinned. The target is left as it is."""
        self._pin.release()
        self._pool.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------------------------ driving

    def _begin(self) -> None:
        """Start from the header, or go on where an earlier ``follow`` ended: with a fresh look instead of a wait."""
        if not self._started:
            if isinstance(self.target, LiveTarget):
                self.target.attach(self.log.run, self.log.catalog)
            self._feed(m.HeaderRead(self._beginning().header(self._machine)))
            self._started = True
        if self._queue and isinstance(waiting := self._queue[0], m.AwaitAttempt):
            self._queue[0] = m.ReadAttempt(waiting.number)

    def _beginning(self) -> Beginning:
        digest = self._staging.landing.digest
        return Beginning(self.log, self.target, digest, self._say, prove=self.prove, switch_run=self._switch_run)

    def _new_machine(self) -> Follower:
        return Follower(self.log.run, self.log.catalog.identity, runtime.token()[:16])

    def _feed(self, event: m.Event) -> None:
        before = self._machine
        after, actions = before.on(event)
        if isinstance(event, m.AttemptRead) and before.is_pruned(event.attempt):
            text = f"what follows version {before.version} was pruned: starting from an anchor after it"
            self._say("pruned", version=event.attempt.number, text=text)
            self._search.above = before.version
        elif after.phase is Phase.LOST and before.phase not in (Phase.BOOT, Phase.LOST) and event != m.NotStaged():
            self._refuse_twice(before)
            text = "live bits are of no known version: starting from an anchor"
            self._say("diverged", version=before.version, text=text)
        if after.phase is Phase.ADRIFT and before.phase is not Phase.ADRIFT:
            text = f"attempt {after.target} failed after some of it was written: paused until the next version"
            self._say("adrift", version=after.target, text=text)
        self._machine = after
        self._queue.extend(actions)
        if after.phase is not Phase.LOST and any(isinstance(action, m.AwaitAttempt) for action in actions):
            self._pin.release()  # nothing is left to catch up with
            self._search.forget()

    def _refuse_twice(self, before: Follower) -> None:
        """Bits that come from an anchor are right: if the same version diverges again, the log is wrong, and a third
        load would not help either. The target stays CLEAN at that version."""
        if before.version == self._diverged and before.phase in (Phase.CLEAN, Phase.STAGING, Phase.FILLING):
            raise IntegrityError(
                f"the version after {before.version} does not apply to its bits, which come from an anchor",
                next_step="The publisher's baseline was wrong. Start a new run in another store.",
            )
        self._diverged = before.version

    def _beat(self) -> None:
        if self._attends:
            self._attendance.beat(self._machine.version)

    def _beat_beside(self) -> None:
        self._attendance.beat_beside(self._machine.version)

    def _say(self, type_: str, phase: str = "", version: int = 0, **rest: object) -> None:
        self._emit(Event(type_, phase, version, **rest))  # type: ignore[arg-type]

    def _timed(self, phase: str, version: int, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = work()
        self._timings[phase] = seconds = time.perf_counter() - started
        self._say("phase", phase, version, seconds=seconds)
        return result

    # ------------------------------------------------------------------------------------ actions

    def _do(self, action: m.Action) -> m.Event | None:
        name = type(action).__name__
        self._beat()
        runtime.point(f"receiver {name}")
        answer: m.Event | None = getattr(self, f"_do_{name}")(action)
        runtime.point(f"receiver {name} done")
        return answer

    def _do_ReadAttempt(self, action: m.ReadAttempt) -> m.Event:  # noqa: N802
        return m.AttemptRead(self._read(action.number))

    def _read(self, number: int) -> Attempt:
        self._newest = self.log.attempt(number)
        return self._newest

    def _do_AwaitAttempt(self, action: m.AwaitAttempt) -> m.Event:  # noqa: N802
        streaming = self._machine.phase is Phase.STREAMING  # generation stands still meanwhile
        if streaming and self._paused_at and time.perf_counter() - self._paused_at > TELL_S:
            if self._told != action.number:
                text = f"paused for {TELL_S:g} s in attempt {action.number}, which is still open"
                self._say("adrift", version=action.number, text=text)
            self._told = action.number
        deadline = runtime.now() + (min(self.poll_s, STREAM_POLL_S) if streaming else self.poll_s)
        while True:
            self._beat()
            if isinstance(self.target, LiveTarget):
                self.target.watch()
            watch_at = runtime.now() + WATCH_S
            told = False
            while not told and (left := min(deadline, watch_at) - runtime.now()) > 0 and not self._stop():
                told = self._idle(left, streaming)
            if told or self._stop() or runtime.now() >= deadline:
                break
        return m.AttemptRead(self._read(action.number))

    def _idle(self, seconds: float, streaming: bool) -> bool:
        """A piece of a wait for the attempt that was read last; True if something of it appeared meanwhile, which only
        some stores tell."""
        store, key = self.log.store, _next_key(self._newest)
        if not streaming and isinstance(store, Watched) and key != self._seen_key:
            with suppress(RefitError):  # it need not tell; the log is read all the same
                if told := store.wait(key, min(seconds, TOLD_S)):
                    self._seen_key = key  # once: it may be there and yet count as not there
                return told
        runtime.sleep(min(seconds, 0.05))
        return False

    def _do_FindAnchor(self, action: m.FindAnchor) -> m.Event:  # noqa: N802
        found = self._search.start()
        if found is None or found[1].outcome is None:
            return m.NoAnchor()
        return m.AnchorFound(found[0], found[1].outcome.digest)

    def _do_LoadAnchor(self, action: m.LoadAnchor) -> m.Event:  # noqa: N802
        anchor = action.anchor
        try:
            self._timed("seed", anchor.version, lambda: self._load(anchor))
            digest = self._staging.landing.digest()
            check_loaded(anchor, digest)
        except (IntegrityError, NotFoundError) as error:
            if not self._search.failed(anchor, error):
                raise
            return m.NotStaged()
        return m.AnchorLoaded(digest)

    def _load(self, anchor: Anchor) -> None:
        load_anchor(self.log, anchor, self.target, self._staging.landing, self._hear)

    def _do_FinishSeed(self, action: m.FinishSeed) -> None:  # noqa: N802
        self.target.finish_seed()

    def _do_WriteHeader(self, action: m.WriteHeader) -> None:  # noqa: N802
        self.target.write_header(action.header)
        if action.header.state is State.CLEAN:
            self._say("clean", version=action.header.version, fields=dict(self._timings))
            self._pause_timings = {name: self._timings[name] for name in IN_PAUSE if name in self._timings}
            self._timings.clear()

    def _do_Pause(self, action: m.Pause) -> None:  # noqa: N802
        self._paused_at = time.perf_counter()
        self._timed("quiesce", self.version, self.target.pause)

    def _do_Resume(self, action: m.Resume) -> None:  # noqa: N802
        if not self._paused_at:
            self.target.resume()
            return
        self._timed("resume", self.version, self.target.resume)
        pause = time.perf_counter() - self._paused_at
        parts: dict[str, float] = getattr(self.target, "timings", {})  # of the resume, as far as the target tells
        resume = max(0.0, self._timings.pop("resume") - sum(parts.values()))
        spent = {**self._pause_timings, **parts, "resume": resume, "pause": pause}
        self._say("resumed", "pause", self.version, seconds=pause, fields=spent)
        self._pause_timings, self._paused_at = {}, 0.0

    def _do_DropStage(self, action: m.DropStage) -> None:  # noqa: N802
        self._staging.drop()

    def _do_Stage(self, action: m.Stage) -> m.Event:  # noqa: N802
        self._keep_chain(action.attempt)
        try:
            stage = partial(self._staging.stage, action.attempt, action.refs)
            return m.Staged(self._timed("stage", action.attempt.number, stage))
        except (IntegrityError, NotFoundError, StorageFullError) as error:
            if action.attempt.outcome is None:  # nobody need wait for us, and it may never be committed
                self._refusal = str(error)
                self._say("refused", version=action.attempt.number, text=self._refusal)
                return m.NotStaged()
            if isinstance(error, StorageFullError):
                raise
            anchor = self._search.past(self._machine.version)
            if anchor is None:
                raise
            self._say("skipped", version=action.attempt.number, text=f"{error} Going on from anchor {anchor.version}.")
            return m.NotStaged()

    def _keep_chain(self, attempt: Attempt) -> None:
        """A receiver that lags keeps the chain before it. One that is only a version behind is done before any grace
        is over, and stays out of the store's way."""
        if attempt.committed and self.log.hint().head > attempt.number:
            self._pin.hold(self._machine.version)

    def _hear(self, event: Event) -> None:
        self._beat()
        self._pin.hear(event)
        self._emit(event)

    def _do_CastVote(self, action: m.CastVote) -> None:  # noqa: N802
        if self._attends:
            refused = action.held is Held.REFUSED
            self._attendance.vote(action.attempt, action.held, self._refusal if refused else "")

    def _do_Classify(self, action: m.Classify) -> m.Event:  # noqa: N802
        live = self._staging.live(action.attempt, action.refs)
        return m.Classified(live, self._staging.kept(action.attempt, action.refs))

    def _do_Prove(self, action: m.Prove) -> m.Event:  # noqa: N802
        return m.Proven(self._staging.landing.digest())

    def _do_Write(self, action: m.Write) -> m.Event:  # noqa: N802
        attempt, refs = action.attempt, action.refs
        torn = tuple(ref for ref, op in zip(refs, action.ops, strict=True) if op is m.Op.SET)
        if not all(self._staging.kept(attempt, torn)):
            return m.ValuesLost()
        try:
            self._timed("write", attempt.number, lambda: self._staging.write(attempt, refs, action.ops))
        except IntegrityError as error:
            if not isinstance(self.target, LiveTarget):
                raise
            self._say("torn", version=attempt.number, text=str(error))  # a rank holds neither old nor new bits
            return m.ValuesLost()
        return m.Written(self._timed("verify", attempt.number, lambda: self._staging.live(attempt, refs)))


def _next_key(attempt: Attempt) -> str:
    """What of an attempt will appear next, if it goes well."""
    if attempt.intent is None:
        return attempt_key(attempt.number, "intent")
    sealed = len(attempt.manifests)
    return attempt_key(attempt.number, f"p/{sealed}" if sealed < attempt.intent.producers else "outcome")
