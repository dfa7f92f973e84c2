"""One run from its seed, and many of them: in this process, or on a pool of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from deltarefit.publishing import trainers as meetings
from deltarefit.simulation.memo import parsed_once
from deltarefit.simulation.oracle import Oracle
from deltarefit.simulation.receivers import Archivist, Follower
from deltarefit.simulation.scenario import HEALING, MODES, Scenario, draw
from deltarefit.simulation.store import Shelf
from deltarefit.simulation.trainers import Trainer
from deltarefit.simulation.world import TAIL, World

MOST_STEPS = 300_000
"""A run that takes more does not end."""
CHUNK = 25
"""Seeds that a process of the pool is given at a time."""


@dataclass(frozen=True)
class Run:
    """What came of one seed. ``failures`` is empty if all held; ``trace`` is the hash of all that happened, ``tail``
    its last events where something failed. ``healed_s``: simulated seconds from the last fault until all was well."""

    seed: int
    mode: str
    failures: tuple[str, ...]
    trace: str
    tail: tuple[str, ...]
    steps: int
    seconds: float
    versions: int
    loads: int
    healed_s: float

    @property
    def command(self) -> str:
        """Replays it."""
        return f"deltarefit simulate --first {self.seed} --seeds 1 --mode {self.mode} --trace"


class Play:
    """One run, with the last ``kept`` events of its trace, or all (None)."""

    def __init__(self, seed: int, mode: str, kept: int | None = TAIL) -> None:
        self.seed, self.kept = seed, kept
        self.world = world = World(f"{mode} {seed}", kept)
        self.scenario: Scenario = draw(world.random, mode)
        self.oracle = Oracle(world)
        self.shelf = Shelf(world, self.scenario.store, self.oracle.landed, self.oracle.removed)
        self.oracle.shelf = self.shelf
        shared = (world, self.scenario, self.shelf, self.oracle)
        self.trainers = [Trainer(*shared, number, train) for number, train in enumerate(self.scenario.trainers)]
        self.receivers = [Follower(*shared, number, follow) for number, follow in enumerate(self.scenario.receivers)]
        self.archivist = Archivist(*shared) if self.scenario.archives else None
        self.healed_s = 0.0
        if self.scenario.outage:
            world.at(0.0, self._outage)
        world.at(self.scenario.end_s, self._faults_end)

    def run(self) -> Run:
        """Play it to its end."""
        with _fresh_meetings(), parsed_once():
            self.world.run()
        world, oracle = self.world, self.oracle
        return Run(
            seed=self.seed,
            mode=self.scenario.mode,
            failures=tuple(world.failures),
            trace=world.trace,
            tail=tuple(world.tail) if world.failures or self.kept is None else (),
            steps=world.steps,
            seconds=world.now,
            versions=len(oracle.versions),
            loads=sum(receiver.weights.loads for receiver in self.receivers),
            healed_s=self.healed_s,
        )

    def _outage(self) -> None:
        """Somebody, or everybody, does not reach the store for a while; then again."""
        random = self.world.random
        if not self.world.faulty:
            return
        if self.world.chance(self.scenario.outage):
            places = ["", "trainer", "archivist", *(receiver.name for receiver in self.receivers)]
            place, seconds = random.choice(places), 30.0 * random.random() ** 2
            self.shelf.outages[place] = self.world.now + seconds
            self.world.note("store", f"fault: cannot be reached by {place or 'anybody'} for {seconds:.1f} s")
        self.world.at(random.uniform(1.0, 20.0), self._outage)

    def _faults_end(self) -> None:
        world = self.world
        if self.scenario.mode != HEALING:
            world.note("world", "the end")
            world.stop()
            return
        world.note("world", "faults end")
        world.faulty = False
        self.shelf.outages.clear()
        self._look(world.now)

    def _look(self, since: float) -> None:
        """Whether all is well again, and whether it takes too long."""
        world, trainer = self.world, self.trainers[0]
        if trainer.done and self.oracle.adrift > self.oracle.head:
            trainer.again()
        if trainer.done and all(receiver.at_head for receiver in self.receivers):
            self.healed_s = world.now - since
            world.stop()
        elif world.now - since > self.scenario.bound_s:
            world.fail(f"not well {world.now - since:.0f} s after the last fault: {self._state()}")
        else:
            world.at(0.5, lambda: self._look(since))
        if world.steps > MOST_STEPS:
            world.fail(f"no end after {world.steps} steps: {self._state()}")

    def _state(self) -> str:
        at = [f"{one.name} at {one.weights.says}" for one in self.receivers]
        done = "done" if self.trainers[0].done else "at work"
        return f"head {self.oracle.head}, trainer {done}, {', '.join(at)}"


@contextmanager
def _fresh_meetings() -> Iterator[None]:
    """What rank 0 has answered is remembered per process; here it is the same in every run of a seed."""
    before = set(meetings._answered)
    meetings._answered.clear()
    try:
        yield
    finally:
        meetings._answered.clear()
        meetings._answered.update(before)


def run_seed(seed: int, mode: str, kept: int | None = TAIL) -> Run:
    """One run; with ``kept`` None its whole trace is kept, in ``tail``."""
    return Play(seed, mode, kept).run()


def run_seeds(
    first: int,
    count: int,
    processes: int | None = None,
    modes: Sequence[str] = MODES,
    kept: int | None = TAIL,
) -> Iterator[Run]:
    """Runs of ``count`` seeds from ``first``, each in all ``modes``, as they end. ``processes``: None: one per CPU;
    ``kept`` as in ``run_seed``."""
    jobs = [(seed, mode, kept) for seed in range(first, first + count) for mode in modes]
    number = min(processes or os.cpu_count() or 1, -(-len(jobs) // CHUNK))
    if number == 1:
        yield from (run_seed(*job) for job in jobs)
        return
    chunks = [jobs[at : at + CHUNK] for at in range(0, len(jobs), CHUNK)]
    with ProcessPoolExecutor(number, mp_context=get_context("spawn")) as pool:
        try:
            for runs in pool.map(_run_jobs, chunks):
                yield from runs
        finally:  # whoever stops early does not wait for the rest
            pool.shutdown(cancel_futures=True)


def _run_jobs(jobs: Sequence[tuple[int, str, int | None]]) -> list[Run]:
    return [run_seed(*job) for job in jobs]
