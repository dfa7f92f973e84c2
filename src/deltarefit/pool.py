"""Work side by side on a pool of threads, that is over when it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def side_by_side(pool: Executor, work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """``map`` on the pool. When it returns or raises, nothing of it runs any more: a write that went on after an error
    would meet the next try at the same payload."""
    if len(items) <= 1:
        return [work(item) for item in items]
    futures = [pool.submit(work, item) for item in items]
    try:
        return [future.result() for future in futures]
    finally:
        wait([future for future in futures if not future.cancel()])
