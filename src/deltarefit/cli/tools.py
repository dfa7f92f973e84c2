"""``doctor``, ``bench`` and ``demo``: about this machine and this package."""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

import deltarefit
from deltarefit import _kernel
from deltarefit.cli import options, words
from deltarefit.cli.engines import Engine, borrowed, engine_at
from deltarefit.cli.output import columns
from deltarefit.cli.settings import cache_directory
from deltarefit.cli.verbs import DIFFERENT, Call, app, verb
from deltarefit.doctor import Check, check_store, report_of
from deltarefit.errors import BaseMismatch, UsageError
from deltarefit.localfiles import disk_errors
from deltarefit.publisher import Published
from deltarefit.runlog import RunLog

_SHOWN = 8
_LIBRARIES = ("numpy", "safetensors", "zstandard", "obstore", "torch", "transformers", "gguf")

_bench = typer.Typer(help="Measure this machine. The last line of stdout is JSON.")
app.add_typer(_bench, name="bench")


@verb(app, "doctor")
def doctor(
    call: Call, store: options.MaybeStore = None, vllm: options.Vllm = None, sglang: options.Sglang = None
) -> int:
    """Show what deltarefit finds on this machine, and check a store's promises, or an engine.

    With STORE, every promise that commits rest on is tried there below a fresh prefix, above all that of many
    racing writers exactly one wins; everything is removed again. Do that once before a run relies on a new
    kind of store. The last line of stdout is `ok` or `failed`; the exit code is 4 if a check failed, and that
    of `follow` if an engine cannot be refitted (2 as it was started, 4 if it follows another run).

    With --vllm or --sglang the engine is checked instead, and nothing is written: whether it can be refitted as
    it was started, and, with STORE, how every tensor of the run there would reach it. A follower that keeps the
    engine waits meanwhile, and goes on by itself.
    """
    engine = engine_at(vllm, sglang)
    facts = _facts()
    for name, value in facts.items():
        call.out.data(f"{name:<12} {value}")
    if engine is not None:
        return _check_engine(call, engine, store, facts)
    checks = _checks(call, store) if store is not None else []
    failed = [check for check in checks if not check.ok]
    _show_checks(call, checks)
    result = "failed" if failed else "ok"
    call.out.result(result, {"result": result, **facts, "checks": [dataclasses.asdict(check) for check in checks]})
    return DIFFERENT if failed else 0


def _check_engine(call: Call, engine: Engine, store: str | None, facts: dict[str, str]) -> int:
    log = RunLog.open(call.remote.existing(store)) if store is not None else None
    found: dict[str, Any] = {"engine": engine.url}
    code = 0
    try:
        found |= _engine_facts(engine, log)
    except (UsageError, BaseMismatch) as error:  # what is wrong with it is the finding
        found["objection"], code = str(error), error.exit_code
    for name in ("engine", "ranks", "serves", "generation", "holds", "objection"):
        if name in found:
            call.out.data(f"{name:<12} {found[name]}")
    _show_placements(call, found.get("placements", []))
    result = "failed" if code else "ok"
    call.out.result(result, {"result": result, **facts, **found})
    return code


def _engine_facts(engine: Engine, log: RunLog | None) -> dict[str, Any]:
    if log is None:
        engine.check()
        return {"ranks": len(engine.agents()), "serves": engine.version(), "generation": _generation(engine)}
    with borrowed(engine, log) as (target, header):
        group = target.group
        return {
            "ranks": group.size,
            "serves": engine.version(),
            "generation": _generation(engine),
            "holds": f"version {header.version}" if header else "no version yet",
            "placements": [dataclasses.asdict(one) for one in report_of(group.report, log.catalog, group.size)],
        }


def _generation(engine: Engine) -> str:
    if engine.serving:
        return "runs"
    return "stands still: by hand, or a follower was killed in a refit: start follow again"


def _show_placements(call: Call, placements: Sequence[dict[str, Any]]) -> None:
    """A line per mode; the tensors that are not written in place, with their reasons, all if verbose."""
    if not placements:
        return
    table = columns("mode", "tensors", "elements", "tensors by rank", left=1)
    for one in placements:
        by_rank = " ".join(map(str, one["ranks"].values()))
        table.add_row(one["mode"], f"{len(one['tensors']):,}", f"{one['elements']:,}", by_rank)
    call.out.table(table)
    for one in placements:
        names = one["tensors"] if call.out.flags.verbose else one["tensors"][:_SHOWN]
        if not one["mode"].startswith("xor") or call.out.flags.verbose:
            for reason in one["reasons"]:
                call.out.data(f"{one['mode']}: {reason}")
            more = len(one["tensors"]) - len(names)
            call.out.data(f"{one['mode']}: {', '.join(names)}" + (f" and {more} more; -v lists all" if more else ""))


def _facts() -> dict[str, str]:
    facts = {
        "deltarefit": deltarefit.__version__,
        "kernel": f"{_kernel.level()} (this CPU runs: {', '.join(_kernel.levels())})",
        "CPUs": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    }
    return facts | {name: _installed(name) for name in _LIBRARIES}


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _checks(call: Call, url: str) -> list[Check]:
    store = call.remote.open(url)
    call.out.say(f"Checking {store.url}: this may take a minute")
    return check_store(store)


def _show_checks(call: Call, checks: Sequence[Check]) -> None:
    if not checks:
        return
    table = columns("check", "result", "seconds", left=2)
    for check in checks:
        table.add_row(check.name, "ok" if check.ok else "FAILED", words.seconds(check.seconds))
    call.out.table(table)
    for check in checks:
        if not check.ok:
            call.out.data(f"FAILED {check.name}: {check.detail}")


@verb(_bench, "codec", remote=False)
def bench_codec(call: Call, quick: options.Quick = False, cache: options.Cache = None) -> None:
    """Measure the encoding of real training deltas: bytes, speed, and the neighbours' encodings beside ours.

    Trains a small model for its deltas (the first time; they are kept in the cache), so it needs the demo
    extra. The last line of stdout is JSON.
    """
    codec = _extra("deltarefit.bench.codec")
    result = codec.run(_made(cache), quick, call.out.say)
    call.out.table(_extra("deltarefit.bench.report").table(result))
    call.out.final(result)


@verb(_bench, "source", remote=False)
def bench_source(
    call: Call, ranks: options.Ranks = 2, size: options.ModelSize = "small", quick: options.Quick = False
) -> None:
    """Measure publishing from a sharded trainer: each rank's own shard, against a gather on rank 0.

    Trains a small model on some processes of this machine (FSDP2 over gloo) and publishes every step in both
    ways; then measures whether uploads overlap with encoding. Needs the demo extra. The last line of stdout is
    JSON.
    """
    result = _extra("deltarefit.bench.source").run(ranks, size, quick, call.out.say)
    call.out.table(_extra("deltarefit.bench.source_report").table(result))
    call.out.final(result)


@verb(_bench, "memory", remote=False)
def bench_memory(call: Call, quick: options.Quick = False) -> None:
    """Measure what a trainer's rank needs to publish, beside its weights and its baseline.

    Publishes and rebuilds a model whose largest tensor has 640 MiB, alone and as two ranks: some 3 GiB of
    memory are needed, and the torch extra. The last line of stdout is JSON.
    """
    result = _extra("deltarefit.bench.memory").run(quick, call.out.say)
    call.out.table(_extra("deltarefit.bench.source_report").memory_table(result))
    call.out.final(result)


@verb(_bench, "apply", remote=False)
def bench_apply(call: Call, quick: options.Quick = False) -> None:
    """Measure what the write of a refit costs one rank of a serving engine, on one core.

    Half of a Llama-style model with fused and sharded weights takes changes of the whole, against a dense load,
    a plain scatter and a copy; every result is compared with the dense load's bits. Needs several GiB of
    memory and the torch extra. The last line of stdout is JSON.
    """
    result = _extra("deltarefit.bench.apply").run(quick, call.out.say)
    call.out.table(_extra("deltarefit.bench.apply_report").table(result))
    call.out.final(result)


@verb(app, "demo", remote=False)
def demo(call: Call, quick: options.Quick = False, cache: options.Cache = None) -> int:
    """Train a small model and refit a live model in another process after each step, end to end.

    At the end every weight of the live model, and of a checkpoint directory that followed too, is compared
    with a dense copy of the trainer's. The last line of stdout is `equal` or `differ`; the exit code is 0 or
    4. Needs the demo extra; prepared models are kept in the cache.
    """
    demonstration = _extra("deltarefit.demo.run")
    result = demonstration.run(_made(cache), quick, call.out.say, lambda row: _say_row(call, row))
    call.out.table(_demo_table(result.rows))
    for name, good in result.parts().items():
        call.out.data(f"{'yes' if good else 'NO '} {name}")
    word = "equal" if result.equal else "differ"
    call.out.result(word, {"result": word, **result.plain()})
    return 0 if result.equal else DIFFERENT


def _say_row(call: Call, row: Any) -> None:
    done: Published = row.published
    smaller = words.times(done.dense_bytes, done.wire_bytes)
    pause = words.seconds(row.receiver["seconds"]["pause"])
    call.out.say(
        f"Version {done.version}: {words.size(done.wire_bytes)} for {words.size(done.dense_bytes)} "
        f"({smaller} times smaller), pause {pause}"
    )


def _demo_table(rows: Sequence[Any]) -> Table:
    """One line per version; stages in milliseconds."""
    stages = ("stage", "pause", "write", "verify")
    names = ("version", "density", "dense MB", "wire MB", "times smaller", "step ms", "encode ms", "publish ms")
    table = columns(*names, *(f"{stage} ms" for stage in stages), "digest agreed")
    for row in rows:
        done: Published = row.published
        spent = [row.step_s, done.seconds["encode"], done.seconds["total"]]
        spent += [row.receiver["seconds"].get(stage, 0.0) for stage in stages]
        table.add_row(
            str(done.version),
            words.percent(done.density),
            words.megabytes(done.dense_bytes),
            words.megabytes(done.wire_bytes),
            words.times(done.dense_bytes, done.wire_bytes),
            *(f"{1000 * value:,.0f}" if value else "-" for value in spent),
            "yes" if row.agreed else "NO",
        )
    return table


@verb(_bench, "recovery", remote=False)
def bench_recovery(call: Call, quick: options.Quick = False) -> None:
    """Measure recovery: receivers and trainers stopped at several places, against a refit without a fault.

    Also what digests and checks cost, and how long a dead receiver delays a commit. Keeps a model of 512 MiB in
    memory three times. The last line of stdout is JSON.
    """
    result = _extra("deltarefit.bench.recovery").run(quick, call.out.say)
    call.out.table(_extra("deltarefit.bench.recovery_report").table(result))
    call.out.final(result)


@verb(_bench, "relay", remote=False)
def bench_relay(call: Call, cases: options.RelayCases = None, quick: options.Quick = False) -> None:
    """Measure a tree of relays: bytes over the slow link, depth, nginx beside one, relays killed, delay and loss.

    Starts relays and receivers as processes, behind a shaped link between two network namespaces; that needs root
    and `ip`. Elsewhere, and with --quick, all runs on plain loopback and the rows say so. Takes some minutes, 1 GiB
    of disk and two cores, and needs the relay extra. The last line of stdout is JSON.
    """
    result = _extra("deltarefit.bench.relay").run(quick, cases or [], call.out.say)
    call.out.table(_extra("deltarefit.bench.relay_report").table(result))
    call.out.final(result)


def _made(cache: Path | None) -> Path:
    directory = cache if cache is not None else cache_directory()
    with disk_errors(f"cannot use {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def _extra(module: str) -> Any:
    """A part of this package that needs the optional libraries."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        step = "Install them: pip install 'deltarefit[demo]'"
        raise UsageError(
            f"{module} needs libraries that are not installed", found=error.name, next_step=step
        ) from error
