"""A deterministic simulator: the product's own publisher, receivers and log on a simulated clock, store, disk and
processes.

``run_seed`` plays one seed; the same seed plays the same run, event by event. In mode ``unlimited`` faults never stop
and only safety is judged; in mode ``healing`` they stop, and everything must be well soon after.
"""

from __future__ import annotations

from deltarefit.simulation.running import Run, run_seed, run_seeds
from deltarefit.simulation.scenario import HEALING, MODES, UNLIMITED
from deltarefit.simulation.world import TAIL

__all__ = ["HEALING", "MODES", "TAIL", "UNLIMITED", "Run", "run_seed", "run_seeds"]
