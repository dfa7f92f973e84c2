"""Does this store keep its promises here? ``check_store`` runs ``StoreContract`` on a user's own store. Can this engine
be refitted? ``report_of`` says how each tensor of a run reaches it.

The first matters before more than one publisher works on a run: a store that ignores the condition of a create lets
two of them commit different bits under one version.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from deltarefit.errors import AlreadyExistsError, RefitError
from deltarefit.manifest import Catalog
from deltarefit.ports import Store
from deltarefit.stores import open_store
from deltarefit.stores.wrappers import Prefixed
from deltarefit.targets.ranks import Row
from deltarefit.testing import StoreContract, check, check_bytes

_PROCESSES = 16
_PROCESS_ROUNDS = 10
_KEYS_PER_ROUND = 4
_WORKER = "from deltarefit.doctor import race_worker; race_worker()"
_WORKER_S = 60.0
"""All processes of the race end within this, or are killed."""


@dataclass(frozen=True)
class Check:
    """One promise: whether it was kept, what was found if not, and how long the check took."""

    name: str
    ok: bool
    detail: str
    seconds: float


def check_store(store: Store, *, rounds: int = 50, large_bytes: int = 40 << 20) -> list[Check]:
    """Try every promise of ``Store`` below a fresh prefix, and clean up. Never raises for what it does.

    ``rounds`` is the number of create races of 16 threads, ``large_bytes`` the size of the largest object.
    A directory is raced by 16 processes as well. If not even a small object can be written and read, that is
    the only finding.
    """
    prefix = f"doctor-{secrets.token_hex(6)}"
    first = _run("reach", lambda: _reach(store, f"{prefix}/reach"))
    if not first.ok:
        return [first]
    checks = [first, *(_run(name, call) for name, call in _promises(store, prefix, rounds, large_bytes))]
    return [*checks, _run("clean up", lambda: _clean(store, prefix))]


def _promises(store: Store, prefix: str, rounds: int, large_bytes: int) -> Iterator[tuple[str, Callable[[], None]]]:
    contract = _Contract(Prefixed(store, prefix), rounds, large_bytes)
    for name in sorted(dir(contract)):
        if name.startswith("test_"):
            yield name.removeprefix("test_").replace("_", " "), getattr(contract, name)
    if store.url.startswith("file://"):
        yield (
            f"racing creates of {_PROCESSES} processes have one winner",
            lambda: race_processes(store, f"{prefix}/processes"),
        )


class _Contract(StoreContract):
    races_at_once = 5

    def __init__(self, store: Store, rounds: int, large_bytes: int) -> None:
        self._store = store
        self.rounds = rounds
        self.large_bytes = large_bytes

    def open(self) -> Store:
        return self._store


def _run(name: str, call: Callable[[], None]) -> Check:
    start = time.monotonic()
    try:
        call()
        detail = ""
    except AssertionError as err:
        detail = str(err) or "a promise is broken"
    except RefitError as err:
        detail = f"{type(err).__name__}: {err}"
    except Exception as err:  # noqa: BLE001  # a store of the user's may raise anything, and that is a finding
        detail = f"{type(err).__name__}, which no store may raise: {err}"
    return Check(name, not detail, detail, time.monotonic() - start)


def _reach(store: Store, key: str) -> None:
    store.put(key, b"deltarefit doctor")
    check_bytes(store.get(key), b"deltarefit doctor", "get after put")


def _clean(store: Store, prefix: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.delete, [key for key, _ in store.list(prefix)]))
    left = [key for key, _ in store.list(prefix)]
    check(not left, f"{len(left)} objects below {prefix} could not be deleted, {left[:1]} first")


def race_processes(store: Store, prefix: str) -> None:
    """Create races between processes. Raises ``AssertionError`` unless each has exactly one winner."""
    workers = [_start_worker(store.url) for _ in range(_PROCESSES)]
    try:
        with ThreadPoolExecutor(_PROCESSES) as pool:
            for number in range(_PROCESS_ROUNDS):
                keys = [f"{prefix}/{number}-{turn}" for turn in range(_KEYS_PER_ROUND)]
                judge_race(store, keys, _one_round(pool, workers, keys))
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _start_worker(url: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _WORKER, url, str(_WORKER_S)]
    return subprocess.Popen(  # noqa: S603  # this Python, our own code
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )


def _one_round(
    pool: ThreadPoolExecutor, workers: Sequence[subprocess.Popen[str]], keys: Sequence[str]
) -> list[dict[str, str]]:
    """For each worker, the SHA-256 of its own bytes by the key that it won."""
    order = json.dumps(keys) + "\n"
    for worker in workers:
        _pipe(worker.stdin).write(order)
        _pipe(worker.stdin).flush()
    lines = list(pool.map(lambda worker: _pipe(worker.stdout).readline(), workers))
    check(all(lines), f"a process of the race ended or took longer than {_WORKER_S:.0f} s")
    return [json.loads(line) for line in lines]


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ValueError("the process was started without this pipe")
    return stream


def judge_race(store: Store, keys: Sequence[str], won: Sequence[dict[str, str]]) -> None:
    """``won`` says for each process which keys it won, with the SHA-256 of its bytes."""
    for key in keys:
        winners = [mine[key] for mine in won if key in mine]
        check(len(winners) == 1, f"{len(winners)} of {len(won)} processes won {key}: create is not atomic here")
        check(_sha256(store.get(key)) == winners[0], f"{key} does not hold its winner's bytes")


def race_worker() -> None:
    """One process of ``race_processes``: reads lists of keys, tries to create each, says which it won."""
    import signal

    url, seconds = sys.argv[1:]
    signal.alarm(int(float(seconds)))  # ends this process even if the one that started it is gone
    store = open_store(url)
    for line in sys.stdin:
        won = {}
        for key in json.loads(line):
            entry = f"process-{os.getpid()}-{secrets.token_hex(16)}".encode() * 50
            try:
                store.create(key, entry)
                won[key] = _sha256(entry)
            except AlreadyExistsError:
                continue
        sys.stdout.write(json.dumps(won) + "\n")
        sys.stdout.flush()


# ------------------------------------------------------------------------------------------ engines


@dataclass(frozen=True)
class Placement:
    """How tensors reach one rank, or several, by one mode: ``tensors`` names them, ``reasons`` are why."""

    mode: str
    tensors: tuple[str, ...]
    elements: int
    reasons: tuple[str, ...]
    ranks: dict[int, int]
    """How many of the tensors reach each rank."""


def report_of(rows: Sequence[Row], catalog: Catalog, ranks: int) -> list[Placement]:
    """The plan of an engine (``RankGroup.report``) by mode, the most usual first."""
    modes: dict[str, list[Row]] = {}
    for row in rows:
        modes.setdefault(row.mode, []).append(row)
    found = []
    for mode, mine in modes.items():
        names = tuple(row.tensor for row in mine)
        elements = sum(catalog.tensors[catalog.index[name]].numel for name in names)
        reasons = tuple(dict.fromkeys(row.reason for row in mine if row.reason))
        counts = {rank: sum(rank in row.ranks for row in mine) for rank in range(ranks)}
        found.append(Placement(mode, names, elements, reasons, counts))
    return sorted(found, key=lambda placement: -len(placement.tensors))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
