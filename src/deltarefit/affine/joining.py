"""Blocks that follow each other at equal distances, joined to larger blocks: one level of ``fitting``.

In this room ``there`` is a canonical position and ``here`` a local one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltarefit.affine.boxes import Dim, NotAffineError

Positions = npt.NDArray[np.int64]
_CHUNK = 1 << 16
"""Elements looked at together: their differences stay in a core's cache."""
_SAMPLE = 4096
"""Blocks that tell noise from kinds."""


@dataclass(frozen=True)
class Blocks:
    """Things in canonical order within each kind: where each starts on both sides, and its kind, an index into
    ``kinds``: the digits of one such block, outermost first."""

    there: Positions
    here: Positions
    kind: Positions
    kinds: list[tuple[Dim, ...]]

    def __len__(self) -> int:
        return len(self.there)


@dataclass(frozen=True)
class Stretches:
    """Maximal stretches of equal distances between neighbours. The last one has none: it is the last block alone.

    ``first`` is the index of the block where a stretch starts; ``there``, ``here`` and ``kind`` are that block's,
    ``stride`` and ``local_stride`` the distances. A ``wall`` joins nothing: the local position falls, or kinds differ.
    """

    first: Positions
    there: Positions
    here: Positions
    stride: Positions
    local_stride: Positions
    kind: Positions
    wall: npt.NDArray[np.bool_]


def element_stretches(flat: Positions) -> Stretches:
    """Of the elements of a canonical tensor that come from local positions ``flat``, -1 for none."""
    none = np.zeros(0, np.int64)
    found: list[tuple[Positions, ...]] = [(none,) * 5]
    last, seen = (none, none), 0
    for start in range(0, len(flat), _CHUNK):
        new = _valid(flat[start : start + _CHUNK], start)
        base = seen - len(last[0])
        seen += len(new[0])
        there, here = (np.concatenate(pair) for pair in zip(last, new, strict=True))
        if len(there) >= 2:
            found.append(_starts(there, here, base, opening=len(found) == 1))
        last = there[-2:], here[-2:]
    end = np.zeros(min(seen, 1), np.int64)
    found.append((end + seen - 1, last[0][-1:], last[1][-1:], end, end))
    first, there, here, stride, local_stride = (np.concatenate(column) for column in zip(*found, strict=True))
    wall = local_stride < 0
    wall[-1:] = True
    return Stretches(first, there, here, stride, local_stride, np.zeros(len(first), np.int64), wall)


def _valid(part: Positions, start: int) -> tuple[Positions, Positions]:
    if part.min() >= 0:
        return np.arange(start, start + len(part)), part
    keep = np.flatnonzero(part >= 0)
    return keep + start, part[keep]


def _starts(there: Positions, here: Positions, base: int, opening: bool) -> tuple[Positions, ...]:
    stride, local_stride = np.diff(there), np.diff(here)
    changed = (stride[1:] != stride[:-1]) | (local_stride[1:] != local_stride[:-1]) | (local_stride[1:] < 0)
    at = np.flatnonzero(changed) + 1
    if opening:
        at = np.concatenate([[0], at])
    return at + base, there[at], here[at], stride[at], local_stride[at]


def block_stretches(blocks: Blocks) -> Stretches:
    """Of blocks, kind by kind."""
    there, here, kind = blocks.there, blocks.here, blocks.kind
    if kind.any():
        order = np.argsort(kind, kind="stable")
        there, here, kind = there[order], here[order], kind[order]
    stride, local_stride = np.diff(there, append=there[-1:]), np.diff(here, append=here[-1:])
    wall = (np.diff(kind, append=kind[-1:]) != 0) | (local_stride < 0)
    wall[-1:] = True
    fresh = np.ones(len(there), np.bool_)
    fresh[1:] = (stride[1:] != stride[:-1]) | (local_stride[1:] != local_stride[:-1]) | wall[1:] | wall[:-1]
    at = np.flatnonzero(fresh)
    return Stretches(at, there[at], here[at], stride[at], local_stride[at], kind[at], wall[at])


def joined(at: Stretches, kinds: list[tuple[Dim, ...]], limit: int, phase: int, split: bool) -> Blocks:
    """The blocks of the next level: runs of blocks, and blocks that are in none.

    ``phase`` and ``split`` choose how ambiguous stretches are read: see ``_runs`` and ``_split``. Raises
    ``NotAffineError`` if there are so many kinds that ``limit`` boxes cannot do.
    """
    skip, joins = _runs(at, phase)
    run = joins > 0
    follows = np.zeros(len(run), np.bool_)
    follows[1:] = run[:-1]
    slots = np.flatnonzero(np.stack([~follows & ~(run & (skip == 0)), run], axis=1))
    source, in_run = slots >> 1, slots & 1
    stride, local_stride = at.stride[source] * in_run, at.local_stride[source] * in_run
    there, here = at.there[source] + skip[source] * stride, at.here[source] + skip[source] * local_stride
    table = np.stack([at.kind[source], joins[source] * in_run + 1, stride, local_stride])
    if split:
        there, here, table = _split(there, here, table)
    number, examples = _numbered(table, 4 * limit)
    if (number < 0).any():
        raise _too_many(there, _sizes(kinds)[table[0]] * table[1], limit)
    return Blocks(there, here, number, [_kind(kinds, *table[:, i].tolist()) for i in examples])


def _kind(kinds: list[tuple[Dim, ...]], kind: int, n: int, stride: int, local_stride: int) -> tuple[Dim, ...]:
    return kinds[kind] if n == 1 else ((n, local_stride, stride), *kinds[kind])


def _runs(at: Stretches, phase: int) -> tuple[Positions, Positions]:
    """For each stretch, whether its first distance is the jump from the run before it (1) or not (0), and how many
    of its distances join blocks to a run.

    A run takes all of a stretch, and the next distance is a jump; so of stretches of one distance every other one
    is a pair. ``phase`` 1 reads the very first distance as a jump. A pair leaves alone what a longer run can have.
    """
    count = np.diff(at.first, append=at.first[-1:])
    long = ~at.wall & (count >= 2)
    index = np.arange(len(count))
    before = np.full(len(index), -1)
    before[1:] = np.maximum.accumulate(np.where(at.wall | long, index, -1))[:-1]
    skip = np.where(before >= 0, long[before], phase) ^ ((index - before - 1) & 1)
    joins = np.where(at.wall, 0, count - skip)
    spoiler = np.flatnonzero(~at.wall[:-1] & (count[:-1] == 1) & (skip[:-1] == 0) & long[1:])
    joins[spoiler], skip[spoiler + 1] = 0, 0
    joins[spoiler + 1] = count[spoiler + 1]
    return skip, joins


def _split(there: Positions, here: Positions, table: Positions) -> tuple[Positions, Positions, Positions]:
    """Runs that are several of their kind's usual length, cut into such: runs that happen to touch at the edge of a
    group would hide the regularity."""
    times = np.ones(len(there), np.int64)
    number, examples = _numbered(table[[0, 2, 3]], most=64)
    for group in range(len(examples)):
        member = np.flatnonzero((number == group) & (table[1] > 1))
        if len(member):
            lengths, counts = np.unique(table[1, member], return_counts=True)
            usual = lengths[counts.argmax()]
            times[member] = np.where(table[1, member] % usual == 0, table[1, member] // usual, 1)
    kind, length, stride, local_stride = np.repeat(table, times, axis=1)
    length = length // np.repeat(times, times)
    part = np.arange(len(length)) - np.repeat(np.cumsum(times) - times, times)
    there, here = np.repeat(there, times), np.repeat(here, times)
    table = np.stack([kind, length, stride, local_stride])
    return there + part * length * stride, here + part * length * local_stride, table


def _numbered(table: Positions, most: int) -> tuple[Positions, list[int]]:
    """A number for each distinct column of ``table``, and where each first stands; -1 for those beyond ``most``."""
    number = np.full(table.shape[1], -1)
    examples: list[int] = []
    left = np.arange(table.shape[1])
    if table.shape[1] > _SAMPLE and len(np.unique(table[:, :: table.shape[1] // _SAMPLE], axis=1).T) > most:
        return number, examples  # noise: not worth a pass for each
    while len(left) and len(examples) < most:
        first = int(left[0])
        same = (table[:, left] == table[:, first : first + 1]).all(axis=0)
        number[left[same]] = len(examples)
        examples.append(first)
        left = left[~same]
    return number, examples


def _sizes(kinds: list[tuple[Dim, ...]]) -> Positions:
    return np.array([math.prod(n for n, _, _ in dims) for dims in kinds], np.int64)


def too_many(blocks: Blocks, limit: int) -> NotAffineError:
    """The error for blocks that are more than ``limit`` boxes."""
    return _too_many(blocks.there, _sizes(blocks.kinds)[blocks.kind], limit)


def _too_many(there: Positions, sizes: Positions, limit: int) -> NotAffineError:
    rest = np.argsort(-sizes, kind="stable")[limit:]
    return NotAffineError(
        f"{int(sizes[rest].sum())} of {int(sizes.sum())} positions do not fit into {limit} boxes, the first of them at "
        f"canonical position {int(there[rest].min())}",
        next_step="Convert this tensor as a residual, or hand in its map.",
    )
