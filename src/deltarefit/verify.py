"""Does this checkpoint hold exactly the bits of a version? By the log's digest; if not, which tensors differ.

The log states one digest per version, so a mismatch alone names no tensor. To find them the version is
rebuilt from anchor and chain in a scratch directory, as any new receiver would, and compared tensor by
tensor.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deltarefit import _kernel
from deltarefit.asof import AsOf
from deltarefit.compare import TensorChange
from deltarefit.digest import array_digest, catalog_keys
from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch
from deltarefit.events import Emit, Event, ignore
from deltarefit.manifest import Catalog
from deltarefit.ports import Source, Target
from deltarefit.receiver import Receiver
from deltarefit.records import Digest
from deltarefit.runlog import RunLog
from deltarefit.targets.checkpoint import CheckpointTarget
from deltarefit.weights import Segment, flat, segments

T = TypeVar("T")
Read = Callable[[int, int, int], AbstractContextManager[Elements]]
"""Elements [start, stop) of a tensor, by its index in the run's catalog."""


@dataclass(frozen=True)
class Bits:
    """A checkpoint seen through a run's catalog. ``ties`` are further copies of tied tensors: (index, name,
    read)."""

    read: Read
    ties: tuple[tuple[int, str, Read], ...] = ()


def bits_of_source(source: Source, catalog: Catalog) -> Bits:
    """Match a checkpoint with a run's catalog by name; a tied tensor may stand under any of its names, or
    several.

    Raises ``BaseMismatch`` that names the first tensor that is missing, superfluous, or of another dtype or
    shape.
    """
    places: dict[int, list[int]] = {number: [] for number in range(len(catalog.tensors))}
    for number, entry in enumerate(source.catalog.tensors):
        known = catalog.index.get(entry.name)
        if known is None:
            raise _mismatch(entry.name, "no such tensor", f"{entry.dtype} {list(entry.shape)}")
        expected = catalog.tensors[known]
        if (entry.dtype, entry.shape) != (expected.dtype, expected.shape):
            kinds = (f"{e.dtype} {list(e.shape)}" for e in (expected, entry))
            raise _mismatch(entry.name, *kinds)
        places[known].append(number)
    for known, numbers in places.items():
        if not numbers:
            expected = catalog.tensors[known]
            raise _mismatch(expected.name, f"{expected.dtype} {list(expected.shape)}", "no such tensor")
    names = source.catalog.tensors
    ties = [(known, names[n].name, _fixed(source, n)) for known, numbers in places.items() for n in numbers[1:]]
    return Bits(lambda tensor, start, stop: source.read(places[tensor][0], start, stop), tuple(ties))


def _fixed(source: Source, number: int) -> Read:
    return lambda _, start, stop: source.read(number, start, stop)


def _mismatch(name: str, expected: str, found: str) -> BaseMismatch:
    step = "Give a checkpoint of the model that this run publishes."
    return BaseMismatch(f"tensor {name} is not that of this run", expected=expected, found=found, next_step=step)


def bits_of_target(target: Target) -> Bits:
    """The live bits of a target that was seeded with the run's catalog."""

    @contextmanager
    def read(tensor: int, start: int, stop: int) -> Iterator[Elements]:
        with target.window(tensor, start, stop) as (array, first):
            yield flat(array, first, stop - start)

    return Bits(read)


class Verifier:
    """Checks bits against versions of one run. ``scratch`` is where a version may be rebuilt: it needs the
    room."""

    def __init__(
        self,
        log: RunLog,
        *,
        scratch: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        emit: Emit = ignore,
    ) -> None:
        self.log = log
        self._scratch = scratch
        self._threads = threads or os.cpu_count() or 1
        self._emit = emit
        self._keys = catalog_keys(log.run, log.catalog)

    def digest(self, bits: Bits) -> Digest:
        """Digest of all elements."""

        def one(segment: Segment) -> Digest:
            tensor, start, stop = segment
            with bits.read(tensor, start, stop) as elements:
                return array_digest(elements, start, self._keys[tensor])

        return sum(self._walk("verify", one), Digest())

    def tie_differences(self, bits: Bits) -> tuple[TensorChange, ...]:
        """Copies of tied tensors that differ from the first: one version cannot hold both."""
        found = []
        for tensor, name, read in bits.ties:
            entry = self.log.catalog.tensors[tensor]
            changed = sum(
                _differing(piece, bits.read, read) for piece in segments(self.log.catalog) if piece[0] == tensor
            )
            found += [TensorChange(name, entry.dtype, entry.shape, entry.numel, changed)] if changed else []
        return tuple(found)

    def differences(self, bits: Bits, version: int) -> tuple[TensorChange, ...]:
        """The tensors that are not those of ``version``, most changed first. Rebuilds the version: fetches
        its anchor and chain. Raises what a receiver would if the store cannot give them."""
        with (
            tempfile.TemporaryDirectory(prefix="deltarefit-verify-", dir=self._scratch) as directory,
            closing(CheckpointTarget(Path(directory) / "version")) as target,
        ):
            self._rebuild(target, version)
            counts = self._count(bits.read, bits_of_target(target).read)
        found = [TensorChange.of(e, n) for e, n in zip(self.log.catalog.tensors, counts, strict=True) if n]
        return tuple(sorted(found, key=lambda change: -change.changed))

    def _rebuild(self, target: Target, version: int) -> None:
        receiver = Receiver(
            AsOf(self.log, version), target, threads=self._threads, emit=self._emit, trust=self.log.notary.trust
        )
        with closing(receiver):
            found = receiver.follow(once=True)
        if found != version:
            raise BaseMismatch("the version could not be rebuilt", expected=version, found=found)

    def _count(self, first: Read, second: Read) -> list[int]:
        counts, lock = [0] * len(self.log.catalog.tensors), threading.Lock()

        def one(segment: Segment) -> None:
            changed = _differing(segment, first, second)
            with lock:
                counts[segment[0]] += changed

        for _ in self._walk("compare", one):
            pass
        return counts

    def _walk(self, phase: str, work: Callable[[Segment], T]) -> Iterator[T]:
        """``work`` on every segment of the catalog, side by side; results in order."""
        catalog, done = self.log.catalog, 0
        pieces = list(segments(catalog))
        with ThreadPoolExecutor(self._threads, thread_name_prefix=phase) as pool:
            for (tensor, start, stop), result in zip(pieces, pool.map(work, pieces), strict=True):
                done += (stop - start) * catalog.tensors[tensor].width
                self._emit(Event("progress", phase, done=done, total=catalog.dense_bytes))
                yield result


def _differing(segment: Segment, first: Read, second: Read) -> int:
    with first(*segment) as a, second(*segment) as b:
        return _kernel.count_changed(a, b)
