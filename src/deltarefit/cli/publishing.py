"""``publish``: what goes into a store."""

from __future__ import annotations

import dataclasses
from contextlib import closing

from deltarefit.cli import options, words
from deltarefit.cli.keys import notary
from deltarefit.cli.output import Output
from deltarefit.cli.settings import baseline_directory
from deltarefit.cli.verbs import Call, Terminated, app, verb
from deltarefit.events import Emit, Event
from deltarefit.manifest import ProducerManifest
from deltarefit.pipeline import PAYLOAD_BYTES
from deltarefit.publisher import DEADLINE_S, Published, Publisher
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
    mode: options.Mode = "stage",
    votes: options.Votes = "all",
    min_receivers: options.MinReceivers = 0,
    deadline: options.Deadline = DEADLINE_S,
    sign: options.Sign = None,
    trust: options.Trust = None,
) -> None:
    """Publish a checkpoint as the next version of a run.

    The first time, the run is created and the whole checkpoint goes up as an anchor. From then on only the
    bits that differ from the version before do. The last line of stdout is the new version's number.

    Nothing of a publish that fails or is killed is ever served: run it again. In mode stream receivers stand still
    until then.

    Example: [bold]deltarefit publish ckpt/step-42 --to s3://bucket/run7 --step 42[/]
    """
    keys, source = notary(trust, sign), CheckpointSource(ckpt)
    store = call.remote.open(to)
    log = RunLog.open_or_create(store, source.catalog, keys)
    directory = baseline_directory(baseline, log.run)
    call.out.detail(f"baseline in {directory}")
    with closing(CheckpointTarget(directory)) as target, call.out.progress() as bars:
        emit = talking(call.out, bars)
        publisher = Publisher(
            store,
            source,
            baseline=target,
            threads=threads,
            payload_bytes=payload_bytes,
            mode=mode,
            votes=int(votes) if votes.isdecimal() else votes,
            min_receivers=min_receivers,
            deadline_s=deadline,
            emit=emit,
            sign=keys.signer,
            trust=keys.trust,
        )
        with closing(publisher):
            try:
                done = publisher.publish(step)
            except (KeyboardInterrupt, Terminated):
                publisher.abandon()
                raise
    _summarize(call.out, log, done)
    smaller = words.ratio(done.dense_bytes, done.wire_bytes)
    body = {"run": log.run, **dataclasses.asdict(done), "density": done.density, "times_smaller": smaller}
    call.out.result(done.version, body)


def talking(out: Output, bars: Emit, who: str = "baseline") -> Emit:
    """Bars for progress, warnings for what had to be repaired, details for the rest."""

    def emit(event: Event) -> None:
        bars(event)
        if event.text:
            out.warn(f"{who}: {event.text}")
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
    if done.evicted:
        lines.append(("Evicted", f"{', '.join(done.evicted)}: catches up from the log", None))
    for name, text, seconds in lines:
        out.say(f"{name:<10} {text:<60} {words.seconds(seconds) if seconds is not None else ''}".rstrip())


def _payloads(log: RunLog, done: Published) -> str:
    manifest = log.read(ProducerManifest, attempt_key(done.version, "p/0"))
    return words.count(len(manifest.payloads) if manifest else 0, "payload")
