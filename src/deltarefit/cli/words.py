"""Numbers as people read them. Decimal units: 1 MB is 1,000,000 bytes."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(nbytes: float) -> str:
    """Three significant digits: ``61.1 GB``."""
    for unit in _UNITS[:-1]:
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} {_UNITS[-1]}"


def megabytes(nbytes: int) -> str:
    """For columns whose heading says MB."""
    return f"{nbytes / 1e6:,.2f}" if nbytes < 1e8 else f"{nbytes / 1e6:,.0f}"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 0.95 else f"{value * 1000:.0f} ms"


def percent(density: float) -> str:
    """Density in percent: ``1.27 %``; never 0 for what is not."""
    value = 100 * density
    return "0 %" if value == 0 else f"{value:.2f} %" if value >= 0.01 else f"{value:.1g} %"


def ratio(dense: int, wire: int) -> float:
    """How many times smaller ``wire`` is; 0 if there is nothing to divide by."""
    return dense / wire if wire else 0.0


def times(dense: int, wire: int) -> str:
    value = ratio(dense, wire)
    return "-" if value == 0 else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def count(number: int, noun: str) -> str:
    """``1 payload``, ``2 payloads``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"
