"""Goals of a benchmark: a figure in the worst case that it covers, its limit, and whether it is reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def at_most(goal: str, figures: Sequence[float], limit: float) -> dict[str, Any]:
    """The largest figure must not be above the limit. Without any figure a goal is not reached."""
    worst = max(figures) if figures else None
    return {"goal": goal, "limit": f"<= {limit:g}", "worst": worst, "reached": worst is not None and worst <= limit}


def at_least(goal: str, figures: Sequence[float], limit: float) -> dict[str, Any]:
    """The smallest figure must not be below the limit."""
    worst = min(figures) if figures else None
    return {"goal": goal, "limit": f">= {limit:g}", "worst": worst, "reached": worst is not None and worst >= limit}
