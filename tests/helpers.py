"""Models, steps and adapters for tests: a source over arrays, a target that checks the receiver, and sudden death.

``StrictTarget`` is a target that fails as soon as a receiver breaks the order of ``ports.Target``; all tests of the two
paths run on it. ``Killing`` wrappers die at the n-th call, before or after its effect, or in the middle of a write.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltarefit import MemoryBaseline, Publisher, Receiver, _kernel
from deltarefit.digest import array_digest, catalog_keys
from deltarefit.elements import Elements
from deltarefit.events import Event
from deltarefit.exchange import WholeTensors
from deltarefit.manifest import WIDTHS, Catalog, Header, State, TensorEntry
from deltarefit.ports import Store, Target
from deltarefit.records import Digest
from deltarefit.runlog import RunLog
from deltarefit.stores.object import memory_store

Model = dict[str, Elements]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
FILES = {"config.json": b"{}", "tokenizer.json": b"[1, 2]"}

MIXED: Shapes = {
    "a.weight": ("BF16", (40, 33)),
    "b.weight": ("F32", (7, 5, 3)),
    "c.scale": ("F8_E4M3", (400,)),
    "d.mask": ("BOOL", (3, 50)),
    "e.steps": ("I64", (11,)),
    "f.empty": ("F16", (0, 5)),
    "g.scalar": ("BF16", ()),
    "h.one": ("U8", (1,)),
    "i.weight": ("BF16", (900,)),
}
"""A little of everything; about 5.5 kB."""
SMALL: Shapes = {"a.weight": ("BF16", (300,)), "b.empty": ("F32", (0,)), "c.steps": ("I64", (20,))}
"""For tests that run a hundred times."""


# ------------------------------------------------------------------------------------------ models


def random_model(rng: np.random.Generator, shapes: Shapes = MIXED) -> Model:
    """Random bits of these shapes, as unsigned integers."""
    return {name: random_bits(rng, dtype, shape) for name, (dtype, shape) in sorted(shapes.items())}


def random_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Elements:
    width = WIDTHS[dtype]
    most = 1 if dtype == "BOOL" else (1 << 8 * width) - 1
    bits: Elements = rng.integers(0, most, shape, dtype=f"u{width}", endpoint=True)
    return bits


def copy_of(model: Model) -> Model:
    return {name: array.copy() for name, array in model.items()}


def bytes_of(model: Model) -> list[bytes]:
    """Little-endian bytes of every tensor in catalog order."""
    return [array.astype(array.dtype.newbyteorder("<")).tobytes() for _, array in sorted(model.items())]


STEPS = ("nothing", "few", "some", "many", "all", "back", "block", "one", "nudge")
"""Kinds of ``step``. "back" returns some elements to what they were before."""


def step(rng: np.random.Generator, model: Model, kind: str, before: Model | None = None) -> None:
    """Change ``model`` in place."""
    if kind == "one":
        names = [name for name, array in model.items() if array.size]
        model[str(rng.choice(names))].reshape(-1)[0] ^= np.uint8(1)
        return
    for name, array in model.items():
        _step_array(rng, array, kind, before[name] if before else array)


def _step_array(rng: np.random.Generator, array: Elements, kind: str, before: Elements) -> None:
    flat, old = array.reshape(-1), before.reshape(-1)
    density = {"nothing": 0.0, "few": 0.01, "some": 0.05, "many": 0.6, "all": 2.0, "back": 0.5, "nudge": 0.1}
    chosen = rng.random(flat.size) < density.get(kind, 0.0)
    if kind == "block" and flat.size:
        first = int(rng.integers(flat.size))
        chosen[first : first + flat.size // 3 + 1] = True
    if kind == "back":
        flat[chosen] = old[chosen]
    elif kind == "nudge":
        flat[chosen] += rng.choice(np.array([1, -1], "i8"), int(chosen.sum())).astype(flat.dtype)
    else:
        flat[chosen] ^= rng.integers(1, 255, int(chosen.sum()), dtype="u1", endpoint=True).astype(flat.dtype)


def catalog_of(model: Model, shapes: Shapes = MIXED) -> Catalog:
    return Catalog(tuple(TensorEntry(name, shapes[name][0], array.shape) for name, array in sorted(model.items())))


class ArraySource(WholeTensors):
    """``ports.Source`` over NumPy arrays, which the test changes in place between publishes."""

    def __init__(self, model: Model, shapes: Shapes = MIXED, files: Mapping[str, bytes] = FILES) -> None:
        self.model = model
        self._catalog = catalog_of(model, shapes)
        self._files = files

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def files(self) -> Mapping[str, bytes]:
        return self._files

    @contextmanager
    def read(self, tensor: int, start: int, stop: int) -> Iterator[Elements]:
        yield self.model[self._catalog.tensors[tensor].name].reshape(-1)[start:stop]


def bits(target: Target) -> list[bytes]:
    """All bits of a target, through its own windows."""
    catalog = target.catalog
    assert catalog is not None, "the target is empty"
    return [_window_bytes(target, number, entry.numel) for number, entry in enumerate(catalog.tensors)]


def _window_bytes(target: Target, tensor: int, numel: int) -> bytes:
    if not numel:
        return b""
    with target.window(tensor, 0, numel) as (array, first):
        return array.reshape(-1)[first : first + numel].tobytes()


def digest_of(run: str, catalog: Catalog, model: Model) -> Digest:
    keys = catalog_keys(run, catalog)
    flats = [model[entry.name].reshape(-1) for entry in catalog.tensors]
    return sum((array_digest(flat, 0, key) for flat, key in zip(flats, keys, strict=True)), Digest())


# ------------------------------------------------------------------------------------------ runs


def new_store() -> Store:
    return memory_store(f"memory://{secrets.token_hex(4)}")


def copy_store(store: Store) -> Store:
    """A store of its own with the same objects."""
    new = new_store()
    for key, _ in store.list():
        new.put(key, store.get(key))
    return new


@dataclass
class Chain:
    """A run with several versions. ``history`` has the bits of every version."""

    store: Store
    source: ArraySource
    history: dict[int, list[bytes]] = field(default_factory=dict)
    models: dict[int, Model] = field(default_factory=dict)

    @property
    def head(self) -> int:
        return max(self.history)


def publish_chain(
    rng: np.random.Generator,
    kinds: Sequence[str] = ("some", "block", "back", "nothing"),
    shapes: Shapes = MIXED,
    store: Store | None = None,
    payload_bytes: int = 400,
) -> Chain:
    """A first version and one more for each of ``kinds``, of several small payloads each."""
    model = random_model(rng, shapes)
    chain = Chain(store or new_store(), ArraySource(model, shapes))
    publisher = Publisher(chain.store, chain.source, threads=1, payload_bytes=payload_bytes)
    before = copy_of(model)
    with contextlib.closing(publisher):
        for number, kind in enumerate(("", *kinds)):
            last = copy_of(model)
            if number:
                step(rng, model, kind, before)
            before = last
            version = publisher.publish(number).version
            chain.history[version], chain.models[version] = bytes_of(model), copy_of(model)
    return chain


def followed(store: Store, target: Target, **options: Any) -> int:
    """Follow once with a fresh receiver; the version then held."""
    with contextlib.closing(Receiver(store, target, threads=options.pop("threads", 1), **options)) as receiver:
        return receiver.follow(once=True)


def published(store: Store, source: ArraySource, step_: int = 0, **options: Any) -> int:
    """Publish once with a fresh publisher; the new version."""
    options = {"threads": 1, "payload_bytes": 400, **options}
    with contextlib.closing(Publisher(store, source, **options)) as publisher:
        return publisher.publish(step_).version


def check_linear(store: Store) -> list[int]:
    """All versions of the log, after a check of I4: each commit's base is the commit before it, only the last
    attempt may be open."""
    log, versions = RunLog.open(store), [0]
    attempts = list(log.attempts(1))
    for attempt in attempts:
        assert attempt.intent is not None
        assert attempt.intent.base == versions[-1], f"attempt {attempt.number} has base {attempt.intent.base}"
        assert attempt.outcome is not None or attempt is attempts[-1], f"attempt {attempt.number} was left open"
        if attempt.committed:
            versions.append(attempt.number)
    return versions[1:]


class Heard:
    """A listener that remembers; count events with ``heard[type]``."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def __getitem__(self, type_: str) -> int:
        return sum(event.type == type_ for event in self.events)

    def phases(self, phase: str) -> int:
        return sum(event.type == "phase" and event.phase == phase for event in self.events)


# ------------------------------------------------------------------------------------------ a strict target


class Broken(AssertionError):
    """A receiver broke the contract of ``Target`` or an invariant of the protocol."""


class StrictTarget(MemoryBaseline):
    """Fails the moment a receiver writes while users run or the header is CLEAN, claims CLEAN without the bits,
    or resumes while the header is not CLEAN.

    What was not flushed may be lost in ``crash``. ``sleeping`` turns the checks off, for mutants that look for
    the damage itself.
    """

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run
        self._durable: list[Elements] = []
        self._lock = threading.RLock()
        self.paused = False
        self.sleeping = False
        self.seeds = 0
        self.finished = 0
        self.open_windows = 0

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        header = self.read_header()
        self._require(header is not None and header.state is State.UNKNOWN, "seeded with a header that is not UNKNOWN")
        self._require(dict(files) == FILES, "seeded without the side files")
        super().seed(catalog, files)
        self.seeds += 1
        self._durable = self._durable or [array.copy() for array in self._arrays]

    def finish_seed(self) -> None:
        self._require(self._is_durable(), "finished a seed that was not flushed")
        self.finished += 1

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        with self._lock:
            self.open_windows += 1
        before = self._arrays[tensor][start:stop].copy()
        try:
            with super().window(tensor, start, stop) as (array, first):
                yield array, first
        finally:
            with self._lock:
                self.open_windows -= 1
            if not np.array_equal(before, self._arrays[tensor][start:stop]):
                self._check_write()

    def _check_write(self) -> None:
        header = self.read_header()
        self._require(self.paused, "wrote while users run (I7)")
        self._require(header is not None and header.state is not State.CLEAN, "wrote under a CLEAN header (I1)")

    def write_header(self, header: Header) -> None:
        if header.state is State.CLEAN:
            self._require(self._is_durable(), "CLEAN before the bits are durable")
            self._require(self.real_digest() == header.digest, f"CLEAN({header.version}) without its bits (I1)")
        if header.state is State.DIRTY:
            self._require(self.paused, "DIRTY while users run (I7)")
        super().write_header(header)

    def flush(self) -> None:
        with self._lock:
            for array, durable in zip(self._arrays, self._durable, strict=True):
                durable[:] = array

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        header = self.read_header()
        self._require(header is not None and header.state is State.CLEAN, "resumed while not CLEAN (I7)")
        self.paused = False

    def real_digest(self) -> Digest:
        assert self.catalog is not None
        keys = catalog_keys(self._run, self.catalog)
        lanes = [_kernel.digest(array, 0, key) for array, key in zip(self._arrays, keys, strict=True)]
        return sum((Digest(*pair) for pair in lanes), Digest())

    def crash(self, rng: np.random.Generator) -> None:
        """Power loss: any part of what was not flushed is gone."""
        for array, durable in zip(self._arrays, self._durable, strict=True):
            lost = rng.random(array.size) < rng.random()
            array[lost] = durable[lost]
        self.flush()

    def _is_durable(self) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self._arrays, self._durable, strict=True))

    def _require(self, good: bool, what: str) -> None:
        if not good and not self.sleeping:
            raise Broken(what)


def strict_target(store: Store) -> StrictTarget:
    return StrictTarget(RunLog.open(store).run)


def received(store: Store) -> list[bytes]:
    """What a new receiver ends up with."""
    target = strict_target(store)
    followed(store, target)
    return bits(target)


def state_of(target: Target) -> tuple[State, int]:
    """What its header says: state and version."""
    header = target.read_header()
    assert header is not None
    return header.state, header.version
