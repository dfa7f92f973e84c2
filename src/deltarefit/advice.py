"""How often an anchor pays: from what anchors and deltas of this run weigh (protocol §3.7).

Per version an anchor every K costs S·c_w/K to write, and whoever joins reads S and half a chain, (S + K·ρ·S/2)·c_r:
least at K* = √(2·c_w / (λ·ρ·c_r)). A bound on the time to recover caps it: S·(1 + ρ·K) / bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deltarefit.errors import NotFoundError, UsageError
from deltarefit.protocol.attempts import Attempt
from deltarefit.runlog import RunLog

VERSIONS = 64
"""Newest versions that are weighed."""
JOINS_PER_VERSION = 0.01


@dataclass(frozen=True)
class Advice:
    """All inputs and what follows. ``interval`` is in versions; ``capped``: by ``recovery_s``, not by cost. ``since``
    versions were published after anchor ``anchor``, the newest; ``recovery_now_s`` is what a joiner would take today (0
    without ``bandwidth``, bytes a second)."""

    versions: int
    anchor_bytes: int
    delta_bytes: float
    density: float
    joins_per_version: float
    write_cost: float
    read_cost: float
    recovery_s: float
    bandwidth: float
    interval: int
    capped: bool
    anchor: int
    since: int
    recovery_now_s: float


def advise(
    log: RunLog,
    *,
    joins_per_version: float = JOINS_PER_VERSION,
    write_cost: float = 1.0,
    read_cost: float = 1.0,
    recovery_s: float = 0.0,
    bandwidth: float = 0.0,
) -> Advice:
    """Weigh the newest anchor and the newest versions of a run. ``joins_per_version``: receivers that start or restart
    while one version is the newest; costs are per byte, only their ratio counts. With ``recovery_s`` and ``bandwidth``
    (bytes a second) a joiner must be able to fetch anchor and chain in that time.

    Raises ``NotFoundError`` if the run has no anchor or no delta, ``UsageError`` for numbers that make no sense or a
    bound that even an anchor at every version misses.
    """
    if min(joins_per_version, write_cost, read_cost) <= 0 or (recovery_s > 0) is not (bandwidth > 0):
        raise UsageError("advice needs numbers above 0, and --recovery-s and --bandwidth together or neither")
    found = log.newest_anchor()
    chain = _newest(log)
    if found is None or not chain:
        raise NotFoundError("nothing to weigh: the run has no anchor or no delta yet", next_step="Publish twice.")
    size = sum(ref.size for ref in found[0].payloads)
    delta = sum(ref.size for commit in chain for ref in commit.payloads) / len(chain)
    density = delta / size if size else 0.0
    best = interval_of(density, joins_per_version, write_cost / read_cost)
    most = longest(size, density, recovery_s, bandwidth)
    since = [commit for commit in chain if commit.number > found[0].version]
    now = size + sum(ref.size for commit in since for ref in commit.payloads)
    return Advice(
        versions=len(chain),
        anchor_bytes=size,
        delta_bytes=delta,
        density=density,
        joins_per_version=joins_per_version,
        write_cost=write_cost,
        read_cost=read_cost,
        recovery_s=recovery_s,
        bandwidth=bandwidth,
        interval=min(best, most) if most else best,
        capped=bool(most) and most < best,
        anchor=found[0].version,
        since=len(since),
        recovery_now_s=now / bandwidth if bandwidth else 0.0,
    )


def interval_of(density: float, joins_per_version: float, cost_ratio: float = 1.0) -> int:
    """Versions from one anchor to the next that cost least; ``cost_ratio`` is of writing to reading a byte. Without
    deltas to speak of: as many as are ever weighed apart (2^32)."""
    if density <= 0:
        return 1 << 32
    return max(1, min(1 << 32, round(math.sqrt(2 * cost_ratio / (joins_per_version * density)))))


def longest(anchor_bytes: int, density: float, recovery_s: float, bandwidth: float) -> int:
    """Most versions after an anchor that a joiner can fetch with it in time; 0: no bound was given."""
    if not recovery_s:
        return 0
    room = recovery_s * bandwidth / anchor_bytes - 1 if anchor_bytes else math.inf
    if room < density:
        least = anchor_bytes * (1 + density) / bandwidth
        step = "Allow more time, or a faster store."
        what = "no anchor is recent enough for that"
        raise UsageError(what, expected=f"--recovery-s {math.ceil(least)} at least", found=recovery_s, next_step=step)
    return 1 << 32 if density <= 0 or math.isinf(room) else min(1 << 32, int(room / density))


def _newest(log: RunLog) -> list[Attempt]:
    """The newest versions that have a base, newest first."""
    found: list[Attempt] = []
    commit = log.head()
    while commit is not None and commit.intent is not None and commit.intent.base and len(found) < VERSIONS:
        if commit.pruned:
            break
        found.append(commit)
        commit = log.version(commit.intent.base)
    return found
