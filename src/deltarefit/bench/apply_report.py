"""The apply benchmark as a table for people; ``bench.apply.run`` has the same as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from deltarefit.bench.report import goals_table


def table(result: dict[str, Any]) -> Group:
    """Densities by way, then goals."""
    return Group(_rows(result), goals_table(result["goals"]))


def _rows(result: dict[str, Any]) -> Table:
    sizes = result["rank_bytes"] / 1e6, result["canonical_bytes"] / 1e6
    title = f"one rank of {result['ranks']}: {sizes[0]:.0f} MB of a model of {sizes[1]:.0f}; one thread; milliseconds"
    shown = Table(title=title, title_justify="left")
    rivals = list(result["rows"][0]["rivals"])
    for name in ("changed", "payloads MB", "ours", *rivals, "GB/s of the rank", "of the model", "extra MiB", "equal"):
        shown.add_column(name, justify="right")
    for row in result["rows"]:
        shown.add_row(
            f"{row['density']:.2%}",
            f"{row['payload_bytes'] / 1e6:.2f}",
            f"{1000 * row['seconds']:.1f}",
            *(f"{1000 * row['rivals'][name]:.1f}" for name in rivals),
            f"{row['rank_gb_s']:.2f}",
            f"{row['canonical_gb_s']:.2f}",
            f"{row['extra_bytes'] / 2**20:.0f}",
            "yes" if row["equal"] else "NO",
        )
    return shown
