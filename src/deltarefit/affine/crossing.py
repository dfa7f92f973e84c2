"""What two boxes share, by digits: the arithmetic under ``compose``, ``restrict`` and ``disjoint``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Digit = tuple[int, int, int]
"""(size, stride on the shared side, stride on the own side), or as a ``Meeting`` says."""
Meeting = tuple[tuple[Digit, ...], int, int]
"""Digits (size, own stride of a, own stride of b), own position of a, own position of b."""
Misfit = Callable[["Side", "Side"], Iterable[Meeting]]


@dataclass(frozen=True, slots=True)
class Side:
    """One of two boxes that share a side: ``start`` and the digits' second entry are positions there; ``own`` and the
    third entry positions on the side that is its own. Digits descend and ascend strictly: see ``ascends``."""

    start: int
    own: int
    digits: tuple[Digit, ...]

    @property
    def last(self) -> int:
        """Its last position on the shared side."""
        return self.start + sum((n - 1) * s for n, s, _ in self.digits)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(n for n, _, _ in self.digits)

    def at(self, index: int) -> Side:
        """The part with its first digit fixed."""
        _, stride, own = self.digits[0]
        return Side(self.start + index * stride, self.own + index * own, self.digits[1:])

    def cut(self, start: int, stop: int) -> Side:
        """The part with its first digit in [start, stop)."""
        _, stride, own = self.digits[0]
        rest = ((stop - start, stride, own), *self.digits[1:])
        return replace(self.at(start), digits=rest if stop - start > 1 else self.digits[1:])

    def positions(self) -> tuple[Positions, Positions]:
        """All its elements: positions on the shared side, ascending, and on its own."""
        shared, own = np.array([self.start]), np.array([self.own])
        for n, stride, step in self.digits:
            index = np.arange(n)
            shared = (shared[:, None] + index * stride).reshape(-1)
            own = (own[:, None] + index * step).reshape(-1)
        return shared, own

    def looked_up(self, shared: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """Positions on its own side of the elements at ``shared``, and which of them it has."""
        rest, own = shared - self.start, np.full(len(shared), self.own)
        inside = rest >= 0
        for n, stride, step in self.digits:
            index, rest = np.divmod(rest, stride)
            inside &= index < n
            own += index * step
        return own, inside & (rest == 0)

    def wound(self, factor: int, used: int) -> Side:
        """With the first digit as two: of each ``factor`` of it, the first ``used``; the last may be incomplete."""
        n, stride, own = self.digits[0]
        halves = ((n - used) // factor + 1, stride * factor, own * factor), (used, stride, own)
        return replace(self, digits=(*(d for d in halves if d[0] > 1), *self.digits[1:]))


def meet(a: Side, b: Side, misfit: Misfit) -> Iterator[Meeting]:
    """The elements that a and b share, exactly, each once.

    ``misfit(a, b)`` finds them for parts whose radices do not align (one stride is no multiple of the other).
    """
    if a.start > b.last or b.start > a.last:
        return
    if not a.digits and not b.digits:
        yield (), a.own, b.own
        return
    stride_a, stride_b = (side.digits[0][1] if side.digits else 0 for side in (a, b))
    if stride_a == stride_b:
        yield from _meet_level(a, b, misfit)
    elif stride_a > stride_b:
        yield from _meet_coarse(a, b, misfit)
    else:
        for digits, own_b, own_a in _meet_coarse(b, a, lambda b, a: map(_swapped, misfit(a, b))):
            yield _swapped((digits, own_b, own_a))


def _swapped(part: Meeting) -> Meeting:
    digits, own_a, own_b = part
    return tuple((n, q, p) for n, p, q in digits), own_b, own_a


def _meet_level(a: Side, b: Side, misfit: Misfit) -> Iterator[Meeting]:
    """First digits of one stride: b's digit lags behind a's by one of at most two amounts."""
    n, stride, step_a = a.digits[0]
    m, _, step_b = b.digits[0]
    apart = b.start - a.start
    least, most = apart - (a.at(0).last - a.start), apart + (b.at(0).last - b.start)
    for lag in range(-(-least // stride), most // stride + 1):
        first, stop = max(0, lag), min(n, m + lag)
        if first < stop:
            outer = ((stop - first, step_a, step_b),) if stop - first > 1 else ()
            for digits, own_a, own_b in meet(a.at(first), b.at(first - lag), misfit):
                yield (*outer, *digits), own_a, own_b


def _meet_coarse(a: Side, b: Side, misfit: Misfit) -> Iterator[Meeting]:
    """a's first stride is the larger one: b is cut where a's digit turns over."""
    n, stride, _ = a.digits[0]
    if b.last - b.start < stride:
        reach = a.at(0).last - a.start
        first, last = -((a.start + reach - b.start) // stride), (b.last - a.start) // stride
        for index in range(max(0, first), min(n - 1, last) + 1):
            yield from meet(a.at(index), b, misfit)
        return
    if stride % b.digits[0][1]:
        yield from misfit(a, b)
        return
    for part in _cut_at_turns(a, b):
        yield from meet(a, part, misfit)


def _cut_at_turns(a: Side, b: Side) -> Iterator[Side]:
    """b before the first turn of a's digit, b turn by turn, and what is left: together all that a can share."""
    (m, fine, _), stride = b.digits[0], a.digits[0][1]
    factor, late = stride // fine, (b.start - a.start) % fine
    head = min(m, -(-((a.start - b.start) % stride) // fine))
    # Only if b's digits start where a's do, none of them reaches into the next turn.
    used = factor if late else min(factor, (a.at(0).last - a.start) // fine + 1)
    turns = (m - head - used) // factor + 1
    if head:
        yield b.cut(0, head)
    if turns == 1:
        yield b.cut(head, head + used)
    elif turns > 1:
        yield b.cut(head, min(m, head + turns * factor)).wound(factor, used)
    if head + max(turns, 0) * factor < m:
        yield b.cut(head + max(turns, 0) * factor, m)
