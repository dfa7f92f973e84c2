"""Order-0 entropy of a change in bytes: what no coder beats that knows only frequencies.

A coder that knows more (which weights are small, what the optimizer did before) may go lower; none of the
encodings compared here does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltarefit.bench.rivals import changed_positions

Bits = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Bounds:
    """Bytes of positions and of values in either form for one model; ``changed`` of ``numel`` differ."""

    numel: int
    changed: int
    positions: float
    differences: float
    xors: float

    @property
    def total(self) -> float:
        """Positions and the cheaper form of values."""
        return self.positions + min(self.differences, self.xors)

    @property
    def per_element(self) -> float:
        """``total`` by changed element; 0 if nothing changed."""
        return self.total / self.changed if self.changed else 0.0


def bounds(pairs: Mapping[str, tuple[Bits, Bits]]) -> Bounds:
    """Positions with one density per tensor; values with one table for the whole model and element width.

    A difference is ``new - old`` modulo 2^bits of the stored integers, sign included.
    """
    changes = [_changed(old, new) for old, new in pairs.values()]
    sizes = [old.size for old, _ in pairs.values()]
    return Bounds(
        numel=sum(sizes),
        changed=sum(old.size for old, _ in changes),
        positions=sum(position_bytes(old.size, size) for size, (old, _) in zip(sizes, changes, strict=True)),
        differences=_pooled_bytes(changes, lambda old, new: new - old),
        xors=_pooled_bytes(changes, np.bitwise_xor),
    )


def position_bytes(changed: int, numel: int) -> float:
    """``numel`` times the binary entropy of ``changed / numel``: any set of positions equally likely."""
    if not 0 < changed < numel:
        return 0.0
    share = changed / numel
    bits = -share * math.log2(share) - (1 - share) * math.log1p(-share) / math.log(2)
    return numel * bits / 8


def symbol_bytes(symbols: npt.NDArray[Any]) -> float:
    """``symbols`` taken at their own frequencies, the table of frequencies not counted."""
    if symbols.size == 0:
        return 0.0
    counts = np.unique(symbols, return_counts=True)[1] if symbols.itemsize > 2 else np.bincount(symbols)
    shares = counts[counts > 0] / symbols.size
    return float(-(shares * np.log2(shares)).sum() * symbols.size / 8)


def _changed(old: Bits, new: Bits) -> tuple[Bits, Bits]:
    positions = changed_positions(old, new)
    return old.reshape(-1)[positions], new.reshape(-1)[positions]


def _pooled_bytes(changes: Iterable[tuple[Bits, Bits]], form: Callable[[Bits, Bits], Bits]) -> float:
    by_width: dict[int, list[Bits]] = {}
    for old, new in changes:
        by_width.setdefault(old.itemsize, []).append(form(old, new))
    return sum(symbol_bytes(np.concatenate(values)) for values in by_width.values())
