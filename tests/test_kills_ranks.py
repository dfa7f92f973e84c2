"""Real processes, real SIGKILL: a rank of a trainer dies in each stage of a publish.

The attempt ends within its deadline for the ranks that live; the trainer that comes after publishes; a receiver that
follows all the time never holds anything but the bits of a committed version.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deltarefit import open_store
from deltarefit.errors import NotFoundError
from deltarefit.receiver import Receiver
from deltarefit.runlog import RunLog
from tests import helpers as h
from tests.rank_process import Task, model_at

SIZE, DEADLINE_S, SEED = 3, 2.0, 7
WAIT_S = 60.0
BY_COORDINATOR = ["before create intent", "after create intent", "before create outcome", "after create outcome"]
BY_ANY = [
    "event prepare", "read", "before put pl", "after put pl", "event encode", "before create p", "after create p",
    "event baseline",
]  # fmt: skip
COMMITS = {"after create outcome", "event baseline"}
"""Deaths after the commit: the version is there."""
CASES = [
    *((stage, 0, "memory") for stage in BY_COORDINATOR),
    *((stage, 2, "memory") for stage in BY_ANY),
    *((stage, 0, "file") for stage in ("after put pl", "after create outcome", "event baseline")),
    ("event baseline", 2, "file"),
]


class Ranks:
    """The processes of one trainer."""

    def __init__(self, store: Path, session: str, first: int, steps: int, **special: dict[str, Any]) -> None:
        self.processes = []
        for rank in range(SIZE):
            more = special.get(f"rank{rank}", {}) | special.get("every", {})
            task = Task(str(store), session, rank, SIZE, SEED, first, steps, DEADLINE_S, **more)
            command = [sys.executable, "-m", "tests.rank_process", json.dumps(task.__dict__)]
            self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    def said(self) -> list[list[dict[str, Any]]]:
        """What each rank said, once all have ended."""
        out = [process.communicate(timeout=WAIT_S)[0] for process in self.processes]
        return [[json.loads(line) for line in text.splitlines()] for text in out]

    def codes(self) -> list[int]:
        return [process.returncode for process in self.processes]


class Watcher(threading.Thread):
    """A receiver that follows all the time, on a target that fails when anything is out of order."""

    def __init__(self, store: Path) -> None:
        super().__init__(daemon=True)
        self._store, self._done = open_store(str(store)), threading.Event()
        self.seen: dict[int, list[bytes]] = {}
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            self.error = error

    def _follow(self) -> None:
        while not self._done.is_set():
            try:
                target = h.strict_target(self._store)
                receiver = Receiver(self._store, target, threads=1, poll_s=0.02)
                while True:
                    last = self._done.is_set()  # asked before: the last version may have come just now
                    version = receiver.follow(once=True)
                    self.seen.setdefault(version, h.bits(target))
                    if last:
                        return
                    time.sleep(0.02)
            except NotFoundError:
                time.sleep(0.05)

    def finish(self) -> None:
        self._done.set()
        self.join(20)
        if self.error:
            raise self.error


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rank", "kept"), CASES)
def test_a_rank_killed_in_any_stage(tmp_path: Path, stage: str, rank: int, kept: str) -> None:
    store = tmp_path / "store"
    every = {"baseline": str(tmp_path / "kept")} if kept == "file" else {}
    watcher = Watcher(store)
    watcher.start()
    dying = Ranks(store, "one", 0, 3, every=every, **{f"rank{rank}": {"die": stage, "at": 2}})
    said = dying.said()
    assert dying.codes()[rank] == -9, f"rank {rank} was to be killed: {said[rank]}"
    log = RunLog.open(open_store(str(store)))
    for other in range(SIZE):
        if other != rank:
            check_survivor(said[other], stage)
    killed = log.attempt(2)
    assert killed.committed == (stage in COMMITS)
    again = Ranks(store, "two", 5, 1, every=every).said()
    numbers = {lines[-1].get("version", 0) for lines in again}
    assert len(numbers) == 1, again
    assert log.version(numbers.pop()).manifests[0].step == 5, again
    if stage != "before create intent":
        assert log.attempt(2).outcome, "the attempt was left open"
    watcher.finish()
    check_seen(log, watcher.seen)


def check_seen(log: RunLog, seen: dict[int, list[bytes]]) -> None:
    """Every version that was ever held is committed, and holds the bits of its step."""
    h.check_linear(log.store)
    assert max(seen) == (head.number if (head := log.head()) else 0)
    for version, bits in seen.items():
        commit = log.version(version)
        assert bits == h.bytes_of(model_at(SEED, commit.manifests[0].step)), f"version {version}"


def check_survivor(lines: list[dict[str, Any]], stage: str) -> None:
    """It came to an end by itself, with an error, within the deadline and what the machine is slow."""
    last = lines[-1]
    if stage in COMMITS and "version" in last and last["step"] == 1:
        return  # killed after the commit: it may have heard before, and ended at the next step
    assert "error" in last, lines
    assert last["seconds"] < DEADLINE_S * 2 + 10, last
