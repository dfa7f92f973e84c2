"""Simulated trainers: ranks that publish together, and whoever starts all of them again when one is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deltarefit.errors import RefitError
from deltarefit.simulation.baselines import BaselineFile, SimBits, SimPublisher
from deltarefit.simulation.exchange import SimExchange
from deltarefit.simulation.fates import plan
from deltarefit.simulation.model import Model, SimSource, new_model, shared_out, trained
from deltarefit.simulation.oracle import Oracle
from deltarefit.simulation.scenario import FILE, HEALING, MEMORY, TARGET, Scenario, Train
from deltarefit.simulation.store import Client, Shelf
from deltarefit.simulation.weights import Access, WeightFaults, Weights
from deltarefit.simulation.world import Process, World

NO_FAULTS = WeightFaults()
POWER, CRASH = "power loss", "crash"


@dataclass(frozen=True)
class Turn:
    """One publish of all ranks. ``step`` is a number that no other publish of the world has."""

    step: int
    model: Model


class Trainer:
    """A training job. Each start goes on from the newest weights, or from an older checkpoint, on as many ranks as are
    there then."""

    def __init__(
        self, world: World, scenario: Scenario, shelf: Shelf, oracle: Oracle, number: int, train: Train
    ) -> None:
        self.world, self.scenario, self.shelf, self.oracle, self.train = world, scenario, shelf, oracle, train
        self.name = "rival" if number else "trainer"
        self.main = number == 0
        self.turns = 0
        self.committed_after_faults = False
        self.done = False
        self.files: dict[tuple[int, int], BaselineFile] = {}
        self.target = Weights(world, f"{self.name}.weights", True, NO_FAULTS, oracle.judge)
        self.history: list[Model] = [new_model(world.random)]
        self._starts = 0
        self.team: Team | None = None
        world.at(train.start_s, self.start)

    def start(self) -> None:
        """All ranks, anew; after an older checkpoint, sometimes."""
        if not self.more():
            self.done = True
            return
        random = self.world.random
        if self._starts and random.random() < 0.4:
            del self.history[random.randrange(len(self.history)) + 1 :]
        ranks = self.train.ranks if not self._starts or random.random() < 0.8 else random.randint(1, 2)
        self._starts += 1
        self.team = Team(self, self._starts, ranks)

    def again(self) -> None:
        """A job that has ended is started once more. Somebody else, a rival or a hung rank of its own that woke up
        late, has opened an attempt after its last COMMIT and aborted it; in mode stream whoever wrote some of it waits
        for the next attempt, and nobody else is there to open one."""
        self.world.note(self.name, "is started again: an attempt was aborted after its last version")
        self.done = self.committed_after_faults = False
        self.start()

    def more(self) -> bool:
        """Whether it publishes again. A rival ends with the faults."""
        if self.main and self.scenario.mode == HEALING:
            return self.world.faulty or not self.committed_after_faults
        return self.turns < self.train.turns and (self.main or self.world.faulty)

    def turn(self) -> Turn:
        """What is published next: the same weights again, or what training has made of them."""
        random, history = self.world.random, self.history
        if self.turns and random.random() < 0.85:
            history.append(trained(random, history[-1], random.choice(history[-3:])))
        self.turns += 1
        step = len(self.oracle.models) + 1
        self.oracle.models[step] = history[-1]
        return Turn(step, history[-1])


class Team:
    """The ranks of one start of a trainer. It ends as soon as one of them does."""

    def __init__(self, trainer: Trainer, start: int, ranks: int) -> None:
        self.trainer, self.start, self.ranks = trainer, start, ranks
        self._world = world = trainer.world
        self._owned = shared_out(world.random, ranks)
        self._said: dict[str, bytes] = {}
        self._turns: list[Turn | None] = []
        self._over = False
        self._kept = trainer.train.baseline == FILE
        self._left = ranks
        self._processes = [
            Process(world, f"{trainer.name}-{start}.{rank}", self._main_of(rank), self._ended_of(rank))
            for rank in range(ranks)
        ]
        for process in self._processes:
            plan(process, trainer.scenario, (CRASH, CRASH, POWER), self._hung)

    def _main_of(self, rank: int) -> Callable[[Process], None]:
        return lambda process: self._main(process, rank)

    # ------------------------------------------------------------------------------------ one rank

    def _main(self, process: Process, rank: int) -> None:
        trainer = self.trainer
        exchange = SimExchange(process, self._said, rank, self.ranks, trainer.scenario.silent)
        source = SimSource(trainer.history[-1], self._owned[rank], exchange)
        store = Client(trainer.shelf, process, trainer.name)
        try:
            publisher, bits = self._publisher(process, rank, store, source)
        except RefitError as error:
            self._world.note(process.name, f"{type(error).__name__}: {error}"[:300])
            return
        number = 0
        while (turn := self._turn(number)) is not None:
            source.model = turn.model
            self._publish(process, publisher, turn, rank)
            if bits is not None and self._world.chance(trainer.scenario.weights.flipped * 0.2):
                bits.flip()
            number += 1
            process.rest(trainer.train.interval_s * self._world.random.uniform(0.5, 1.0))
        publisher.close()

    def _publisher(
        self, process: Process, rank: int, store: Client, source: SimSource
    ) -> tuple[SimPublisher, SimBits | None]:
        """A file outlives the process, one for each place among so many ranks; so does a target."""
        trainer, train = self.trainer, self.trainer.train
        target, bits = None, None
        if train.baseline == TARGET and self.ranks == 1:
            target = Access(trainer.target, process)
        else:
            bits = SimBits(self._bits(rank), process, trainer.oracle, self._owned[rank])
        publisher = SimPublisher(
            store,
            source,
            bits,
            baseline=target,
            payload_bytes=train.payload_bytes,
            deadline_s=train.deadline_s,
            mode=train.mode,
            votes=train.votes,
            min_receivers=train.min_receivers,
        )
        return publisher, bits

    def _bits(self, rank: int) -> BaselineFile:
        files = self.trainer.files
        return files.setdefault((self.ranks, rank), BaselineFile()) if self._kept else BaselineFile()

    def _turn(self, number: int) -> Turn | None:
        """The same for all ranks: whoever comes first decides."""
        if number == len(self._turns):
            self._turns.append(self.trainer.turn() if self.trainer.more() and not self._over else None)
        return self._turns[number]

    def _publish(self, process: Process, publisher: SimPublisher, turn: Turn, rank: int) -> None:
        trainer, healthy = self.trainer, not self._world.faulty
        self._world.note(process.name, f"publishes step {turn.step}")
        try:
            done = publisher.publish(turn.step)
        except RefitError as error:
            self._world.note(process.name, f"{type(error).__name__}: {error}"[:300])
            if rank == 0 and "unknown" not in str(error):
                trainer.oracle.denied(turn.step)
            return
        trainer.oracle.answered(turn.step, done)
        trainer.committed_after_faults |= healthy

    # ------------------------------------------------------------------------------------ whoever watches over them

    def _ended_of(self, rank: int) -> Callable[[str | None], None]:
        return lambda how: self._ended(rank, how)

    def _ended(self, rank: int, how: str | None) -> None:
        self._left -= 1
        if how == POWER:
            self._bits(rank).lose_power()
            if self.ranks == 1:
                self.trainer.target.lose_power()
        if how is None and self._left and self._turns and self._turns[-1] is None:
            return  # the others are about to finish, too
        self._replace()

    def _hung(self) -> None:
        """Taken for dead, sometimes: then it may wake up beside its successor. A file has one owner at a time."""
        random = self._world.random
        if random.random() < 0.6 and self.trainer.train.baseline == MEMORY:
            self._world.at(random.uniform(3.0, 60.0), lambda: self._replace(kill=False))

    def _replace(self, *, kill: bool = True) -> None:
        if self._over:
            return
        self._over = True
        if kill:
            self._world.at(self._world.random.uniform(0.0, 5.0), self._kill)
        self._world.at(self._world.random.uniform(5.0, 8.0), self.trainer.start)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
