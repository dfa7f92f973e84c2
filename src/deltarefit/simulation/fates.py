"""What happens to processes: they crash, hang for up to an hour, and their clocks jump or run fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltarefit.simulation.scenario import Scenario, fuse
from deltarefit.simulation.world import Process

HANG_S = (1.0, 3600.0)
MOST_STEPS, MOST_MARKED = 600, 12
MARKED = 0.5
"""Share of faults that strike at one kind of step: most of these are rare among all steps."""
MARKS = (
    "wrote",
    "wrote",
    "header DIRTY",
    "header CLEAN",
    "header UNKNOWN",
    "flush",
    "spool",
    "resume",
    "pause",
    "create",
    "outcome",
    "intent",
    "seed",
    "baseline",
    "payload put",
    "/b/",
    "anchor",
    "prune",
)
LOOK_S = 2.0
"""A hung process wakes so soon after faults have stopped."""


def plan(process: Process, scenario: Scenario, deaths: Sequence[str], hung: Callable[[], None] = lambda: None) -> None:
    """Draw what will happen to a process next. ``deaths`` are the ways in which it may die; ``hung`` is called when it
    stops for long."""
    world, random = process.world, process.world.random
    process.fuse = -1
    if not world.faulty:
        return
    chosen = random.random()
    if chosen < scenario.crash:
        how = random.choice(deaths)
        _light(process, lambda: process.die(how))
    elif random.random() < scenario.hang:
        _light(process, lambda: _hang(process, scenario, deaths, hung))
    elif random.random() < scenario.jump:
        _light(process, lambda: _jump(process, scenario, deaths, hung))


def _light(process: Process, happens: Callable[[], None]) -> None:
    def burn() -> None:
        if process.world.faulty:
            happens()

    random = process.world.random
    process.mark, process.burn = "", burn
    process.fuse = fuse(random, MOST_STEPS)
    if random.random() < MARKED:
        process.mark, process.fuse = random.choice(MARKS), fuse(random, MOST_MARKED)


def _hang(process: Process, scenario: Scenario, deaths: Sequence[str], hung: Callable[[], None]) -> None:
    world = process.world
    low, high = HANG_S
    until = world.now + low * (high / low) ** world.random.random()
    world.note(process.name, f"fault: hangs until {until:.1f}")
    hung()
    while world.faulty and world.now < until:
        process.rest(min(LOOK_S, until - world.now))
    world.note(process.name, "goes on")
    plan(process, scenario, deaths, hung)


def _jump(process: Process, scenario: Scenario, deaths: Sequence[str], hung: Callable[[], None]) -> None:
    random = process.world.random
    before = process.now()
    process.rate = random.choice((0.5, 1.0, 1.0, 2.0))
    jump = random.choice((-5.0, 0.0, 7.0, 3600.0))
    process.offset += before + jump - process.now()
    process.world.note(process.name, f"fault: its clock jumps by {jump} s and runs at {process.rate}")
    plan(process, scenario, deaths, hung)
