"""Simulated weights with header and spool, in a live engine's memory or on a disk, and one process's access to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from deltarefit.elements import Elements
from deltarefit.errors import NotFoundError, StorageFullError
from deltarefit.manifest import Catalog, Header, State
from deltarefit.ports import Spool
from deltarefit.simulation.model import CATALOG
from deltarefit.simulation.world import Killed, Process, World

PAGE_BYTES = 16


@dataclass(frozen=True)
class WeightFaults:
    """Chances. ``full``: no room in the spool, per put. ``forgotten``: a write that does not stick and is not reported,
    per window. ``flipped``: a bit of the live weights, when an agent dies over CLEAN weights."""

    full: float = 0.0
    forgotten: float = 0.0
    flipped: float = 0.0


@dataclass
class Weights:
    """What lives as long as the weights do. On a ``disk`` bytes count once they are flushed; a header, and what is in
    the spool, count at once. ``judge`` is asked after everything that happens to them.

    ``flipped`` are (tensor, element) with a bit that flipped under a CLEAN header, and whether anything was written
    there since: until the next proof of all bits nobody can know of them, but nothing may be built on them. ``due``: a
    proof comes next, which must find them. ``excused``: there is a reason to give these bits up. ``loads`` counts
    anchors that were begun, ``starts`` the times that the memory was lost.
    """

    world: World
    name: str
    disk: bool
    faults: WeightFaults
    judge: Callable[[Weights, str], None]
    catalog: Catalog | None = None
    arrays: list[Elements] = field(default_factory=list)
    durable: list[Elements] = field(default_factory=list)
    header: Header | None = None
    kept: dict[str, bytes] = field(default_factory=dict)
    paused: bool = False
    flipped: dict[tuple[int, int], bool] = field(default_factory=dict)
    due: bool = False
    excused: bool = False
    loads: int = 0
    starts: int = 1

    def lose(self) -> None:
        """The engine is gone, and another one is started."""
        self.world.note(self.name, "the weights are gone")
        self.catalog, self.arrays, self.durable, self.header, self.kept = None, [], [], None, {}
        self.paused, self.due, self.excused = False, False, False
        self.flipped.clear()
        self.starts += 1

    def lose_power(self) -> None:
        """Any part of what was not flushed is gone, page by page, and within a page."""
        self.world.note(self.name, "power is lost")
        for live, durable in zip(self.arrays, self.durable, strict=True):
            for lost in self._pages(live):
                live[lost] = durable[lost]
        self.flush()
        self.judge(self, "after a power loss")

    def _pages(self, array: Elements) -> Iterator[slice]:
        random, page = self.world.random, max(1, PAGE_BYTES // array.itemsize)
        for start in range(0, array.size, page):
            if random.random() < 0.5:
                cut = random.randrange(page) if random.random() < 0.3 else 0
                yield slice(start + cut, start + page)

    def flip(self) -> None:
        """One bit of CLEAN weights is another now."""
        random = self.world.random
        tensor = random.randrange(len(self.arrays))
        array = self.arrays[tensor]
        at = random.randrange(array.size)
        array[at] ^= array.dtype.type(1 << random.randrange(8 * array.itemsize))
        self.flush()
        self.flipped[tensor, at] = False
        self.world.note(self.name, f"fault: a bit flips in element {at} of tensor {tensor}")

    def wrote(self, tensor: int, start: int, changed: Elements) -> None:
        """Elements from ``start`` on were written where ``changed``."""
        for number, at in self.flipped:
            if number == tensor and 0 <= at - start < changed.size and changed[at - start]:
                self.flipped[number, at] = True

    def give_up(self) -> bool:
        """Nothing is said of the bits any more; whether there was a reason for it."""
        reason = self.excused or bool(self.flipped)
        self.excused = self.due = False
        self.flipped.clear()
        return reason

    def flush(self) -> None:
        for live, durable in zip(self.arrays, self.durable, strict=True):
            durable[:] = live

    @property
    def clean(self) -> int:
        """The version that the header calls CLEAN, or 0."""
        return self.header.version if self.header is not None and self.header.state is State.CLEAN else 0

    @property
    def says(self) -> str:
        """What the header says, in words."""
        header = self.header
        if header is None:
            return "no header"
        target = f" -> {header.target}" if header.target else ""
        return f"{header.state.value}({header.version}{target})"


class Access:
    """``ports.Target`` on weights, for as long as ``process`` lives."""

    def __init__(self, weights: Weights, process: Process) -> None:
        self._weights, self._process = weights, process
        self._spool = _Spool(weights, process)

    @property
    def catalog(self) -> Catalog | None:
        self._process.alive()
        return self._weights.catalog

    @property
    def spool(self) -> Spool:
        return self._spool

    def read_header(self) -> Header | None:
        self._process.alive()
        return self._weights.header

    def write_header(self, header: Header) -> None:
        text = f"{header.state.value}({header.version}{f' -> {header.target}' if header.target else ''})"
        self._process.step(f"header {text}")
        weights, before = self._weights, self._weights.header
        weights.header = header
        if weights.due and header.state is not State.UNKNOWN:
            self._process.world.fail(f"{weights.name} has a flipped bit, which was not found before {text}")
        if header.state is State.UNKNOWN:
            known = before is not None and before.state is not State.UNKNOWN
            if not weights.give_up() and known:
                self._process.world.fail(f"{weights.name} gave up weights without need")
        if header.state is State.CLEAN:
            weights.excused = False
        weights.judge(weights, f"at header {text}")
        self._process.step(f"header {text} done")

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        self._process.step("seed")
        weights = self._weights
        if weights.header is None or weights.header.state is State.CLEAN:
            self._process.world.fail(f"{weights.name} is seeded over a header that is not set aside")
        weights.loads += 1
        if weights.catalog is None:
            weights.catalog = CATALOG
            weights.arrays = [np.full(entry.numel, 7, f"<u{entry.width}") for entry in CATALOG.tensors]
            weights.durable = [array.copy() for array in weights.arrays]

    def finish_seed(self) -> None:
        self._process.step("finish seed")

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        self._process.alive()
        weights = self._weights
        if weights.catalog is None:
            raise NotFoundError("the target is empty", next_step="Seed it first.")
        array = weights.arrays[tensor][start:stop]
        before = array.copy()
        yield array, 0
        if (changed := array != before).any():
            weights.wrote(tensor, start, changed)
            self._written(array, before, changed)

    def _written(self, array: Elements, before: Elements, changed: Elements) -> None:
        """Users must stand still, under a header that is not CLEAN; whoever dies here has written a part."""
        weights, world = self._weights, self._process.world
        header = weights.header
        if not weights.paused:
            world.fail(f"{weights.name} was written to while it is used")
        if header is None or header.state is State.CLEAN:
            world.fail(f"{weights.name} was written to under a header that says CLEAN")
        if world.chance(weights.faults.forgotten):
            world.note(weights.name, "fault: a write does not stick")
            weights.excused = True  # if it is the second try, the receiver gives up
            array[changed] = before[changed]
        try:
            self._process.step("wrote")
        except Killed:
            kept = np.array([world.random.random() < 0.5 for _ in range(array.size)])
            array[~kept] = before[~kept]
            raise

    def flush(self) -> None:
        self._process.step("flush")
        self._weights.flush()

    def pause(self) -> None:
        self._process.step("pause")
        self._weights.paused = True

    def resume(self) -> None:
        self._process.step("resume")
        self._weights.paused = False
        self._weights.judge(self._weights, "at resume")


class _Spool:
    def __init__(self, weights: Weights, process: Process) -> None:
        self._weights, self._process = weights, process

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._process.step("spool")
        if self._process.world.chance(self._weights.faults.full):
            raise StorageFullError("no room in the spool")
        self._weights.kept[name] = bytes(data)

    def get(self, name: str) -> bytes | None:
        self._process.alive()
        return self._weights.kept.get(name)

    def clear(self) -> None:
        self._process.step("clear spool")
        self._weights.kept.clear()
