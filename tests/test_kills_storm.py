"""A storm of SIGKILL: receivers that follow, and a publisher that makes new versions meanwhile, die all the time.

Weights, header and spool are shared memory, which outlives the agents as an engine's memory does. At every death of a
receiver its header is held against the bits; in the end everything must be at the head, and no anchor was loaded. Each
storm runs in a process of its own (``python -m tests.test_kills_storm MODE KILLS SEED [BROKEN]``) and prints its
counts as one line of JSON. The same storm on a broken product must find the damage.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import Publisher, Receiver, open_store
from deltarefit.elements import Elements
from deltarefit.errors import AttemptLostError, RefitError
from deltarefit.manifest import Catalog, Header, State
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from tests import helpers as h
from tests.planted import BROKEN, SHOWS
from tests.test_kills import ROOT, Counters, SharedTarget, fork, next_step, shared

SHAPES: h.Shapes = {
    "a": ("BF16", (900, 500)),
    "b": ("F32", (60_000,)),
    "c": ("BOOL", (1000,)),
    "d": ("F8_E4M3", (120_000,)),
    "e": ("I64", ()),
}
KINDS = ("some", "nudge", "many", "few", "nothing", "block", "some")
SLICES, SLICE_S = 12, 0.0004
AHEAD = 2
"""Most versions that the publisher is ahead of the slowest receiver, so that every version is refitted."""
ROUND_KILLS = 250
"""Kills in one store, whose log only grows."""
AIM_S = 0.2
"""Half of the kills of a receiver wait so long for a write; the others come at any instant."""
DEADLINE_S = 0.6
"""A publish does not wait longer than this for votes of receivers, which die all the time."""
END_S = 60.0
"""A storm that has blown over must be at the head within this."""
NAMES = ("kills", "publisher_kills", "dirty", "torn", "loads", "wrong", "versions", "rounds", "refused")


# ------------------------------------------------------------------------------------------ tests


def run_storm(mode: str, kills: int, broken: str = "") -> dict[str, int]:
    """Counts of a storm in a fresh process, which has no threads when it forks."""
    seed = random.SystemRandom().randrange(1 << 32)
    command = [sys.executable, "-m", "tests.test_kills_storm", mode, str(kills), str(seed), *([broken] * bool(broken))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    seconds = 120 + kills
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    print("storm", mode, broken, "seed", seed, done.stdout.strip())
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def check_storm(counts: dict[str, int], kills: int) -> None:
    """What a storm must have met, else it is too kind, and what must not have happened."""
    assert counts["wrong"] == 0, "bits differ"
    assert counts["loads"] == 0, "loaded an anchor though the memory survived"
    assert counts["kills"] >= kills
    assert counts["torn"] >= kills // 10, "too few payloads were torn"
    assert counts["dirty"] >= kills // 10, "too few kills met a write"
    assert counts["publisher_kills"] >= kills // 60
    assert counts["versions"] >= kills // 50


MODES = ("stage", "stream")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_a_storm(mode: str) -> None:
    kills = 500
    check_storm(run_storm(mode, kills), kills)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["unguarded", "done-bitmap"])
def test_a_storm_finds_wrong_bits_where_nothing_guards(broken: str) -> None:
    """Payloads applied again from their start, whatever a killed agent had done of them; nobody sums afterwards."""
    counts = run_storm("stage", 600, broken)
    assert counts["wrong"] > 0
    assert counts["torn"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "broken"), [("stage", "never-set"), ("stream", "no-union")])
def test_a_storm_finds_loads_where_only_sums_are_left(mode: str, broken: str) -> None:
    """Sums find it before anything wrong is CLEAN, but memory that survived is loaded anew."""
    counts = run_storm(mode, 600, broken)
    assert counts["loads"] > 0
    assert counts["wrong"] == 0


# ------------------------------------------------------------------------------------------ weights of any step


@functools.lru_cache(maxsize=1)
def first_model(seed: int) -> h.Model:
    return h.random_model(np.random.default_rng(seed), SHAPES)


@functools.lru_cache(maxsize=8)
def model_at(seed: int, step: int) -> h.Model:
    """The weights of a step, whoever computes them. Every step starts from the first model, so that many changes of
    the last one are taken back."""
    model = h.copy_of(first_model(seed))
    if step:
        h.step(np.random.default_rng([seed, step]), model, KINDS[step % len(KINDS)])
    return model


# ------------------------------------------------------------------------------------------ agents


class SlowTarget(SharedTarget):
    """Writes arrive in slices, as over a slow bus, so that a kill meets half of a payload; ``writes`` counts them, so
    that a killer may aim."""

    slow = True

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog)
        self._writes = np.frombuffer(shared(8), "u8")

    @property
    def writes(self) -> int:
        return int(self._writes[0])

    @contextlib.contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        live = self.arrays[tensor][start:stop]
        if not self.slow:
            yield live, 0
            return
        copy = live.copy()
        yield copy, 0
        if (changed := np.flatnonzero(copy != live)).size:
            self._writes[0] += np.uint64(1)
            for part in np.array_split(changed, SLICES):
                live[part] = copy[part]
                time.sleep(SLICE_S)


def receive(store: Store, target: SlowTarget, counters: Counters, options: dict[str, Any], slow: bool) -> None:
    target.slow = slow
    Receiver(store, target, emit=counters, poll_s=0.01, **options).follow()


def publish(store: Store, seed: int, targets: Sequence[SlowTarget], skip: int, options: dict[str, Any]) -> None:
    """Step after step; ``skip`` steps are left out at first, so that a retry is of newer weights than what failed."""
    source = h.ArraySource(model_at(seed, 0), SHAPES)
    with contextlib.closing(Publisher(store, source, threads=1, payload_bytes=60_000, **options)) as publisher:
        step = next_step(store) + skip
        while True:
            source.model = model_at(seed, step)
            with contextlib.suppress(AttemptLostError):  # too few receivers were there to vote
                version, step = publisher.publish(step).version, step + 1
                keep_pace(targets, version)


def keep_pace(targets: Sequence[SlowTarget], version: int) -> None:
    until = time.monotonic() + 1.0
    while min(version_of(target) for target in targets) < version - AHEAD and time.monotonic() < until:
        time.sleep(0.002)


def die_with_parent() -> None:
    """Whatever ends a storm ends its agents."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def version_of(target: SlowTarget) -> int:
    """Without a check: another process may be writing the header."""
    with contextlib.suppress(RefitError):
        header = target.read_header()
        return header.version if header else 0
    return 0


# ------------------------------------------------------------------------------------------ the storm


@dataclass
class Storm:
    """One store, two receivers, one publisher; ``running`` has the living agents by name."""

    store: Store
    seed: int
    mode: str
    chooser: random.Random
    counters: Counters
    baseline: Path
    broken: str
    targets: list[SlowTarget] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def begin(self, receivers: int) -> None:
        """Version 1 of the run is in all targets, as in engines that were started from it."""
        with contextlib.closing(self.publisher()) as publisher:
            publisher.publish(0)
        log = RunLog.open(self.store)
        model = model_at(self.seed, 0)
        digest = h.digest_of(log.run, log.catalog, model)
        for number in range(receivers):
            target = SlowTarget(log.catalog)
            header = Header(log.run, log.catalog.identity, State.CLEAN, 1, 0, digest, 0, f"{number:016x}")
            target.load(model, header)
            self.targets.append(target)

    def publisher(self) -> Publisher:
        return Publisher(self.store, h.ArraySource(model_at(self.seed, 0), SHAPES), threads=1, payload_bytes=60_000)

    def start(self, name: str) -> None:
        agent = self._agent(name)
        self.running[name] = fork(lambda: (die_with_parent(), agent()))

    def _agent(self, name: str) -> Callable[[], object]:
        if name == "publisher":
            kept = self.baseline if self.chooser.random() < 0.8 else None
            votes = self.chooser.choice(["all", "none", "none", 1])
            making = {"baseline": kept, "mode": self.mode, "votes": votes, "deadline_s": DEADLINE_S}
            skip = self.chooser.randint(0, 2)
            return lambda: publish(self.store, self.seed, self.targets, skip, making)
        options = {"threads": self.chooser.randint(1, 3), "prove": self.chooser.random() < 0.5, "name": f"r{name}"}
        target, slow = self.targets[int(name)], self.chooser.random() < 0.85
        return lambda: receive(self.store, target, self.counters, options, slow)

    def kill(self, name: str) -> None:
        pid = self.running.pop(name)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if status != signal.SIGKILL:
            assert self.broken, f"agent {name} ended by itself with status {status}"
            self.counters.add("refused")
        if name == "publisher":
            self.counters.add("publisher_kills")
            return
        self.counters.add("kills")
        self.check(self.targets[int(name)])

    def check(self, target: SlowTarget) -> None:
        """I1 and I7 at the very instant of death."""
        header = target.read_header()
        assert header is not None
        if header.state is State.CLEAN:
            self.counters.add("wrong", self.holds(target, header.version) is False)
            if header.version not in self.seen:
                self.seen.add(header.version)
                self.counters.add("versions")
        else:
            self.counters.add("dirty")
            assert target.paused, "users run on weights that are not CLEAN"

    def holds(self, target: SlowTarget, version: int) -> bool:
        commit = RunLog.open(self.store).version(version)
        return h.bits(target) == h.bytes_of(model_at(self.seed, commit.manifests[0].step))

    def blow(self, kills: int) -> None:
        names = [*map(str, range(len(self.targets))), "publisher"]
        weights = [*[8] * len(self.targets), 1]
        while self.counters["kills"] < kills and not self.shown():
            for name in names:
                if name not in self.running:
                    self.start(name)
            victim = self.chooser.choices(names, weights)[0]
            if victim == "publisher" or self.chooser.random() < 0.5:
                time.sleep(self.chooser.uniform(0, 0.06))
            else:
                self.aim(self.targets[int(victim)])
            self.kill(victim)
        for name in list(self.running):
            self.kill(name)

    def shown(self) -> bool:
        """Whether a broken product has shown what is wrong with it."""
        return bool(self.broken) and self.counters[SHOWS[self.broken]] > 2

    def aim(self, target: SlowTarget) -> None:
        """Wait for a write, and for some instant of it."""
        before, until = target.writes, time.monotonic() + AIM_S
        while target.writes == before and time.monotonic() < until:
            time.sleep(0.0005)
        time.sleep(self.chooser.uniform(0, SLICES * SLICE_S * 2))

    def settle(self) -> None:
        """Nobody dies any more: one more version, and everyone is at the head with its bits."""
        making = {"baseline": self.baseline, "threads": 1, "votes": "none"}
        with contextlib.closing(Publisher(self.store, self.source(), **making)) as publisher:
            head = publisher.publish(next_step(self.store)).version
        check_log(self.store, self.seed)
        for target in self.targets:
            target.slow = False
            started = time.monotonic()
            with contextlib.closing(Receiver(self.store, target, emit=self.counters, threads=2)) as receiver:
                assert receiver.follow(once=True) == head
            assert time.monotonic() - started < END_S
            self.counters.add("wrong", not self.holds(target, head))
        self.counters.add("rounds")

    def source(self) -> h.ArraySource:
        return h.ArraySource(model_at(self.seed, next_step(self.store)), SHAPES)


def check_log(store: Store, seed: int) -> None:
    """Linear; every version has the digest of its step's weights; no step made two versions."""
    log, steps = RunLog.open(store), list[int]()
    for version in h.check_linear(store):
        attempt = log.version(version)
        assert attempt.outcome is not None
        steps.append(attempt.manifests[0].step)
        if version % 7 == 0:  # each takes a pass over all weights
            assert attempt.outcome.digest == h.digest_of(log.run, log.catalog, model_at(seed, steps[-1]))
    assert steps == sorted(set(steps))


def storms(mode: str, kills: int, seed: int, broken: str = "") -> dict[str, int]:
    """Storms of ``ROUND_KILLS`` kills each, until there were ``kills``; the counts of all."""
    BROKEN[broken]()
    counters, started = Counters(*NAMES), time.monotonic()
    for number in itertools.count():
        wanted = kills if broken else min(kills, counters["kills"] + ROUND_KILLS)
        with tempfile.TemporaryDirectory() as directory:
            store, chooser = open_store(f"{directory}/store"), random.Random(f"{seed} {number}")
            storm = Storm(store, seed + number, mode, chooser, counters, Path(directory, "kept"), broken)
            storm.begin(receivers=2)
            storm.blow(wanted)
            if broken or (storm.settle() is None and counters["kills"] >= kills):
                return {**counters.all(), "seconds": int(time.monotonic() - started)}
    raise AssertionError


def main(arguments: Sequence[str]) -> None:
    mode, kills, seed, *broken = arguments
    print(json.dumps(storms(mode, int(kills), int(seed), *broken)))


if __name__ == "__main__":
    main(sys.argv[1:])
