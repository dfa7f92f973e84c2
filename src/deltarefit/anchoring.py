"""Write an anchor of the head: a full version, so that a late joiner need not fetch the chain from the first
one.

The bits come from a baseline, receiver number zero, which is brought up to the head first. Nothing of an
anchor counts until its record is written, last and create-once; a try that died is done again under the same
hashes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from deltarefit.anchors import read_files, seal_anchor
from deltarefit.codec import EncodedDelta, encode_full
from deltarefit.digest import catalog_keys
from deltarefit.errors import AlreadyExistsError, AttemptLostError, DigestMismatch, IntegrityError, NotFoundError
from deltarefit.events import Emit, Event, ignore
from deltarefit.manifest import Anchor, PayloadRef
from deltarefit.notary import Notary, check_signer, signer_of
from deltarefit.pieces import whole
from deltarefit.pins import CatchUpPin
from deltarefit.pipeline import PAYLOAD_BYTES, Upload, counted, extents_of, upload_segments
from deltarefit.ports import Store, Target
from deltarefit.protocol.attempts import Attempt
from deltarefit.receiver import Receiver
from deltarefit.records import Digest
from deltarefit.retention import Doomed
from deltarefit.runlog import RUN, RunLog, anchor_prefix
from deltarefit.signing import Signer
from deltarefit.trust import Trust
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
    sign: Signer | None = None,
    trust: Trust | None = None,
) -> Anchored:
    """Make the head an anchor; receivers that start later begin there.

    ``baseline`` is moved to the head if it is not there; an empty one (``MemoryBaseline()``, a new directory) is filled
    from the newest anchor and the chain. Of several writers of one version the first wins, and all return its anchor.
    Raises ``NotFoundError`` if nothing was published yet, ``DigestMismatch`` if the baseline's bits changed under our
    hands (nothing is written then), ``AttemptLostError`` if the version was condemned by a prune meanwhile. ``sign``
    and ``trust`` as in ``Publisher``.
    """
    log = RunLog.open(store, Notary(sign, trust))
    check_signer(log.notary, signer_of(store, RUN), store.url)
    version = _bring_to_head(store, baseline, threads, emit, trust)
    anchor, created = log.anchor(version), False
    if anchor is None:
        pin = CatchUpPin(log, "anchor", emit)  # what is not sealed yet looks like what a dead writer left
        try:
            pin.hold(version)
            upload = Upload(_KeepsWhole(store), anchor_prefix(version) + "pl/", payload_bytes)
            refs = _upload(log, baseline, version, upload, threads, _heard(pin, emit))
            anchor, created = _sealed(log, log.version(version), refs)
        finally:
            pin.release()
    log.put_hint(version, version)
    return _anchored(log, anchor, created=created)


def _heard(pin: CatchUpPin, emit: Emit) -> Emit:
    def both(event: Event) -> None:
        pin.hear(event)
        emit(event)

    return both


def _sealed(log: RunLog, commit: Attempt, refs: tuple[PayloadRef, ...]) -> tuple[Anchor, bool]:
    """The anchor, and whether it is ours."""
    digest = _proven(commit, refs)
    _check_stored(log, commit.number, refs)
    if log.tombstone(Doomed.ANCHOR, commit.number) is not None:
        step = "Run it again: it makes an anchor of the head as it is now."
        raise AttemptLostError(f"an anchor of version {commit.number} is not wanted any more: pruned", next_step=step)
    try:
        return seal_anchor(log, commit.number, digest, refs, _side_files(log)), True
    except AlreadyExistsError:
        other = log.anchor(commit.number)
        if other is None or other.digest != digest:
            raise
        return other, False  # another writer was first: its payloads came before its record


def _bring_to_head(store: Store, baseline: Target, threads: int | None, emit: Emit, trust: Trust | None) -> int:
    receiver = Receiver(store, baseline, threads=threads, emit=emit, trust=trust)
    try:
        return receiver.follow(once=True)
    finally:
        receiver.close()


def _upload(
    log: RunLog, baseline: Target, version: int, upload: Upload, threads: int | None, emit: Emit
) -> tuple[PayloadRef, ...]:
    keys = catalog_keys(log.run, log.catalog)

    def encode(segment: Segment) -> tuple[EncodedDelta, ...]:
        tensor, start, stop = segment
        piece = whole(tensor, log.catalog.tensors[tensor].numel)
        with baseline.window(tensor, start, stop) as (array, first):
            return (encode_full(piece, flat(array, first, stop - start), start, keys[tensor]),)

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
    """Of the newest anchor whose files can be read."""
    errors: list[Exception] = []
    for anchor, _ in log.anchors(lambda _, error: errors.append(error)):
        try:
            return read_files(log, anchor)
        except (IntegrityError, NotFoundError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
    raise NotFoundError("the run has no anchor to take side files from", next_step="Publish to a new store.")


class _KeepsWhole:
    """``ports.Store`` over another that never puts a payload over the same one. Of what several writers have in
    common, and one that died among them, the record may be there already, or on its way: what they saw whole must not
    become less because a later upload is cut short."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        try:
            for _ in range(2):  # what was read may have been damaged on its way
                if self._store.get(key, 0, len(data) + 1) == data:
                    return
        except NotFoundError:
            with suppress(AlreadyExistsError):  # another writer's by now; its length is looked at before the record
                self._store.create(key, bytes(data))
        else:
            self._store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._store.create(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._store.get(key, start, length)

    def size(self, key: str) -> int:
        return self._store.size(key)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)


def _anchored(log: RunLog, anchor: Anchor, *, created: bool) -> Anchored:
    outcome = log.version(anchor.version).outcome
    if outcome is None or anchor.digest != outcome.digest:
        what = f"anchor {anchor.version} does not have the digest of its version"
        raise IntegrityError(what, expected=outcome.digest if outcome else None, found=anchor.digest)
    _check_stored(log, anchor.version, anchor.payloads)
    wire = sum(ref.size for ref in anchor.payloads) + sum(file.size for file in anchor.files) + len(anchor.to_bytes())
    return Anchored(anchor.version, created, len(anchor.payloads), log.catalog.dense_bytes, wire)


def _check_stored(log: RunLog, version: int, refs: tuple[PayloadRef, ...]) -> None:
    """Rule (4) of protocol §3.5 holds for anchors, too: a record of short payloads could never be taken back."""
    prefix = anchor_prefix(version) + "pl/"
    for ref in refs:
        if (found := log.store.size(prefix + ref.sha256)) != ref.size:
            raise IntegrityError(f"payload {ref.sha256[:12]} of an anchor is short", expected=ref.size, found=found)
