"""A simulated object store: atomic create-once, and around it everything that a network does.

``Shelf`` is the truth, one per run; a ``Client`` is one process's way to it. Each call takes time, may be lost, may be
carried out and not answered, may be carried out later than it was given up, and may not be seen for a while.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from deltarefit.errors import AlreadyExistsError, NotFoundError, UnavailableError
from deltarefit.simulation.world import Process, World

T = TypeVar("T")
Landed = Callable[[str, bytes], None]
Removed = Callable[[str], None]


@dataclass(frozen=True)
class StoreFaults:
    """Chances per call, and seconds. ``lost``: nothing happens. ``unanswered``: it happens. ``late``: it happens once
    it was given up. ``again``: a create that succeeds and says that the key is taken. ``hidden``: what was written is
    not always found for a while. ``garbled``: bytes read are damaged. ``short``: half of a payload is stored, and
    nobody is told. ``slow``: it takes seconds."""

    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    again: float = 0.0
    hidden: float = 0.0
    garbled: float = 0.0
    short: float = 0.0
    slow: float = 0.0
    latency_s: float = 0.02
    late_s: float = 5.0
    hidden_s: float = 3.0
    slow_s: float = 4.0


@dataclass
class Shelf:
    """What the store really holds. ``landed`` is told of each object that appears, ``removed`` of each that goes;
    ``outages`` are ends of the times
    for which nobody (key ``""``) or one client reaches it."""

    world: World
    faults: StoreFaults
    landed: Landed = lambda key, data: None
    removed: Removed = lambda key: None
    objects: dict[str, bytes] = field(default_factory=dict)
    once: set[str] = field(default_factory=set)
    hidden: dict[str, float] = field(default_factory=dict)
    outages: dict[str, float] = field(default_factory=dict)

    def put(self, key: str, data: bytes) -> None:
        before = self.objects.get(key)
        if before not in (None, data):
            if key in self.once:
                self.world.fail(f"the create-once object {key} was replaced")
            elif _whole(key, before):  # a record may name it, or be on its way to
                self.world.fail(f"{key} was whole, and is not any more")
        self._place(key, data)

    def create(self, key: str, data: bytes) -> None:
        if key in self.objects:
            raise AlreadyExistsError(f"{key} is taken")
        if not _is_payload(key):  # half of one may be replaced by all of it
            self.once.add(key)
        self._place(key, data)

    def _place(self, key: str, data: bytes) -> None:
        if key not in self.objects and self.world.chance(self.faults.hidden):
            self.hidden[key] = self.world.now + self.world.random.random() * self.faults.hidden_s
        self.objects[key] = data
        self.landed(key, data)

    def delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self.removed(key)

    def find(self, key: str) -> bytes:
        """As a reader sees it now."""
        data = self.objects.get(key)
        if data is None or (self.hidden.get(key, 0.0) > self.world.now and self.world.random.random() < 0.7):
            raise NotFoundError(f"{key} is not there")
        return data

    def reached_by(self, client: str) -> bool:
        return self.world.now >= max(self.outages.get("", 0.0), self.outages.get(client, 0.0))


def _is_payload(key: str) -> bool:
    return "/pl/" in key


def _whole(key: str, data: bytes) -> bool:
    """Whether a payload is what its key says."""
    return _is_payload(key) and hashlib.sha256(data).hexdigest() == key.rpartition("/")[2]


class Client:
    """``ports.Store`` of one process; ``place`` names it in outages."""

    def __init__(self, shelf: Shelf, process: Process, place: str) -> None:
        self._shelf, self._process, self._place = shelf, process, place
        self._world, self._faults = shelf.world, shelf.faults

    @property
    def url(self) -> str:
        return "sim://store"

    def put(self, key: str, data: bytes | memoryview) -> None:
        stored, short = self._arriving(key, bytes(data))
        self._call("put", key, lambda: self._shelf.put(key, stored), changes=True, once=short)

    def create(self, key: str, data: bytes) -> None:
        stored, short = self._arriving(key, data)
        self._call("create", key, lambda: self._shelf.create(key, stored), changes=True, once=short)
        if self._world.chance(self._faults.again):
            raise AlreadyExistsError(f"{key} is taken")

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        stop = None if length is None else start + length
        return self._garbled(self._call("get", key, lambda: self._shelf.find(key)[start:stop]))

    def size(self, key: str) -> int:
        return self._call("size", key, lambda: len(self._shelf.find(key)))

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        below = f"{prefix.rstrip('/')}/" if prefix else ""
        objects = self._call("list", prefix, lambda: sorted(self._shelf.objects.items()))
        return ((key, len(data)) for key, data in objects if key.startswith(below))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self._shelf.delete(key), changes=True)

    # ------------------------------------------------------------------------------------ the way there and back

    def _arriving(self, key: str, data: bytes) -> tuple[bytes, bool]:
        """What the store will hold of an object, and whether that is half of it."""
        if not _is_payload(key) or not self._world.chance(self._faults.short):
            return data, False
        self._world.note(self._process.name, f"fault: {key} is stored short")
        return data[: len(data) // 2], True

    def _call(self, verb: str, key: str, effect: Callable[[], T], *, changes: bool = False, once: bool = False) -> T:
        world, process = self._world, self._process
        process.step(f"{verb} {key}")
        self._travel()
        if not self._shelf.reached_by(self._place):
            process.rest(world.random.random() * self._faults.slow_s)
            raise UnavailableError(f"{verb} {key}: the store cannot be reached")
        if world.chance(self._faults.lost):
            raise UnavailableError(f"{verb} {key}: the request was lost")
        if changes and not once and world.chance(self._faults.late):
            self._later(verb, key, effect)
            raise UnavailableError(f"{verb} {key}: no answer in time")
        result = effect()
        if changes:  # what is read is as old on arrival, whichever way took the time
            self._travel()
            process.step(f"{verb} {key} done")
        if world.chance(self._faults.unanswered):
            raise UnavailableError(f"{verb} {key}: the answer was lost")
        return result

    def _travel(self) -> None:
        random, faults = self._world.random, self._faults
        seconds = random.random() * faults.latency_s
        if self._world.chance(faults.slow):
            seconds += random.random() * faults.slow_s
        self._process.rest(seconds)

    def _later(self, verb: str, key: str, effect: Callable[[], object]) -> None:
        def land() -> None:
            try:
                effect()
            except AlreadyExistsError:
                what = "came too late"
            else:
                what = "arrived late"
            self._world.note("store", f"{verb} {key} of {self._process.name} {what}")

        self._world.at(self._world.random.random() * self._faults.late_s, land)

    def _garbled(self, data: bytes) -> bytes:
        world = self._world
        if not data or not world.chance(self._faults.garbled):
            return data
        at = world.random.randrange(len(data))
        world.note(self._process.name, "fault: what was read is damaged")
        if world.random.random() < 0.3:
            return data[:at]
        return data[:at] + bytes([data[at] ^ (1 << world.random.randrange(8))]) + data[at + 1 :]
