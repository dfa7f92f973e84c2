"""How many receivers must hold an attempt before COMMIT (protocol §3.5). Pure: who lives is told, not found out here.

Votes are policy, not safety: receivers learn what was decided from the log, and what was committed without one of them
it takes from there. So no majority is needed, and a vote that is lost costs nothing but time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltarefit.manifest import Held


@dataclass(frozen=True)
class Policy:
    """``need`` receivers, or all that live (None). With fewer than ``least`` nothing is committed at all."""

    need: int | None = None
    least: int = 0


@dataclass(frozen=True)
class Enough:
    """Whose votes count, and who was there without one."""

    members: tuple[str, ...]
    evicted: tuple[str, ...]


@dataclass(frozen=True)
class TooFew:
    """Nothing can be committed; the reason."""

    reason: str


def tally(
    policy: Policy, living: Mapping[str, bool], votes: Mapping[str, Held], held: Held, *, expired: bool
) -> Enough | TooFew | None:
    """What the votes say so far; None: wait. ``living``: receivers that are registered, and whether they give signs of
    life; ``held``: the vote that counts; ``expired``: no more can be waited for."""
    yes = {name for name in living if votes.get(name) is held}
    refused = {name for name in living if votes.get(name) is Held.REFUSED}
    waiting = {name for name, lives in living.items() if lives} - yes - refused
    wanted = policy.least if policy.need is None else max(policy.need, policy.least)
    if len(yes) >= wanted and (policy.need is not None or not waiting or expired):
        if refused and not yes:
            return TooFew(f"all receivers refuse it: {', '.join(sorted(refused))}")
        return Enough(tuple(sorted(yes)), tuple(sorted(living.keys() - yes)))
    if expired or (refused and len(living) - len(refused) < wanted):
        follow = f"{len(living)} follow" if living else "none follows this run"
        return TooFew(f"{len(yes)} of {wanted} receivers hold it, {follow}")
    return None
