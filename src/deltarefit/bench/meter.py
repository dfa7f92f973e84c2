"""What the process itself can tell about its memory (Linux), and seconds summed over threads."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def settled() -> int:
    """Resident bytes, once freed memory went back to the system; the peak is counted from now on (proc(5), 5 in
    ``clear_refs``)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5")
    return _field("VmRSS")


def peak() -> int:
    """Most resident bytes since ``settled``."""
    return _field("VmHWM")


def _field(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


class Stopwatch:
    """Seconds by stage, summed over all threads that spend them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """The block belongs to ``stage``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
