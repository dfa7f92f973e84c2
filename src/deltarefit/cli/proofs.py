"""``compare`` and ``verify``: are these the same bits? Exit code 0 if they are, 4 if not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltarefit.catalogs import check_catalog
from deltarefit.cli import options, words
from deltarefit.cli.engines import Engine, borrowed, engine_at
from deltarefit.cli.keys import notary
from deltarefit.cli.output import Output, columns
from deltarefit.cli.verbs import DIFFERENT, Call, app, verb
from deltarefit.compare import Comparison, TensorChange
from deltarefit.compare import compare as compare_sources
from deltarefit.errors import BaseMismatch, IntegrityError, NotFoundError, RefitError, UsageError
from deltarefit.manifest import Header, State
from deltarefit.records import Digest
from deltarefit.runlog import RunLog
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.targets.checkpoint import STATE_DIRECTORY, CheckpointTarget
from deltarefit.verify import Bits, Verifier, bits_of_source, bits_of_target

_RESULT = {True: "equal", False: "differ"}
_LISTED = 20


@verb(app, "compare", remote=False)
def compare(
    call: Call,
    a: options.CheckpointA,
    b: options.CheckpointB,
    top: options.Top = _LISTED,
    threads: options.Threads = None,
) -> int:
    """Compare two checkpoints bit by bit, and say what publishing B after A would send.

    Needs no store. The estimate is made by really encoding the changes. The last line of stdout is `equal` or
    `differ`; like diff, the exit code tells them apart: 0 if all tensors are equal, 4 if not.
    """
    with call.out.progress() as bars:
        found = compare_sources(CheckpointSource(a), CheckpointSource(b), threads=threads, emit=bars)
    _list_changes(call.out, [change for change in found.tensors if change.changed], top)
    for name in found.only_first:
        call.out.data(f"only in A: {name}")
    for name in found.only_second:
        call.out.data(f"only in B: {name}")
    for misfit in found.misfits:
        call.out.data(f"{misfit.name} is {misfit.first} in A, {misfit.second} in B")
    _say_totals(call.out, found)
    call.out.result(_RESULT[found.equal], _plain(found))
    return 0 if found.equal else DIFFERENT


def _say_totals(out: Output, found: Comparison) -> None:
    changed = sum(1 for change in found.tensors if change.changed)
    out.say(
        f"{words.count(changed, 'tensor')} of {len(found.tensors)} differ in bits: {found.changed:,} of "
        f"{words.count(found.numel, 'element')}, density {words.percent(found.density)}"
    )
    if not found.same_model:
        out.say("B has other tensors than A: it cannot follow A in one run")
    elif found.changed:
        dense, wire = words.size(found.dense_bytes), words.size(found.wire_bytes)
        smaller = words.times(found.dense_bytes, found.wire_bytes)
        each = found.wire_bytes / found.changed
        out.say(
            f"Publishing B after A would send {wire} for {dense}: {smaller} times smaller, "
            f"{each:.3f} bytes per changed element"
        )


def _plain(found: Comparison) -> dict[str, object]:
    body = {name: value for name, value in dataclasses.asdict(found).items() if name != "tensors"}
    totals = {
        "result": _RESULT[found.equal],
        "numel": found.numel,
        "changed": found.changed,
        "density": found.density,
        "times_smaller": words.ratio(found.dense_bytes, found.wire_bytes),
    }
    return {**totals, **body, "tensors": [dataclasses.asdict(change) for change in found.tensors]}


def _list_changes(out: Output, changes: Sequence[TensorChange], top: int) -> None:
    """The tensors with most changes as a table; all if verbose."""
    shown = sorted(changes, key=lambda change: -change.changed)[: None if out.flags.verbose else top]
    if not shown:
        return
    table = columns("tensor", "dtype", "shape", "changed", "density", left=3)
    for change in shown:
        density = words.percent(change.density)
        table.add_row(change.name, change.dtype, words.shape(change.shape), f"{change.changed:,}", density)
    out.table(table)
    if len(changes) > len(shown):
        out.say(f"and {words.count(len(changes) - len(shown), 'more tensor')}; -v lists all")


@verb(app, "verify")
def verify(
    call: Call,
    store: options.Store,
    directory: options.Directory = None,
    version: options.AtVersion = None,
    threads: options.Threads = None,
    vllm: options.Vllm = None,
    sglang: options.Sglang = None,
    trust: options.Trust = None,
) -> int:
    """Prove that a checkpoint, or a serving engine, holds exactly the bits of a version.

    A directory kept by `follow` is held against the version that its own header claims; any other checkpoint
    against the head. The digest of all its bits must be the one that the log states. If it is not, the
    version is rebuilt in a temporary directory ($TMPDIR; it takes the size of a checkpoint) to name the
    tensors that differ.

    With --vllm or --sglang all live bits of an engine are read where they are, while it serves, and held
    against the version that its own header claims; without one, against any version of the run, else the
    head. A follower that keeps the engine waits meanwhile, and goes on by itself.

    The last line of stdout is `equal` or `differ`; the exit code is 0 or 4.
    """
    engine = engine_at(vllm, sglang)
    if (directory is None) is (engine is None):
        found = "none of them" if engine is None else "a directory and an engine"
        raise UsageError("what to prove is not clear", expected="one of DIR, --vllm and --sglang", found=found)
    log = RunLog.open(call.remote.existing(store), notary(trust))
    if engine is not None:
        return _verify_engine(call.out, log, engine, version)
    return _verify_directory(call, log, Path(directory or ""), version, threads)


def _verify_engine(out: Output, log: RunLog, engine: Engine, version: int | None) -> int:
    with borrowed(engine, log) as (target, header):
        found = target.digest()
        served = engine.version()
    number = version or (header.version if header is not None else _known(log, found))
    outcome = log.version(number).outcome
    expected = outcome.digest if outcome else None
    equal = found == expected
    out.say(f"{engine.url} {'holds' if equal else 'does not hold'} version {number}, digest {expected}")
    if not equal and header is not None:
        out.say(f"Its header claims version {header.version}")
    if served != str(number):
        out.say(f"It says that it serves version {served}")
    body = {"result": _RESULT[equal], "version": number, "expected": str(expected), "found": str(found)}
    claimed = header.version if header is not None else None
    out.result(_RESULT[equal], {**body, "claimed": claimed, "served": served, "tensors": []})
    return 0 if equal else DIFFERENT


def _known(log: RunLog, found: Digest) -> int:
    """The version that bits without a header are, else the head."""
    outcome = log.find_version(found)
    return outcome.attempt if outcome is not None else _head(log)


def _verify_directory(call: Call, log: RunLog, directory: Path, version: int | None, threads: int | None) -> int:
    with call.out.progress() as bars, _opened(directory, log) as held:
        number = version if version is not None else _claimed(held, log)
        outcome = log.version(number).outcome
        verifier = Verifier(log, threads=threads, emit=bars)
        expected, found = outcome.digest if outcome else None, verifier.digest(held.bits)
        ties = verifier.tie_differences(held.bits)
        equal = found == expected and not ties
        tensors = ties if found == expected else (_differences(call.out, verifier, held.bits, number) or ties)
    _list_changes(call.out, tensors, _LISTED)
    call.out.say(f"{directory} {'holds' if equal else 'does not hold'} version {number}, digest {expected}")
    body = {"result": _RESULT[equal], "version": number, "expected": str(expected), "found": str(found)}
    call.out.result(_RESULT[equal], {**body, "tensors": [dataclasses.asdict(change) for change in tensors]})
    return 0 if equal else DIFFERENT


def _differences(out: Output, verifier: Verifier, bits: Bits, version: int) -> tuple[TensorChange, ...]:
    """That the bits differ is certain; that the version cannot be rebuilt must not hide it."""
    out.say(f"The bits are not those of version {version}; rebuilding it to see where they differ")
    try:
        return verifier.differences(bits, version)
    except RefitError as error:
        out.warn(f"cannot say which tensors differ: {error}")
        return ()


@dataclass(frozen=True)
class _Held:
    """An opened checkpoint; ``header`` only where we keep one."""

    path: Path
    bits: Bits
    header: Header | None = None
    ours: bool = False


@contextmanager
def _opened(path: Path, log: RunLog) -> Iterator[_Held]:
    """A directory of ours is locked meanwhile (``UnavailableError`` if a receiver has it); others are only
    read."""
    if not (path / STATE_DIRECTORY).is_dir():
        yield _Held(path, bits_of_source(CheckpointSource(path), log.catalog))
        return
    with closing(CheckpointTarget(path)) as target:
        if target.catalog is None:
            raise NotFoundError(
                f"{path} is still empty", next_step=f"Run: deltarefit follow STORE --into {path} --once"
            )
        check_catalog(target.catalog, log.catalog)
        yield _Held(path, bits_of_target(target), target.read_header(), ours=True)


def _claimed(held: _Held, log: RunLog) -> int:
    """The version that a checkpoint says it is."""
    header = held.header
    if not held.ours:
        return _head(log)
    if header is None or header.state is not State.CLEAN:
        found = "no header" if header is None else f"state {header.state.value}"
        step = f"Run: deltarefit follow STORE --into {held.path} --once"
        if header is not None and header.state is State.DIRTY:
            found += f", partly written by attempt {header.target}"
            step = f"If that attempt is not committed, publish again. {step}"
        raise IntegrityError(f"{held.path} claims no version", expected="state CLEAN", found=found, next_step=step)
    if header.run != log.run:
        raise BaseMismatch(f"{held.path} follows another run", expected=log.run, found=header.run)
    return header.version


def _head(log: RunLog) -> int:
    if (head := log.head()) is None:
        raise NotFoundError("the run has no committed version yet", next_step="Publish a checkpoint first.")
    return head.number
