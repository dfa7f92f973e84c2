"""What a relay has moved: numbers for its status page, for Prometheus, and for benchmarks."""

from __future__ import annotations

import resource
import sys
import threading
from collections import Counter
from pathlib import Path

COUNTED = ("sent_bytes", "fetched_bytes", "damaged", "not_kept", "refused", "not_answered")
_PAGE = resource.getpagesize()


class Meter:
    """Counts since the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by

    def sent(self, nbytes: int) -> None:
        """Bytes of bodies that went to children."""
        self.count("sent_bytes", nbytes)

    def fetched(self, nbytes: int) -> None:
        """Bytes of bodies that came from the parent."""
        self.count("fetched_bytes", nbytes)

    def numbers(self) -> dict[str, int]:
        """All counts, and this process's memory in bytes."""
        with self._lock:
            counts = {**dict.fromkeys(COUNTED, 0), **self._counts}
        return {**counts, "resident_bytes": _resident(), "peak_resident_bytes": _peak()}


def prometheus(numbers: dict[str, int]) -> str:
    """The same as Prometheus' text."""
    return "".join(f"deltarefit_relay_{name} {value}\n" for name, value in sorted(numbers.items()))


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except OSError:  # not Linux
        return _peak()


def _peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
