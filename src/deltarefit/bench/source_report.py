"""The source benchmark as tables for people; ``bench.source.run`` has the same as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from deltarefit.bench.report import goals_table

NOTES = """\
Both ways use all cores: ours on every rank, the gather on rank 0. Casting to bfloat16 counts as read/encode in ours, as
gather in the other. Bytes between ranks are counted from shapes for the gather (all ranks get all of every parameter as
bfloat16, rows padded to equal chunks), and as carried for our messages. One machine hides what a gather costs on a
network, where its bytes cross links, and what it leaves idle: the cores of all other hosts. Where every rank holds all
weights (replicated) there is nothing to gather: such a gather moves no byte."""


def table(result: dict[str, Any]) -> Group:
    """Ways by sharding, then streaming and goals."""
    return Group(*map(_case, result["cases"]), NOTES, _stream(result["stream"]), goals_table(result["goals"]))


def _case(case: dict[str, Any]) -> Table:
    ways = case["ways"]
    facts = ways["ours"]
    size = f"{facts['dense_bytes'] / 1e6:.1f} MB of bfloat16"
    title = f"{case['sharding']}: {size}, {facts['density']:.2%} changed a step"
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for name in ways:
        shown.add_column(name, justify="right")
    for line in _lines(ways):
        shown.add_row(*line)
    return shown


def _lines(ways: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    every = list(ways.values())
    stages = every[0]["seconds"]

    def each(name: str, figure: Any) -> tuple[str, ...]:
        return (name, *(figure(way) for way in every))

    return [
        each("threads a rank", lambda way: str(way["threads"])),
        *(each(f"{stage}, ms", lambda way, stage=stage: f"{1000 * way['seconds'][stage]:.0f}") for stage in stages),
        each("first version, total, ms", lambda way: f"{1000 * way['first_seconds']['total']:.0f}"),
        each("between ranks, bytes", lambda way: f"{way['bytes_between_ranks']:,.0f}"),
        each("wire, bytes", lambda way: f"{way['wire_bytes']:,.0f}"),
        each("extra memory by rank, MiB", lambda way: _mebibytes(way["memory"])),
        each("  first version", lambda way: _mebibytes(way["first_memory"])),
        each("receiver equals dense export", lambda way: "yes" if way["equal"] else "NO"),
    ]


def _mebibytes(by_rank: list[int]) -> str:
    return ", ".join(f"{value / 2**20:.0f}" for value in by_rank)


def _stream(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="publish over a slow link, seconds", title_justify="left")
    for name in ("version", "MB/s", "payload MB", "uploads", "build alone", "upload alone", "publish", "/ longer"):
        shown.add_column(name, justify="left" if name == "version" else "right")
    for row in rows:
        what = "anchor" if row["what"] == "anchor" else f"{row['density']:.0%} changed"
        figures = (row["bytes_per_s"] / 1e6, row["payload_bytes"] / 1e6, row["uploads"])
        seconds = (f"{row[name]:.2f}" for name in ("build", "upload", "wall", "wall/longer"))
        shown.add_row(what, *(f"{figure:.0f}" for figure in figures), *seconds)
    return shown


def memory_table(result: dict[str, Any]) -> Group:
    """What ranks need by phase, and the goal; for ``bench.memory.run``."""
    return Group(_memory(result["rows"]), goals_table(result["goals"]))


def _memory(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="peak memory of a rank beyond its weights, MiB", title_justify="left")
    for name in ("ranks", "weights", "largest tensor", "phase", "extra", "baseline", "beside it"):
        shown.add_column(name)
    for row in rows:
        sizes = (f"{row[name] / 2**20:.0f}" for name in ("extra", "baseline", "beyond_baseline"))
        shown.add_row(str(row["ranks"]), row["weights"], f"{row['largest'] / 2**20:.0f}", row["phase"], *sizes)
    return shown
