"""A run in which one named point of one process fails: it dies, gets an error, or never returns. Then others carry on.

A scenario is the same every time, so that the n-th hit of a point is the same line of the same step: a trainer makes
versions, receivers follow (one of them starts from a torn write), an anchor is written, somebody joins late. What
survives is what would survive in truth: store, target, header, spool; never an object of the process that died.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from deltarefit import MemoryBaseline, Publisher, Receiver, runtime
from deltarefit.anchoring import write_anchor
from deltarefit.errors import RefitError, UnavailableError
from deltarefit.manifest import State
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from tests import helpers as h
from tests import killing as k
from tests.failing import HANGS, PLACES, Fault, Plan, Process

T = TypeVar("T")
DEADLINE_S = 30.0
"""Nothing here takes a second; a process that is to hang must do so within this."""
SEED = 11


@dataclass
class World:
    """``base`` is a run of two versions; ``targets`` hold the first or the second."""

    plan: Plan
    store: Store
    source: h.ArraySource
    targets: list[h.StrictTarget]
    anchored: MemoryBaseline = field(default_factory=MemoryBaseline)
    joiner: h.StrictTarget | None = None
    heard: h.Heard = field(default_factory=h.Heard)
    said: list[int] = field(default_factory=list)
    """Versions that a publish returned."""
    hanging: threading.Thread | None = None
    ended: list[bool | BaseException] = field(default_factory=list)
    """How the process that hung has ended, once it has."""
    speed: float = 0.0
    newer: bool = False
    """Once the fault has struck, the next publish is of other weights than those that were about to be published."""

    def process(self, start: Callable[[], T], work: Callable[[T], None]) -> None:
        """One process: what it works with is made by ``start``, and lives no longer than it does. After an error the
        same one is asked again; after a death or a hang a new one, in another process."""
        while not self._lived(start, work):
            pass

    def _lived(self, start: Callable[[], T], work: Callable[[T], None]) -> bool:
        process = Process(self.plan, self.speed)
        if self.plan.fault not in HANGS or not self.plan.at or self.plan.struck.is_set():
            return self._run(process, start, work)
        done = list[bool | BaseException]()
        thread = threading.Thread(target=lambda: self._report(done, process, start, work), daemon=True)
        thread.start()
        until = time.monotonic() + DEADLINE_S
        while thread.is_alive() and not process.hung.is_set():
            thread.join(0.001)
            assert time.monotonic() < until, "a process hangs although no fault struck"
        if process.hung.is_set():
            self.hanging, self.ended = thread, done
            return False
        if isinstance(done[0], BaseException):
            raise done[0]
        return done[0]

    def _report(
        self, done: list[bool | BaseException], process: Process, start: Callable[[], T], work: Callable[[T], None]
    ) -> None:
        try:
            done.append(self._run(process, start, work))
        except BaseException as error:
            done.append(error)

    def _run(self, process: Process, start: Callable[[], T], work: Callable[[T], None]) -> bool:
        """True if it came to its end. A dead process closes nothing."""
        struck = self.plan.struck.is_set()
        with runtime.using(process):
            try:
                one = again(start, None)
                again(lambda: work(one), self.plan.struck)
            except k.Killed:
                assert self.plan.struck.is_set()
                assert not struck, "killed twice"
                return False
            if close := getattr(one, "close", None):
                close()
        return True

    # ------------------------------------------------------------------------------------ who does what

    def publish(self) -> None:
        def work(publisher: Publisher) -> None:
            if self.newer and self.plan.struck.is_set():
                self.step_on()
            self.said.append(self.made(publisher))

        self.process(self.publisher, work)

    def step_on(self) -> None:
        """The trainer has other weights than those that it was about to publish."""
        self.newer = False
        other = h.random_model(np.random.default_rng(SEED), h.SMALL)
        h.step(np.random.default_rng([SEED, 9]), self.source.model, "back", other)

    def made(self, publisher: Publisher) -> int:
        """The version that a publish makes."""
        return publisher.publish().version

    def publisher(self) -> Publisher:
        return Publisher(self.store, self.source, threads=1, payload_bytes=PAYLOAD_BYTES)

    def follow(self, target: h.StrictTarget) -> None:
        """Until a look at the tail has found nothing more."""

        def work(receiver: Receiver) -> None:
            waited = self.plan.hits[AWAITED]
            receiver.follow(stop=lambda: self.plan.hits[AWAITED] > waited)
            receiver.follow(once=True)

        self.process(lambda: Receiver(self.store, target, threads=1, emit=self.heard), work)

    def anchor(self) -> None:
        self.process(
            lambda: None, lambda _: write_anchor(self.store, self.anchored, threads=1, payload_bytes=PAYLOAD_BYTES)
        )

    def join(self) -> None:
        self.joiner = self.joiner or h.strict_target(self.store)
        self.follow(self.joiner)

    def awake(self, where: str) -> None:
        """The process that hung has come to its end, whatever that was; nothing is lost by it."""
        assert self.hanging is not None
        self.hanging.join(DEADLINE_S)
        assert not self.hanging.is_alive()
        assert self.ended == [True] or isinstance(self.ended[0], RefitError), f"{where}: ended with {self.ended}"
        check_world(self, where)

    def everything(self) -> None:
        """The scenario. A process that died is followed by another, which does the same."""
        self.publish()
        for target in self.targets:
            self.follow(target)
        h.step(np.random.default_rng([SEED, 7]), self.source.model, "some")
        self.publish()
        self.anchor()
        self.join()
        for target in reversed(self.targets):
            self.follow(target)

    def close(self) -> None:
        """Let go of every process that still lives."""
        self.plan.released.set()


PAYLOAD_BYTES = 700
AWAITED = "receiver AwaitAttempt done"


def again(work: Callable[[], T], struck: threading.Event | None) -> T:
    """The result, asked a second time if a planned error came between."""
    try:
        return work()
    except UnavailableError:
        if struck is not None and not struck.is_set():
            raise
        return work()


# ------------------------------------------------------------------------------------------ worlds


@dataclass(frozen=True)
class Base:
    """What every scenario starts from."""

    chain: h.Chain
    torn: h.StrictTarget

    @classmethod
    def make(cls) -> Base:
        chain = h.publish_chain(np.random.default_rng(SEED), ("some",), h.SMALL, payload_bytes=PAYLOAD_BYTES)
        run = RunLog.open(chain.store).run
        target = h.StrictTarget(run)
        h.followed(h_first(chain), target)
        _kill_in_write(chain, target)
        return cls(chain, target)

    def world(self, plan: Plan, receivers: int, newer: bool = False, kind: type[World] = World) -> World:
        """A world of its own: nothing in it is shared with another."""
        model = h.copy_of(self.chain.source.model)
        h.step(np.random.default_rng([SEED, 5]), model, "some")
        targets = [copy_target(self.torn), self._clean()][:receivers]
        return kind(plan, h.copy_store(self.chain.store), h.ArraySource(model, h.SMALL), targets, newer=newer)

    def _clean(self) -> h.StrictTarget:
        target = h.strict_target(self.chain.store)
        h.followed(self.chain.store, target)
        return target


def h_first(chain: h.Chain) -> Store:
    """The run as it was when it had one version."""
    store = h.copy_store(chain.store)
    for key, _ in list(store.list("a/0000000002")):
        store.delete(key)
    store.delete("head")
    return store


def _kill_in_write(chain: h.Chain, target: h.StrictTarget) -> None:
    """DIRTY(1 -> 2), one payload torn: half of its changes are there."""
    with contextlib.suppress(k.Killed), runtime.using(Process(Plan("payload write", 1))):
        h.followed(chain.store, target)
    old, new = chain.models[1]["a.weight"], chain.models[2]["a.weight"]
    changed = np.flatnonzero(old != new)[::2]
    target._arrays[0][changed] = new[changed]
    assert h.state_of(target) == (State.DIRTY, 1)


def copy_target(target: h.StrictTarget) -> h.StrictTarget:
    """Another target in the same state."""
    copied = h.StrictTarget(target._run)
    copied.seeds = target.seeds
    copied._catalog, copied._header, copied.paused = target._catalog, target._header, target.paused
    copied._arrays = [array.copy() for array in target._arrays]
    copied._durable = [array.copy() for array in target._durable]
    copied._spool._entries.update(target._spool._entries)  # type: ignore[attr-defined]
    return copied


# ------------------------------------------------------------------------------------------ one case


@dataclass(frozen=True)
class Case:
    """``newer``: after the fault, the trainer publishes other weights than those that it was about to publish."""

    name: str
    at: int
    fault: Fault
    receivers: int
    newer: bool
    kind: type[World] = World

    def __str__(self) -> str:
        what = f"{self.fault.name.lower()} at hit {self.at} of {self.name}, {self.receivers} receivers"
        return f"{self.kind.__name__}: {what}{', newer target' * self.newer}"


def recorded(base: Base, receivers: int, kind: type[World] = World) -> Counter[str]:
    """How often each point is hit when nothing fails."""
    plan = Plan()
    world = base.world(plan, receivers, kind=kind)
    try:
        world.everything()
        hits = Counter(plan.hits)
        check_world(world, "nothing failed")
    finally:
        world.close()
    return hits


def cases(hits: Counter[str], receivers: int, fault: Fault, kind: type[World] = World) -> Iterator[Case]:
    """Every point x {first, middle, last hit} x {same target, newer}, as far as the fault can happen there."""
    for name, count in sorted(hits.items()):
        if name.startswith(PLACES.get(fault, ("",))):
            for at in sorted({1, (count + 1) // 2, count}):
                yield from (Case(name, at, fault, receivers, newer, kind) for newer in (False, True))


def run_case(base: Base, case: Case) -> bool:
    """The scenario with its fault, then recovery; ``AssertionError`` names the case. False if the point was not hit so
    often, as may happen where processes do not wait for each other."""
    plan = Plan(case.name, case.at, case.fault)
    world = base.world(plan, case.receivers, case.newer, case.kind)
    try:
        world.everything()
        check_world(world, str(case))
        if case.fault is Fault.WAKE and plan.struck.is_set():
            plan.released.set()
            world.awake(f"{case}, awake")
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    finally:
        world.close()
    return plan.struck.is_set()


@dataclass
class Results:
    """``missed``: cases whose point was not hit so often."""

    run: int = 0
    missed: int = 0
    wrong: list[str] = field(default_factory=list)


def run_all(base: Base, wanted: Sequence[Case]) -> Results:
    results = Results()
    for case in wanted:
        results.run += 1
        try:
            results.missed += not run_case(base, case)
        except AssertionError as error:
            results.wrong.append(str(error))
    return results


def check_world(world: World, where: str) -> None:
    """A fault-free publish and everyone follows: linear, nothing lost, all at the head, all bits equal, and only who
    had no memory loaded an anchor."""
    world.publish()
    for target in [*world.targets, world.joiner]:
        assert target is not None
        world.follow(target)
        assert h.bits(target) == h.bytes_of(world.source.model), f"{where}: bits differ"
        assert h.state_of(target) == (State.CLEAN, max(world.said)), where
        assert not target.paused, where
        assert target.seeds <= (2 if target is world.joiner else 1), f"{where}: seeded {target.seeds} times"
    versions = h.check_linear(world.store)
    assert set(world.said) <= set(versions), f"{where}: a version that was said to be committed is lost"
    assert versions[-1] == max(world.said), where
