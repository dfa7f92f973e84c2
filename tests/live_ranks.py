"""An engine of several rank processes for tests: ``ports.LiveTarget`` with real agents, real sockets and real death.

``ArrayRank`` is one rank's weights over NumPy arrays: the parts of canonical tensors that its layout names, each in an
array of its own. ``python -m tests.live_ranks FILE RANK`` is a worker process that serves one behind an agent.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltarefit import _kernel
from deltarefit.codec import ADD, SET, XOR, Delta, open_payload
from deltarefit.digest import array_digest, catalog_keys
from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch, IntegrityError
from deltarefit.manifest import Catalog, Header, PayloadRef
from deltarefit.protocol.messages import Op
from deltarefit.records import Digest
from deltarefit.targets.agent import Agent
from deltarefit.targets.engine import EngineTarget, read_note
from tests import helpers as h

ROOT = Path(__file__).parent.parent
Positions = npt.NDArray[np.int64]

SHAPES: h.Shapes = {
    "a.rows": ("BF16", (40, 33)),
    "b.columns": ("F32", (12, 16)),
    "c.kv": ("BF16", (8, 6)),
    "d.norm": ("F32", (7, 5)),
    "e.fan": ("U8", (50,)),
    "f.opaque": ("BF16", (60,)),
    "g.skipped": ("I64", (11,)),
    "h.late": ("BOOL", (3, 50)),
    "i.scalar": ("BF16", ()),
    "j.empty": ("F16", (0, 5)),
}
NAMES = sorted(SHAPES)


def layout(rank: int, size: int) -> dict[str, Any]:
    """The plan of one of 2 or 4 ranks: rows, columns, heads on pairs of ranks, replicas, two copies on one rank, a
    tensor that only the last rank has, one for the native loader and one that nobody stores."""
    index = NAMES.index
    rows, columns, pair = 40 // size, 16 // size, rank * 2 // size
    parts = [
        [index("a.rows"), [[rows, 33], [33, 1]], rank * rows * 33],
        [index("b.columns"), [[columns, 1], [12, 16]], rank * columns],  # transposed in storage
        [index("c.kv"), [[24, 1]], pair * 24],
        [index("d.norm"), [[35, 1]], 0],
        [index("f.opaque"), [[60 // size, 1]], rank * (60 // size)],
        [index("i.scalar"), [], 0],
    ]
    modes = {str(k): ["xor", ""] for k in range(len(NAMES))}
    modes[str(index("f.opaque"))] = ["opaque", "mixed while loading"]
    modes[str(index("g.skipped"))] = ["skipped", "the loader stores nothing"]
    for name, holder in (("e.fan", 1), ("h.late", size - 1)):
        if rank == holder:
            whole = [index(name), [[int(np.prod(SHAPES[name][1])), 1]], 0]
            parts += [whole, whole] if name == "e.fan" else [whole]
        else:
            modes[str(index(name))] = ["skipped", "another rank's"]
    return {"parts": parts, "modes": modes}


def positions_of(part: Sequence[Any]) -> Positions:
    """Canonical positions of a part's elements, in the order of its storage."""
    _, dims, offset = part
    found = np.array([offset], np.int64)
    for size, stride in dims:
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return found


def sums_at(positions: Positions, values: Elements, key: int) -> Digest:
    """Digest of elements at any positions: the formula of docs/format.md §5 on arrays."""
    with np.errstate(over="ignore"):
        s = np.uint64(key) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        t = s ^ values.astype(np.uint64)
        u = (t ^ (t >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        u ^= u >> np.uint64(29)
        lanes = [u * np.uint64(k) for k in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]
        return Digest(*(int((a ^ (a >> np.uint64(32))).sum(dtype=np.uint64)) for a in lanes))


@dataclass
class View:
    """Elements of one tensor that a rank holds in one place. ``class_id`` as the group gave it."""

    class_id: int
    tensor: int
    positions: Positions
    bits: Elements

    def __post_init__(self) -> None:
        self._order = np.argsort(self.positions)
        self._sorted = self.positions[self._order]

    def find(self, wanted: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """Local indices of those of ``wanted`` that are here, and which these are."""
        at = np.searchsorted(self._sorted, wanted)
        here = at < len(self._sorted)
        here[here] = self._sorted[at[here]] == wanted[here]
        return self._order[at[here]], here


@dataclass
class Kept:
    """A staged payload on one rank: its deltas, sums by class, and absolute values by view."""

    deltas: list[Delta]
    pre: dict[int, Digest] = field(default_factory=dict)
    post: dict[int, Digest] = field(default_factory=dict)
    values: list[tuple[View, Positions, Elements]] = field(default_factory=list)


class ArrayRank:
    """``agent.RankWeights`` over arrays. ``may_write`` is asked before each write; ``nap_s`` makes writes slow."""

    def __init__(self, plan: Mapping[str, Any], checkpoint: h.Model | None, nap_s: float = 0.0) -> None:
        self.header: bytes | None = None
        self.plan = dict(plan)
        self.nap_s = nap_s
        self.may_write = lambda: True
        self._checkpoint = checkpoint
        self._staged: dict[str, Kept] = {}
        self._shadows: dict[int, Elements] = {}
        self._views: list[View] = []
        self._opaque: set[int] = set()
        self._catalog: Catalog | None = None
        self._keys: Sequence[int] = ()
        self.parts: list[Elements] = []

    def load(self, model: h.Model) -> None:
        """What a native loader does at the start of an engine."""
        flats = [model[name].reshape(-1) for name in NAMES]
        self.parts = [flats[part[0]][positions_of(part)].copy() for part in self.plan["parts"]]
        self._loaded = [flat.copy() for flat in flats]
        self.header = None
        self._staged.clear()
        self._shadows.clear()
        self._views = []

    def ready_for(self, catalog: str) -> bool:
        return bool(self._views)

    def attach(self, run: str, catalog: Catalog) -> dict[str, Any]:
        if [entry.name for entry in catalog.tensors] != NAMES:
            raise BaseMismatch("another model's catalog", expected=NAMES, found=catalog.tensors[0].name)
        self._catalog, self._keys = catalog, catalog_keys(run, catalog)
        return self.plan

    def assign(self, assignment: dict[str, Any]) -> None:
        self._opaque = set(assignment["opaque"])
        for tensor in assignment["shadows"]:
            self._shadows.setdefault(tensor, self._loaded[tensor].copy())
        if self._views and self._staged:
            return  # what is staged stays valid: a new follower gets the same classes
        placed = zip(assignment["classes"], self.plan["parts"], self.parts, strict=True)
        self._views = [View(c, part[0], positions_of(part), bits) for c, part, bits in placed if c >= 0]
        for tensor, class_id in zip(assignment["shadows"], assignment["shadow_classes"], strict=True):
            bits = self._shadows[tensor]
            self._views.append(View(class_id, tensor, np.arange(bits.size, dtype=np.int64), bits))

    def stage(self, ref: PayloadRef, data: bytes) -> dict[int, tuple[Digest, Digest]]:
        assert self._catalog is not None
        kept = Kept(open_payload(data, ref, self._catalog))
        for delta, view, at, positions, operands in self._hits(kept.deltas):
            key, old = self._keys[delta.tensor], view.bits[at]
            new = carried_out(delta.operation, old, operands)
            kept.pre[view.class_id] = kept.pre.get(view.class_id, Digest()) + sums_at(positions, old, key)
            kept.post[view.class_id] = kept.post.get(view.class_id, Digest()) + sums_at(positions, new, key)
            kept.values.append((view, at, new))
        self._staged[ref.sha256] = kept
        return {class_id: (kept.pre[class_id], kept.post[class_id]) for class_id in kept.pre}

    def staged(self, ref: PayloadRef) -> bool:
        return ref.sha256 in self._staged

    def live(self, ref: PayloadRef) -> dict[int, Digest] | None:
        kept = self._staged.get(ref.sha256)
        if kept is None:
            return None
        found: dict[int, Digest] = {}
        for delta, view, at, positions, _ in self._hits(kept.deltas):
            more = sums_at(positions, view.bits[at], self._keys[delta.tensor])
            found[view.class_id] = found.get(view.class_id, Digest()) + more
        return found

    def write(self, ref: PayloadRef, op: Op) -> None:
        """Guarded: what has the new bits is left alone, and what has neither old nor new bits is refused."""
        assert self.may_write(), "wrote while the engine runs"
        kept, found = self._staged[ref.sha256], self.live(ref) or {}
        torn = [c for c, sums in found.items() if sums not in (kept.pre[c], kept.post[c])]
        if torn and not ref.overwrites:
            raise IntegrityError("live bits are neither old nor new", found=torn)
        for view, at, values in kept.values:
            if found[view.class_id] != kept.post[view.class_id]:
                time.sleep(random.random() * self.nap_s)
                view.bits[at] = values
        self._reload({delta.tensor for delta in kept.deltas})

    def fill(self, ref: PayloadRef, data: bytes) -> None:
        assert self.may_write(), "wrote while the engine runs"
        assert self._catalog is not None
        deltas = open_payload(data, ref, self._catalog)
        for delta, view, at, _, operands in self._hits(deltas):
            view.bits[at] = carried_out(delta.operation, view.bits[at], operands)
        self._reload({delta.tensor for delta in deltas})

    def digest(self) -> dict[int, Digest]:
        found: dict[int, Digest] = {}
        for view in self._views:
            more = sums_at(view.positions, view.bits, self._keys[view.tensor])
            found[view.class_id] = found.get(view.class_id, Digest()) + more
        return found

    def drop(self) -> None:
        self._staged.clear()

    def proof(self) -> Digest | None:
        if self._checkpoint is None:
            return None
        flats = [self._checkpoint[name].reshape(-1) for name in NAMES]
        return sum((array_digest(flat, 0, key) for flat, key in zip(flats, self._keys, strict=True)), Digest())

    def _reload(self, tensors: set[int]) -> None:
        """The native loader takes an opaque tensor as a whole."""
        for part, bits in zip(self.plan["parts"], self.parts, strict=True):
            if part[0] in tensors & self._opaque:
                bits[:] = self._shadows[part[0]][positions_of(part)]

    def _hits(self, deltas: Sequence[Delta]) -> Iterator[tuple[Delta, View, Positions, Positions, Elements]]:
        """What each delta lists of each view: local indices, canonical positions, operands."""
        for delta in deltas:
            offsets, operands = _kernel.decode(delta.record, delta.slices)
            positions = offsets.astype(np.int64) + delta.low
            for view in self._views:
                if view.tensor == delta.tensor:
                    at, here = view.find(positions)
                    yield delta, view, at, positions[here], operands[here]


def carried_out(operation: int, old: Elements, operands: Elements) -> Elements:
    if operation == XOR:
        return np.asarray(old ^ operands)
    with np.errstate(over="ignore"):
        return np.asarray({ADD: old + operands, SET: operands}[operation])


# ------------------------------------------------------------------------------------------ a worker process


def worker(file: Path, rank: int) -> None:
    """Serve until stdin ends; lines on stdin are for the tests alone."""
    spec = json.loads(file.read_text())
    with np.load(spec["model"]) as found:
        model = {name: found[name] for name in found.files}
    with np.load(spec["checkpoint"]) as found:
        checkpoint = {name: found[name] for name in found.files}
    weights = ArrayRank(spec["plans"][rank], checkpoint, spec["nap_s"])
    weights.load(model)
    weights.may_write = Path(spec["paused"]).exists  # type: ignore[assignment]
    agent = Agent(weights, rank, len(spec["plans"]), directory=Path(spec["sockets"]))
    print(agent.start(), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        with agent._lock:
            if command == "dump":
                np.savez(arguments[0], *weights.parts)
            elif command == "load":
                weights.load(model)
            elif command == "flip":
                weights.parts[int(arguments[0])].reshape(-1)[0] ^= 1
            elif command == "forget":
                weights.drop()
        print("done", flush=True)
    agent.close()


# ------------------------------------------------------------------------------------------ the engine, seen from tests


class FileControl:
    """``engine.Control`` of an engine that is described by files, so that any process can use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.calls: list[str] = []

    def check(self) -> None:
        """It serves."""

    def agents(self) -> list[str]:
        found: list[str] = json.loads((self._directory / "agents.json").read_text())
        return found

    def pause(self) -> None:
        self.calls.append("pause")
        (self._directory / "paused").touch()

    def reset_cache(self) -> None:
        self.calls.append("reset_cache")

    def set_version(self, version: int, digest: Digest) -> None:
        self.calls.append(f"version {version}")

    def resume(self) -> None:
        self.calls.append("resume")
        (self._directory / "paused").unlink(missing_ok=True)


class Engine:
    """``size`` worker processes that were loaded with ``model``; ``checkpoint`` is what ``proof`` speaks of."""

    def __init__(
        self, directory: Path, size: int, model: h.Model, checkpoint: h.Model | None = None, nap_s: float = 0.0
    ) -> None:
        self.directory, self.size = directory, size
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(directory / "model.npz", **model)
        np.savez(directory / "checkpoint.npz", **(checkpoint or model))
        self.plans = [layout(rank, size) for rank in range(size)]
        spec = {
            "model": str(directory / "model.npz"),
            "checkpoint": str(directory / "checkpoint.npz"),
            "plans": self.plans,
            "nap_s": nap_s,
            "paused": str(directory / "paused"),
            "sockets": str(directory / "s"),
        }
        (directory / "spec.json").write_text(json.dumps(spec))
        self.workers = [self._launched(rank) for rank in range(size)]
        self.paths = [self._line(rank) for rank in range(size)]
        self._tell()

    def _launched(self, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.live_ranks", str(self.directory / "spec.json"), str(rank)]
        return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _line(self, rank: int) -> str:
        out = self.workers[rank].stdout
        assert out is not None
        line = out.readline().strip()
        assert line, f"rank {rank} died"
        return line

    def _tell(self) -> None:
        (self.directory / "agents.json").write_text(json.dumps(self.paths))

    def say(self, rank: int, command: str) -> None:
        """A command of ``worker``, carried out on return."""
        into = self.workers[rank].stdin
        assert into is not None
        into.write(command + "\n")
        into.flush()
        assert self._line(rank) == "done"

    def kill(self, rank: int) -> None:
        self.workers[rank].kill()
        self.workers[rank].wait(10)

    def restart(self, rank: int) -> None:
        self.kill(rank)
        self.workers[rank] = self._launched(rank)
        self.paths[rank] = self._line(rank)
        self._tell()

    def load(self) -> None:
        """As if all ranks had been started anew."""
        for rank in range(self.size):
            self.say(rank, "load")

    def target(self) -> EngineTarget:
        return EngineTarget(FileControl(self.directory), self.directory / "spool")

    @property
    def paused(self) -> bool:
        return (self.directory / "paused").exists()

    def wrong(self, model: h.Model) -> list[str]:
        """Parts whose bits are not those of ``model``, and why; read from the workers' own arrays."""
        flats = [model[name].reshape(-1) for name in NAMES]
        found = []
        for rank, plan in enumerate(self.plans):
            file = self.directory / f"dump-{rank}.npz"
            self.say(rank, f"dump {file}")
            with np.load(file) as dump:
                for number, part in enumerate(plan["parts"]):
                    bits, right = dump[f"arr_{number}"], flats[part[0]][positions_of(part)]
                    if bits.tobytes() != right.tobytes():
                        found.append(f"rank {rank}: part {number} of {NAMES[part[0]]}")
        return found

    def header(self) -> Header | None:
        """As a status reader finds it, without attaching."""
        from deltarefit.targets.agent_client import AgentClient

        client = AgentClient(self.paths[0])
        with contextlib.closing(client):
            text = client.hello()["header"]
        return None if text is None else read_note(text)[1]

    def close(self) -> None:
        for rank, one in enumerate(self.workers):
            self.kill(rank)
            for stream in (one.stdin, one.stdout):
                if stream is not None:
                    stream.close()


class Here:
    """The same engine with all ranks in this process, for tests that look into them."""

    def __init__(self, directory: Path, size: int, model: h.Model) -> None:
        self.control = FileControl(directory)
        self.ranks = [ArrayRank(layout(rank, size), model) for rank in range(size)]
        self.agents = [Agent(one, rank, size, directory=directory / "s") for rank, one in enumerate(self.ranks)]
        for one in self.ranks:
            one.load(model)
            one.may_write = (directory / "paused").exists
        (directory / "agents.json").write_text(json.dumps([agent.start() for agent in self.agents]))
        self.target = EngineTarget(self.control, directory / "spool")

    def wrong(self, model: h.Model) -> list[str]:
        """As ``Engine.wrong``."""
        flats = [model[name].reshape(-1) for name in NAMES]
        pairs = [(part, bits) for one in self.ranks for part, bits in zip(one.plan["parts"], one.parts, strict=True)]
        return [NAMES[p[0]] for p, bits in pairs if bits.tobytes() != flats[p[0]][positions_of(p)].tobytes()]

    def close(self) -> None:
        self.target.close()
        for agent in self.agents:
            agent.close()


def followed(store: Any, target: EngineTarget, **options: Any) -> int:
    with contextlib.closing(target):
        return h.followed(store, target, **options)  # type: ignore[arg-type]


if __name__ == "__main__":
    threading.current_thread().name = "worker"
    worker(Path(sys.argv[1]), int(sys.argv[2]))
