"""The relay benchmark as tables for people; ``bench.relay.run`` has the same as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from deltarefit.bench.report import goals_table

Row = Mapping[str, Any]


def table(result: dict[str, Any]) -> Group:
    """A table for each case that ran, then goals."""
    shown = [_TABLES[case](rows) for case, rows in result["rows"].items()]
    return Group(*shown, goals_table(result["goals"]))


def _egress(rows: Sequence[Row]) -> Table:
    shown = _table(f"bytes over the link ({rows[0]['link']}), times the payloads", "receivers", "seconds", "root sent")
    for name in ("with headers", "peak MiB", "equal"):
        shown.add_column(name, justify="right")
    for row in rows:
        crossed = "-" if row["crossed"] is None else f"{row['crossed']:.3f}"
        line = (str(row["receivers"]), f"{row['seconds']:.2f}", f"{row['egress']:.3f}", crossed)
        shown.add_row(*line, _mib(row["peak_bytes"]), _yes(row["equal"]))
    return shown


def _depth(rows: Sequence[Row]) -> Table:
    title = f"time by depth ({rows[0]['link']}); a plain copy takes {rows[0]['plain_s']:.2f} s"
    shown = _table(title, "depth", "seconds", "all", "equal")
    for row in rows:
        every = " ".join(f"{seconds:.2f}" for seconds in row["all_s"])
        shown.add_row(str(row["depth"]), f"{row['seconds']:.2f}", every, _yes(row["equal"]))
    return shown


def _nginx(rows: Sequence[Row]) -> Table:
    names = ("server", "GB/s", "CPU s/GiB", "server busy", "load busy", "peak MiB")
    shown = _table("whole objects over loopback, server and load on a core each", *names)
    for row in rows:
        line = (f"{row['bytes_s'] / 1e9:.2f}", f"{row['cpu_s_gib']:.2f}", f"{row['busy']:.0%}")
        shown.add_row(row["server"], *line, f"{row['load_busy']:.0%}", _mib(row["peak_bytes"]))
    return shown


def _kills(rows: Sequence[Row]) -> Table:
    names = ("killed", "at", "seconds", "times", "sent again MiB", "may be MiB", "equal")
    shown = _table(f"an interior relay is killed ({rows[0]['link']})", *names)
    for row in rows:
        seconds, equal = f"{row['seconds']:.2f}", _yes(row["equal"])
        if row["killed"] is None:
            shown.add_row("none", "", seconds, "", "", "", equal)
            continue
        figures = (f"{row['times']:.2f}", f"{row['resent'] / 2**20:.1f}", f"{row['allowed'] / 2**20:.1f}")
        shown.add_row(row["killed"], f"{row['instant']:.0%}", seconds, *figures, equal)
    return shown


def _distance(rows: Sequence[Row]) -> Table:
    shown = _table("payloads over a link with delay and loss, Mbit/s", "link", "relay", "share", "equal")
    for streams in rows[0]["plain_bytes_s"]:
        shown.add_column(f"plain x{streams}", justify="right")
    for row in rows:
        share = "-" if row["share"] is None else f"{row['share']:.0%}"
        plain = (_mbit(rate) for rate in row["plain_bytes_s"].values())
        shown.add_row(row["link"], _mbit(row["bytes_s"]), share, _yes(row["equal"]), *plain)
    return shown


_TABLES: dict[str, Callable[[Sequence[Row]], Table]] = {
    "egress": _egress,
    "depth": _depth,
    "nginx": _nginx,
    "kills": _kills,
    "distance": _distance,
}


def _table(title: str, first: str, *names: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column(first)
    for name in names:
        shown.add_column(name, justify="right")
    return shown


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f}"


def _mbit(rate: float) -> str:
    return f"{rate * 8 / 1e6:.0f}"


def _yes(good: bool) -> str:
    return "yes" if good else "NO"
