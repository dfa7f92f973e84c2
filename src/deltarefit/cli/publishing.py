"""``publish`` and ``anchor``: what goes into a store."""

from __future__ import annotations

import dataclasses
from contextlib import closing

from deltarefit.anchoring import Anchored, write_anchor
from deltarefit.cli import options, words
from deltarefit.cli.output import Output
from deltarefit.cli.settings import baseline_directory
from deltarefit.cli.verbs import Call, app, verb
from deltarefit.events import Emit, Event
from deltarefit.manifest import ProducerManifest
from deltarefit.pipeline import PAYLOAD_BYTES
from deltarefit.publisher import Published, Publisher
from deltarefit.runlog import RunLog, attempt_key
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.targets.checkpoint import CheckpointTarget


@verb(app, "publish")
def publish(
    call: Call,
    ckpt: options.Checkpoint,
    to: options.To,
    step: options.Step = 0,
    baseline: options.Baseline = None,
    threads: options.Threads = None,
    payload_bytes: options.PayloadBytes = PAYLOAD_BYTES,
) -> None:
    """Publish a checkpoint as the next version of a run.

    The first time, the run is created and the whole checkpoint goes up as an anchor. From then on only the
    bits that differ from the version before do. The last line of stdout is the new version's number.

    Nothing of a publish that fails or is killed is ever visible to receivers: run it again.

    Example: [bold]deltarefit publish ckpt/step-42 --to s3://bucket/run7 --step 42[/]
    """
    source = CheckpointSource(ckpt)
    store = call.remote.open(to)
    log = RunLog.open_or_create(store, source.catalog)
    directory = baseline_directory(baseline, log.run)
    call.out.detail(f"baseline in {directory}")
    with closing(CheckpointTarget(directory)) as target, call.out.progress() as bars:
        emit = _talking(call.out, bars)
        publisher = Publisher(store, source, baseline=target, threads=threads, payload_bytes=payload_bytes, emit=emit)
        with closing(publisher):
            done = publisher.publish(step)
    _summarize(call.out, log, done)
    smaller = words.ratio(done.dense_bytes, done.wire_bytes)
    body = {"run": log.run, **dataclasses.asdict(done), "density": done.density, "times_smaller": smaller}
    call.out.result(done.version, body)


@verb(app, "anchor")
def anchor(
    call: Call, store: options.Store, baseline: options.Baseline = None, threads: options.Threads = None
) -> None:
    """Store the head as a whole, so that receivers that start later begin there.

    Without it, a new receiver fetches the first version and every delta since. The bits come from the
    baseline, which is brought up to the head first. The last line of stdout is the anchor's version.
    """
    objects = call.remote.existing(store)
    directory = baseline_directory(baseline, RunLog.open(objects).run)
    with closing(CheckpointTarget(directory)) as target, call.out.progress() as bars:
        done = write_anchor(objects, target, threads=threads, emit=_talking(call.out, bars))
    call.out.say(_anchor_summary(done))
    call.out.result(done.version, dataclasses.asdict(done))


def _anchor_summary(done: Anchored) -> str:
    if not done.created:
        return f"Version {done.version} is an anchor already"
    payloads = words.count(done.payloads, "payload")
    return f"Anchored   version {done.version}: {words.size(done.wire_bytes)} in {payloads}"


def _talking(out: Output, bars: Emit) -> Emit:
    """Bars for progress, warnings for what had to be repaired, details for the rest."""

    def emit(event: Event) -> None:
        bars(event)
        if event.text:
            out.warn(f"baseline: {event.text}")
        elif event.type != "progress":
            out.detail(f"{event.type} {event.phase} {event.version or ''} {words.seconds(event.seconds)}")

    return emit


def _summarize(out: Output, log: RunLog, done: Published) -> None:
    if out.flags.quiet:
        return
    dense = words.size(done.dense_bytes)
    smaller = f"{words.times(done.dense_bytes, done.wire_bytes)} times smaller"
    lines = [
        (
            "Compared",
            f"{words.count(len(log.catalog.tensors), 'tensor')}, {dense}, with version {done.base}",
            None,
        ),
        (
            "Packed",
            f"{done.changed:,} elements in {_payloads(log, done)}, density {words.percent(done.density)}",
            None,
        ),
        ("Uploaded", f"{words.size(done.wire_bytes)} side by side with that", done.seconds.get("encode")),
        (
            "Committed",
            f"version {done.version} on base {done.base}, {smaller}",
            done.seconds.get("total"),
        ),
    ]
    if not done.base:
        lines[0] = (
            "Read",
            f"{words.count(len(log.catalog.tensors), 'tensor')}, {dense}: the run's first version",
            None,
        )
        lines[1] = ("Packed", f"{done.changed:,} elements as an anchor", None)
        lines[3] = ("Committed", f"version {done.version}, an anchor", done.seconds.get("total"))
    for name, text, seconds in lines:
        out.say(f"{name:<10} {text:<60} {words.seconds(seconds) if seconds is not None else ''}".rstrip())


def _payloads(log: RunLog, done: Published) -> str:
    manifest = log.read(ProducerManifest, attempt_key(done.version, "p/0"))
    return words.count(len(manifest.payloads) if manifest else 0, "payload")
