"""``deltarefit bench relay``: a tree of relays as real processes, behind a slow link, beside nginx, and killed.

The root and its store stand on the near side of a link, all other relays and the receivers on the far side: network
namespaces with a shaped link between them (``bench.links``) where this machine gives them, plain loopback elsewhere,
and then the rows say so. Every run begins with empty caches; every receiver compares every byte. Ways by turns,
medians.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltarefit.bench import links, relay_rival
from deltarefit.bench.links import Link, Shape
from deltarefit.bench.relay_goals import goals
from deltarefit.bench.relay_tree import ROOT, Above, Payloads, Tree, grown, leaves, make_payloads
from deltarefit.cli.relaying import CHUNK_BYTES
from deltarefit.errors import UsageError

Say = Callable[[str], None]

ONE: Above = {"a": ROOT}
THREE: Above = {"a": ROOT, "b": "a", "c": "b"}
BUSH: Above = {"a": ROOT, "b": "a", "c": "a", "d": "b", "e": "b"}
"""Of its relays, ``a`` hangs at the slow link and has two children, ``b`` has two leaves."""
INTERIOR = ("a", "b")
MOST_S = 600.0
FETCHES = 4
"""Objects that a receiver fetches at once."""
MOST_FETCHES = 64
"""By all receivers together: they are on one machine."""
LOADS = 2
"""Of each server, for each repeat."""
RIVAL_S = 12.0
"""Longest time of a plain copy."""
EARLIEST, LATEST = 0.05, 0.95
"""Of the fault-free time: the range of instants at which a relay is killed."""


@dataclass(frozen=True)
class Size:
    """Bytes of payloads, their number, and how often each case runs."""

    nbytes: int
    objects: int
    receivers: tuple[int, ...]
    repeats: int
    load_s: float
    kills: int


FULL = Size(256 << 20, 32, (1, 2, 8, 32), 3, 2.0, 6)
QUICK = Size(4 << 20, 8, (1, 2), 1, 0.3, 1)
SLOW = Shape(200)
DISTANT = (Shape(200, 0.0425, 0.001, 1500), Shape(200, 0.0425, 0.001, 9000))
STREAMS = (1, 16)
"""Of the plain copies over a distant link: the rival, and what the link gives at best."""


def run(quick: bool, cases: Sequence[str], say: Say) -> dict[str, Any]:
    """Rows of each case (all, if none is named), and whether each goal is reached; JSON-ready."""
    unknown = set(cases) - set(CASES)
    if unknown:
        raise UsageError(f"no such case: {', '.join(sorted(unknown))}", expected=f"some of {', '.join(CASES)}")
    size = QUICK if quick else FULL
    reason = "--quick" if quick else links.missing()
    with tempfile.TemporaryDirectory(prefix="deltarefit-payloads-") as work:
        bench = _Bench(size, make_payloads(Path(work, "store"), size.nbytes, size.objects), reason, say)
        rows = {name: CASES[name](bench) for name in CASES if not cases or name in cases}
    result = {
        "quick": quick, "load": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0)), "not_shaped": reason,
        "congestion": _congestion(), "payload_bytes": size.nbytes, "objects": size.objects, "rows": rows,
    }  # fmt: skip
    return {**result, "goals": goals(rows)}


def _congestion() -> str:
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return "unknown"


class _Bench:
    def __init__(self, size: Size, payloads: Payloads, not_shaped: str, say: Say) -> None:
        self.size, self.payloads, self.say = size, payloads, say
        self._not_shaped = not_shaped

    def slow(self) -> AbstractContextManager[Link]:
        """The slow link, or none."""
        return links.loopback() if self._not_shaped else links.shaped(SLOW)

    def distant(self, shape: Shape) -> AbstractContextManager[Link]:
        """A link with delay and loss, or none."""
        return links.loopback() if self._not_shaped else links.distant(shape)

    # ------------------------------------------------------------------------------------ cases

    def egress(self) -> list[dict[str, Any]]:
        """Bytes over the slow link by number of receivers behind one relay."""
        rows = []
        with self.slow() as link:
            for count in self.size.receivers:
                self.say(f"{count} receivers behind one relay ...")
                rows.append({"link": str(link), "receivers": count, **self._transfer(link, ONE, count)})
        return rows

    def depth(self) -> list[dict[str, Any]]:
        """Time by depth, each beside a plain copy of as many bytes."""
        runs: dict[int, list[dict[str, Any]]] = {1: [], 3: []}
        with self.slow() as link:
            for turn in range(self.size.repeats):
                for depth, above in ((1, ONE), (3, THREE)):
                    self.say(f"depth {depth}, {turn + 1} of {self.size.repeats} ...")
                    runs[depth].append(self._transfer(link, above, max(self.size.receivers[:3])))
            plain = self._plain(link, 1)
            return [{"link": str(link), "depth": n, "plain_s": plain, **_median(rows)} for n, rows in runs.items()]

    def nginx(self) -> list[dict[str, Any]]:
        """One relay beside nginx."""
        self.say("one relay beside nginx ..." if relay_rival.nginx_path() else "one relay; nginx is not installed ...")
        with links.loopback() as link:
            return relay_rival.rows(link, self.payloads, self.size.load_s, LOADS * self.size.repeats)

    def kills(self) -> list[dict[str, Any]]:
        """Interior relays killed at random instants, beside the same tree in peace."""
        instants, count = random.Random(0), len(leaves(BUSH))  # noqa: S311  # the same instants each time
        calm, killed = [], []
        with self.slow() as link:
            for number in range(self.size.kills):
                if number % len(INTERIOR) == 0:
                    self.say("nothing is killed ...")
                    calm.append(self._transfer(link, BUSH, count))
                victim, instant = INTERIOR[number % len(INTERIOR)], instants.uniform(EARLIEST, LATEST)
                self.say(f"{victim} is killed at {instant:.0%} ...")
                row = self._transfer(link, BUSH, count, (victim, instant * _median(calm)["seconds"]))
                killed.append({"link": str(link), **row, "instant": instant})
            peace = {"link": str(link), "killed": None, **_median(calm)}
        return [peace, *({**row, "times": row["seconds"] / peace["seconds"]} for row in killed)]

    def distance(self) -> list[dict[str, Any]]:
        """A far relay's rate over links with delay and loss, beside plain copies; bytes of payloads a second."""
        rows = []
        for shape in DISTANT[: 1 if self._not_shaped else None]:
            with self.distant(shape) as link:
                self.say(f"{link} ...")
                plain = {str(n): self.size.nbytes / self._plain(link, n) for n in STREAMS}
                done = [self._transfer(link, ONE, 1) for _ in range(self.size.repeats)]
                rate = self.size.nbytes / statistics.median(row["seconds"] for row in done)
                share = rate / (link.shape.mbit * 1e6 / 8) if link.shape else None
                equal = all(row["equal"] for row in done)
                row = {"link": str(link), "bytes_s": rate, "share": share, "plain_bytes_s": plain, "equal": equal}
                rows.append({**row, "damaged": max(one["damaged"] for one in done)})
        return rows

    # ------------------------------------------------------------------------------------ one transfer

    def _plain(self, link: Link, streams: int) -> float:
        """Seconds of a plain copy of all payload bytes."""
        return self.size.nbytes / links.plain_copy(link, self.size.nbytes, streams, RIVAL_S)

    def _transfer(
        self, link: Link, above: Above, receivers: int, kill: tuple[str, float] | None = None
    ) -> dict[str, Any]:
        """All payloads from the root to all receivers; ``kill``: which relay, after how many seconds."""
        fetches = max(1, min(FETCHES, MOST_FETCHES // receivers))
        with grown(link, self.payloads, above) as tree:
            group = tree.receivers(receivers, fetches)
            before, started = link.crossed(), time.perf_counter()
            group.go()
            lost = self._kill(tree, *kill, started) if kill else None
            found = group.done(MOST_S)
            seconds = time.perf_counter() - started
            after, said = link.crossed(), tree.status()
        return {
            "seconds": seconds, "fetches": fetches, "equal": self._equal(found),
            "egress": said[ROOT]["sent_bytes"] / self.payloads.nbytes,
            "crossed": None if before is None or after is None else (after - before) / self.payloads.nbytes,
            "peak_bytes": max(one["peak_resident_bytes"] for one in said.values()),
            "damaged": sum(one.get("damaged", 0) for one in said.values()),
            **(resent(above, kill[0], lost, said, self.payloads.nbytes, receivers) if kill and lost else {}),
        }  # fmt: skip

    def _kill(self, tree: Tree, name: str, seconds: float, started: float) -> dict[str, dict[str, Any]]:
        """What each relay had said of itself just before ``name`` died."""
        time.sleep(max(0.0, started + seconds - time.perf_counter()))
        said = tree.status()
        tree.kill(name)
        return said

    def _equal(self, found: Sequence[dict[str, Any]]) -> bool:
        return all(one["equal"] and one["bytes"] == self.payloads.nbytes for one in found)


def resent(
    above: Above,
    victim: str,
    before: dict[str, dict[str, Any]],
    after: dict[str, dict[str, Any]],
    nbytes: int,
    receivers: int,
) -> dict[str, Any]:
    """Bytes that were sent more than once because ``victim`` died, and how many may be.

    Sent: what the root and all relays sent, the victim as far as it had said just before. Needed: the payloads, once
    for every other relay and every receiver, and what the victim itself had. Allowed: what was on its way to the victim
    and its children at that moment (sent by the one above, and not all there), and a chunk for each child that had to
    go elsewhere. Pieces that the kill cut are not counted as sent by anybody; each is part of a chunk that was in
    flight.
    """
    sent = before[victim]["sent_bytes"] + sum(one["sent_bytes"] for one in after.values())
    needed = before[victim]["fetched_bytes"] + nbytes * (len(above) - 1 + receivers)
    below = [name for name in above if above[name] == victim]
    pairs = [(above[victim], [name for name in above if above[name] == above[victim]]), (victim, below)]
    flying = sum(
        max(0, before[one]["sent_bytes"] - sum(before[child]["fetched_bytes"] for child in children))
        for one, children in pairs
    )
    return {"killed": victim, "resent": sent - needed, "allowed": flying + CHUNK_BYTES * len(below)}


def _median(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row whose time is in the middle, with the worst of everything else."""
    middle = sorted(rows, key=lambda row: float(row["seconds"]))[len(rows) // 2]
    worst = {name: max(row[name] for row in rows) for name in ("egress", "peak_bytes", "damaged")}
    return {**middle, **worst, "equal": all(row["equal"] for row in rows), "all_s": [row["seconds"] for row in rows]}


CASES: dict[str, Callable[[_Bench], list[dict[str, Any]]]] = {
    "egress": _Bench.egress,
    "depth": _Bench.depth,
    "nginx": _Bench.nginx,
    "kills": _Bench.kills,
    "distance": _Bench.distance,
}
