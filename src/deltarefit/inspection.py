"""What a run's log says of its versions, for people and tools. Reads records, and payloads only for
``tensor_changes``."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from functools import partial

from deltarefit.codec import open_payload
from deltarefit.compare import TensorChange
from deltarefit.errors import NotFoundError
from deltarefit.events import Emit, Event, ignore
from deltarefit.manifest import Anchor, FileRef, PayloadRef
from deltarefit.protocol.attempts import Attempt
from deltarefit.records import Record
from deltarefit.runlog import RunLog, anchor_prefix, payload_prefix


@dataclass(frozen=True)
class Row:
    """One attempt. ``outcome`` is COMMIT, ABORT or open; ``step`` is None until a manifest says. ``changed``
    counts the positions that the deltas carry: where most of a range changed, they may carry all of it. Bytes
    are canonical, and as stored with all records but batches and signatures; ``anchor``: receivers can start here."""

    attempt: int
    outcome: str
    base: int
    step: int | None
    changed: int
    numel: int
    density: float
    dense_bytes: int
    wire_bytes: int
    times_smaller: float
    anchor: bool
    reason: str


@dataclass(frozen=True)
class VersionDetails:
    """One committed version. ``payloads`` and ``files`` are the anchor's where there is no base."""

    run: str
    row: Row
    digest: str
    base_digest: str
    payloads: tuple[PayloadRef, ...]
    files: tuple[FileRef, ...]
    mode: str = ""
    members: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()

    @property
    def bytes_per_changed(self) -> float:
        """Payload bytes for each changed element."""
        return sum(ref.size for ref in self.payloads) / self.row.changed if self.row.changed else 0.0

    def plain(self) -> dict[str, object]:
        """For JSON."""
        row = asdict(self.row)
        return {
            "run": self.run,
            "version": row.pop("attempt"),
            **row,
            "mode": self.mode,
            "members": self.members,
            "evicted": self.evicted,
            "digest": self.digest,
            "base_digest": self.base_digest,
            "bytes_per_changed": self.bytes_per_changed,
            "payloads": [_plain(ref) for ref in self.payloads],
            "files": [asdict(file) for file in self.files],
        }


def _plain(ref: PayloadRef) -> dict[str, object]:
    return {
        "sha256": ref.sha256,
        "size": ref.size,
        "deltas": ref.deltas,
        "changed": ref.changed,
        "streams": ref.streams,
    }


def row(log: RunLog, attempt: Attempt, anchors: AbstractSet[int] = frozenset()) -> Row:
    """What is known of an attempt. ``anchors`` are versions known to be anchors beside those that are one by
    birth."""
    intent, outcome = attempt.intent, attempt.outcome
    base = intent.base if intent else 0
    whole = attempt.committed and base == 0 and not attempt.pruned
    changed = sum(manifest.changed for manifest in attempt.manifests)
    dense, wire = log.catalog.dense_bytes, _wire_bytes(attempt, log.anchor(attempt.number) if whole else None)
    return Row(
        attempt=attempt.number,
        outcome=outcome.decision.value if outcome else "open",
        base=base,
        step=attempt.manifests[0].step if attempt.manifests else None,
        changed=changed,
        numel=log.catalog.numel,
        density=changed / log.catalog.numel if log.catalog.numel else 0.0,
        dense_bytes=dense,
        wire_bytes=wire,
        times_smaller=dense / wire if wire else 0.0,
        anchor=whole or (attempt.committed and attempt.number in anchors),
        reason=outcome.reason if outcome else "",
    )


def _wire_bytes(attempt: Attempt, anchor: Anchor | None) -> int:
    records: list[Record | None] = [attempt.intent, *attempt.manifests, attempt.outcome, anchor]
    objects: list[PayloadRef | FileRef] = list(attempt.payloads)
    if anchor:
        objects += [*anchor.payloads, *anchor.files]
    return sum(len(record.to_bytes()) for record in records if record) + sum(each.size for each in objects)


def inspect_version(log: RunLog, number: int) -> VersionDetails:
    """Details of a version; ``NotFoundError`` if that attempt is not committed, or pruned."""
    attempt = log.version(number)
    if attempt.pruned:
        raise NotFoundError(f"version {number} was pruned", next_step="Only its place in the log is left: log STORE.")
    intent, outcome = attempt.intent, attempt.outcome
    anchor = log.anchor(number)
    first = anchor if intent and intent.base == 0 else None
    return VersionDetails(
        run=log.run,
        row=row(log, attempt, {number} if anchor else frozenset()),
        digest=str(outcome.digest) if outcome else "",
        base_digest=str(intent.base_digest) if intent else "",
        payloads=first.payloads if first else attempt.payloads,
        files=first.files if first else (),
        mode=intent.mode.value if intent else "",
        members=outcome.members if outcome else (),
        evicted=outcome.evicted if outcome else (),
    )


def tensor_changes(log: RunLog, details: VersionDetails, emit: Emit = ignore) -> tuple[TensorChange, ...]:
    """Changed elements of every tensor that the version touches, most first. Fetches and checks all its
    payloads, one at a time."""
    number, base = details.row.attempt, details.row.base
    prefix = payload_prefix(number) if base else anchor_prefix(number) + "pl/"
    counts = [0] * len(log.catalog.tensors)
    total, done = sum(ref.size for ref in details.payloads), 0
    for ref in details.payloads:
        for delta in log.fetch(prefix + ref.sha256, partial(open_payload, ref=ref, catalog=log.catalog), most=ref.size):
            counts[delta.tensor] += delta.count
        done += ref.size
        emit(Event("progress", "fetch", number, done=done, total=total))
    found = [TensorChange.of(entry, n) for entry, n in zip(log.catalog.tensors, counts, strict=True) if n]
    return tuple(sorted(found, key=lambda change: -change.changed))
