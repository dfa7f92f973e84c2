"""The codec benchmark as tables for people; ``bench.codec.run`` has the same as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table


def table(result: dict[str, Any]) -> Group:
    """One row per case and encoding, then memory, then goals."""
    return Group(_cases(result["cases"]), _memory(result["memory"]), goals_table(result["goals"]))


def _cases(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="bytes per changed element; GB/s of model bytes on one core", title_justify="left")
    for name in ("case", "density", "encoding"):
        shown.add_column(name)
    for name in ("B/change", "/ entropy", "encode", "apply"):
        shown.add_column(name, justify="right")
    for row in rows:
        for line in _lines(row):
            shown.add_row(*line)
        shown.add_section()
    return shown


def _lines(row: dict[str, Any]) -> list[tuple[str, ...]]:
    changed = max(row["changed"], 1)
    difference, xor = row["bound_difference"], row["bound_xor"]

    def line(name: str, wire: float, encode: float | None, apply: float | None) -> tuple[str, ...]:
        ratio = f"{wire / difference:.3f}" if difference else "-"
        return ("", "", name, f"{wire / changed:.3f}", ratio, *(f"{x:.2f}" if x else "" for x in (encode, apply)))

    floors = [
        ("", "", "order-0 entropy, differences", f"{difference / changed:.3f}", "1.000", "", ""),
        line("order-0 entropy, XOR", xor, None, None),
        ("", "", "compare scan", "", "", f"{row['compare_scan']:.2f}", ""),
        ("", "", "memcpy", "", "", f"{row['memcpy']:.2f}", f"{row['memcpy']:.2f}"),
    ]
    ours = line("deltarefit, everything", row["ours"]["wire"], row["ours"]["encode"], row["ours"]["apply"])
    first = (row["case"], f"{row['density']:.3%}", *ours[2:])
    others = [line(name, o["wire"], o["encode"], o["apply"]) for name, o in row["others"].items()]
    return [first, *floors, *others]


def _memory(memory: dict[str, Any]) -> Table:
    shown = Table(title="peak resident memory, MiB", title_justify="left")
    for name in ("model MiB", "nothing (--version)", "publish", "follow"):
        shown.add_column(name, justify="right")
    for size, peak in memory["sizes"].items():
        shown.add_row(
            *(f"{value / 2**20:.0f}" for value in (int(size), memory["base"], peak["publish"], peak["follow"]))
        )
    return shown


def goals_table(goals: list[dict[str, Any]]) -> Table:
    """Each goal, its limit, the worst figure and whether it is reached."""
    shown = Table(title="goals (worst case covered)", title_justify="left")
    for name in ("goal", "limit", "worst", "reached"):
        shown.add_column(name)
    for goal in goals:
        worst = "-" if goal["worst"] is None else f"{goal['worst']:.3g}"
        shown.add_row(goal["goal"], goal["limit"], worst, "yes" if goal["reached"] else "NO")
    return shown
