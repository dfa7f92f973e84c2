"""Simulated machines that follow: the product's receiver, started again whenever it dies, and a writer of anchors."""

from __future__ import annotations

from deltarefit.anchoring import write_anchor
from deltarefit.errors import RefitError
from deltarefit.events import Event
from deltarefit.pruning import prune
from deltarefit.receiver import Receiver
from deltarefit.simulation.fates import plan
from deltarefit.simulation.oracle import Oracle, same
from deltarefit.simulation.scenario import Follow, Scenario
from deltarefit.simulation.store import Client, Shelf
from deltarefit.simulation.weights import Access, WeightFaults, Weights
from deltarefit.simulation.world import Process, World

TOLD = ("skipped", "pruned", "diverged", "proven", "refetch", "torn", "unpinned")
"""Events that the trace shows."""
POWER, ENGINE, CRASH = "power loss", "engine died", "crash"


class Machine:
    """Weights, and a process at work on them that is started again and again."""

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        shelf: Shelf,
        oracle: Oracle,
        name: str,
        disk: bool,
        faults: WeightFaults,
    ) -> None:
        self.world, self.scenario, self.shelf, self.oracle, self.name = world, scenario, shelf, oracle, name
        self.weights = Weights(world, f"{name}.weights", disk, faults, oracle.judge)
        self._deaths = (CRASH, CRASH, POWER) if disk else (CRASH, CRASH, ENGINE)
        if faults.flipped:
            world.at(world.random.uniform(0.0, 30.0), self._age)

    def start(self) -> None:
        """A new process."""
        weights = self.weights
        weights.due = bool(weights.clean and weights.flipped)
        process = Process(self.world, self.name, self._main, self._ended)
        plan(process, self.scenario, self._deaths)

    def _ended(self, how: str | None) -> None:
        random, weights = self.world.random, self.weights
        if how == POWER:
            weights.lose_power()
        elif how == ENGINE:
            weights.lose()
        self._flip(weights.faults.flipped)
        self.world.at(random.uniform(0.1, 5.0), self.start)

    def _age(self) -> None:
        """Bits flip while an agent is at work, too."""
        self._flip(self.weights.faults.flipped)
        self.world.at(self.world.random.uniform(5.0, 30.0), self._age)

    def _flip(self, probability: float) -> None:
        if self.weights.clean and self.world.chance(probability):
            self.weights.flip()

    def _main(self, process: Process) -> None:
        store, access = Client(self.shelf, process, self.name), Access(self.weights, process)
        while True:
            try:
                self.work(process, store, access)
            except RefitError as error:
                self.world.note(self.name, f"{type(error).__name__}: {error}"[:300])
                process.rest(self.world.random.uniform(0.2, 2.0))

    def work(self, process: Process, store: Client, access: Access) -> None:
        raise NotImplementedError

    def heard(self, event: Event) -> None:
        """What a receiver says of its weights."""
        weights = self.weights
        if event.type in TOLD:
            self.world.note(self.name, f"says {event.type}: {event.text}"[:200])
        if event.type in ("skipped", "pruned"):
            weights.excused = True
        elif event.type == "proven" and weights.due:
            model = self.oracle.model_of(weights.clean)
            weights.due = model is None or not same(weights.arrays, model)


class Follower(Machine):
    """A receiver that follows for ever."""

    def __init__(
        self, world: World, scenario: Scenario, shelf: Shelf, oracle: Oracle, number: int, follow: Follow
    ) -> None:
        super().__init__(world, scenario, shelf, oracle, f"receiver-{number}", follow.disk, scenario.weights)
        self._follow = follow
        world.at(follow.start_s, self.start)

    def work(self, process: Process, store: Client, access: Access) -> None:
        receiver = Receiver(
            store,
            access,
            threads=1,
            poll_s=self._follow.poll_s,
            emit=self.heard,
            name=(self._follow.named and self.name) or "",
        )
        while True:
            try:
                receiver.follow()
            except RefitError as error:
                if self.world.random.random() < 0.3:
                    raise
                self.world.note(self.name, f"{type(error).__name__}: {error}"[:300])
                process.rest(self.world.random.uniform(0.2, 2.0))

    @property
    def at_head(self) -> bool:
        """It serves the newest version."""
        weights = self.weights
        return weights.clean == self.oracle.head and not weights.paused and not weights.due


class Archivist(Machine):
    """Makes the head an anchor, now and then."""

    def __init__(self, world: World, scenario: Scenario, shelf: Shelf, oracle: Oracle) -> None:
        disk = world.random.random() < 0.5
        super().__init__(world, scenario, shelf, oracle, "archivist", disk, scenario.weights)
        self._grace_s = world.random.uniform(3.0, 20.0)
        world.at(world.random.uniform(1, 10), self.start)

    def work(self, process: Process, store: Client, access: Access) -> None:
        done = write_anchor(store, access, threads=1, payload_bytes=200, emit=self.heard)
        self.world.note(self.name, f"anchor {done.version}")
        process.rest(self.world.random.uniform(1.0, 6.0))
        if self.scenario.prunes:
            self.world.note(self.name, "prunes")
            pruned = prune(store, keep_anchors=self.world.random.choice((1, 2)), grace_s=self._grace_s, threads=1)
            self.world.note(self.name, f"pruned below {pruned.floor}: {pruned.objects} objects")
            process.rest(self.world.random.uniform(1.0, 6.0))
