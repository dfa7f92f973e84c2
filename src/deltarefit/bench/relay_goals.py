"""What ``bench relay`` must reach, from its rows (design §9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltarefit.bench import relay_rival
from deltarefit.bench.goals import at_least, at_most

EGRESS, DEPTH, NGINX, MIB, TIMES, SHARE = 1.02, 1.2, 0.6, 256, 2.0, 0.8
Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def goals(rows: Rows) -> list[dict[str, Any]]:
    """Each goal of the cases that ran, with its worst figure, and whether it is reached. What could not be measured
    (no shaped link, no nginx) is not reached."""
    found = [goal for case, make in _GOALS.items() if case in rows for goal in make(rows[case])]
    every = [row for case in rows.values() for row in case]
    peaks = [
        row["peak_bytes"] / 2**20 for row in every if "peak_bytes" in row and row.get("server") != relay_rival.NGINX
    ]
    wrong = [int(not row["equal"]) for row in every if "equal" in row]
    if peaks:
        found.append(at_most("peak memory of a relay, MiB", peaks, MIB))
    return [*found, at_most("runs in which a byte was wrong or missing", [sum(wrong)], 0)]


def _egress(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [at_most("bytes that the root sent, times the payloads", [row["egress"] for row in rows], EGRESS)]


def _depth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    seconds = {row["depth"]: row["seconds"] for row in rows}
    return [at_most("time at depth 3, times that at depth 1", [seconds[3] / seconds[1]], DEPTH)]


def _nginx(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rates = {row["server"]: row["bytes_s"] for row in rows}
    rival = rates.pop(relay_rival.NGINX, None)
    name = "one relay's rate, times nginx's" + ("" if rival else " (not installed here)")
    return [at_least(name, [rate / rival for rate in rates.values()] if rival else [], NGINX)]


def _kills(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    killed = [row for row in rows if row["killed"]]
    return [
        at_most("time with a relay killed, times the time in peace", [row["times"] for row in killed], TIMES),
        at_most("bytes sent again, beyond those in flight, MiB", [_beyond(row) for row in killed], 0),
    ]


def _beyond(row: Mapping[str, Any]) -> float:
    return float(max(0, row["resent"] - row["allowed"])) / 2**20


def _distance(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    shares = [row["share"] for row in rows if row["share"] is not None]
    return [at_least("rate over a link with delay and loss, share of the link's", shares, SHARE)]


_GOALS = {"egress": _egress, "depth": _depth, "nginx": _nginx, "kills": _kills, "distance": _distance}
