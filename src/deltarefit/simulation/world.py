"""A world of one thread: a clock that jumps to the next wake-up, seeded chance, processes that are greenlets, a trace.

Whatever happens is drawn from one generator, in one order: a seed replays. A process yields wherever it calls the
store, the target, the exchange or a named point of the product; there it may be stopped, and there it may die.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from random import Random

from greenlet import getcurrent, greenlet

from deltarefit import runtime
from deltarefit.simulation.inline import ProcessRuntime

TAIL = 400
"""Last events of the trace that a failure shows."""
Callback = Callable[[], None]


class Killed(BaseException):
    """The process that meets this is dead: nothing it still does may have an effect."""


class World:
    """Clock, chance, schedule and trace of one run. ``failures`` are broken invariants: the first one ends the run.
    ``kept``: so many of the last events are kept; None: all."""

    def __init__(self, seed: str, kept: int | None = TAIL) -> None:
        self.random = Random(seed)  # noqa: S311 - replayed, not secret
        self.now = 0.0
        self.faulty = True
        """Whether faults may still begin."""
        self.failures: list[str] = []
        self.tail: deque[str] = deque(maxlen=kept)
        self.steps = 0
        self._trace = hashlib.blake2b(digest_size=16)
        self._hub = getcurrent()
        self._queue: list[tuple[float, int, Process | Callback]] = []
        self._number = 0
        self._over = False

    # ------------------------------------------------------------------------------------ trace

    def note(self, who: str, what: str) -> None:
        """One event of the trace."""
        line = f"{self.now:10.3f}  {who:<12} {what}"
        self.tail.append(line)
        self._trace.update(line.encode())

    @property
    def trace(self) -> str:
        """Hash of all events so far: equal for equal runs."""
        return self._trace.hexdigest()

    def fail(self, what: str) -> None:
        """An invariant is broken. The run ends with the present step."""
        self.note("oracle", f"VIOLATION: {what}")
        self.failures.append(what)

    # ------------------------------------------------------------------------------------ schedule

    def at(self, delay: float, callback: Callback) -> None:
        """Call something after ``delay`` seconds, outside of every process."""
        self.push(self.now + delay, callback)

    def push(self, time: float, item: Process | Callback) -> None:
        self._number += 1
        heapq.heappush(self._queue, (time, self._number, item))

    def advance(self, seconds: float) -> bool:
        """Let time pass at once if nothing else happens meanwhile; whether it did."""
        wake = self.now + seconds
        if self._over or (self._queue and self._queue[0][0] <= wake):
            return False
        self.now = wake
        return True

    def stop(self) -> None:
        """The run ends with the present step."""
        self._over = True

    def run(self) -> None:
        """Until ``stop``, a failure, or nothing is left to happen. Every process is dead then."""
        queue = self._queue
        while queue and not self._over and not self.failures:
            self.now, _, item = heapq.heappop(queue)
            if isinstance(item, Process):
                item.resume()
            else:
                item()
        left = [item for _, _, item in queue if isinstance(item, Process)]
        queue.clear()
        for process in left:
            process.kill()

    def leave(self) -> None:
        """Called by a process: back to the schedule."""
        self._hub.switch()

    def chance(self, probability: float) -> bool:
        """True so often, while faults may begin."""
        return self.faulty and self.random.random() < probability


class Process:
    """One life of one program. ``ended`` is called, outside of it, once it is over, with what it died of or None.

    ``fuse`` counts the steps, of those that have ``mark`` in their text, until ``burn`` is called, in the process
    itself; what that raises is its end.
    """

    def __init__(self, world: World, name: str, main: Callable[[Process], None], ended: Callable[[str | None], None]):
        self.world, self.name = world, name
        self.dead = False
        self.fuse, self.mark = -1, ""
        self.burn: Callback = lambda: self.die("crash")
        self.rate, self.offset = 1.0, 0.0
        self._main, self._ended = main, ended
        self._greenlet = greenlet(self._live, parent=getcurrent())
        world.push(world.now, self)

    # ------------------------------------------------------------------------------------ from outside

    def resume(self) -> None:
        """Let it go on until it yields."""
        if not self.dead:
            self._greenlet.switch()

    def kill(self) -> None:
        """It dies where it is, and unwinds without effect."""
        if self.dead:
            return
        self.dead = True
        self.world.note(self.name, "killed")
        if self._greenlet:
            self._greenlet.throw(Killed())

    # ------------------------------------------------------------------------------------ from inside

    def _live(self) -> None:
        died: str | None = None
        with runtime.using(ProcessRuntime(self)):
            try:
                self._main(self)
            except Killed as death:
                died = str(death) or "killed"
            except Exception as error:  # noqa: BLE001 - whatever the product raises and the actor did not expect
                self.world.fail(f"{self.name} ended with {type(error).__name__}: {error}")
        self.dead = True
        self.world.at(0.0, lambda: self._ended(died))

    def die(self, how: str) -> None:
        """Its end, now."""
        self.dead = True
        self.world.note(self.name, how)
        raise Killed(how)

    def alive(self) -> None:
        """Raises ``Killed`` in a dead process, and in any once an invariant is broken."""
        if self.dead or self.world.failures:
            raise Killed

    def step(self, what: str) -> None:
        """A line of the program that the trace shows, and at which its fuse may end."""
        self.alive()
        self.world.steps += 1
        self.world.note(self.name, what)
        if self.fuse > 0 and self.mark in what:
            self.fuse -= 1
            if self.fuse == 0:
                self.burn()

    def rest(self, seconds: float) -> None:
        """Let so much time of the world pass."""
        self.alive()
        world = self.world
        if world.advance(seconds):
            return
        world.push(world.now + seconds, self)
        world.leave()
        self.alive()

    def now(self) -> float:
        """Its own clock, in seconds."""
        return self.offset + self.rate * self.world.now
