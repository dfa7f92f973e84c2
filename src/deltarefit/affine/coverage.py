"""Does every element of every canonical tensor have exactly one owner? Exact, whatever the shapes of the pieces.

Pieces of one tensor nearly always are rectangles of one table of rows, and a sweep over their edges decides at once.
Whatever else there is, and the place of a fault, is found by marking.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from deltarefit.affine.crossing import Meeting, Side, meet
from deltarefit.errors import IntegrityError, RefitError, UsageError
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece

MAX_COMPARED = 1 << 24
"""Most elements that ``disjoint`` looks at one by one."""
_CHUNK = 1 << 23
"""Units marked at a time."""
_MAX_ROWS = 1024
"""Most rows of a piece that are looked at one by one where they are not rows of the common table."""
_MAX_STEP = 64
"""Largest distance of elements that counts as a step within a row."""

Owned = tuple[Piece, str]
"""A piece and who has it, for messages."""
Table = tuple[int, int, int, int, int]
"""(offset, rows, pitch, run, step)"""
Line = tuple[int, int, int, int, int]
"""(first row, last row + 1, first column, columns, distance of columns)"""
Tile = tuple[int, int, int, int]
"""(first row, last row + 1, first column, last column + 1) of a table."""
Marks = npt.NDArray[np.uint32]


def check_coverage(catalog: Catalog, owned: Sequence[Sequence[Piece]]) -> None:
    """Every element of every tensor of ``catalog`` is in exactly one piece of ``owned``, the pieces of all ranks.

    ``UsageError`` names the first tensor and position that nobody or more than one owns, and the ranks.
    """
    every = ((piece, f"rank {rank}") for rank, pieces in enumerate(owned) for piece in pieces)
    _check(catalog, every, UsageError)


def check_segments(
    catalog: Catalog, parts: Iterable[tuple[Piece, int, int]], error: type[RefitError] = IntegrityError
) -> None:
    """Every element of every tensor of ``catalog`` is in exactly one of ``parts``: elements [start, stop) of a piece.

    ``error`` is raised where ``check_coverage`` would raise.
    """
    _check(catalog, _joined(parts, error), error)


def _joined(parts: Iterable[tuple[Piece, int, int]], error: type[RefitError]) -> Iterator[Owned]:
    """Segments that adjoin made one."""
    for piece, group in groupby(sorted(parts), key=lambda part: part[0]):
        first = reached = 0
        for _, start, stop in group:
            if not 0 <= start <= stop <= piece.length or piece.run < 1:
                raise error("a segment is outside its piece", expected=f"in 0 .. {piece.length}", found=(start, stop))
            if start != reached:
                yield from ((part, f"segment {first} .. {reached} of {piece}") for part in cut(piece, first, reached))
                first = start
            reached = stop
        yield from ((part, f"segment {first} .. {reached} of {piece}") for part in cut(piece, first, reached))


def cut(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """Elements [start, stop) of a piece as at most three pieces: the end of a row, rows, the beginning of a row."""
    head = min(stop, -(-start // piece.run) * piece.run)
    body = max(head, stop // piece.run * piece.run)
    for first, last, run in ((start, head, head - start), (head, body, piece.run), (body, stop, stop - body)):
        if first < last:
            pitch = piece.pitch if last - first > run else 0
            yield Piece(piece.tensor, piece.position(first), last - first, run, piece.step, pitch, piece.overwrite)


def _check(catalog: Catalog, owned: Iterable[Owned], error: type[RefitError]) -> None:
    by_tensor: list[list[Owned]] = [[] for _ in catalog.tensors]
    for piece, who in owned:
        if not 0 <= piece.tensor < len(by_tensor):
            raise error(f"{who}: a piece of no tensor", expected=f"a tensor below {len(by_tensor)}", found=piece)
        if piece.length:
            _check_piece(piece, catalog.tensors[piece.tensor].numel, who, error)
            by_tensor[piece.tensor].append((piece, who))
    proven: set[tuple[object, ...]] = set()  # a model has many tensors, but few ways to share one
    for entry, mine in zip(catalog.tensors, by_tensor, strict=True):
        shares = entry.numel, *sorted((p.offset, p.length, p.run, p.step, p.pitch) for p, _ in mine)
        if shares in proven:
            continue
        if (position := _first_fault(entry.numel, [piece for piece, _ in mine])) is not None:
            owners = [who for piece, who in mine if contains(piece, position)]
            raise error(
                f"{entry.name}: element {position} is owned {len(owners)} times",
                expected="each element of each tensor owned once",
                found=", ".join(owners[:8]) or "no owner",
            )
        proven.add(shares)


def _check_piece(piece: Piece, numel: int, who: str, error: type[RefitError]) -> None:
    rows = piece.length // piece.run if piece.run > 0 else 0
    good = rows > 0 and piece.length == rows * piece.run and piece.step >= 1 and piece.offset >= 0
    good = good and (rows == 1 or piece.pitch > (piece.run - 1) * piece.step)
    if not good or piece.position(piece.length - 1) >= numel:
        raise error(f"{who}: a piece is malformed or outside its tensor", expected=f"below {numel}", found=piece)


def contains(piece: Piece, position: int) -> bool:
    """Canonical ``position`` is one of the piece's."""
    row, rest = 0, position - piece.offset
    if piece.length > piece.run:
        row, rest = divmod(rest, piece.pitch)
    return 0 <= row < piece.length // piece.run and rest % piece.step == 0 and 0 <= rest // piece.step < piece.run


def _first_fault(numel: int, pieces: list[Piece]) -> int | None:
    """The first position that is not in exactly one piece."""
    if sum(piece.length for piece in pieces) == numel:
        tiles = _tiles([_table(piece) for piece in pieces], numel)
        if tiles is not None and not _overlap(tiles):
            return None
    return _first_fault_by_marking(numel, pieces)


def _table(piece: Piece) -> Table:
    """Elements at one distance are one row if the distance is small, else rows of one."""
    if piece.flat:
        return piece.offset, 1, 0, piece.length, 1
    offset, run, step, pitch = piece.rows
    if run == 1 and pitch <= _MAX_STEP:
        return offset, 1, 0, piece.length, pitch
    return offset, piece.length // run, pitch, run, step


def _tiles(tables: list[Table], numel: int) -> list[Tile] | None:
    """The pieces as rectangles of one table whose rows have its columns sorted by residue, so that columns at equal
    distances stand together; None if some are none."""
    pitches: Counter[int] = Counter()
    for _, rows, pitch, _, _ in tables:
        if rows > 1:
            pitches[pitch] += rows
    comb = math.lcm(*(step for *_, step in tables))
    width = pitches.most_common(1)[0][0] if pitches else -(-numel // comb) * comb
    if comb > _MAX_STEP or width % comb:
        return None
    tiles: list[Tile] = []
    for table in tables:
        if (lines := _lines(table, width)) is None:
            return None
        for line in lines:
            tiles += _combed(*line, width, comb)
    return tiles


def _lines(table: Table, width: int) -> list[Line] | None:
    offset, rows, pitch, run, step = table
    if rows > 1 and pitch == width:
        row, column = divmod(offset, width)
        first = min(run, -(-(width - column) // step))
        lines = [(row, row + rows, column, first, step)]
        if first < run:
            lines.append((row + 1, row + rows + 1, column + first * step - width, run - first, step))
        return lines
    if rows > _MAX_ROWS:
        return None
    return [line for index in range(rows) for line in _range_lines(offset + index * pitch, run, step, width)]


def _range_lines(start: int, count: int, step: int, width: int) -> Iterator[Line]:
    """The end of a row, rows, the beginning of a row."""
    row, column = divmod(start, width)
    full = width // step
    head = min(count, -(-(width - column) // step))
    if head < full:
        yield row, row + 1, column, head, step
        row, count = row + 1, count - head
    if count >= full:
        yield row, row + count // full, column % step, full, step
    if count % full:
        yield row + count // full, row + count // full + 1, column % step, count % full, step


def _combed(row: int, end: int, column: int, count: int, step: int, width: int, comb: int) -> Iterator[Tile]:
    teeth = comb // step
    for tooth in range(min(teeth, count)):
        residue, first = (column + tooth * step) % comb, (column + tooth * step) // comb
        at = residue * (width // comb) + first
        yield row, end, at, at - (tooth - count) // teeth


def _overlap(tiles: list[Tile]) -> bool:
    """Two of them share a place: swept row by row, with what lies across the row kept in order."""
    edges = [(tile[0], 1, tile[2], tile[3]) for tile in tiles] + [(tile[1], 0, tile[2], tile[3]) for tile in tiles]
    across: list[tuple[int, int]] = []
    for _, opens, first, stop in sorted(edges):
        at = bisect_left(across, (first, stop))
        if not opens:
            del across[at]
        elif (at and across[at - 1][1] > first) or (at < len(across) and across[at][0] < stop):
            return True
        else:
            across.insert(at, (first, stop))
    return False


def _first_fault_by_marking(numel: int, pieces: list[Piece]) -> int | None:
    unit = _unit(numel, pieces)
    units = numel // unit
    room = np.empty(min(_CHUNK, units), np.uint32)
    for start in range(0, units, _CHUNK):
        marks = room[: units - start]
        marks.fill(0)
        for piece in pieces:
            _mark(marks, start, piece, unit)
        wrong = np.flatnonzero(marks != 1)
        if len(wrong):
            return (start + int(wrong[0])) * unit
    return None


def _unit(numel: int, pieces: list[Piece]) -> int:
    """The largest number of elements that every piece has, or has not, as a whole."""
    if any(piece.step != 1 for piece in pieces):
        return 1
    pitches = [piece.pitch for piece in pieces if piece.length > piece.run]
    return math.gcd(numel, *pitches, *(piece.offset for piece in pieces), *(piece.run for piece in pieces))


def _mark(marks: Marks, start: int, piece: Piece, unit: int) -> None:
    """Count the piece's elements among units [start, start + len(marks))."""
    run, step, rows = piece.run // unit, piece.step, piece.length // piece.run
    reach, first = (run - 1) * step, piece.offset // unit - start
    pitch = piece.pitch // unit if rows > 1 else reach + 1
    full = max(0, -(first // pitch)), min(rows, (len(marks) - reach - 1 - first) // pitch + 1)
    if full[0] < full[1]:
        shape, strides = (full[1] - full[0], run), (pitch * marks.itemsize, step * marks.itemsize)
        view = np.lib.stride_tricks.as_strided(marks[first + full[0] * pitch :], shape, strides)
        np.add(view, 1, out=view)
    for row in {full[0] - 1, max(full[0], full[1])}:  # at most these two reach over an end
        at = first + row * pitch
        if 0 <= row < rows and at < len(marks) and at + reach >= 0:
            marks[at if at >= 0 else at % step : max(0, at + reach + 1) : step] += 1


def disjoint(a: Piece, b: Piece) -> bool:
    """No element is in both pieces, which are well-formed.

    Exact by digits. Pieces whose strides do not divide each other are compared element by element; if the smaller has
    more than ``MAX_COMPARED`` within the other's reach, False: not shown to be disjoint.
    """
    if a.tensor != b.tensor:
        return True
    return next(meet(_side(a), _side(b), _shared), None) is None


def _side(piece: Piece) -> Side:
    digits = ((piece.length // piece.run, piece.pitch, 0), (piece.run, piece.step, 0))
    return Side(piece.offset, 0, tuple(digit for digit in digits if digit[0] > 1))


def _shared(a: Side, b: Side) -> Iterator[Meeting]:
    """Something if a and b share an element."""
    small, large = (a, b) if a.numel <= b.numel else (b, a)
    small = _within(small, large)
    if small.numel > MAX_COMPARED or large.looked_up(small.positions()[0])[1].any():
        yield (), 0, 0


def _within(small: Side, large: Side) -> Side:
    """Without the first digits of ``small`` that lie outside ``large``."""
    n, stride, _ = small.digits[0]
    reach = small.at(0).last - small.start
    first = max(0, -((small.start + reach - large.start) // stride))
    stop = min(n, (large.last - small.start) // stride + 1)
    return small.cut(first, stop) if first < stop else Side(large.start - 1, 0, ())
