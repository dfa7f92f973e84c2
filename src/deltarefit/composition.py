"""Several deltas as one: what leads from a version to a much later one directly (protocol §3.7).

Operations on a position form a monoid: nothing, XOR x, ADD x, SET v. XOR and XOR is XOR, ADD and ADD is ADD, SET and
anything is SET, anything and SET is SET; XOR and ADD at one position have no common form unless the base is known. What
comes out as nothing is dropped. Sums telescope: before the first touch, after the last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from deltarefit import _kernel, runtime
from deltarefit.asof import AsOf
from deltarefit.baseline import MemoryBaseline
from deltarefit.codec import (
    ADD,
    SET,
    XOR,
    Delta,
    EncodedDelta,
    PayloadBuilder,
    encode_delta,
    encode_overwrite,
    open_payload,
)
from deltarefit.digest import catalog_keys
from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch, DigestMismatch, NotFoundError, UsageError
from deltarefit.events import Emit, Event, ignore
from deltarefit.manifest import PayloadRef
from deltarefit.pieces import whole
from deltarefit.pipeline import PAYLOAD_BYTES
from deltarefit.protocol.attempts import Attempt
from deltarefit.receiver import Receiver
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, payload_prefix
from deltarefit.weights import Segment, Weights, cut

Positions = npt.NDArray[np.uint64]
Operations = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Change:
    """What is done to one tensor: at ``positions`` (flat, ascending, each once) ``operations`` (XOR, ADD or SET) with
    ``values``, unsigned integers of the tensor's width. All three have one length."""

    positions: Positions
    operations: Operations
    values: Elements

    @classmethod
    def nothing(cls, width: int) -> Change:
        return cls(np.zeros(0, np.uint64), np.zeros(0, np.uint8), np.zeros(0, f"<u{width}"))

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> Change:
        """Decoded deltas of one tensor that share no element, such as all those of one version."""
        decoded = [(delta, *_kernel.decode(delta.record, delta.slices)) for delta in deltas]
        positions = np.concatenate([at + np.uint64(delta.low) for delta, at, _ in decoded])
        operations = np.concatenate([np.full(at.size, delta.operation, np.uint8) for delta, at, _ in decoded])
        order = np.argsort(positions, kind="stable")
        values = np.concatenate([values for _, _, values in decoded])
        return cls(positions[order], operations[order], values[order])._without_nothing()

    def apply(self, array: Elements) -> None:
        """Carry it out on all elements of the tensor, in one dimension."""
        at = self.positions.astype(np.int64)
        array[at] = _after(self.operations, self.values, array[at])

    def _without_nothing(self) -> Change:
        kept = (self.operations == SET) | (self.values != 0)
        return self if kept.all() else Change(self.positions[kept], self.operations[kept], self.values[kept])


def compose(first: Change, second: Change, base: Elements | None = None) -> Change:
    """What ``first`` and then ``second`` do to one tensor. ``base``, all its elements before ``first`` in one
    dimension, is needed only where one of them is XOR and the other ADD; ``UsageError`` without it."""
    if first.values.dtype != second.values.dtype:
        raise UsageError("deltas of different tensors", expected=first.values.dtype, found=second.values.dtype)
    positions = np.union1d(first.positions, second.positions)
    operations, values = np.zeros(positions.size, np.uint8), np.zeros(positions.size, first.values.dtype)
    at = np.searchsorted(positions, first.positions)
    operations[at], values[at] = first.operations, first.values
    touched = np.zeros(positions.size, np.bool_)
    touched[at] = True
    at = np.searchsorted(positions, second.positions)
    before = Change(second.positions, operations[at], values[at])
    operations[at], values[at] = _joined(before, touched[at], second, base)
    return Change(positions, operations, values)._without_nothing()


def _joined(first: Change, touched: npt.NDArray[np.bool_], second: Change, base: Elements | None) -> tuple[
    Operations, Elements
]:  # fmt: skip
    """Operation and value at each position of ``second``; ``first`` says something where ``touched``."""
    operations, values = second.operations.copy(), second.values.copy()
    on_value = touched & (first.operations == SET) & (second.operations != SET)
    operations[on_value] = SET
    values[on_value] = _after(second.operations[on_value], second.values[on_value], first.values[on_value])
    same = touched & (first.operations == second.operations) & (second.operations != SET)
    values[same] = _after(second.operations[same], second.values[same], first.values[same])
    mixed = touched & (first.operations != second.operations) & (first.operations != SET) & (second.operations != SET)
    if mixed.any():
        if base is None:
            step = "Give the base, or compose from a version between them on."
            raise UsageError("XOR and ADD at one position compose only over known bits", next_step=step)
        old = base[second.positions[mixed].astype(np.int64)]
        new = _after(first.operations[mixed], first.values[mixed], old)
        operations[mixed] = ADD
        values[mixed] = _after(second.operations[mixed], second.values[mixed], new) - old
    return operations, values


def _after(operations: Operations, values: Elements, old: Elements) -> Elements:
    """``old`` after one operation each. Of two differences of one kind: their composite."""
    new = np.where(operations == XOR, old ^ values, np.where(operations == ADD, old + values, values))
    return new.astype(old.dtype, copy=False)


# ---------------------------------------------------------------------------------------------- versions


@dataclass(frozen=True)
class Composite:
    """Payloads that lead from ``base`` to ``version`` directly, each with its bytes. ``parts`` is how many versions
    they stand for, ``parts_bytes`` what the payloads of these weigh."""

    base: int
    version: int
    payloads: tuple[tuple[bytes, PayloadRef], ...]
    parts: int
    parts_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(ref.size for _, ref in self.payloads)


def compose_versions(
    log: RunLog,
    base: int,
    version: int,
    *,
    threads: int | None = None,
    payload_bytes: int = PAYLOAD_BYTES,
    emit: Emit = ignore,
) -> Composite:
    """All deltas after ``base`` up to ``version`` as one set of payloads, proven: applied to the bits of ``base`` they
    give the digest of ``version``, and their sums are those of the parts, telescoped. Needs memory for the model.

    Raises ``NotFoundError`` if a part is gone, ``BaseMismatch`` if ``version`` does not follow from ``base``.
    """
    commits = _between(log, base, version)
    bits = MemoryBaseline()
    with closing(Receiver(AsOf(log, base), bits, threads=threads, emit=emit, trust=log.notary.trust)) as receiver:
        receiver.follow(once=True)
    changes = _composed(log, commits, bits, emit)
    payloads = tuple(_payloads(log, bits, changes, payload_bytes))
    with runtime.executor(threads or os.cpu_count() or 1, "compose") as pool:
        _prove(log, bits, commits, payloads, pool)
    parts = [ref for commit in commits for ref in commit.payloads]
    return Composite(base, version, payloads, len(commits), sum(ref.size for ref in parts))


def _between(log: RunLog, base: int, version: int) -> list[Attempt]:
    """The versions after ``base`` up to ``version``, oldest first."""
    found: list[Attempt] = []
    number = version
    while number > base:
        commit = log.version(number)
        if commit.pruned:
            raise NotFoundError(f"version {number} was pruned", next_step="Compose from a later version on.")
        found.append(commit)
        number = commit.intent.base if commit.intent else 0
    if number != base or not base or not found:
        raise BaseMismatch(f"version {version} does not follow from {base} by deltas", found=f"it leads to {number}")
    return found[::-1]


def _composed(log: RunLog, commits: Sequence[Attempt], bits: MemoryBaseline, emit: Emit) -> dict[int, Change]:
    """By tensor, all that the versions do to it."""
    changes: dict[int, Change] = {}
    total, done = sum(ref.size for commit in commits for ref in commit.payloads), 0
    for commit in commits:
        deltas: list[Delta] = []
        for ref in commit.payloads:
            opened = partial(open_payload, ref=ref, catalog=log.catalog)
            deltas += log.fetch(payload_prefix(commit.number) + ref.sha256, opened, most=ref.size)
            done += ref.size
            emit(Event("progress", "compose", commit.number, done=done, total=total))
        deltas.sort(key=lambda delta: delta.tensor)
        for tensor, several in groupby(deltas, key=lambda delta: delta.tensor):
            change = Change.of(list(several))
            entry = log.catalog.tensors[tensor]
            with bits.window(tensor, 0, entry.numel) as (array, _):
                changes[tensor] = compose(changes.get(tensor, Change.nothing(entry.width)), change, array)
    return changes


def _payloads(
    log: RunLog, bits: MemoryBaseline, changes: dict[int, Change], payload_bytes: int
) -> Iterator[tuple[bytes, PayloadRef]]:
    """Absolute values go into payloads of their own: they need no base."""
    builders: dict[bool, PayloadBuilder] = {}
    for encoded in _encoded(log, bits, changes):
        kind = encoded.overwrites
        builder = builders.setdefault(kind, PayloadBuilder(overwrites=kind))
        builder.add(encoded)
        if builder.nbytes >= payload_bytes:
            yield builders.pop(kind).build()
    for builder in builders.values():
        yield builder.build()


def _encoded(log: RunLog, bits: MemoryBaseline, changes: dict[int, Change]) -> Iterator[EncodedDelta]:
    keys = catalog_keys(log.run, log.catalog)
    for tensor, change in sorted(changes.items()):
        entry = log.catalog.tensors[tensor]
        with bits.window(tensor, 0, entry.numel) as (old, _):
            new = old.copy()
            change.apply(new)
            sets = change.positions[change.operations == SET].astype(np.int64)
            for _, start, stop in cut([(entry.numel, entry.width)]):
                index = sets[np.searchsorted(sets, start) : np.searchsorted(sets, stop)] - start
                yield from _segment((tensor, start, entry.numel), old[start:stop], new[start:stop], index, keys[tensor])


def _segment(
    place: Segment, old: Elements, new: Elements, index: npt.NDArray[np.int64], key: int
) -> Iterable[EncodedDelta]:
    tensor, start, numel = place
    piece, rest = whole(tensor, numel), old
    if index.size:
        yield encode_overwrite(piece, old, new, index, start, key)
        rest = old.copy()
        rest[index] = new[index]
    if (encoded := encode_delta(piece, rest, new, start, key)) is not None:
        yield encoded


def _prove(
    log: RunLog,
    bits: MemoryBaseline,
    commits: Sequence[Attempt],
    payloads: Sequence[tuple[bytes, PayloadRef]],
    pool: Executor,
) -> None:
    """Open what was made, as a receiver would, and write it over the base."""
    parts = sum((ref.post - ref.pre for commit in commits for ref in commit.payloads), Digest())
    if (found := sum((ref.post - ref.pre for _, ref in payloads), Digest())) != parts:
        raise DigestMismatch("the sums of a composite do not telescope", expected=parts, found=found)
    weights = Weights(bits, log.run, log.catalog, pool)
    for data, ref in payloads:
        deltas = open_payload(data, ref, log.catalog)
        if (sums := weights.sums(deltas)) != ref.pre:
            raise DigestMismatch("a composite does not start from its base", expected=ref.pre, found=sums)
        weights.apply(deltas)
    outcome = commits[-1].outcome
    if outcome is None or weights.digest() != outcome.digest:
        raise DigestMismatch(f"a composite does not lead to version {commits[-1].number}")
