"""The recovery benchmark as tables for people; ``bench.recovery.run`` has the same as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from deltarefit.bench.report import goals_table


def table(result: dict[str, Any]) -> Group:
    """A refit without a fault and its checks, recoveries, then goals."""
    return Group(_calm(result), _faults(result), goals_table(result["goals"]))


def _calm(result: dict[str, Any]) -> Table:
    title = f"{result['model_bytes'] / 1e6:.0f} MB, {result['density']:.0%} changed, without a fault; milliseconds"
    shown = Table(title=title, title_justify="left")
    for name in result["calm"]:
        shown.add_column(name, justify="right")
    shown.add_row(*(f"{1000 * seconds:.1f}" for seconds in result["calm"].values()))
    return shown


def _faults(result: dict[str, Any]) -> Table:
    shown = Table(title="stopped ...", title_justify="left")
    shown.add_column("where")
    for name in ("recovery ms", "times a refit", "equal"):
        shown.add_column(name, justify="right")
    for row in result["rows"]:
        times = f"{row['times']:.2f}"
        shown.add_row(row["fault"], f"{1000 * row['seconds']:.1f}", times, "yes" if row["equal"] else "NO")
    return shown
