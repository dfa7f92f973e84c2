"""The demo's rollout side, a process of its own: a live model and a checkpoint directory that follow one run.

Reads commands, one JSON object a line, from standard input; answers one JSON object a line on standard output::

    {"do": "reach", "version": 3}      -> timings, digest and generations at that version
    {"do": "prove", "dense": "DIR"}    -> whether live model and directory equal a dense copy, and its generations
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deltarefit.demo.model import transformers
from deltarefit.demo.task import problems
from deltarefit.digest import array_digest, catalog_keys
from deltarefit.errors import NotFoundError, UnavailableError
from deltarefit.events import Event
from deltarefit.receiver import Receiver
from deltarefit.records import Digest
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.stores import open_store
from deltarefit.targets.checkpoint import CheckpointTarget
from deltarefit.targets.module import ModuleTarget
from deltarefit.weights import segments

PATIENCE_S = 120.0
NEW_TOKENS = 12


class Engine:
    """A model that generates, and does not while a refit holds it paused."""

    def __init__(self, directory: Path, random_weights: bool = False) -> None:
        import torch

        torch.set_num_threads(2)
        library = transformers()
        self._tokenizer: Any = library.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        if random_weights:
            config = library.AutoConfig.from_pretrained(directory, local_files_only=True)
            self.model: Any = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        else:
            self.model = library.AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.bfloat16, local_files_only=True
            )
        self.model.eval()
        self._running = threading.Lock()

    def pause(self) -> None:
        """Wait for the present generation; may be called twice."""
        self._running.acquire(blocking=False)

    def resume(self) -> None:
        if self._running.locked():
            self._running.release()

    def generate(self) -> list[str]:
        """Greedy answers to four fixed problems."""
        import torch

        with self._running, torch.no_grad():
            return [self._answer(problem.prompt) for problem in problems(seed=1, batch=0, count=4)]

    def _answer(self, prompt: str) -> str:
        tokens = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        end = self._tokenizer.eos_token_id
        out = self.model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=end)
        text: str = self._tokenizer.decode(out[0, tokens.input_ids.shape[1] :])
        return text


class Rollout:
    """One live model and one directory, each with its receiver."""

    def __init__(self, store: str, model: Path, into: Path) -> None:
        self._into = into
        self._seconds: dict[str, float] = {}
        # Random weights: all that the live model knows, it has from the store.
        self._engine = Engine(model, random_weights=True)
        self._live = ModuleTarget(self._engine.model, on_pause=self._engine.pause, on_resume=self._engine.resume)
        self._receivers = [
            _receiver(store, self._live, self._note),
            _receiver(store, CheckpointTarget(into), lambda event: None),
        ]

    def _note(self, event: Event) -> None:
        if event.type in ("phase", "resumed"):
            self._seconds[event.phase] = event.seconds

    def reach(self, version: int) -> dict[str, Any]:
        self._seconds.clear()
        for receiver in self._receivers:
            _reach(receiver, version)
        return {
            "version": version,
            "seconds": dict(self._seconds),
            "digest": str(self._digest()),
            "generations": self._engine.generate(),
        }

    def _digest(self) -> Digest:
        """Of the live model's memory, summed anew from all its bytes."""
        log = self._receivers[0].log
        keys = catalog_keys(log.run, log.catalog)
        total = Digest()
        for tensor, start, stop in segments(log.catalog):
            with self._live.window(tensor, start, stop) as (array, first):
                total += array_digest(array.reshape(-1)[first : first + stop - start], start, keys[tensor])
        return total

    def prove(self, dense: Path) -> dict[str, Any]:
        generations = self._engine.generate()
        fresh = Engine(dense)
        return {
            "live_equal": _same_as(self._live_arrays(), dense),
            "directory_equal": _same_as(_file_arrays(self._into), dense),
            "generations_equal": generations == fresh.generate() == Engine(self._into).generate(),
            "generations": generations,
        }

    def _live_arrays(self) -> Iterator[tuple[str, Any]]:
        catalog = self._receivers[0].log.catalog
        for tensor, entry in enumerate(catalog.tensors):
            with self._live.window(tensor, 0, entry.numel) as (array, _):
                yield entry.name, array.reshape(-1)


def _receiver(store: str, target: Any, emit: Any) -> Receiver:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return Receiver(open_store(store), target, emit=emit)
        except NotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _reach(receiver: Receiver, version: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while _follow_once(receiver) < version:
        if time.monotonic() > deadline:
            raise UnavailableError(f"version {version} did not come within {PATIENCE_S:.0f} s", found=receiver.version)
        time.sleep(0.02)


def _follow_once(receiver: Receiver) -> int:
    try:
        return receiver.follow(once=True)
    except NotFoundError:  # nothing is committed yet
        return 0


def _file_arrays(directory: Path) -> Iterator[tuple[str, Any]]:
    source = CheckpointSource(directory)
    for tensor, entry in enumerate(source.catalog.tensors):
        with source.read(tensor, 0, entry.numel) as array:
            yield entry.name, array


def _same_as(arrays: Iterator[tuple[str, Any]], dense: Path) -> bool:
    """Byte equality, tensor by tensor, of all tensors on both sides."""
    source = CheckpointSource(dense)
    seen = 0
    for name, array in arrays:
        tensor = source.catalog.index.get(name)
        if tensor is None:
            return False
        with source.read(tensor, 0, source.catalog.tensors[tensor].numel) as expected:
            if not np.array_equal(array, expected):
                return False
        seen += 1
    return seen == len(source.catalog.tensors)


def main(arguments: list[str]) -> None:
    store, model, into = arguments
    rollout = Rollout(store, Path(model), Path(into))
    for line in sys.stdin:
        command = json.loads(line)
        answer = (
            rollout.reach(command["version"]) if command["do"] == "reach" else rollout.prove(Path(command["dense"]))
        )
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
