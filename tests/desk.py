"""For tests of the command line: checkpoints, and commands in processes of their own. Fixtures: ``desk_fixtures``."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers import MIXED, Model, Shapes, copy_of, random_model, step

PATIENCE_S = 60.0
SHAPES: Shapes = {**MIXED, "layer.weight": ("BF16", (300, 100))}
STEPS = 5


def save(model: Model, shapes: Shapes, path: Path) -> None:
    """A safetensors file, written by hand: what the tests compare with must not come from what they test."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in sorted(model.items()):
        offsets = [end, end := end + array.nbytes]
        header[name] = {"dtype": shapes[name][0], "shape": list(array.shape), "data_offsets": offsets}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(a.tobytes() for _, a in sorted(model.items())))


@dataclass
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.rstrip("\n").rpartition("\n")[2]

    @property
    def body(self) -> dict[str, Any]:
        """The last line of stdout as JSON."""
        found: dict[str, Any] = json.loads(self.last)
        return found

    @property
    def lines(self) -> list[str]:
        return self.out.split("\n")[:-1]


@dataclass
class Desk:
    """A place to run commands in, with a cache of its own."""

    root: Path
    models: list[Model] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> str:
        return str(self.root / "store")

    def checkpoint(self, number: int) -> str:
        return str(self.root / f"step-{number}")

    def start(self, *arguments: object, **streams: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "deltarefit", *map(str, arguments)]
        path = os.pathsep.join(filter(None, sys.path))
        mine = {
            "PYTHONPATH": path,
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "TMPDIR": str(self.root / "tmp"),
        }
        # A shell that runs tests in the background has them ignore SIGINT, and programs inherit that.
        streams = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **streams}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        return subprocess.Popen(command, env=os.environ | mine | self.environment, text=True, **pipes)

    def run(self, *arguments: object) -> Done:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=PATIENCE_S)
        return Done(process.returncode, out, err)

    def copy(self, root: Path) -> Desk:
        """The same store and checkpoints, to spoil."""
        shutil.copytree(self.root, root)
        return Desk(root, self.models)


def make_desk(root: Path) -> Desk:
    """Checkpoints step-0 to step-4, each a training step after the one before."""
    rng = np.random.default_rng(7)
    desk = Desk(root)
    (root / "tmp").mkdir(parents=True)
    model = random_model(rng, SHAPES)
    for number in range(STEPS):
        if number:
            step(rng, model, "few")
        directory = root / f"step-{number}"
        directory.mkdir()
        save(model, SHAPES, directory / "model.safetensors")
        (directory / "config.json").write_text('{"model_type": "none"}')
        desk.models.append(copy_of(model))
    return desk


Here = Callable[..., Done]


def run_id(desk: Desk) -> str:
    text: str = json.loads((Path(desk.store) / "run").read_text().partition("\n")[0])["run"]
    return text


def same_files(directory: Path, expected: Path) -> bool:
    names = [path.name for path in expected.iterdir()]
    return all((directory / name).read_bytes() == (expected / name).read_bytes() for name in names)


def flipped(data: bytes, at: int) -> bytes:
    """One bit of ``data`` is the other one."""
    copy = bytearray(data)
    copy[at] ^= 4
    return bytes(copy)


class Following:
    """A ``follow`` that runs until it is told to stop; ``wait_for`` finds lines of its stdout and stderr."""

    def __init__(self, desk: Desk, *arguments: object) -> None:
        self.process = desk.start("follow", *arguments)
        self.out: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=(stream, kept), daemon=True)
            for stream, kept in ((self.process.stdout, self.out), (self.process.stderr, []))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, kept: list[str]) -> None:
        for line in stream:
            kept.append(line.rstrip("\n"))
            self._lines.put(line.rstrip("\n"))

    def wait_for(self, pattern: str) -> str:
        end = time.monotonic() + PATIENCE_S
        while True:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            if re.search(pattern, line):
                return line

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return code

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
