"""Write an anchor of the head: a full version, so that a late joiner need not fetch the chain from the first
one.

The bits come from a baseline, receiver number zero, which is brought up to the head first. Nothing of an
anchor counts until its record is written, last and create-once; a try that died is done again under the same
hashes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from deltarefit.anchors import read_files, seal_anchor
from deltarefit.codec import EncodedDelta, encode_full
from deltarefit.digest import catalog_keys
from deltarefit.errors import DigestMismatch, IntegrityError, NotFoundError
from deltarefit.events import Emit, ignore
from deltarefit.manifest import Anchor, PayloadRef
from deltarefit.pieces import whole
from deltarefit.pipeline import PAYLOAD_BYTES, Upload, counted, extents_of, upload_segments
from deltarefit.ports import Store, Target
from deltarefit.protocol.messages import Attempt
from deltarefit.receiver import Receiver
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, anchor_prefix
from deltarefit.weights import Segment, flat


@dataclass(frozen=True)
class Anchored:
    """The anchor of one version. ``created`` is false if it was there before; bytes are canonical and as
    stored."""

    version: int
    created: bool
    payloads: int
    dense_bytes: int
    wire_bytes: int


def write_anchor(
    store: Store,
    baseline: Target,
    *,
    threads: int | None = None,
    payload_bytes: int = PAYLOAD_BYTES,
    emit: Emit = ignore,
) -> Anchored:
    """Make the head an anchor; receivers that start later begin there.

    ``baseline`` is moved to the head if it is not there. Raises ``NotFoundError`` if nothing was published
    yet, ``DigestMismatch`` if the baseline's bits changed under our hands (nothing is written then).
    """
    log = RunLog.open(store)
    version = _bring_to_head(store, baseline, threads, emit)
    commit = log.version(version)
    if (anchor := log.anchor(version)) is not None:
        log.put_hint(version, version)
        return _anchored(log, anchor, created=False)
    refs = _upload(log, baseline, version, Upload(store, anchor_prefix(version) + "pl/", payload_bytes), threads, emit)
    anchor = seal_anchor(log, version, _proven(commit, refs), refs, _side_files(log))
    log.put_hint(version, version)
    return _anchored(log, anchor, created=True)


def _bring_to_head(store: Store, baseline: Target, threads: int | None, emit: Emit) -> int:
    receiver = Receiver(store, baseline, threads=threads, emit=emit)
    try:
        return receiver.follow(once=True)
    finally:
        receiver.close()


def _upload(
    log: RunLog, baseline: Target, version: int, upload: Upload, threads: int | None, emit: Emit
) -> tuple[PayloadRef, ...]:
    keys = catalog_keys(log.run, log.catalog)

    def encode(segment: Segment) -> EncodedDelta:
        tensor, start, stop = segment
        piece = whole(tensor, log.catalog.tensors[tensor].numel)
        with baseline.window(tensor, start, stop) as (array, first):
            return encode_full(piece, flat(array, first, stop - start), start, keys[tensor])

    return upload_segments(
        counted(extents_of(log.catalog), "anchor", version, emit), encode, upload, threads or os.cpu_count() or 1
    )


def _proven(commit: Attempt, refs: tuple[PayloadRef, ...]) -> Digest:
    """What was read and uploaded is what the log says of this version."""
    found = sum((ref.post for ref in refs), Digest())
    expected = commit.outcome.digest if commit.outcome else None
    if found != expected:
        what = f"the baseline does not hold version {commit.number}"
        raise DigestMismatch(
            what, expected=expected, found=found, next_step="Run it again: the baseline is proven first."
        )
    return found


def _side_files(log: RunLog) -> dict[str, bytes]:
    found = log.newest_anchor()
    if found is None:
        raise NotFoundError("the run has no anchor to take side files from", next_step="Publish to a new store.")
    return read_files(log, found[0])


def _anchored(log: RunLog, anchor: Anchor, *, created: bool) -> Anchored:
    prefix = anchor_prefix(anchor.version) + "pl/"
    for ref in anchor.payloads:
        if (found := log.store.size(prefix + ref.sha256)) != ref.size:
            raise IntegrityError(f"payload {ref.sha256[:12]} of an anchor is short", expected=ref.size, found=found)
    wire = sum(ref.size for ref in anchor.payloads) + sum(file.size for file in anchor.files) + len(anchor.to_bytes())
    return Anchored(anchor.version, created, len(anchor.payloads), log.catalog.dense_bytes, wire)
