"""The release run: ``python -m tests.soak --hours 3`` (``make soak``), every part as much of it as fits; with
``--hours 0.02`` the same in small. Prints one line of JSON for each part and one with the verdict; exits with 1 if any
part failed.

Parts run two at a time, each in a process of its own; ``--only PART`` runs one alone, or several.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deltarefit import simulation
from tests import explorer, failpoints, stream_explorer, test_every_bit, test_kills_storm
from tests.failing import Fault
from tests.failpoints_ranks import trainer_cases
from tests.failpoints_stream import StreamWorld

ROOT = Path(__file__).parent.parent
FULL_HOURS = 3.0
STATES, SEEDS, KILLS, TORN, BIT_SEEDS = 1_000_000, 200_000, 10_000, 1_000, 40
FUZZ_S, WEATHER_S = 600.0, 300.0
"""What the release run must reach, in ``FULL_HOURS`` on two cores."""
Found = dict[str, Any]


def need(good: bool, what: str, problems: list[str]) -> None:
    if not good:
        problems.append(what)


# ------------------------------------------------------------------------------------------ parts


def model(scale: float, seed: int) -> Found:
    """Both modes, recovery tried from every state."""
    limit, problems, states = max(int(STATES * scale), 2000), list[str](), 0
    for losses in (1, 0):
        count, bad = explorer.explore(crashes=3 - losses, losses=losses, limit=limit)
        states += count
        need(bad is None, f"stage: {bad}", problems)
    for number, (name, fate) in enumerate(stream_explorer.RELEASE.items()):
        left = len(stream_explorer.RELEASE) - number
        found = stream_explorer.explore(fate, max((limit - states) // left, limit // 10), seed)
        states += found.states
        need(found.bad is None, f"stream, {name}: {found.bad}", problems)
    need(states >= limit, f"{states} of {limit} states", problems)
    return {"states": states, "problems": problems}


def simulate(scale: float, seed: int) -> Found:
    """Seeds from a random first one, half of them in either mode of the simulator."""
    each, problems, count, loads, healed = max(int(SEEDS * scale / 2), 20), list[str](), 0, 0, 0.0
    for number, mode in enumerate(simulation.MODES):
        for run in simulation.run_seeds(seed + number * each, each, processes=1, modes=(mode,)):
            count, loads, healed = count + 1, loads + run.loads, max(healed, run.healed_s)
            need(not run.failures, f"{run.command}: {run.failures[:1]}", problems)
    return {"seeds": count, "loads": loads, "healed_s": round(healed, 1), "problems": problems[:20]}


def kills(scale: float, seed: int) -> Found:
    """Storms of real SIGKILL in both modes, and on a broken product, which must show it."""
    wanted, problems, counts = max(int(KILLS * scale), 60), list[str](), dict[str, dict[str, int]]()
    for mode in test_kills_storm.MODES:
        counts[mode] = storm(mode, wanted // 2 + 1, seed)
    total = {name: sum(of[name] for of in counts.values()) for name in counts["stage"]}
    need(total["wrong"] == 0, "bits differ", problems)
    need(total["loads"] == 0, "loaded although the memory survived", problems)
    need(total["kills"] >= wanted, f"{total['kills']} kills", problems)
    need(total["torn"] >= wanted * TORN // KILLS, f"only {total['torn']} payloads were torn", problems)
    broken = storm("stage", 1000, seed, "unguarded")
    need(broken["wrong"] > 0, "an unguarded product did not show", problems)
    return {**total, "unguarded_wrong": broken["wrong"], "problems": problems}


def storm(mode: str, wanted: int, seed: int, broken: str = "") -> dict[str, int]:
    """In a process without threads, as it forks."""
    command = [sys.executable, "-m", "tests.test_kills_storm", mode, str(wanted), str(seed), *([broken] * bool(broken))]
    counts: dict[str, int] = json.loads(checked(command, 600 + wanted).splitlines()[-1])
    return counts


def points(scale: float, seed: int) -> Found:
    """The failpoint matrix, whole in the release run."""
    base, problems, run, missed = failpoints.Base.make(), list[str](), 0, 0
    names = set[str]()
    for cases in matrices(base):
        names |= {case.name for case in cases}
        share = cases if scale >= 1 else random.Random(seed).sample(cases, max(int(len(cases) * scale), 8))
        results = failpoints.run_all(base, share)
        run, missed = run + results.run, missed + results.missed
        problems += results.wrong[:5]
    return {"cases": run, "missed": missed, "points": len(names), "problems": problems}


def matrices(base: failpoints.Base) -> Iterator[list[failpoints.Case]]:
    for kind in (failpoints.World, StreamWorld):
        for receivers in (1, 2):
            hits = failpoints.recorded(base, receivers, kind)
            yield [case for fault in Fault for case in failpoints.cases(hits, receivers, fault, kind)]
    yield [case for fault in Fault for case in trainer_cases(base, fault)]


def bits(scale: float, seed: int) -> Found:
    """Every flip and every length of 4 KiB objects, of several seeds."""
    problems, cases = list[str](), 0
    for number in range(max(int(BIT_SEEDS * scale), 1)):
        try:
            cases += test_every_bit.check_all(seed + number)
        except AssertionError as error:
            problems.append(f"seed {seed + number}: {error}")
    return {"cases": cases, "problems": problems}


def fuzz(scale: float, seed: int) -> Found:
    """Each parser, and the native decoder where there is time to build it."""
    from fuzz.targets import TARGETS

    seconds, problems = max(int(FUZZ_S * scale), 1), list[str]()
    commands = {name: [sys.executable, "-m", "fuzz.fuzz_python", name, str(seconds)] for name in TARGETS}
    if seconds >= 30:
        commands["native"] = ["fuzz/run.sh", str(seconds)]
    for name, command in commands.items():
        try:
            checked(command, seconds + 400)
        except RuntimeError as error:
            problems.append(f"{name}: {error}")
    return {"seconds_each": seconds, "parsers": sorted(commands), "problems": problems}


def weather(scale: float, seed: int) -> Found:
    """Publish and follow through a network that cuts, corrupts, repeats and forgets."""
    from tests.fault_proxy import FaultProxy
    from tests.seaweed import Seaweed
    from tests.test_fault_proxy import run_weather

    with tempfile.TemporaryDirectory() as directory, Seaweed(Path(directory)) as server:
        server.make_bucket("refits")
        with FaultProxy(("127.0.0.1", server.s3), seed=seed) as proxy:
            counts = run_weather(proxy, server, "soak", max(WEATHER_S * scale, 5.0), 0.08, seed)
    return {**counts, "problems": []}


def checked(command: Sequence[str], seconds: float) -> str:
    """What a command says; ``RuntimeError`` with the end of it if it failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[1:4])} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


PARTS: dict[str, Callable[[float, int], Found]] = {
    "simulate": simulate,
    "model": model,
    "kills": kills,
    "points": points,
    "fuzz": fuzz,
    "weather": weather,
    "bits": bits,
}
TURNS = ("simulate", "fuzz", "simulate", "kills", "model", "simulate", "points", "weather", "simulate", "bits")
"""The order in which two workers take them. What stands there several times is done in so many shares."""


# ------------------------------------------------------------------------------------------ running them


def run_part(name: str, hours: float, seed: int) -> Found:
    started = time.monotonic()
    try:
        found = PARTS[name](hours / FULL_HOURS, seed)
    except Exception as error:
        found = {"problems": [f"{type(error).__name__}: {error}"[-3000:]]}
    return {"part": name, "seed": seed, **found, "seconds": round(time.monotonic() - started, 1)}


def in_process(name: str, hours: float, seed: int) -> Found:
    command = [sys.executable, "-m", "tests.soak", "--only", name, "--hours", str(hours), "--seed", str(seed)]
    try:
        found: Found = json.loads(checked([*command, "--part"], hours * 3600 * 2 + 900).splitlines()[-1])
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        found = {"part": name, "seed": seed, "problems": [f"{type(error).__name__}: {error}"[-3000:]]}
    return found


def say(found: Found) -> Found:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=FULL_HOURS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part:
        say(run_part(given.only[0], given.hours, given.seed))
        return 0
    started = time.monotonic()
    turns = [name for name in TURNS if name in given.only]

    def take(turn: int) -> Found:
        name = turns[turn]
        return say(in_process(name, given.hours / turns.count(name), (given.seed + turn * 1_000_003) % (1 << 31)))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(take, range(len(turns))))
    bad = {part["part"] for part in found if part["problems"]}
    verdict = "every part held" if not bad else f"failed: {', '.join(sorted(bad))}"
    say({"verdict": verdict, "seed": given.seed, "hours": round((time.monotonic() - started) / 3600, 3)})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
