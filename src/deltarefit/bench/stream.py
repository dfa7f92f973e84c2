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
    """One row for the first version (an anchor) and each of ``DENSITIES`` at ``LINK``, then for the densest change and
    for an anchor over links that take just as long as their build."""
    source = ArraySource({name: old for name, (old, _) in generated_pair(0.0, elements).items()})
    with contextlib.closing(_Pair(source, threads)) as pair:
        rows = [pair.row("anchor", 1.0, LINK)]
        rows += [pair.row("change", density, LINK) for density in DENSITIES]
        rows.append(pair.row("change", DENSITIES[-1], _as_fast_as_built(rows[-1])))
    with contextlib.closing(_Pair(source, threads)) as pair:
        rows.append(pair.row("anchor", 1.0, _as_fast_as_built(rows[0])))
    return rows


def _as_fast_as_built(row: dict[str, Any]) -> float:
    return float(row["payload_bytes"] / row["build"])


class _Link(Limited):
    """Its rate may change between versions."""

    def at(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s


class _Pair:
    """Two runs of one source side by side: into a store without limit, and over a link."""

    def __init__(self, source: ArraySource, threads: int) -> None:
        self._source, self._free, self._link = source, _memory(), _Link(_memory(), LINK)
        self._fast = Publisher(self._free, source, threads=threads)
        self._slow = Publisher(self._link, source, threads=threads)

    def row(self, what: str, density: float, rate: float) -> dict[str, Any]:
        """The next version of both."""
        if what == "change":
            self._source.change(density)
        self._link.at(rate)
        build, wall = _seconds(self._fast), _seconds(self._slow)
        return _row(self._free, what, density, rate, build, wall)

    def close(self) -> None:
        self._fast.close()
        self._slow.close()


def _memory() -> Store:
    return open_store(f"memory://bench-{secrets.token_hex(8)}")


def _seconds(publisher: Publisher) -> float:
    started = time.perf_counter()
    publisher.publish()
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
