"""What one run is made of, all drawn from its seed: who takes part, how they are set up, and what goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from deltarefit.manifest import Mode
from deltarefit.simulation.store import StoreFaults
from deltarefit.simulation.weights import WeightFaults

UNLIMITED, HEALING = "unlimited", "healing"
MODES = (UNLIMITED, HEALING)
MEMORY, FILE, TARGET = "memory", "file", "target"
LEVELS = (0.0, 0.01, 0.04, 0.12)
"""Chances of a store's fault, per call."""


@dataclass(frozen=True)
class Follow:
    """One receiver. ``start_s``: when it is first started."""

    disk: bool
    start_s: float
    poll_s: float
    named: bool
    """Keeps its name when it is started again."""


@dataclass(frozen=True)
class Train:
    """One trainer. ``turns``: how often it publishes unless faults must end first; ``baseline``: what it is kept in.
    ``mode``, ``votes`` and ``min_receivers`` as in ``Publisher``."""

    start_s: float
    turns: int
    ranks: int
    baseline: str
    mode: Mode
    votes: str | int
    min_receivers: int
    interval_s: float
    deadline_s: float
    payload_bytes: int


@dataclass(frozen=True)
class Scenario:
    """One run. Faults of processes are chances per life; those of the medium among ranks, per call. ``end_s`` is when
    a run of unlimited faults ends, or when faults stop."""

    mode: str
    receivers: tuple[Follow, ...]
    trainers: tuple[Train, ...]
    """The first goes on until the end; the others are rivals."""
    archives: bool
    prunes: bool
    store: StoreFaults
    weights: WeightFaults
    crash: float
    hang: float
    jump: float
    outage: float
    silent: float
    end_s: float

    @property
    def bound_s(self) -> float:
        """Within so many seconds after the last fault all is well again: the dead are started again within 8 s, silent
        receivers are evicted after 10 s, and silent ranks are given up after their deadline, a few times in a row."""
        return 40.0 + 4 * max(trainer.deadline_s for trainer in self.trainers)


def draw(random: Random, mode: str) -> Scenario:
    """The scenario of a seed."""
    level = random.choice(LEVELS)

    def some(share: float = 1.0) -> float:
        return level * share * random.random() if random.random() < 0.6 else 0.0

    store = StoreFaults(
        lost=some(),
        unanswered=some(),
        late=some(),
        again=some(),
        hidden=some(),
        garbled=some(0.5),
        short=some(2.0),
        slow=some(0.5),
        latency_s=10 ** random.uniform(-3, -1),
    )
    trainers = [_train(random, rival=False)]
    if random.random() < 0.25:
        trainers.append(_train(random, rival=True))
    return Scenario(
        mode=mode,
        receivers=tuple(_follow(random, number) for number in range(random.choice((1, 1, 2, 2, 3)))),
        trainers=tuple(trainers),
        archives=(archives := random.random() < 0.4),
        prunes=archives and random.random() < 0.4,
        store=store,
        weights=WeightFaults(some(), some(), random.choice((0.0, 0.3))),
        crash=random.choice((0.0, 0.5, 0.9)),
        hang=random.choice((0.0, 0.0, 0.3)),
        jump=random.choice((0.0, 0.0, 0.3)),
        outage=random.choice((0.0, 0.0, 0.5)),
        silent=some(0.3),
        end_s=random.uniform(5.0, 40.0),
    )


def _follow(random: Random, number: int) -> Follow:
    late = number and random.random() < 0.4
    return Follow(
        disk=random.random() < 0.5,
        start_s=random.uniform(5, 20) if late else random.uniform(0, 1),
        poll_s=random.uniform(0.2, 2),
        named=random.random() < 0.5,
    )


def _train(random: Random, *, rival: bool) -> Train:
    ranks = 1 if rival else random.choice((1, 1, 2))
    return Train(
        start_s=random.uniform(2, 20) if rival else 0.0,
        turns=random.randint(1, 3) if rival else random.randint(3, 8),
        ranks=ranks,
        baseline=random.choice((MEMORY, MEMORY, FILE, TARGET) if ranks == 1 else (MEMORY, FILE)),
        mode=random.choice(tuple(Mode)),
        votes=(votes := random.choice(("all", "all", "none", 1))),
        min_receivers=random.choice((0, 0, 1)) if votes != "none" else 0,
        interval_s=random.uniform(0.2, 4.0),
        deadline_s=random.uniform(3.0, 10.0),
        payload_bytes=random.choice((24, 60, 200, 1000)),
    )


def fuse(random: Random, most: int) -> int:
    """Steps until something happens to a process: as often early as late."""
    return int(math.exp(random.uniform(0.0, math.log(most))))
