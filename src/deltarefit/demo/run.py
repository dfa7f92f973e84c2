"""``deltarefit demo``: train, publish each step, refit a live model in another process, prove it bit by bit.

The trainer is this process. It takes AdamW steps at an RL learning rate and publishes to a directory store; a second
process (``demo.follower``) holds a live model and a checkpoint directory that know nothing but that store. After the
last version both must equal a dense copy of the trainer's weights, byte for byte, and generate the same text.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from deltarefit.demo.model import real_model, tiny_model
from deltarefit.demo.train import Trainer
from deltarefit.elements import Elements
from deltarefit.errors import UnavailableError
from deltarefit.exchange import WholeTensors
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.publisher import Published, Publisher
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.stores import open_store

LEARNING_RATE = 3e-6
STEPS = 4
ANSWER_S = 300.0


@dataclass(frozen=True)
class Row:
    """One version: what was published, what the receiver reports, and whether both digests agree."""

    published: Published
    step_s: float
    receiver: dict[str, Any]

    @property
    def agreed(self) -> bool:
        return bool(self.receiver["digest"] == self.published.digest)


@dataclass(frozen=True)
class Result:
    rows: list[Row] = field(default_factory=list)
    proof: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def parts(self) -> dict[str, bool]:
        """Each thing the demo set out to prove, and whether it holds."""
        return {
            "live model equals the dense copy, byte for byte": bool(self.proof.get("live_equal")),
            "followed directory equals the dense copy, byte for byte": bool(self.proof.get("directory_equal")),
            "live model, directory and dense copy generate the same text": bool(self.proof.get("generations_equal")),
            "every version's digest agreed": bool(self.rows) and all(row.agreed for row in self.rows),
        }

    @property
    def equal(self) -> bool:
        return all(self.parts().values())

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        versions = [
            {
                **asdict(r.published),
                "density": r.published.density,
                "step_s": r.step_s,
                "agreed": r.agreed,
                "receiver": r.receiver,
            }
            for r in self.rows
        ]
        return {"equal": self.equal, "seconds": self.seconds, **self.proof, "versions": versions}


class LiveWeights(WholeTensors):
    """``ports.Source`` over the trainer's own bf16 weights: views, no copy. Read only between optimizer steps."""

    def __init__(self, bits: Mapping[str, npt.NDArray[np.uint16]], files: Mapping[str, bytes]) -> None:
        self._arrays = [bits[name].reshape(-1) for name in sorted(bits)]
        self._catalog = Catalog(tuple(TensorEntry(name, "BF16", bits[name].shape) for name in sorted(bits)))
        self._files = files

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def files(self) -> Mapping[str, bytes]:
        return self._files

    @contextmanager
    def read(self, tensor: int, start: int, stop: int) -> Iterator[Elements]:
        yield self._arrays[tensor][start:stop]


class FollowerProcess:
    """The rollout process, spoken to in JSON lines; every answer has a deadline."""

    def __init__(self, store: str, model: Path, into: Path) -> None:
        command = [sys.executable, "-m", "deltarefit.demo.follower", store, str(model), str(into)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603

    def ask(self, **command: object) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise UnavailableError("the receiver process has no pipes")
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], ANSWER_S)
        line = stdout.readline() if ready else ""
        if not line:
            raise UnavailableError(f"the receiver process did not answer {command}", found=self._process.poll())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> FollowerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)


def run(cache: Path, quick: bool, say: Callable[[str], None], on_row: Callable[[Row], None]) -> Result:
    """The whole demo. ``say`` gets a line of talk, ``on_row`` each finished version. Errors are raised."""
    started = time.perf_counter()
    say("Preparing the model (made once, then cached) ...")
    model = tiny_model(cache) if quick else real_model(cache)
    with tempfile.TemporaryDirectory(prefix="deltarefit-demo-", dir=cache) as work:
        result = _refits(Path(work), model, say, on_row)
    return Result(result.rows, result.proof, time.perf_counter() - started)


def _refits(work: Path, model: Path, say: Callable[[str], None], on_row: Callable[[Row], None]) -> Result:
    store = str(work / "store")
    trainer = Trainer(model, LEARNING_RATE)
    publisher = Publisher(open_store(store), LiveWeights(trainer.bits(), CheckpointSource(model).files()))
    say(f"Trainer: {trainer.numel:,} bf16 weights, AdamW at {LEARNING_RATE:g}.")
    say("Receiver: another process, random weights.")
    rows: list[Row] = []
    with FollowerProcess(store, model, work / "followed") as follower:
        for step in range(STEPS + 1):
            step_s = trainer.step()["seconds"] if step else 0.0
            published = publisher.publish(step)
            rows.append(Row(published, step_s, follower.ask(do="reach", version=published.version)))
            on_row(rows[-1])
        say("Proving: live model and directory against a dense copy, byte by byte, and what they generate ...")
        trainer.save(work / "dense")
        proof = follower.ask(do="prove", dense=str(work / "dense"))
    publisher.close()
    return Result(rows, proof)
