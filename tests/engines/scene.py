"""A run of refits with real parts only: trainer ranks, a store directory, a serving engine, and ``deltarefit follow``.

Each is in processes of its own. What the engine says after a refit is compared with what an engine says that was loaded
from a dense export of that step; and a client reads a stream of tokens through the refit.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deltarefit import open_store
from deltarefit.stores.wrappers import Limited
from tests.desk import Desk, Following
from tests.engines.servers import Server, Tokens
from tests.engines.trainer import Trainer

CACHE = Path(__file__).resolve().parents[2] / ".cache"
REFITS = int(os.environ.get("DELTAREFIT_REFITS", "4"))
FULL = "DELTAREFIT_REFITS" in os.environ
KINDS = ("train", "count", "nothing", "plant")
"""Of the first steps; all later ones train."""
TRAINING = ("train", "plant")
LENGTH = 16
"""Tokens of a reply."""
STREAMED = 160
"""Tokens of a stream."""
WAIT_S = 90.0

Prompt = tuple[Tokens, float, int | None]
"""Tokens, temperature and seed."""


@dataclass
class Scene:
    """The processes of one run. ``store`` is a directory, ``home`` where the follower's and the engine's files are."""

    root: Path
    base: Path
    trainer: Trainer
    server: Server
    option: str
    prompts: Sequence[Prompt]
    port: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def store(self) -> str:
        return str(self.root / "store")

    @property
    def desk(self) -> Desk:
        return Desk(self.root, [], {"DELTAREFIT_RUN_DIR": os.environ["DELTAREFIT_RUN_DIR"]})

    def following(self) -> Following:
        """``deltarefit follow`` on the engine, with readiness at ``port``."""
        options = ("--poll", "0.2", "--json", "--ready", f"127.0.0.1:{self.port}")
        return Following(self.desk, self.store, self.option, self.server.url, *options)

    def replies(self) -> list[Tokens]:
        """One prompt after the other, as ``refitted`` does, so that batches are the same."""
        return [
            self.server.generate([tokens], temperature=temperature, seed=seed, max_tokens=LENGTH)[0]
            for tokens, temperature, seed in self.prompts
        ]

    def ready(self) -> dict[str, Any]:
        """What readiness says: its status, and the body; status 0 if nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=10) as reply:
                return {"status": reply.status, **json.loads(reply.read())}
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.loads(error.read())}
        except OSError:
            return {"status": 0, "version": 0, "state": "silent"}

    def verify(self) -> dict[str, Any]:
        """``deltarefit verify``: reads all bits of the engine, and compares with the log."""
        done = self.desk.run("verify", self.store, self.option, self.server.url, "--json")
        assert done.code == 0, done.err
        return done.body

    def refit(self, kind: str, following: Following, *, streamed: bool) -> dict[str, Any]:
        """A step, its publish, and the follower's report once the engine has it; with a stream of tokens meanwhile."""
        self.trainer.advance(kind)
        client = Client(self.server) if streamed else None
        if client is not None:
            client.wait_for(50)
        began = time.monotonic()
        published = self.trainer.publish()
        report = json.loads(following.wait_for(rf'"version":{published["version"]}\b'))
        row = {"kind": kind, "published": published, "lag_s": time.monotonic() - began, **report}
        if client is not None:
            row["client"] = client.gaps(began)
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return row


class Client:
    """Reads a stream of tokens, and notes when each came."""

    def __init__(self, server: Server, prompt: Sequence[int] = (30, 40, 50, 60), count: int = STREAMED) -> None:
        self._stream, self._count = server.stream(list(prompt), max_tokens=count), count
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while len(self.times) < self._count:
            found = len(self._stream.wait_for(len(self.times) + 1))
            self.times += [time.monotonic()] * (found - len(self.times))

    def wait_for(self, count: int) -> None:
        self._stream.wait_for(count)

    def gaps(self, since: float) -> dict[str, float]:
        """Seconds between tokens: median and 99th percentile before ``since``, the longest after it, and how much
        longer that is than the percentile. The stream is read to its end."""
        self._thread.join(WAIT_S)
        assert len(self.times) == self._count == len(self._stream.result()), "tokens were lost"
        times = np.array(self.times)
        gaps, ends = np.diff(times), times[1:]
        before, after = gaps[ends < since], gaps[ends >= since]
        assert after.size, "the stream ended before the refit"
        p50, p99 = (float(np.quantile(before, q)) for q in (0.5, 0.99))
        longest = float(after.max())
        return {"p50_s": p50, "p99_s": p99, "longest_s": longest, "stall_s": max(0.0, longest - p99)}


class Slow(Limited):
    """A store from which everything is read over one slow link."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, start, length)
        self._pass(len(data))
        return data


def slow_store(path: str, bytes_per_s: float) -> Slow:
    return Slow(open_store(path), bytes_per_s)


def until(holds: Callable[[], object], seconds: float = WAIT_S) -> None:
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def prompts_of(base: Path, seeded: bool) -> list[Prompt]:
    """Greedy ones, and with ``seeded`` the same ones sampled; in the model's own tokens. The last is longer than a
    block of the engine's cache: with what older weights computed for it, its reply would be another."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    texts = ("Question: What is 17 + 25?\nAnswer:", "The capital of France is", "Once upon a time, " * 40)
    tokens = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    greedy = [(one, 0.0, None) for one in tokens]
    return [*greedy, *((one, 1.0, 11 + k) for k, one in enumerate(tokens))] if seeded else greedy
