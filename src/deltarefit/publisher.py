"""The trainer's path: compare with the baseline, encode, upload, commit, move the baseline.

Read top to bottom: ``publish`` drives the pure machine of ``protocol.coordinator``; each ``_do_*`` carries out one of
its
actions and answers with what came of it. The baseline is receiver number zero and moves by the same code as any other.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deltarefit.anchors import seal_anchor
from deltarefit.baseline import MemoryBaseline, NoSpool
from deltarefit.digest import catalog_keys
from deltarefit.encoding import SegmentEncoder
from deltarefit.errors import (
    AlreadyExistsError,
    AttemptLostError,
    DigestMismatch,
    IntegrityError,
    NotFoundError,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.events import Emit, Event, ignore
from deltarefit.manifest import Intent, PayloadRef, ProducerManifest
from deltarefit.pipeline import MOST_PAYLOAD_BYTES, PAYLOAD_BYTES, EncodeSegment, Upload, counted, upload_segments
from deltarefit.ports import Source, Store, Target
from deltarefit.protocol import messages as m
from deltarefit.protocol.coordinator import FINAL, Coordinator, Phase
from deltarefit.receiver import Receiver
from deltarefit.recent import RecentPayloads
from deltarefit.records import Digest, Record
from deltarefit.runlog import RunLog, anchor_prefix, attempt_key, check_catalog, payload_prefix

CREATE_TRIES = 5


@dataclass(frozen=True)
class Published:
    """What one ``publish`` did. ``changed`` and ``numel`` count elements; bytes are canonical and as stored."""

    version: int
    base: int
    step: int
    changed: int
    numel: int
    dense_bytes: int
    wire_bytes: int
    digest: str
    anchor: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def density(self) -> float:
        return self.changed / self.numel if self.numel else 0.0


class Publisher:
    """Publishes versions of one source into one run. Not thread-safe; one publisher per run at a time.

    ``baseline`` holds the bits of the head between publishes: in memory by default, or any target (a checkpoint
    directory) that survives the process. A missing, old or wrong baseline is rebuilt from the store. A second
    publisher is harmless: whichever commits an attempt first wins and the other gets ``AttemptLostError``.
    ``prove`` sums up the source's bits beside every delta and commits only if base and changes lead exactly there.
    """

    def __init__(
        self,
        store: Store,
        source: Source,
        *,
        baseline: Target | None = None,
        threads: int | None = None,
        payload_bytes: int = PAYLOAD_BYTES,
        prove: bool = True,
        emit: Emit = ignore,
    ) -> None:
        self.source = source
        self.log = RunLog.open_or_create(store, source.catalog)
        if not 0 < payload_bytes <= MOST_PAYLOAD_BYTES:
            raise UsageError("payload_bytes", expected=f"1 .. {MOST_PAYLOAD_BYTES}", found=payload_bytes)
        self._threads = threads or os.cpu_count() or 1
        self._payload_bytes = payload_bytes
        self._prove = prove
        self._emit = emit
        self._recent = RecentPayloads(store)
        self._baseline = baseline if baseline is not None else MemoryBaseline(NoSpool())
        self._zero = Receiver(
            self._recent, self._baseline, threads=self._threads, emit=self._say_baseline, switch_run=True
        )
        self._keys = catalog_keys(self.log.run, self.log.catalog)
        self._seconds: dict[str, float] = {}
        self._wire_bytes = 0
        self._step = 0
        self._changed = 0

    def publish(self, step: int = 0) -> Published:
        """Make the source's present bits the next version; returns when it is committed and the baseline holds it.

        An unchanged source still makes a version. ``step`` is the trainer's own number, from 0. Raises
        ``AttemptLostError`` if another publisher came between, ``UnavailableError`` if the store went away (if its
        message says that the outcome is unknown, the next publish finds out), ``BaseMismatch`` for another model.
        Nothing of a failed attempt is visible to receivers. Nothing is raised once it is committed: a baseline that
        could not follow is told as an event, and brought up by the next publish.
        """
        self._seconds, self._wire_bytes, self._step = {}, 0, _step_number(step)
        started = time.perf_counter()
        check_catalog(self.source.catalog, self.log.catalog)
        coordinator = self._drive(self._new_coordinator())
        if coordinator.phase is not Phase.COMMITTED or coordinator.outcome is None or coordinator.manifest is None:
            raise AttemptLostError(
                f"attempt {coordinator.number} was not committed: {coordinator.reason}",
                next_step="Publish again.",
            )
        version, anchor = coordinator.number, coordinator.outcome.anchor
        self._settle("hint", lambda: self.log.put_hint(version, max(anchor, self.log.hint().anchor)))
        self._settle("baseline", lambda: self._move_baseline(version))
        self._seconds["total"] = time.perf_counter() - started
        return self._report(coordinator.manifest, coordinator.outcome.digest, anchor)

    def close(self) -> None:
        """Let go of threads."""
        self._zero.close()

    # ------------------------------------------------------------------------------------ driving

    def _new_coordinator(self) -> Coordinator:
        head = self.log.head()
        fresh = Coordinator(self.log.run, nonce=secrets.token_hex(16))
        if head is None or head.outcome is None:
            return fresh
        return Coordinator(
            self.log.run, fresh.nonce, number=head.number + 1, base=head.number, digest=head.outcome.digest
        )

    def _drive(self, coordinator: Coordinator) -> Coordinator:
        coordinator, actions = coordinator.start()
        queue: deque[m.Action] = deque(actions)
        error: Exception | None = None
        while queue:
            action = queue.popleft()
            try:
                event = self._do(action)
            except Exception as failure:
                if coordinator.phase is Phase.COMMITTING:
                    raise _unknown(coordinator.number, failure) from failure
                if error is not None:
                    raise error from failure  # closing the attempt failed too: the next publish does it
                if not isinstance(action, m.Encode):
                    raise
                error, event = failure, m.EncodeFailed(f"{type(failure).__name__}: {failure}"[:1000])
            coordinator, actions = coordinator.on(event)
            queue.extend(actions)
        if coordinator.phase not in FINAL:
            raise IntegrityError(f"the coordinator stopped in phase {coordinator.phase.value}")
        if error is not None:
            raise error
        return coordinator

    def _do(self, action: m.Action) -> m.Event:
        if isinstance(action, m.ReadAttempt):
            return m.AttemptRead(self.log.attempt(action.number))
        if isinstance(action, m.CreateIntent):
            return self._create(action.intent.attempt, "intent", action.intent)
        if isinstance(action, m.CreateManifest):
            return self._create(action.manifest.attempt, "p/0", action.manifest)
        if isinstance(action, m.CreateOutcome):
            return self._create(action.outcome.attempt, "outcome", action.outcome)
        if isinstance(action, m.Encode):
            return self._encode(action.intent)
        raise IntegrityError(f"the coordinator asked for {type(action).__name__}")

    def _create(self, number: int, name: str, record: Record) -> m.Event:
        data = record.to_bytes()
        self._wire_bytes += len(data)
        last: UnavailableError | None = None
        for attempt in range(CREATE_TRIES):
            try:
                self.log.store.create(attempt_key(number, name), data)
            except AlreadyExistsError:
                return self._taken(number, name)
            except StorageFullError:
                raise
            except UnavailableError as error:
                if found := self._readable(number, name):
                    return found
                last = error
                time.sleep(0.1 * 2**attempt)
            else:
                return m.Created()
        raise UnavailableError(
            f"the store did not take {name} of attempt {number} in {CREATE_TRIES} tries",
            found=last,
            next_step="Publish again.",
        ) from last

    def _taken(self, number: int, name: str) -> m.Event:
        """NotCreated, once what stands there can be read: a machine that reads nothing would ask again for ever."""
        try:
            self.log.fetch(attempt_key(number, name), len)
        except NotFoundError as error:
            raise UnavailableError(
                f"the store says that {name} of attempt {number} exists, and does not find it"
            ) from error
        return m.NotCreated()

    def _readable(self, number: int, name: str) -> m.Event | None:
        """After an ambiguous create: NotCreated if something stands there now (the machine compares nonces)."""
        try:
            return m.NotCreated() if self.log.store.size(attempt_key(number, name)) else None
        except RefitError:
            return None

    # ------------------------------------------------------------------------------------ encoding

    def _encode(self, intent: Intent) -> m.Event:
        if intent.base == 0:
            return self._encode_anchor(intent)
        self._timed("prepare", lambda: self._move_baseline(intent.base))
        encoder = SegmentEncoder(self.source, self._baseline, self._keys, self._prove)
        refs = self._upload(encoder.delta, payload_prefix(intent.attempt))
        manifest = ProducerManifest(self.log.run, intent.attempt, intent.base, 0, self._step, refs)
        digest = intent.base_digest + manifest.shift
        try:
            encoder.check(digest)
        except DigestMismatch:
            self._zero.restart()
            raise
        self._changed = encoder.changed
        return m.Encoded(manifest, digest, self._newest_anchor())

    def _encode_anchor(self, intent: Intent) -> m.Event:
        """The first version has nothing to apply to: it is an anchor, with a manifest that lists no payload."""
        encoder = SegmentEncoder(self.source, self._baseline, self._keys, prove=False)
        refs = self._upload(encoder.whole, anchor_prefix(intent.attempt) + "pl/")
        digest = sum((ref.post for ref in refs), Digest())
        anchor = seal_anchor(self.log, intent.attempt, digest, refs, self.source.files())
        self._wire_bytes += len(anchor.to_bytes()) + sum(file.size for file in anchor.files)
        self._changed = self.log.catalog.numel
        manifest = ProducerManifest(self.log.run, intent.attempt, 0, 0, self._step, ())
        return m.Encoded(manifest, digest, intent.attempt)

    def _upload(self, encode: EncodeSegment, prefix: str) -> tuple[PayloadRef, ...]:
        taken = counted(self.log.catalog, "encode", 0, self._emit)
        upload = Upload(self._recent, prefix, self._payload_bytes)
        refs: list[PayloadRef] = []
        self._timed("encode", lambda: refs.extend(upload_segments(taken, encode, upload, self._threads)))
        self._wire_bytes += sum(ref.size for ref in refs)
        self._check_stored(prefix, refs)
        return tuple(refs)

    def _check_stored(self, prefix: str, refs: list[PayloadRef]) -> None:
        """Rule (4) of protocol §3.5: every payload is in the store at its full length before COMMIT."""
        for ref in refs:
            if (found := self.log.store.size(prefix + ref.sha256)) != ref.size:
                raise IntegrityError("a payload was stored short", expected=ref.size, found=found)

    # ------------------------------------------------------------------------------------ baseline

    def _move_baseline(self, version: int) -> None:
        """Bring receiver number zero to ``version``, which is the head."""
        found = self._zero.follow(once=True)
        if found != version:
            raise AttemptLostError("another publisher moved the head", expected=version, found=found)
        self._recent.forget()

    def _settle(self, phase: str, work: Callable[[], None]) -> None:
        """After COMMIT: an error would say that nothing was committed, and the next publish makes good what failed."""
        try:
            self._timed(phase, work)
        except Exception as error:  # noqa: BLE001 - whatever it is, the version is committed
            self._emit(Event("behind", phase, text=str(error) or type(error).__name__))

    def _newest_anchor(self) -> int:
        found = self.log.newest_anchor()
        return found[0].version if found else 0

    def _say_baseline(self, event: Event) -> None:
        if event.type == "progress":
            self._emit(event)
        else:
            self._emit(replace(event, type="baseline", phase=event.phase or event.type))

    # ------------------------------------------------------------------------------------ reporting

    def _timed(self, phase: str, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        work()
        self._seconds[phase] = time.perf_counter() - started
        self._emit(Event("phase", phase, seconds=self._seconds[phase]))

    def _report(self, manifest: ProducerManifest, digest: Digest, anchor: int) -> Published:
        catalog = self.log.catalog
        return Published(
            version=manifest.attempt,
            base=manifest.base,
            step=manifest.step,
            changed=self._changed,
            numel=catalog.numel,
            dense_bytes=catalog.dense_bytes,
            wire_bytes=self._wire_bytes,
            digest=str(digest),
            anchor=anchor,
            seconds=dict(self._seconds),
        )


def _step_number(step: int) -> int:
    """``step`` as a record holds it. A manifest with any other number could be written and never read."""
    if isinstance(step, str) or (number := int(step)) != step or not 0 <= number < 1 << 64:
        raise UsageError("bad step", expected="an integer, 0 .. 2^64 - 1", found=repr(step)[:80])
    return number


def _unknown(number: int, failure: Exception) -> UnavailableError:
    return UnavailableError(
        f"the outcome of attempt {number} is unknown: {failure}",
        next_step="Publish again: the next publish finds out what became of it.",
    )
