"""``deltarefit bench recovery``: what recovery costs, beside the same refit without a fault, and what checks cost.

A model in memory is published into a directory store and followed. A receiver is stopped at several places of a refit,
in the middle of a payload among them, and the time of the next one from its start to CLEAN is held against the
follow that nothing disturbed; a trainer is stopped while it uploads. The share of digests, proofs and hashes is
measured by doing them alone. One receiver that is registered and dead delays one commit. Bits are compared at the end
of each.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltarefit import _kernel, runtime
from deltarefit.attendance import member_key
from deltarefit.baseline import MemoryBaseline
from deltarefit.bench.goals import at_most
from deltarefit.codec import open_payload
from deltarefit.elements import Elements
from deltarefit.exchange import WholeTensors
from deltarefit.manifest import Catalog, Member, TensorEntry
from deltarefit.ports import Store, Target
from deltarefit.publisher import Publisher
from deltarefit.receiver import Receiver
from deltarefit.runlog import RunLog, payload_prefix
from deltarefit.runtime import SystemRuntime
from deltarefit.stores.directory import DirectoryStore
from deltarefit.weights import Weights

DENSITY = 0.03
GOAL_TIMES, GOAL_CHECKS, GOAL_DELAY_S = 2.0, 0.05, 10.0
SLACK_S = 1.0
"""Of the delay: looks at the roll are some tenths of a second apart, and the commit itself takes time."""


@dataclass(frozen=True)
class Size:
    """``tensors`` of ``numel`` BF16 elements each."""

    tensors: int
    numel: int
    repeats: int
    payload_bytes: int


FULL, QUICK = Size(16, 16 << 20, 3, 1 << 20), Size(3, 40_000, 1, 1 << 10)


class Stopped(BaseException):
    """The process ends here."""


class StopAt(SystemRuntime):
    """Stops at the n-th time that a point of this name is reached."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._left = name, number

    def point(self, name: str) -> None:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                raise Stopped(name)


class Tearing(MemoryBaseline):
    """Stops in the middle of a payload, once ``left`` windows were opened since ``arm``."""

    left = -1

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        self.left -= 1
        if self.left == 0:
            raise Stopped("window")
        with super().window(tensor, start, stop) as found:
            yield found


class Model(WholeTensors):
    """``ports.Source`` over random bits; ``step`` changes some."""

    def __init__(self, size: Size) -> None:
        self._rng = np.random.default_rng(0)
        self.arrays = [self._rng.integers(0, 1 << 16, size.numel, dtype=np.uint16) for _ in range(size.tensors)]
        self._catalog = Catalog(tuple(TensorEntry(f"t{n:03}", "BF16", (size.numel,)) for n in range(size.tensors)))

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def files(self) -> Mapping[str, bytes]:
        return {}

    def step(self) -> None:
        for array in self.arrays:
            where = self._rng.random(array.size, np.float32) < DENSITY
            array[where] += self._rng.integers(1, 3, int(where.sum()), dtype=np.uint16)

    @contextmanager
    def read(self, tensor: int, start: int, stop: int) -> Iterator[Elements]:
        yield self.arrays[tensor][start:stop]


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Figures, and whether the goals are reached; JSON-ready."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as directory:
        bench = _Bench(size, DirectoryStore(Path(directory)))
        say("without a fault ...")
        calm = bench.calm()
        faults = []
        for name, fault in bench.faults():
            say(f"{name} ...")
            seconds, equal = bench.recovery(fault)
            faults.append({"fault": name, "seconds": seconds, "times": seconds / calm["follow"], "equal": equal})
        say("trainer ...")
        faults.append(bench.trainer(calm))
        say("a dead receiver ...")
        delay = bench.dead_receiver()
    result = {
        "quick": quick, "level": _kernel.level(), "load": os.getloadavg()[0], "model_bytes": bench.catalog.dense_bytes,
        "density": DENSITY, "calm": calm, "rows": faults, "dead_receiver_s": delay,
    }  # fmt: skip
    return {**result, "goals": goals(result)}


def goals(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal with its worst figure, and whether it is reached."""
    rows, calm = result["rows"], result["calm"]
    checks = sum(calm[name] for name in CHECKS) / (calm["publish"] + calm["follow"])
    return [
        at_most("recovery, times a refit without a fault", [row["times"] for row in rows], GOAL_TIMES),
        at_most("digests and checks, share of a refit", [checks], GOAL_CHECKS),
        at_most("s that a dead receiver delays a commit", [result["dead_receiver_s"]], GOAL_DELAY_S + SLACK_S),
        at_most("recoveries that end with other bits", [sum(not row["equal"] for row in rows)], 0),
    ]


CHECKS = ("prove source", "sums before and after", "verify", "hashes")
"""What is done only to be sure."""
Fault = Callable[[Receiver, Tearing], None]


class _Bench:
    def __init__(self, size: Size, store: Store) -> None:
        self.size, self.store, self.model = size, store, Model(size)
        self.catalog = self.model.catalog
        self.publisher = Publisher(store, self.model, votes="none", payload_bytes=size.payload_bytes)
        self.publisher.publish()
        self.target = Tearing()
        self._follow()

    # ------------------------------------------------------------------------------------ without a fault

    def calm(self) -> dict[str, float]:
        """Seconds of a publish and a follow that nothing disturbs, and of each check done alone; medians."""
        rows = []
        for _ in range(self.size.repeats):
            self.model.step()
            row = {"publish": _seconds(self._publish), "follow": _seconds(self._follow)}
            rows.append({**row, **self._checks()})
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]}

    def _publish(self) -> int:
        return self.publisher.publish().version

    def _follow(self) -> None:
        with closing(Receiver(self.store, self.target, prove=False)) as receiver:
            receiver.follow(once=True)

    def _checks(self) -> dict[str, float]:
        """Each pass again, on the same number of threads, with what it reads in memory."""
        log = self.publisher.log
        head = log.head()
        if head is None:
            raise RuntimeError("nothing was published")
        refs, prefix = head.payloads, payload_prefix(head.number)
        stored = [self.store.get(prefix + ref.sha256) for ref in refs]
        deltas = [one for ref, data in zip(refs, stored, strict=True) for one in open_payload(data, ref, self.catalog)]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            weights = Weights(self.target, log.run, self.catalog, pool)
            sums = _seconds(lambda: weights.sums(deltas))
            whole = _seconds(weights.digest)
        hashes = _seconds(lambda: [hashlib.sha256(data).digest() for data in stored])
        return {"prove source": whole, "sums before and after": 2 * sums, "verify": sums, "hashes": 2 * hashes}

    # ------------------------------------------------------------------------------------ faults

    def faults(self) -> list[tuple[str, Fault]]:
        """Where a receiver is stopped."""
        half = max(1, self._payloads() // 2)
        return [
            ("while it stages", _at("payload stage", half)),
            ("after DIRTY, before the first write", _at("receiver Write", 1)),
            ("between two payloads", _at("payload write", half + 1)),
            ("in the middle of a payload", self._tear),
            ("after the last write", _at("payload flush", 1)),
            ("before CLEAN", _at("receiver Write done", 1)),
        ]

    def _payloads(self) -> int:
        head = self.publisher.log.head()
        return len(head.payloads) if head else 0

    def _tear(self, receiver: Receiver, target: Tearing) -> None:
        """Deltas of a payload are written one by one; half of all windows of the write are opened."""
        real = receiver._staging.write

        def write(*arguments: Any) -> None:
            target.left = max(2, len(self.model.arrays) // 2)
            real(*arguments)

        receiver._staging.write = write  # type: ignore[method-assign, assignment]
        with contextlib.suppress(Stopped):
            receiver.follow(once=True)
        target.left = -1

    def recovery(self, fault: Fault) -> tuple[float, bool]:
        """Seconds from the start of the next receiver to CLEAN, the median; and whether the bits are right."""
        times, equal = [], True
        for _ in range(self.size.repeats):
            self.model.step()
            self._publish()
            with closing(Receiver(self.store, self.target, prove=False)) as receiver:
                fault(receiver, self.target)
            times.append(_seconds(self._follow))
            equal &= self._holds()
        return statistics.median(times), equal

    def trainer(self, calm: Mapping[str, float]) -> dict[str, Any]:
        """It is stopped while it uploads, and publishes again: the attempt is closed, the delta made anew."""
        times, equal = [], True
        for _ in range(self.size.repeats):
            self.model.step()
            with runtime.using(StopAt("payload put", max(1, self._payloads() // 2))), contextlib.suppress(Stopped):
                self._publish()
            times.append(_seconds(self._publish))
            self._follow()
            equal &= self._holds()
        seconds = statistics.median(times)
        return {
            "fault": "trainer, while it uploads",
            "seconds": seconds,
            "times": seconds / calm["publish"],
            "equal": equal,
        }

    def dead_receiver(self) -> float:
        """Seconds that a publish without changes takes longer with a receiver that is registered and dead."""
        with closing(Publisher(self.store, self.model)) as publisher:
            publisher.publish()  # the first one makes the baseline
            calm = _seconds(publisher.publish)
            log = RunLog.open(self.store)
            self.store.put(member_key("dead"), Member(log.run, "dead", "0" * 16, 1, 1).to_bytes())
            return _seconds(publisher.publish) - calm

    def _holds(self) -> bool:
        return all(_bits(self.target, n, array.size) == array.tobytes() for n, array in enumerate(self.model.arrays))


def _at(name: str, number: int) -> Fault:
    def stop(receiver: Receiver, target: Tearing) -> None:
        with runtime.using(StopAt(name, number)), contextlib.suppress(Stopped):
            receiver.follow(once=True)

    return stop


def _bits(target: Target, tensor: int, numel: int) -> bytes:
    with target.window(tensor, 0, numel) as (array, first):
        return array[first : first + numel].tobytes()


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
