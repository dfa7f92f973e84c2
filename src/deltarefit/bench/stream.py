"""Do payloads leave while the next ones are built? A publish over a slow link beside each half of its work alone.

Three times are taken of one and the same publish: *build* into a store that takes everything at once, *upload* of the
same payloads over the link with nothing to build, and *wall*, the publish over that link. Perfect overlap makes wall
the longer of the two; ``ALLOWED`` is what the publisher is held to. Links are at 50 MB/s, and as fast as the build,
where overlap matters most.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from deltarefit.bench.data import generated_pair
from deltarefit.elements import Elements
from deltarefit.exchange import WholeTensors
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pipeline import UPLOADS
from deltarefit.ports import Store
from deltarefit.publisher import Publisher
from deltarefit.stores import open_store
from deltarefit.stores.wrappers import Limited

LINK = 50e6
"""Bytes a second."""
DENSITIES = (0.01, 0.05, 0.2)
FACTOR, SLACK_S = 1.15, 0.5
"""A publish may take FACTOR times the longer half, and SLACK_S."""
_CHUNK = 16 << 20


class ArraySource(WholeTensors):
    """``ports.Source`` over arrays of bfloat16 bits, which the caller changes in place."""

    def __init__(self, arrays: Mapping[str, Elements]) -> None:
        self._arrays = [array.reshape(-1) for _, array in sorted(arrays.items())]
        self._catalog = Catalog(tuple(TensorEntry(name, "BF16", a.shape) for name, a in sorted(arrays.items())))
        self._random = np.random.default_rng(1)

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def files(self) -> Mapping[str, bytes]:
        return {}

    @contextmanager
    def read(self, piece: int, start: int, stop: int) -> Iterator[Elements]:
        yield self._arrays[piece][start:stop]

    def change(self, density: float) -> None:
        """One of the two low bits of about that share of all elements, or both."""
        for array in self._arrays:
            for start in range(0, array.size, _CHUNK):
                chunk = array[start : start + _CHUNK]
                chosen = np.flatnonzero(self._random.random(chunk.size, dtype=np.float32) < density)
                chunk[chosen] ^= self._random.integers(1, 4, chosen.size, dtype=chunk.dtype)


def measure(elements: int, threads: int) -> list[dict[str, Any]]:
    """One row for the first version (an anchor) and each of ``DENSITIES`` at ``LINK``, then for the anchor and the
    densest change over links that take just as long as their build."""
    source = ArraySource({name: old for name, (old, _) in generated_pair(0.0, elements).items()})
    rows = _chain(source, LINK, DENSITIES, threads)
    anchor, dense = rows[0], rows[-1]
    rows += _chain(source, anchor["payload_bytes"] / anchor["build"], (), threads)
    return [*rows, _chain(source, dense["payload_bytes"] / dense["build"], DENSITIES[-1:], threads)[-1]]


def _chain(source: ArraySource, rate: float, densities: Sequence[float], threads: int) -> list[dict[str, Any]]:
    """A run over a link of ``rate`` bytes a second and one without limit, version by version side by side."""
    free = _memory()
    fast, slow = (Publisher(store, source, threads=threads) for store in (free, Limited(_memory(), rate)))
    rows: list[dict[str, Any]] = []
    with contextlib.closing(fast), contextlib.closing(slow):
        for density in (1.0, *densities):
            if rows:
                source.change(density)
            build, wall = _seconds(fast, len(rows)), _seconds(slow, len(rows))
            rows.append(_row(free, "change" if rows else "anchor", density, rate, build, wall))
    return rows


def _memory() -> Store:
    return open_store(f"memory://bench-{secrets.token_hex(8)}")


def _seconds(publisher: Publisher, step: int) -> float:
    started = time.perf_counter()
    publisher.publish(step)
    return time.perf_counter() - started


def _row(free: Store, what: str, density: float, rate: float, build: float, wall: float) -> dict[str, Any]:
    """The payloads in ``free`` are those of this publish; they are removed."""
    sizes = {key: size for key, size in free.list() if "/pl/" in key}
    upload = _upload_alone([free.get(key) for key in sizes], rate)
    allowed = FACTOR * max(build, upload) + SLACK_S
    for key in sizes:
        free.delete(key)
    return {
        "what": what, "density": density, "bytes_per_s": rate,
        "payload_bytes": sum(sizes.values()), "uploads": len(sizes),
        "build": build, "upload": upload, "wall": wall,
        "wall/longer": wall / max(build, upload), "wall/allowed": wall / allowed,
    }  # fmt: skip


def _upload_alone(payloads: Sequence[bytes], rate: float) -> float:
    link = Limited(_memory(), rate)
    started = time.perf_counter()
    with ThreadPoolExecutor(UPLOADS) as pool:
        list(pool.map(link.put, map(str, range(len(payloads))), payloads))
    return time.perf_counter() - started
