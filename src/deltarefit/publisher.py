"""The trainer's path: ranks diff their pieces with their baselines, encode, upload; rank 0 commits; baselines move.

Read top to bottom: ``publish`` opens or joins an attempt, ``driving`` takes this rank's machine through it, ``share``
makes this rank's part, and the baseline, receiver number zero, follows the log like any other receiver.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from deltarefit import runtime
from deltarefit.errors import AttemptLostError, IntegrityError, RefitError, UnavailableError, UsageError
from deltarefit.events import Emit, Event, ignore
from deltarefit.manifest import Intent, Mode, Outcome, ProducerManifest
from deltarefit.notary import Notary
from deltarefit.pieces import whole
from deltarefit.pipeline import AHEAD_BYTES, MOST_PAYLOAD_BYTES, PAYLOAD_BYTES
from deltarefit.ports import Baseline, Source, Store, Target
from deltarefit.protocol import coordinator, producer
from deltarefit.protocol.attempts import abort, new_digest
from deltarefit.publishing.creating import create_record
from deltarefit.publishing.driving import Driver, lost
from deltarefit.publishing.meeting import meet
from deltarefit.publishing.polling import Roll, policy_of
from deltarefit.publishing.shard_baseline import ShardBaseline
from deltarefit.publishing.shards import FileBits, MemoryBits
from deltarefit.publishing.share import Options, Share
from deltarefit.publishing.target_baseline import TargetBaseline
from deltarefit.publishing.trainers import Closing, Report, Trainers
from deltarefit.recent import RecentPayloads
from deltarefit.signing import Signer
from deltarefit.trust import Trust

DEADLINE_S = 300.0
MOST_THREADS = 4
"""Threads where none are asked for: ranks share a machine, and each thread holds up to some 60 MB."""


@dataclass(frozen=True)
class Published:
    """What one ``publish`` did, over all ranks. ``changed`` and ``numel`` count elements; bytes are canonical and as
    stored. ``members`` are the receivers whose votes counted, ``evicted`` others that were there.

    ``seconds`` are this rank's, by phase. ``prepare``: the baseline is brought to the base version (not for a first
    version; long only if it must be rebuilt or caught up). ``encode``: the source is read, compared and encoded,
    until the store has the last payload. ``votes`` (rank 0, if asked): receivers are waited for. ``hint`` (rank 0):
    the hint that tells receivers of the new head is written. ``baseline``: the committed version is written into
    the baseline. ``total``: all of ``publish``, the waits for other ranks and for the commit included; so it is
    more than the sum.
    """

    version: int
    base: int
    step: int
    changed: int
    numel: int
    dense_bytes: int
    wire_bytes: int
    digest: str
    anchor: int
    members: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def density(self) -> float:
        return self.changed / self.numel if self.numel else 0.0


class Publisher:
    """Publishes versions of one source into one run. Not thread-safe; one trainer per run at a time.

    Every rank of the trainer makes one, with its own source, and all call ``publish`` together. Making it is such a
    common act, too: rank 0 proves that the ranks own every element exactly once, before anything is written.

    ``baseline`` holds the bits of the head between publishes, of this rank's pieces: in memory by default, in a file
    below a directory if a path is given, or (one rank only) any target such as a checkpoint directory. A missing, old
    or wrong one is rebuilt from the store. A second trainer is harmless: whichever commits an attempt first wins and
    the other gets ``AttemptLostError``. ``prove`` sums up the source's bits beside every delta and commits only if base
    and changes lead exactly there. A rank that is silent for ``deadline_s`` seconds ends the attempt for all.
    ``threads`` encode; None: one per CPU, at most ``MOST_THREADS``. Beside the baseline, a publish then holds less than
    512 MiB however large the model is.

    In ``mode`` "stage" receivers write after COMMIT, in "stream" on arrival, while they are paused: less memory and
    latency, and longer pauses. ``votes``: before COMMIT "all" receivers that follow must hold the version, or so many,
    or "none" need be asked; fewer than ``min_receivers`` commit nothing. One that is silent delays a commit by
    ``polling.SILENCE_S``, one that is slow by ``deadline_s``; they catch up from the log.

    ``sign`` signs every record that this rank writes; ``trust`` has it read only
    what those keys signed, and commit only what receivers with the same keys will take (docs/security.md).
    """

    def __init__(
        self,
        store: Store,
        source: Source,
        *,
        baseline: Target | str | os.PathLike[str] | None = None,
        threads: int | None = None,
        payload_bytes: int = PAYLOAD_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        prove: bool = True,
        deadline_s: float = DEADLINE_S,
        mode: Mode | str = Mode.STAGE,
        votes: str | int = "all",
        min_receivers: int = 0,
        emit: Emit = ignore,
        sign: Signer | None = None,
        trust: Trust | None = None,
    ) -> None:
        _check_ends(store, source)
        if not 0 < payload_bytes <= MOST_PAYLOAD_BYTES:
            raise UsageError("payload_bytes", expected=f"1 .. {MOST_PAYLOAD_BYTES}", found=payload_bytes)
        if not deadline_s > 0 or (threads or 0) < 0:
            found = f"deadline_s={deadline_s}, threads={threads}"
            raise UsageError("deadline_s or threads", expected="numbers above 0", found=found)
        self._emit = emit
        self._mode, self._policy = _mode(mode), policy_of(votes, min_receivers)
        self._trainers = Trainers(source.exchange, deadline_s)
        self.log = meet(store, source, self._trainers, Notary(sign, trust))
        self._roll = Roll(self.log)
        self._recent = RecentPayloads(store)
        options = Options(threads or min(os.cpu_count() or 1, MOST_THREADS), payload_bytes, ahead_bytes, prove)
        self._baseline = self._open_baseline(baseline, source, options.threads)
        self._share = Share(self.log, self._recent, source, self._baseline, options, self._tell)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._running: Future[Published] | None = None
        self._closed = False
        self._opened: Intent | None = None

    @property
    def source(self) -> Source:
        """Where the bits come from. May be replaced by another of the same catalog and pieces."""
        return self._share.source

    @source.setter
    def source(self, source: Source) -> None:
        self._share.source = source

    def publish(self, step: int = 0) -> Published:
        """Make the source's present bits the next version; returns when it is committed and the baseline holds it.
        Called by all ranks, equally often.

        An unchanged source still makes a version. ``step`` is the trainer's own number, from 0. Raises
        ``AttemptLostError`` if another publisher came between, ``UnavailableError`` if the store or a rank went away
        (if its message says that the outcome is unknown, the next publish finds out), ``BaseMismatch`` for another
        model. What one rank refuses for good (``trainers.LASTING``) is raised by all as the same class; any other error
        of one rank is ``AttemptLostError`` at the others. No receiver serves anything of a failed attempt.

        Nothing is raised once it is committed: a baseline that could not follow is told as an event, and brought up by
        the next publish.
        """
        self._begin()
        return self._publish(step, lambda: None)

    def start(self, step: int = 0) -> Future[Published]:
        """Like ``publish``, but returns as soon as every bit of this rank is read: the optimizer may step again while
        payloads leave and the attempt is decided. The result, or what ``publish`` would raise, comes from the future;
        the next ``publish`` or ``start`` waits for it first. Payloads beyond ``ahead_bytes`` hold it back until the
        store has taken them.
        """
        self._begin()
        taken = threading.Event()
        self._running = self._worker.submit(self._publish, step, taken.set)
        self._running.add_done_callback(lambda _: taken.set())
        taken.wait()
        return self._running

    def abandon(self) -> None:
        """After ``KeyboardInterrupt`` and the like in ``publish``: close the attempt that rank 0 left open, if the
        store can be reached, so that nobody waits for it. The next publish would do the same."""
        if (intent := self._opened) is not None and self._trainers.rank == 0:
            outcome = abort(intent.run, intent.attempt, intent.base, runtime.token(), "interrupted")
            with contextlib.suppress(RefitError):
                create_record(self.log, intent.attempt, "outcome", outcome)

    def close(self) -> None:
        """Finish what was started; let go of threads, memory and files. May be called twice."""
        self._finish()
        self._closed = True
        self._worker.shutdown()
        self._baseline.close()

    # ------------------------------------------------------------------------------------ one publish

    def _begin(self) -> None:
        if self._closed:
            raise UsageError("this publisher is closed", next_step="Make a new one, on every rank.")
        self._finish()

    def _finish(self) -> None:
        """Wait for a publish that was started. Its error belongs to whoever holds the future."""
        if self._running is not None:
            self._running.exception()
            self._running = None

    def _publish(self, step: int, taken: Callable[[], None]) -> Published:
        started = time.perf_counter()
        self._trainers.next_turn()
        with ExitStack() as held:

            def release() -> None:
                held.pop_all().close()
                taken()

            driver = Driver(self.log, self._trainers, self._share, release, self._roll, self._policy)
            take_part = self._join if self._trainers.rank else self._coordinate
            try:
                commit, closing = take_part(driver, step, held)
            finally:
                self._opened = driver.intent
        own = driver.reports[0].manifest
        self._settle("baseline", lambda: self._move_baseline(own))
        seconds = {**self._share.seconds, "total": time.perf_counter() - started}
        return self._published(own, commit, closing, seconds)

    def _hold(self, driver: Driver, step: int, held: ExitStack) -> None:
        """Hold the source's bits until ``held`` ends, and tell rank 0, whatever comes of it."""
        try:
            driver.step = _step_number(step)
            self._share.check_source()
            held.enter_context(self.source.hold())
        except BaseException as error:
            with contextlib.suppress(UnavailableError):
                self._trainers.ready(driver.step, error)
            raise
        self._trainers.ready(driver.step)

    def _coordinate(self, driver: Driver, step: int, held: ExitStack) -> tuple[Outcome, Closing]:
        """Rank 0: open once all are ready, gather, decide; the others hear in any case that it is over."""
        closing = Closing(False, 0, 0)
        try:
            self._hold(driver, step, held)
            self._trainers.all_ready(driver.step)
            machine = driver.run(self._new_coordinator())
            if not driver.intent:
                self._trainers.refuse(_lost(machine.number, machine.reason))
            reports = driver.reports
            closing = Closing(
                _disagree(machine.intent, reports),
                sum(report.manifest.changed for report in reports),
                driver.wire_bytes + sum(report.wire_bytes for report in reports),
            )
        except BaseException as error:
            if not driver.intent:
                self._trainers.refuse(error)
            raise
        finally:
            self._trainers.close(closing)
        if closing.doubt:
            self._baseline.doubt()
        if machine.phase is not coordinator.Phase.COMMITTED or machine.outcome is None:
            raise _lost(machine.number, machine.reason)
        number, anchor = machine.number, machine.outcome.anchor
        self._settle("hint", lambda: self.log.put_hint(number, max(anchor, self.log.hint().anchor)))
        return machine.outcome, closing

    def _join(self, driver: Driver, step: int, held: ExitStack) -> tuple[Outcome, Closing]:
        """Other ranks: take part in the attempt that rank 0 opened."""
        self._hold(driver, step, held)
        intent = self._trainers.opened()
        machine = driver.run(producer.Producer(intent, self._trainers.rank, runtime.token()))
        own, closing = driver.reports[0], self._closing()
        if closing is not None and closing.doubt:
            self._baseline.doubt()
        if machine.phase is not producer.Phase.COMMITTED or machine.outcome is None:
            raise _lost(intent.attempt, machine.reason)
        return machine.outcome, closing or Closing(False, own.manifest.changed, own.wire_bytes)

    def _closing(self) -> Closing | None:
        """What rank 0 said of an attempt that is decided already."""
        with contextlib.suppress(UnavailableError):
            return self._trainers.closed()
        return None

    def _new_coordinator(self) -> coordinator.Coordinator:
        head, polls = self.log.head(), self._policy is not None
        new = coordinator.Coordinator(self.log.run, runtime.token(), self._trainers.size, self._mode, polls)
        if head is None or head.outcome is None:
            return new
        return replace(new, number=head.number + 1, base=head.number, digest=head.outcome.digest)

    # ------------------------------------------------------------------------------------ baseline

    def _open_baseline(self, given: Target | str | os.PathLike[str] | None, source: Source, threads: int) -> Baseline:
        if given is None or isinstance(given, str | os.PathLike):
            rank, size = self._trainers.rank, self._trainers.size
            bits = MemoryBits() if given is None else FileBits(Path(given), f"rank-{rank}-of-{size}")
            try:
                return ShardBaseline(self.log, source.pieces, bits, self._recent, self._tell, threads)
            except BaseException:
                bits.close()
                raise
        expected = [whole(number, entry.numel) for number, entry in enumerate(self.log.catalog.tensors)]
        if self._trainers.size > 1 or list(source.pieces) != expected:
            raise UsageError(
                "a target cannot be the baseline of a source that owns parts of tensors",
                next_step="Give a directory, or no baseline at all to keep it in memory.",
            )
        return TargetBaseline(self._recent, given, threads, self._tell, self.log.notary.trust)

    def _move_baseline(self, own: ProducerManifest) -> None:
        if own.base == 0:
            self._baseline.adopt(own.attempt, own.part)
        else:
            self._baseline.move(own.attempt)
        self._recent.forget()

    def _settle(self, phase: str, work: Callable[[], None]) -> None:
        """After COMMIT: an error would say that nothing was committed, and the next publish makes good what failed."""
        try:
            self._share.timed(phase, work)
        except Exception as error:  # noqa: BLE001 - whatever it is, the version is committed
            with contextlib.suppress(Exception):  # a listener that raises, too
                self._emit(Event("behind", phase, text=str(error) or type(error).__name__))

    # ------------------------------------------------------------------------------------ reporting

    def _tell(self, event: Event) -> None:
        self._trainers.beat()
        self._emit(event)

    def _published(
        self, own: ProducerManifest, commit: Outcome, closing: Closing, seconds: dict[str, float]
    ) -> Published:
        catalog = self.log.catalog
        return Published(
            version=commit.attempt,
            base=commit.base,
            step=own.step,
            changed=closing.changed,
            numel=catalog.numel,
            dense_bytes=catalog.dense_bytes,
            wire_bytes=closing.wire_bytes,
            digest=str(commit.digest),
            anchor=commit.anchor,
            members=commit.members,
            evicted=commit.evicted,
            seconds=seconds,
        )


def _disagree(intent: Intent | None, reports: list[Report]) -> bool:
    """All ranks made their shares, and these do not add up: at least one baseline is wrong."""
    if intent is None or len(reports) != intent.producers:
        return False
    try:
        new_digest(intent, tuple(report.manifest for report in reports))
    except IntegrityError:
        return True
    return False


def _lost(number: int, reason: str) -> AttemptLostError:
    return lost(f"attempt {number} was not committed", reason)


def _check_ends(store: object, source: object) -> None:
    """Errors that say what to give instead, for what is given by mistake most often."""
    if isinstance(store, str | os.PathLike):
        raise UsageError("the store is a path", found=repr(store), next_step=f"Pass open_store({os.fspath(store)!r}).")
    if not all(hasattr(type(source), name) or hasattr(source, name) for name in ("catalog", "pieces", "exchange")):
        found, step = type(source).__name__, "Wrap the model: FsdpSource(model), StateDictSource(tensors), ..."
        raise UsageError("the source is no source", found=found, next_step=step)


def _mode(mode: Mode | str) -> Mode:
    try:
        return Mode(mode)
    except ValueError as error:
        raise UsageError("mode", expected=[one.value for one in Mode], found=repr(mode)[:80]) from error


def _step_number(step: int) -> int:
    """``step`` as a record holds it. A manifest with any other number could be written and never read."""
    if isinstance(step, str) or (number := int(step)) != step or not 0 <= number < 1 << 64:
        raise UsageError("bad step", expected="an integer, 0 .. 2^64 - 1", found=repr(step)[:80])
    return number
