"""Find the few strided boxes that a table of positions consists of, exactly and fast.

Bottom up: elements that follow each other at equal distances on both sides form runs; runs of one kind that follow each
other at equal distances form rows of runs, and so on, until nothing joins any more (``joining``). Each step compares
every element, so what comes out holds by construction. Where whole rows of a tensor differ only by where they start,
which is nearly always so, only one of them is taken apart.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

from deltarefit.affine.boxes import Box, Dim, NotAffineError, box_of, glued, ordered
from deltarefit.affine.joining import Blocks, Positions, Stretches, block_stretches, element_stretches, joined, too_many
from deltarefit.errors import UsageError

LIMIT = 64
"""Most boxes of one fit."""
_CHUNK = 1 << 15
"""Elements looked at together: their differences stay in a core's cache."""
_FEW, _SMALL = 4, 1 << 16
"""Of more boxes than this, in a tensor of at most that many elements, another way is tried too."""
_SHORT, _ROW = 16, 256
"""Rows of fewer elements are not worth comparing; a good length of rows where the tensor has none."""


def fit(positions: npt.NDArray[np.int64], limit: int = LIMIT) -> tuple[Box, ...]:
    """The boxes of an int64 array in canonical shape that holds local flat positions, or -1 for "not from here".

    Together they carry every position >= 0 to where it stands, and nothing else. Local strides are never negative;
    canonical strides are positive and descend. Raises ``NotAffineError`` if more than ``limit`` boxes were needed.
    """
    if positions.dtype != np.int64:
        raise UsageError("positions are not int64", found=positions.dtype)
    flat = np.ascontiguousarray(positions).reshape(-1)
    by_rows = _by_rows(flat, _row_length(flat, positions.shape[-1] if positions.ndim > 1 else 0), limit)
    if by_rows is not None and (len(by_rows) <= _FEW or flat.size > _SMALL):
        return tuple(by_rows)
    try:
        by_elements = _fewest(element_stretches(flat), [()], limit)
    except NotAffineError:
        if by_rows is None:
            raise
        return tuple(by_rows)
    return tuple(by_elements if by_rows is None or len(by_elements) < len(by_rows) else by_rows)


def _row_length(flat: Positions, last: int) -> int:
    """Elements of a row: the last dimension, or for short ones what the middle of the tensor seems to repeat; 0 if
    rows are not worth comparing."""
    if last >= _SHORT or flat.size <= _SMALL:
        return last if last >= _SHORT else 0
    middle = flat[flat.size // 2 : flat.size // 2 + 16 * _ROW]
    try:
        boxes = _fewest(element_stretches(middle), [()], LIMIT)
    except NotAffineError:
        return 0
    strides = max(boxes, key=lambda box: box.numel).strides if boxes else ()
    period = max((stride for stride in strides if stride <= 4 * _ROW), default=1)
    return -(-_ROW // period) * period


def fit_pairs(canonical: Positions, local: Positions, limit: int = LIMIT) -> tuple[Box, ...]:
    """``fit`` of (canonical, local) pairs whose canonical positions ascend strictly."""
    elements = Blocks(canonical, local, np.zeros(len(canonical), np.int64), [()])
    return tuple(_fewest(block_stretches(elements), [()], limit))


def _fewest(stretches: Stretches, kinds: list[tuple[Dim, ...]], limit: int, whole: bool = True) -> list[Box]:
    """Of a few ways to read ambiguous stretches, the one that needs the fewest boxes."""
    best: list[Box] | None = None
    failure = NotAffineError("no boxes")
    for phase, split in product((0, 1), (False, True)):
        try:
            found = _nested(stretches, kinds, limit, phase, split)
        except NotAffineError as error:
            failure = error
            continue
        found = glued(found) if whole else found
        if best is None or len(found) < len(best):
            best = found
        if len(best) <= 1:
            break
    if best is None or len(best) > limit:
        raise failure
    return best


def _nested(stretches: Stretches, kinds: list[tuple[Dim, ...]], limit: int, phase: int, split: bool) -> list[Box]:
    """Blocks joined level by level until nothing joins any more."""
    blocks, before = joined(stretches, kinds, limit, phase, split), -1
    while 1 < len(blocks) != before:
        before = len(blocks)
        blocks = joined(block_stretches(blocks), blocks.kinds, limit, phase, split)
    if len(blocks) > 4 * limit:
        raise too_many(blocks, limit)
    starts = zip(blocks.there.tolist(), blocks.here.tolist(), blocks.kind.tolist(), strict=True)
    return [ordered(box_of(blocks.kinds[kind], local, canonical)) for canonical, local, kind in starts]


def _by_rows(flat: Positions, length: int, limit: int) -> list[Box] | None:
    """The boxes, found from the patterns of whole rows of ``length``; None if that is not the way."""
    if not length or not flat.size:
        return None
    if flat.size % length:
        flat = np.concatenate([flat, np.full(-flat.size % length, -1)])
    try:
        rows = _row_blocks(flat.reshape(-1, length), limit)
        return None if rows is None else _fewest(block_stretches(rows), rows.kinds, limit)
    except NotAffineError:
        return None


def _row_blocks(table: Positions, limit: int) -> Blocks | None:
    """The boxes of each row as blocks; None if rows follow too many patterns for that to be the short way."""
    rows, fresh = _patterns(table)
    leaders = rows[fresh]
    if len(leaders) > max(limit, len(rows) // 8):
        return None
    known: dict[bytes, int] = {}
    patterns = [known.setdefault(_relative(table[row]).tobytes(), len(known)) for row in leaders.tolist()]
    if len(known) > limit:
        return None
    pattern = np.array(patterns, np.int64)[np.cumsum(fresh) - 1]
    parts, kinds = [], list[tuple[Dim, ...]]()
    for number in range(len(known)):
        members = rows[pattern == number]
        for box in _fewest(element_stretches(table[members[0]]), [()], limit, whole=False):
            kinds.append(box.dims)
            start = members * table.shape[1] + box.canonical
            parts.append((start, table.reshape(-1)[start], np.full(len(members), kinds.index(box.dims))))
    return _in_order(parts, kinds)


def _in_order(parts: list[tuple[Positions, Positions, Positions]], kinds: list[tuple[Dim, ...]]) -> Blocks:
    if not parts:
        none = np.zeros(0, np.int64)
        return Blocks(none, none, none, [()])
    canonical, local, kind = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(canonical)
    return Blocks(canonical[order], local[order], kind[order], kinds)


def _relative(row: Positions) -> Positions:
    """Equal for rows that differ only by where they start. At least one position is valid."""
    valid = row >= 0
    return np.where(valid, row - row[valid.argmax()], np.iinfo(np.int64).min)


def _patterns(table: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
    """Rows that hold any position, and which of them is not the one before shifted by a constant."""
    height = max(1, _CHUNK // table.shape[1])
    kept, fresh, last = [], [], table[:0]
    for start in range(0, len(table), height):
        part = table[start : start + height]
        dense = part.min() >= 0
        rows = np.arange(len(part)) if dense else np.flatnonzero((part >= 0).any(axis=1))
        both = np.concatenate([last, part[rows] if len(rows) < len(part) else part])
        alike = _alike(both[1:], both[:-1], dense=bool(dense and last.min(initial=0) >= 0))
        kept.append(rows + start)
        fresh.append(~alike if len(last) else np.concatenate([[True], ~alike])[: len(rows)])
        last = both[-1:]
    return np.concatenate(kept), np.concatenate(fresh)


def _alike(rows: Positions, before: Positions, dense: bool) -> npt.NDArray[np.bool_]:
    """Which rows are the ones before shifted by a constant."""
    apart = rows - before
    if dense:
        return _all(apart == apart[:, :1])
    valid = rows >= 0
    lead = np.take_along_axis(apart, valid.argmax(axis=1)[:, None], axis=1)
    return _all(((apart == lead) | ~valid) & (valid == (before >= 0)))


def _all(table: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    return np.asarray(table.all(axis=1))
