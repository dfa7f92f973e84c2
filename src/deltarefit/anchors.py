"""Anchors: full versions from which a late joiner starts (protocol §3.7).

An anchor is payloads that set every element once, the side files of the checkpoint, and a record that is written last
and create-once; a directory without that record is nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial

from deltarefit import runtime
from deltarefit.affine.coverage import check_segments
from deltarefit.codec import ALL, SET, Delta, check_object, open_payload
from deltarefit.errors import AlreadyExistsError, FormatError, UnavailableError, UsageError
from deltarefit.events import Emit, Event
from deltarefit.landing import Landing
from deltarefit.manifest import Anchor, Catalog, FileRef, PayloadRef
from deltarefit.pieces import Rows, piece_with
from deltarefit.ports import LiveTarget, Target
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, anchor_prefix


def seal_anchor(
    log: RunLog, version: int, digest: Digest, payloads: Sequence[PayloadRef], files: Mapping[str, bytes]
) -> Anchor:
    """Store the side files, then the record. The payloads are in the store already."""
    refs = tuple(_put_file(log, version, name, data) for name, data in sorted(files.items()))
    anchor = Anchor(log.run, version, digest, tuple(payloads), refs)
    runtime.point("anchor seal")
    try:
        log.store.create(anchor_prefix(version) + "anchor", anchor.to_bytes())
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

    return log.fetch(f"{anchor_prefix(version)}file/{ref.sha256}", check)


def load_anchor(log: RunLog, anchor: Anchor, target: Target | LiveTarget, landing: Landing, emit: Emit) -> None:
    """Set every element of ``target`` from the anchor; bytes are durable on return. Proving them is the caller's."""
    target.seed(log.catalog, read_files(log, anchor))
    coverage = _Coverage(log.catalog)
    total, done = sum(ref.size for ref in anchor.payloads), 0
    for ref in anchor.payloads:
        data, deltas = log.fetch(f"{anchor_prefix(anchor.version)}pl/{ref.sha256}", partial(_opened, log, ref))
        coverage.add(deltas)
        runtime.point("payload fill")
        landing.fill(ref, data, deltas)
        done += ref.size
        emit(Event("progress", "seed", anchor.version, done=done, total=total))
    coverage.finish()
    landing.flush()


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
