"""Real SIGKILL at random instants: of a receiver on shared memory, of one on a checkpoint directory, of a publisher.

Each loop runs in a fresh process of its own (``python -m tests.test_kills LOOP SEED``), which has no threads when it
forks the agents that it kills, and prints what it counted as JSON. A failure names the seed that repeats its choices;
the instants of death are as the machine gives them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import safetensors

from deltarefit import Publisher, Receiver, open_store
from deltarefit.elements import Elements
from deltarefit.errors import NotFoundError
from deltarefit.events import Event
from deltarefit.manifest import Catalog, Header, State
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from deltarefit.targets.checkpoint import CheckpointTarget
from tests import helpers as h

ROOT = Path(__file__).parent.parent


def run_loop(name: str, seconds: float) -> dict[str, int]:
    seed = random.SystemRandom().randrange(1 << 32)
    command = [sys.executable, "-m", "tests.test_kills", name, str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    counts: dict[str, int] = json.loads(done.stdout)
    print(name, counts)
    return counts


def test_a_receiver_on_shared_memory() -> None:
    """The agent dies in the middle of writes; weights, header and spool live on, and no bit is ever wrong."""
    counts = run_loop("shared", 150)
    assert counts["kills"] >= 150
    assert counts["dirty"] > 0, "no kill met a write"
    assert counts["torn"] > 0, "no payload was torn"
    assert counts["loads"] == 0, "loaded the anchor though the memory survived"


def test_a_receiver_on_a_checkpoint_directory() -> None:
    counts = run_loop("directory", 150)
    assert counts["kills"] >= 40
    assert counts["rounds"] >= 2
    assert counts["unfinished"] > 0, "no kill met a seed or a write"


def test_a_publisher_on_a_directory() -> None:
    counts = run_loop("publisher", 150)
    assert counts["kills"] >= 30
    assert counts["aborted"] > 0, "no kill met an open attempt"
    assert counts["versions"] > counts["rounds"]


# ------------------------------------------------------------------------------------------ agents and their death


class Counters:
    """Numbers that an agent and its killer share."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._numbers = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), "u8")

    def add(self, name: str, more: int = 1) -> None:
        self._numbers[self._names.index(name)] += np.uint64(more)

    def __getitem__(self, name: str) -> int:
        return int(self._numbers[self._names.index(name)])

    def __call__(self, event: Event) -> None:
        """A listener: counts torn payloads and loads of an anchor."""
        if event.type == "torn":
            self.add("torn")
        if event.type == "phase" and event.phase == "seed":
            self.add("loads")

    def all(self) -> dict[str, int]:
        return {name: self[name] for name in self._names}


def fork(agent: Callable[[], object]) -> int:
    if pid := os.fork():
        return pid
    try:
        agent()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def kill_after(pid: int, seconds: float) -> bool:
    """True if the agent was killed, False if it had ended well before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, f"an agent ended with status {status}"
            return False
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), f"an agent ended with status {status}"
    return status != 0


def timed(agent: Callable[[], object]) -> float:
    """Seconds that an agent takes when nobody kills it."""
    started = time.monotonic()
    assert not kill_after(fork(agent), 60)
    return time.monotonic() - started


# ------------------------------------------------------------------------------------------ shared memory


class SharedTarget:
    """``ports.Target`` in anonymous shared memory: outlives the process that writes it, as an engine does its agent.

    Every record becomes visible by one store of eight bytes, after all that it stands for.
    """

    SLOT, ENTRIES, NAME = 2048, 256, 80

    def __init__(self, catalog: Catalog, room: int = 64 << 20) -> None:
        self._catalog = catalog
        self.arrays = [np.frombuffer(shared(e.nbytes), f"u{e.width}", e.numel) for e in catalog.tensors]
        self._slots = shared(2 * self.SLOT)
        self._which = np.frombuffer(shared(24), "u8")
        self._data = shared(room)
        self._names = shared(self.ENTRIES * self.NAME)
        self._places = np.frombuffer(shared(self.ENTRIES * 16), "u8")

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def spool(self) -> SharedTarget:
        return self

    def put(self, name: str, data: bytes | memoryview) -> None:
        count = int(self._which[1])
        start = int(self._places[2 * count - 2] + self._places[2 * count - 1]) if count else 0
        self._data[start : start + len(data)] = bytes(data)
        self._names[count * self.NAME : (count + 1) * self.NAME] = name.encode().ljust(self.NAME, b"\0")
        self._places[2 * count : 2 * count + 2] = start, len(data)
        self._which[1] = count + 1

    def get(self, name: str) -> bytes | None:
        for entry in reversed(range(int(self._which[1]))):
            if self._names[entry * self.NAME : (entry + 1) * self.NAME].rstrip(b"\0") == name.encode():
                start, size = (int(n) for n in self._places[2 * entry : 2 * entry + 2])
                return self._data[start : start + size]
        return None

    def clear(self) -> None:
        self._which[1] = 0

    def read_header(self) -> Header | None:
        if not self._which[0]:
            return None
        start = int(self._which[0] % np.uint64(2)) * self.SLOT
        return Header.from_bytes(self._slots[start : start + self.SLOT].rstrip(b"\0"))

    def write_header(self, header: Header) -> None:
        number = int(self._which[0]) + 1
        start = number % 2 * self.SLOT
        self._slots[start : start + self.SLOT] = header.to_bytes().ljust(self.SLOT, b"\0")
        self._which[0] = number

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        assert catalog == self._catalog

    def finish_seed(self) -> None:
        """Users look here already."""

    @contextlib.contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        yield self.arrays[tensor], start

    def flush(self) -> None:
        """Memory that lives as long as the header does."""

    @property
    def paused(self) -> bool:
        return bool(self._which[2])

    def pause(self) -> None:
        self._which[2] = 1

    def resume(self) -> None:
        self._which[2] = 0

    def load(self, model: h.Model, header: Header) -> None:
        """As a new engine that holds these bits; a DIRTY header meanwhile would be a lie that nobody reads."""
        for array, (_, bits) in zip(self.arrays, sorted(model.items()), strict=True):
            array[:] = bits.reshape(-1)
        self.clear()
        self.write_header(header)


def shared(size: int) -> mmap.mmap:
    return mmap.mmap(-1, max(size, 8))


LARGE: h.Shapes = {
    "a": ("BF16", (1500, 700)),
    "b": ("F32", (300_000,)),
    "c": ("BOOL", (1000,)),
    "d": ("F8_E4M3", (400_000,)),
    "e": ("I64", ()),
}
KINDS = ("some", "nudge", "many", "nothing", "back", "some", "block", "nudge", "many", "back")


def shared_loop(seed: int) -> dict[str, int]:
    chooser, counters = random.Random(seed), Counters("kills", "dirty", "torn", "loads", "rounds")
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(directory)
        chain = h.publish_chain(np.random.default_rng(seed), KINDS, LARGE, store, payload_bytes=300_000)
        target = SharedTarget(chain.source.catalog)
        first = seeded(store, target, chain)

        def agent() -> None:
            threads, prove = chooser.randint(1, 3), chooser.random() < 0.5
            Receiver(store, target, emit=counters, threads=threads, prove=prove).follow(once=True)

        typical = timed(agent)
        while counters["kills"] < 160:
            header = target.read_header()
            assert header is not None
            if header.state is State.CLEAN and header.version == chain.head:
                assert h.bits(target) == chain.history[chain.head]
                counters.add("rounds")
                target.load(chain.models[1], first)
            if kill_after(fork(agent), chooser.uniform(0, typical * 0.4)):
                counters.add("kills")
                check_survivor(target, chain, counters)
            chooser.random()
        assert not kill_after(fork(agent), 60)
        assert h.bits(target) == chain.history[chain.head]
    return counters.all()


def seeded(store: Store, target: SharedTarget, chain: h.Chain) -> Header:
    """Load the first version; the header that says so."""
    log, incarnation = RunLog.open(store), "0123456789abcdef"
    digest = h.digest_of(log.run, log.catalog, chain.models[1])
    header = Header(log.run, log.catalog.identity, State.CLEAN, 1, 0, digest, 0, incarnation)
    target.load(chain.models[1], header)
    return header


def check_survivor(target: SharedTarget, chain: h.Chain, counters: Counters) -> None:
    """I1 and I7 at the very instant of death."""
    header = target.read_header()
    assert header is not None
    if header.state is State.CLEAN:
        assert h.bits(target) == chain.history[header.version], f"CLEAN({header.version}) is not its bits"
    else:
        counters.add("dirty")
        assert header.state is State.DIRTY
        assert target.paused


# ------------------------------------------------------------------------------------------ a checkpoint directory


def directory_loop(seed: int) -> dict[str, int]:
    chooser, counters = random.Random(seed), Counters("kills", "unfinished", "torn", "loads", "rounds")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        store = open_store(str(root / "store"))
        chain = h.publish_chain(np.random.default_rng(seed), KINDS, LARGE, store, payload_bytes=300_000)

        def follow(checkpoint: Path) -> Callable[[], object]:
            return lambda: Receiver(store, CheckpointTarget(checkpoint), emit=counters, threads=2).follow(once=True)

        typical = timed(follow(root / "first"))
        deadline = time.monotonic() + 60
        while counters["rounds"] < 2 or (counters["kills"] < 40 and time.monotonic() < deadline):
            checkpoint = root / f"round-{counters['rounds']}"
            while kill_after(fork(follow(checkpoint)), chooser.uniform(0, typical * 0.4)):
                counters.add("kills")
                if not is_clean(checkpoint):
                    counters.add("unfinished")
            check_directory(checkpoint, store, chain)
            counters.add("rounds")
            shutil.rmtree(checkpoint)
    return counters.all()


def is_clean(checkpoint: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        header = Header.from_bytes((checkpoint / ".deltarefit" / "header").read_bytes())
        return header.state is State.CLEAN
    return False


def check_directory(checkpoint: Path, store: Store, chain: h.Chain) -> None:
    """What any reader of safetensors finds, and what a proof at the start finds."""
    found: dict[str, bytes] = {}
    for file in checkpoint.glob("*.safetensors"):
        entries = safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        found.update({name: bytes(entry["data"]) for name, entry in entries})
    expected = dict(zip(sorted(chain.source.model), chain.history[chain.head], strict=True))
    assert found == expected
    assert {name: (checkpoint / name).read_bytes() for name in h.FILES} == h.FILES
    heard, target = h.Heard(), CheckpointTarget(checkpoint)
    assert h.followed(store, target, emit=heard) == chain.head
    assert (heard["proven"], heard["diverged"]) == (1, 0)
    target.close()


# ------------------------------------------------------------------------------------------ a publisher


def model_at(seed: int, step: int) -> h.Model:
    """The weights of a step, whoever computes them."""
    model = h.random_model(np.random.default_rng(seed))
    h.step(np.random.default_rng([seed, step]), model, ("some", "block", "all", "few")[step % 4])
    return model


def publish_steps(store: Store, seed: int, first: int, last: int, baseline: Path | None) -> None:
    kept = CheckpointTarget(baseline) if baseline and "directory" in baseline.name else baseline
    source = h.ArraySource(model_at(seed, first))
    with contextlib.closing(Publisher(store, source, baseline=kept, threads=2, payload_bytes=700)) as publisher:
        for step in range(first, last):
            source.model = model_at(seed, step)
            publisher.publish(step)


def publisher_loop(seed: int) -> dict[str, int]:
    chooser, counters = random.Random(seed), Counters("kills", "aborted", "versions", "rounds")
    with tempfile.TemporaryDirectory() as directory:
        typical = timed(lambda: publish_steps(open_store(f"{directory}/timed"), seed, 0, 8, None))
        for kept in ("", "directory", "mapped"):
            store = open_store(f"{directory}/store-{kept}")
            baseline = Path(directory, kept) if kept else None
            for _ in range(12):
                agent = partial(publish_steps, store, seed, next_step(store), 1000, baseline)
                assert kill_after(fork(agent), chooser.uniform(0, typical))
                counters.add("kills")
            publish_steps(store, seed, next_step(store), next_step(store) + 1, baseline)
            check_run(store, seed, counters)
            counters.add("rounds")
    return counters.all()


def next_step(store: Store) -> int:
    with contextlib.suppress(NotFoundError):
        head = RunLog.open(store).head()
        return head.manifests[0].step + 1 if head else 0
    return 0


def check_run(store: Store, seed: int, counters: Counters) -> None:
    """Linear; every version has the bits of its step, and each step made at most one version."""
    versions, log, steps = h.check_linear(store), RunLog.open(store), list[int]()
    for version in versions:
        attempt = log.version(version)
        assert attempt.outcome is not None
        steps.append(attempt.manifests[0].step)
        assert attempt.outcome.digest == h.digest_of(log.run, log.catalog, model_at(seed, steps[-1]))
        counters.add("versions")
    assert steps == sorted(set(steps))
    for attempt in log.attempts(1):
        if not attempt.committed:
            counters.add("aborted")
    target = h.StrictTarget(log.run)
    assert h.followed(store, target) == versions[-1]
    assert h.bits(target) == h.bytes_of(model_at(seed, steps[-1]))


LOOPS: dict[str, Callable[[int], dict[str, int]]] = {
    "shared": shared_loop, "directory": directory_loop, "publisher": publisher_loop,
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    name, seed = arguments
    print(json.dumps(LOOPS[name](int(seed))))


if __name__ == "__main__":
    main(sys.argv[1:])
