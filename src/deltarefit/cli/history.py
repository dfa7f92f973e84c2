"""``log`` and ``show``: what the store says of a run. They read records only, and payloads if asked to."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

from deltarefit.cli import options, words
from deltarefit.cli.keys import notary
from deltarefit.cli.output import Output, columns
from deltarefit.cli.verbs import Call, app, verb
from deltarefit.errors import NotFoundError, UsageError
from deltarefit.inspection import Row, VersionDetails, inspect_version, row, tensor_changes
from deltarefit.protocol.attempts import Attempt
from deltarefit.runlog import RunLog


@verb(app, "log")
def log(call: Call, store: options.Store, attempts: options.Attempts = 20, trust: options.Trust = None) -> None:
    """List the attempts of a run, newest last.

    A committed attempt is the version of its number. An aborted one is no version; an open one is being
    published, or its publisher died and the next publish will close it. Sizes are in MB (1,000,000 bytes).
    """
    run = RunLog.open(call.remote.existing(store), notary(trust))
    anchors = {run.hint().anchor}
    rows = [row(run, attempt, anchors) for attempt in _newest(run, attempts)]
    table = columns(
        "attempt",
        "outcome",
        "base",
        "step",
        "density",
        "changed",
        "dense MB",
        "wire MB",
        "x smaller",
        "anchor",
    )
    for entry in rows:
        table.add_row(*_cells(entry))
    call.out.table(table)
    for entry in rows:
        if entry.reason:
            call.out.detail(f"attempt {entry.attempt} was aborted: {entry.reason}")
    call.out.record({"run": run.run, "attempts": [asdict(entry) for entry in rows]})


def _newest(run: RunLog, wanted: int) -> deque[Attempt]:
    """The hint may be stale or wrong; then all attempts are read."""
    first = max(1, run.hint().head - wanted + 1)
    found = deque(run.attempts(first), wanted)
    return found if found or first == 1 else deque(run.attempts(1), wanted)


def _cells(entry: Row) -> tuple[str, ...]:
    known = entry.step is not None
    return (
        str(entry.attempt),
        entry.outcome,
        str(entry.base),
        str(entry.step) if known else "-",
        words.percent(entry.density) if known else "-",
        f"{entry.changed:,}" if known else "-",
        words.megabytes(entry.dense_bytes),
        words.megabytes(entry.wire_bytes) if known else "-",
        words.times(entry.dense_bytes, entry.wire_bytes) if known else "-",
        "anchor" if entry.anchor else "",
    )


@verb(app, "show")
def show(
    call: Call,
    store: options.Store,
    version: options.Version = "head",
    tensors: options.Tensors = False,
    trust: options.Trust = None,
) -> None:
    """Show one version in detail: its base, digests, and payloads.

    Streams are the parts of a payload before compression: positions (gaps, runs) and values by bit width.
    """
    run = RunLog.open(call.remote.existing(store), notary(trust))
    number = _number(run, version)
    details = inspect_version(run, number)
    with call.out.progress() as bars:
        changes = tensor_changes(run, details, bars) if tensors else None
    _print_details(call.out, details)
    body = details.plain()
    if changes is not None:
        table = columns("tensor", "dtype", "shape", "changed", "density", left=3)
        for change in changes:
            density = words.percent(change.density)
            table.add_row(change.name, change.dtype, words.shape(change.shape), f"{change.changed:,}", density)
        call.out.table(table)
        body["tensors"] = [asdict(change) for change in changes]
    call.out.record(body)


def _number(run: RunLog, text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text != "head":
        raise UsageError("bad VERSION", expected="a number from 1 on, or head", found=repr(text)[:40])
    if (head := run.head()) is None:
        raise NotFoundError("the run has no committed version yet", next_step="Publish a checkpoint first.")
    return head.number


def _print_details(out: Output, details: VersionDetails) -> None:
    entry = details.row
    each = f"{details.bytes_per_changed:.3f} bytes per changed element"
    dense, wire = words.size(entry.dense_bytes), words.size(entry.wire_bytes)
    smaller = words.times(entry.dense_bytes, entry.wire_bytes)
    facts = {
        "version": f"{entry.attempt} on base {entry.base}, step {entry.step}" + ", anchor" * entry.anchor,
        "mode": details.mode,
        **({"held by": ", ".join(details.members)} if details.members else {}),
        **({"evicted": ", ".join(details.evicted)} if details.evicted else {}),
        "digest": details.digest,
        "base digest": details.base_digest,
        "changed": f"{entry.changed:,} of {entry.numel:,} elements, density {words.percent(entry.density)}",
        "wire": f"{wire} for {dense}, {smaller} times smaller, {each}",
    }
    for name, text in facts.items():
        out.data(f"{name:<12} {text}")
    table = columns("payload", "bytes", "deltas", "changed", "raw bytes", "streams (raw bytes)")
    table.columns[-1].justify = "left"
    for ref in details.payloads:
        streams = " ".join(f"{name}:{size}" for name, size in sorted(ref.streams.items()))
        raw = sum(ref.streams.values())
        table.add_row(ref.sha256[:12], f"{ref.size:,}", str(ref.deltas), f"{ref.changed:,}", f"{raw:,}", streams)
    for file in details.files:
        table.add_row(file.sha256[:12], f"{file.size:,}", "", "", "", f"side file {file.name}")
    out.table(table)
