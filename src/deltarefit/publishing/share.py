"""One producer's share of an attempt: its own pieces diffed, encoded and uploaded, and the manifest that says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deltarefit.catalogs import check_catalog
from deltarefit.errors import BaseMismatch, DigestMismatch, IntegrityError
from deltarefit.events import Emit, Event
from deltarefit.manifest import Intent, PayloadRef, ProducerManifest
from deltarefit.pieces import layout_of
from deltarefit.pipeline import EncodeSegment, Upload, counted, upload_segments
from deltarefit.ports import Baseline, Source, Store
from deltarefit.publishing.announcing import Announcing
from deltarefit.publishing.encoding import SegmentEncoder
from deltarefit.publishing.touched import Touched, touched_since
from deltarefit.publishing.trainers import Report
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, anchor_prefix, payload_prefix


@dataclass(frozen=True)
class Options:
    """How a share is made. ``payload_bytes`` and ``ahead_bytes`` as in ``pipeline``; ``prove`` as in ``Publisher``."""

    threads: int
    payload_bytes: int
    ahead_bytes: int
    prove: bool


@dataclass
class Share:
    """Makes this rank's share, publish after publish. ``store`` remembers what it took until the baseline has it;
    ``watch`` is called again and again meanwhile and may raise to stop it."""

    log: RunLog
    store: Store
    source: Source
    baseline: Baseline
    options: Options
    emit: Emit
    watch: Callable[[], None] = lambda: None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = layout_of(self.source.pieces)

    def make(self, intent: Intent, step: int, taken: Callable[[], None]) -> Report:
        """Everything up to the manifest, from a source that is held. ``taken`` is called once all its bits are read;
        what it raises fails the attempt."""
        self.seconds.clear()
        return self._anchor(intent, step, taken) if intent.base == 0 else self._delta(intent, step, taken)

    def check_source(self) -> None:
        """``BaseMismatch`` unless the source still is what the run was opened with: catalog and pieces."""
        check_catalog(self.source.catalog, self.log.catalog)
        if (found := layout_of(self.source.pieces)) != self.layout:
            raise BaseMismatch(
                f"rank {self.source.exchange.rank} owns other pieces than when it began",
                expected=self.layout,
                found=found,
                next_step="Make a new Publisher for another mesh or sharding: it rebuilds the baseline.",
            )

    def _delta(self, intent: Intent, step: int, taken: Callable[[], None]) -> Report:
        self.timed("prepare", lambda: self.baseline.move(intent.base))
        touched = touched_since(self.log, intent.base, intent.attempt, self.source.pieces, self.watch)
        encoder = self._encoder(self.options.prove, touched)
        announcing = Announcing(self.log, intent, self.source.exchange.rank)
        refs = self._upload(encoder.delta, payload_prefix(intent.attempt), taken, announcing.add)
        announcing.end()
        part = self.baseline.part + sum((ref.post - ref.pre for ref in refs), Digest())
        try:
            encoder.check(part)
        except DigestMismatch:
            self.baseline.doubt()
            raise
        return self._report(intent, step, part, refs, (), encoder.changed)

    def _anchor(self, intent: Intent, step: int, taken: Callable[[], None]) -> Report:
        """The first version has nothing to apply to: it is an anchor, with manifests that list no payload."""
        encoder = self._encoder(prove=False, touched=Touched())
        refs = self._upload(encoder.whole, anchor_prefix(intent.attempt) + "pl/", taken)
        part = sum((ref.post for ref in refs), Digest())
        return self._report(intent, step, part, (), refs, encoder.changed)

    def _encoder(self, prove: bool, touched: Touched) -> SegmentEncoder:
        return SegmentEncoder(self.log.run, self.log.catalog, self.source, self.baseline, prove, touched)

    def _report(
        self,
        intent: Intent,
        step: int,
        part: Digest,
        refs: tuple[PayloadRef, ...],
        anchored: tuple[PayloadRef, ...],
        changed: int,
    ) -> Report:
        run, rank = self.log.run, self.source.exchange.rank
        manifest = ProducerManifest(run, intent.attempt, intent.base, rank, step, part, self.layout, refs, changed)
        wire_bytes = sum(ref.size for ref in (*refs, *anchored)) + len(manifest.to_bytes())
        return Report(manifest, anchored, wire_bytes)

    def _upload(
        self,
        encode: EncodeSegment,
        prefix: str,
        taken: Callable[[], None],
        announce: Callable[[PayloadRef], None] = lambda ref: None,
    ) -> tuple[PayloadRef, ...]:
        catalog, options = self.log.catalog, self.options
        extents = [(piece.length, catalog.tensors[piece.tensor].width) for piece in self.source.pieces]
        upload = Upload(self.store, prefix, options.payload_bytes, options.ahead_bytes, self.watch, announce)
        segments = counted(extents, "encode", 0, self._progress)
        refs: list[PayloadRef] = []
        self.timed("encode", lambda: refs.extend(upload_segments(segments, encode, upload, options.threads, taken)))
        self._check_stored(prefix, refs)
        return tuple(refs)

    def _progress(self, event: Event) -> None:
        self.watch()
        self.emit(event)

    def _check_stored(self, prefix: str, refs: list[PayloadRef]) -> None:
        """Rule (4) of protocol §3.5: every payload is in the store at its full length before COMMIT."""
        for ref in refs:
            if (found := self.log.store.size(prefix + ref.sha256)) != ref.size:
                raise IntegrityError("a payload was stored short", expected=ref.size, found=found)

    def timed(self, phase: str, work: Callable[[], None]) -> None:
        """Do it, and say how long it took."""
        started = time.perf_counter()
        work()
        self.seconds[phase] = time.perf_counter() - started
        self.emit(Event("phase", phase, seconds=self.seconds[phase]))
