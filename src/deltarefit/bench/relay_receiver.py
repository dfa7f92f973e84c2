"""Receivers for ``bench relay``: ``python -m deltarefit.bench.relay_receiver JOB``; JOB is JSON.

Says ``ready``, waits for a line on stdin, fetches, and says what became of it in a line of JSON. A receiver fetches
every key, a few at a time, through the store that any receiver uses, and compares each byte with the original.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltarefit.errors import UnavailableError
from deltarefit.ports import Store
from deltarefit.stores import open_store

TRIES, PAUSE_S = 20, 0.25
"""As often as a receiver comes back to a store that is not there: a relay may be looking for another parent."""


@dataclass
class Receiver:
    """One of several in this process."""

    store: Store
    originals: Mapping[str, mmap.mmap]
    threads: ThreadPoolExecutor

    def run(self) -> dict[str, Any]:
        """Fetch all; seconds, bytes, tries beyond the first, and whether all bytes were right."""
        started = time.perf_counter()
        found = list(self.threads.map(self._fetch, self.originals))
        return {
            "seconds": time.perf_counter() - started,
            "bytes": sum(nbytes for nbytes, _, _ in found),
            "equal": all(equal for _, equal, _ in found),
            "again": sum(again for _, _, again in found),
        }

    def _fetch(self, key: str) -> tuple[int, bool, int]:
        for again in range(TRIES):
            try:
                data = self.store.get(key)
            except UnavailableError:
                time.sleep(PAUSE_S)
            else:
                return len(data), _equal(data, self.originals[key]), again
        return 0, False, TRIES


def main(urls: Sequence[str], fetches: int, directory: str, keys: Sequence[str]) -> None:
    """Be ready, fetch, and tell."""
    originals = {key: _mapped(Path(directory, key)) for key in keys}
    receivers = [Receiver(open_store(url), originals, ThreadPoolExecutor(fetches)) for url in urls]
    with ThreadPoolExecutor(len(receivers)) as threads:
        _say("ready")
        sys.stdin.readline()
        _say(json.dumps(list(threads.map(Receiver.run, receivers))))


def _equal(data: bytes, original: mmap.mmap) -> bool:
    return np.array_equal(np.frombuffer(data, np.uint8), np.frombuffer(original, np.uint8))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
