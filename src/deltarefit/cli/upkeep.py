"""``anchor`` and ``prune``: what late joiners start from, and what nobody needs any more."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from deltarefit.advice import JOINS_PER_VERSION, Advice, advise
from deltarefit.anchoring import Anchored, write_anchor
from deltarefit.baseline import MemoryBaseline
from deltarefit.cli import options, words
from deltarefit.cli.keys import notary
from deltarefit.cli.publishing import talking
from deltarefit.cli.settings import baseline_directory
from deltarefit.cli.verbs import Call, app, verb
from deltarefit.errors import UsageError
from deltarefit.events import Event
from deltarefit.localfiles import disk_errors
from deltarefit.ports import Target
from deltarefit.pruning import GRACE_S, Pruned, prune
from deltarefit.runlog import RunLog
from deltarefit.targets.checkpoint import CheckpointTarget


@verb(app, "anchor")
def anchor(
    call: Call,
    store: options.Store,
    baseline: options.Baseline = None,
    within: options.Within = None,
    threads: options.Threads = None,
    sign: options.Sign = None,
    trust: options.Trust = None,
    advice: options.Advise = False,
    joins_per_version: options.JoinsPerVersion = JOINS_PER_VERSION,
    recovery_s: options.RecoveryS = 0.0,
    bandwidth: options.Bandwidth = 0.0,
) -> None:
    """Store the head as a whole, so that receivers that start later begin there.

    Without it, a new receiver fetches the first version and every delta since. The bits come from the trainer's
    baseline, if it is on this machine; else from the last anchor and the chain, in memory or, with --in, in a
    temporary directory. The last line of stdout is the anchor's version.

    With --advise nothing is written: it says after how many versions an anchor pays, from what anchors and
    deltas of this run weigh. Then the last line of stdout is that number.
    """
    keys, objects = notary(trust, sign), call.remote.existing(store)
    log = RunLog.open(objects, keys)
    if advice:
        _advise(call, log, joins_per_version, recovery_s, bandwidth)
        return
    with _working_copy(log.run, baseline, within) as target, call.out.progress() as bars:
        emit = talking(call.out, bars)
        done = write_anchor(objects, target, threads=threads, emit=emit, sign=keys.signer, trust=keys.trust)
    call.out.say(_anchor_summary(done))
    call.out.result(done.version, dataclasses.asdict(done))


@contextmanager
def _working_copy(run: str, baseline: Path | None, within: Path | None) -> Iterator[Target]:
    """Where the head is put together."""
    if baseline is not None and within is not None:
        raise UsageError("--baseline and --in are two places", next_step="Give one of them, or none.")
    kept = baseline_directory(baseline, run)
    if within is not None:
        with disk_errors(f"cannot use {within}"):
            scratch = tempfile.TemporaryDirectory(prefix="deltarefit-anchor-", dir=within)
        with scratch as directory, closing(CheckpointTarget(Path(directory) / "version")) as target:
            yield target
    elif baseline is not None or kept.is_dir():
        with closing(CheckpointTarget(kept)) as target:
            yield target
    else:
        yield MemoryBaseline()


def _anchor_summary(done: Anchored) -> str:
    if not done.created:
        return f"Version {done.version} is an anchor already"
    payloads = words.count(done.payloads, "payload")
    return f"Anchored   version {done.version}: {words.size(done.wire_bytes)} in {payloads}"


def _advise(call: Call, log: RunLog, joins: float, recovery_s: float, bandwidth: float) -> None:
    found = advise(log, joins_per_version=joins, recovery_s=recovery_s, bandwidth=bandwidth * 1e6)
    for name, text in _reasons(found).items():
        call.out.data(f"{name:<12} {text}")
    call.out.result(found.interval, dataclasses.asdict(found))


def _reasons(found: Advice) -> dict[str, str]:
    each = f"{words.size(found.delta_bytes)} each, {found.density:.3f} of it"
    facts = {
        "anchor": f"{words.size(found.anchor_bytes)} (version {found.anchor})",
        "delta": f"{each} ({words.count(found.versions, 'version')})",
        "joins": f"{found.joins_per_version:g} per version",
        "since": f"{words.count(found.since, 'version')} after the newest anchor",
    }
    if found.bandwidth:
        speed = f"{words.size(found.bandwidth)} a second"
        facts["recovery"] = f"{words.seconds(found.recovery_now_s)} now, at {speed}; {found.recovery_s:g} s allowed"
    why = "longer chains take too long to recover" if found.capped else "writing and reading cost least together"
    facts["advice"] = f"an anchor every {words.count(found.interval, 'version')}: {why}"
    return facts


@verb(app, "prune")
def prune_verb(
    call: Call,
    store: options.Store,
    keep: options.Keep = 2,
    grace: options.Grace = GRACE_S,
    dry_run: options.DryRun = False,
    deep: options.Deep = False,
    trust: options.Trust = None,
) -> None:
    """Delete payloads, manifests and anchors that nobody needs any more.

    Kept are the newest anchors that can be read and all that follows them, everything that a living receiver or a
    catch-up still reads, and every intent and outcome. Receivers that come too late start from an anchor. It may
    be killed at any instant: run it again. The last line of stdout is the number of objects deleted.

    Example: [bold]deltarefit prune s3://bucket/run7 --dry-run[/]
    """
    objects = call.remote.existing(store)
    with call.out.progress() as bars:
        tell = talking(call.out, bars, "prune")

        def emit(event: Event) -> None:
            tell(event)
            if event.phase == "grace" and event.seconds:
                call.out.say(f"Waiting    {words.seconds(event.seconds)} for readers, before anything is deleted")

        done = prune(
            objects,
            keep_anchors=keep,
            grace_s=grace,
            dry_run=dry_run,
            deep=deep,
            trust=notary(trust, None).trust,
            emit=emit,
        )
    for line in _prune_summary(done, keep):
        call.out.say(line)
    call.out.result(done.objects, dataclasses.asdict(done))


def _prune_summary(done: Pruned, keep: int) -> list[str]:
    if len(done.anchors) < keep:
        found = words.count(len(done.anchors), "anchor")
        return [
            f"Kept       everything: {found} can be read, and {keep} must stay. Write one (anchor STORE), or --keep 1"
        ]
    what = f"{words.count(done.attempts, 'attempt')} and {words.count(done.old_anchors, 'anchor')}"
    verb = "Would free" if done.dry_run else "Freed     "
    lines = [f"{verb} {words.size(done.size)} of {what} before version {done.floor}"]
    if done.held_by:
        lines.append(f"Kept       more than {keep} anchors need: {done.held_by}")
    if done.stale_pins:
        lines.append(f"Removed    {words.count(len(done.stale_pins), 'pin')} of readers that died")
    return lines
