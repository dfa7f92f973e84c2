"""A trainer rank's baseline in simulated memory, or in a simulated file that outlives it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltarefit.elements import Elements
from deltarefit.errors import UnavailableError
from deltarefit.manifest import Header, State
from deltarefit.ports import Baseline, Source, Store, Target
from deltarefit.publisher import Publisher
from deltarefit.publishing.shard_baseline import ShardBaseline
from deltarefit.publishing.shards import Extents
from deltarefit.simulation.model import Owned
from deltarefit.simulation.oracle import Oracle
from deltarefit.simulation.world import Process


@dataclass
class BaselineFile:
    """What lies on the disk, or in the memory of one process. ``durable`` is what a power loss leaves."""

    arrays: list[Elements] = field(default_factory=list)
    durable: list[Elements] = field(default_factory=list)
    header: Header | None = None
    owner: Process | None = None
    tainted: bool = False

    def lose_power(self) -> None:
        for live, durable in zip(self.arrays, self.durable, strict=True):
            live[:] = durable


class SimBits:
    """``ShardBits`` of one process on a file; every header is held against the oracle (I5)."""

    def __init__(self, file: BaselineFile, process: Process, oracle: Oracle, pieces: Owned) -> None:
        if file.owner is not None and not file.owner.dead:
            raise UnavailableError("the baseline is in use")
        file.owner = process
        self._file, self._process, self._oracle, self._pieces = file, process, oracle, pieces

    def claim(self, extents: Extents) -> None:
        file = self._file
        if [(a.size, a.itemsize) for a in file.arrays] != list(extents):
            file.header = None
            file.arrays = [np.zeros(numel, f"<u{width}") for numel, width in extents]
            file.durable = [array.copy() for array in file.arrays]

    def array(self, piece: int) -> Elements:
        self._process.alive()
        return self._file.arrays[piece]

    def read_header(self) -> Header | None:
        return self._file.header

    def write_header(self, header: Header) -> None:
        self._process.step(f"baseline {header.state.value}({header.version})")
        file = self._file
        if header.state is State.CLEAN:
            for live, durable in zip(file.arrays, file.durable, strict=True):
                durable[:] = live
            if not file.tainted:
                self._oracle.judge_baseline(self._process.name, header.version, self._pieces, file.arrays)
        elif header.state is State.UNKNOWN:
            file.tainted = False
        file.header = header

    def flip(self) -> bool:
        """One bit is another now; whether there was one to flip."""
        random, file = self._process.world.random, self._file
        arrays = [array for array in file.arrays if array.size]
        if not arrays or file.header is None or file.header.state is not State.CLEAN:
            return False
        array = random.choice(arrays)
        array[random.randrange(array.size)] ^= array.dtype.type(1 << random.randrange(8 * array.itemsize))
        file.tainted = True
        self._process.world.note(self._process.name, "fault: a bit of the baseline flips")
        return True

    def close(self) -> None:
        self._file.owner = None


class SimPublisher(Publisher):
    """The product's publisher; only what its baseline is kept in is simulated, unless ``options`` name a target."""

    def __init__(self, store: Store, source: Source, bits: SimBits | None, **options: Any) -> None:
        self._bits = bits
        super().__init__(store, source, threads=1, **options)

    def _open_baseline(self, given: Target | str | os.PathLike[str] | None, source: Source, threads: int) -> Baseline:
        if self._bits is None:
            return super()._open_baseline(given, source, threads)
        return ShardBaseline(self.log, source.pieces, self._bits, self._recent, self._tell, threads)
