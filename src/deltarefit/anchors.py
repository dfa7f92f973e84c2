"""Anchors: full versions from which a late joiner starts (protocol §3.7).

An anchor is payloads that set every element once, the side files of the checkpoint, and a record that is written last
and create-once; a directory without that record is nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from deltarefit import runtime
from deltarefit.affine.coverage import check_segments
from deltarefit.codec import ALL, SET, Delta, check_object, open_payload
from deltarefit.errors import (
    AlreadyExistsError,
    DigestMismatch,
    FormatError,
    IntegrityError,
    UnavailableError,
    UsageError,
)
from deltarefit.events import Emit, Event
from deltarefit.landing import Landing
from deltarefit.manifest import Anchor, Catalog, FileRef, PayloadRef
from deltarefit.pieces import Rows, piece_with
from deltarefit.pins import CatchUpPin
from deltarefit.ports import LiveTarget, Target
from deltarefit.protocol.attempts import Attempt
from deltarefit.records import Digest
from deltarefit.retention import Doomed
from deltarefit.runlog import RunLog, anchor_prefix


def seal_anchor(
    log: RunLog, version: int, digest: Digest, payloads: Sequence[PayloadRef], files: Mapping[str, bytes]
) -> Anchor:
    """Store the side files, then the record. The payloads are in the store already."""
    refs = tuple(_put_file(log, version, name, data) for name, data in sorted(files.items()))
    anchor = Anchor(log.run, version, digest, tuple(payloads), refs)
    runtime.point("anchor seal")
    try:
        key = anchor_prefix(version) + "anchor"
        log.store.create(key, log.bytes_of(key, anchor))
    except (AlreadyExistsError, UnavailableError):
        if log.anchor(version) != anchor:  # not our own success seen again: its payloads may not be there
            raise
    return anchor


def _put_file(log: RunLog, version: int, name: str, data: bytes) -> FileRef:
    try:
        ref = FileRef(name, hashlib.sha256(data).hexdigest(), len(data))
    except ValueError as error:
        raise UsageError(str(error), next_step="Rename it or leave it out of the source's files.") from error
    log.store.put(f"{anchor_prefix(version)}file/{ref.sha256}", data)
    return ref


def read_files(log: RunLog, anchor: Anchor) -> dict[str, bytes]:
    """The side files of an anchor, checked."""
    return {ref.name: _read_file(log, anchor.version, ref) for ref in anchor.files}


def _read_file(log: RunLog, version: int, ref: FileRef) -> bytes:
    def check(data: bytes) -> bytes:
        check_object(data, ref.sha256, ref.size, f"side file {ref.name}")
        return data

    return log.fetch(f"{anchor_prefix(version)}file/{ref.sha256}", check, most=ref.size)


def load_anchor(log: RunLog, anchor: Anchor, target: Target | LiveTarget, landing: Landing, emit: Emit) -> None:
    """Set every element of ``target`` from the anchor; bytes are durable on return. Proving them is the caller's."""
    target.seed(log.catalog, read_files(log, anchor))
    coverage = _Coverage(log.catalog)
    total, done = sum(ref.size for ref in anchor.payloads), 0
    for ref in anchor.payloads:
        key = f"{anchor_prefix(anchor.version)}pl/{ref.sha256}"
        data, deltas = log.fetch(key, partial(_opened, log, ref), most=ref.size)
        coverage.add(deltas)
        runtime.point("payload fill")
        landing.fill(ref, data, deltas)
        done += ref.size
        emit(Event("progress", "seed", anchor.version, done=done, total=total))
    coverage.finish()
    landing.flush()


class AnchorSearch:
    """Where one joiner may start: newest first, what turned out to be damaged passed over (F51).

    ``above`` is a version that only an anchor after it leads on from, as what followed it was pruned (F50).
    """

    def __init__(self, log: RunLog, pin: CatchUpPin, emit: Emit) -> None:
        self._log, self._pin, self._emit = log, pin, emit
        self._bad: dict[int, Exception] = {}
        self.above = 0

    def newest(self) -> tuple[Anchor, Attempt] | None:
        """The best one there is, as far as its record shows. Nothing is pinned. If none is left, raises what was wrong
        with the newest; None if there never was any."""
        found = next(self._left(), None)
        if found is None and self._bad:
            raise self._bad[max(self._bad)]
        return found

    def start(self) -> tuple[Anchor, Attempt] | None:
        """As ``newest``, pinned: once it is, no prune that has not condemned it yet will take it away."""
        for found in self._left():
            self._pin.hold(found[0].version)
            if self._log.tombstone(Doomed.ANCHOR, found[0].version) is None:
                return found
        newest = self.newest()
        if newest is not None:  # condemned, all of them: better than nothing, and perhaps still there
            self._pin.hold(newest[0].version)
        elif self.above:
            what, step = f"what follows version {self.above} was pruned", "Write an anchor: deltarefit anchor STORE."
            raise IntegrityError(what, expected="an anchor after it", found="none that can be read", next_step=step)
        return newest

    def past(self, version: int) -> Anchor | None:
        """One that leads past what follows ``version``, if there is one."""
        return next((anchor for anchor, _ in self._left() if anchor.version > version), None)

    def failed(self, anchor: Anchor, error: Exception) -> bool:
        """``anchor`` cannot be read; whether there is another. Says so then."""
        self._bad[anchor.version] = error
        found = next(self._left(), None)
        if found is not None:
            text = f"anchor {anchor.version} cannot be used, starting from {found[0].version}: {error}"
            self._emit(Event("skipped", "seed", anchor.version, text=text))
        return found is not None

    def retry(self) -> None:
        """What was damaged may have been restored, or was only read so."""
        self._bad.clear()

    def forget(self) -> None:
        """A catch-up is over."""
        self.retry()
        self.above = 0

    def _left(self) -> Iterator[tuple[Anchor, Attempt]]:
        for found in self._log.anchors(self._skip):
            if found[0].version not in self._bad and found[0].version > self.above:
                yield found

    def _skip(self, version: int, error: IntegrityError) -> None:
        if version not in self._bad:
            self._bad[version] = error
            self._emit(Event("skipped", "seed", version, text=f"anchor {version} cannot be used: {error}"))


def check_loaded(anchor: Anchor, found: Digest) -> None:
    """``DigestMismatch`` unless bits that were loaded from an anchor, read back, are those that it promises (I15)."""
    if found != anchor.digest:
        raise DigestMismatch("seeded weights are wrong", expected=anchor.digest, found=found)


def check_complete(log: RunLog, anchor: Anchor, *, deep: bool = False) -> None:
    """``IntegrityError`` unless every object of an anchor is there at its full length and they add up to its digest;
    ``deep``: unless all bytes are those that it names, too."""
    prefix = anchor_prefix(anchor.version)
    if (found := sum((ref.post for ref in anchor.payloads), Digest())) != anchor.digest:
        raise IntegrityError(f"anchor {anchor.version} does not add up", expected=anchor.digest, found=found)
    there = dict(log.store.list(prefix))
    refs = [(f"{prefix}pl/{ref.sha256}", ref.sha256, ref.size) for ref in anchor.payloads]
    refs += [(f"{prefix}file/{ref.sha256}", ref.sha256, ref.size) for ref in anchor.files]
    for key, sha256, size in refs:
        if (length := there.get(key)) != size:
            raise IntegrityError(f"{key[:-52]} is short or missing", expected=size, found=length)
        if deep:
            log.fetch(key, partial(check_object, sha256=sha256, size=size, where=key), most=size)


def _opened(log: RunLog, ref: PayloadRef, data: bytes) -> tuple[bytes, list[Delta]]:
    return data, open_payload(data, ref, log.catalog)


class _Coverage:
    """Checks that an anchor's deltas set every element of the catalog exactly once; they come from several producers,
    in any order."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._ranges: dict[tuple[int, Rows], list[tuple[int, int]]] = {}

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.operation != SET or delta.kind != ALL:
                name = self._catalog.tensors[delta.tensor].name
                raise FormatError("an anchor does not set every element", found=f"a difference of {name}")
            self._ranges.setdefault((delta.tensor, delta.rows), []).append((delta.start, delta.stop))

    def finish(self) -> None:
        parts = []
        for (tensor, rows), ranges in self._ranges.items():
            piece = piece_with(tensor, rows, max(stop for _, stop in ranges))
            parts += [(piece, start, stop) for start, stop in ranges]
        check_segments(self._catalog, parts, FormatError)
