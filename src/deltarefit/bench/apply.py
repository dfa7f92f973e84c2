"""``deltarefit bench apply``: what a refit's write costs one rank of a serving engine, on one core.

The rank holds its part of a Llama-style model as engines do: q, k and v fused and cut by rows, gate and up fused, the
other matrices cut by columns. Changes come as payloads of the whole canonical model; those of other ranks are decoded
and passed by. *Ours* is decode, placement and write of staged payloads (``RankWeights.write``). Beside it, on the same
bits: the engine's own dense load; a scatter by torch with indices and masks all ready; the same payloads applied to
plain canonical arrays, without placement; and a copy of the rank's bytes. Results are compared byte for byte.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltarefit import _kernel
from deltarefit.bench.goals import at_least, at_most
from deltarefit.bench.meter import peak, settled
from deltarefit.codec import Delta, PayloadBuilder, encode_delta, open_payload
from deltarefit.digest import catalog_keys
from deltarefit.elements import Elements
from deltarefit.manifest import Catalog, PayloadRef, TensorEntry
from deltarefit.pieces import whole
from deltarefit.protocol.messages import Op
from deltarefit.targets.placing.rank import RankWeights
from deltarefit.targets.ranks import RankGroup
from deltarefit.weights import segments

RUN = "bench"
DENSITIES = (0.0002, 0.01, 0.03, 0.05)
GOAL_DENSITY, GOAL_GB_S, GOAL_MIB = 0.03, 2.0, 256
PAYLOAD_BYTES = 16 << 20
"""Raw bytes of deltas after which the next payload begins."""
Payload = tuple[PayloadRef, bytes]


@dataclass(frozen=True)
class Size:
    """Sizes of the model; ``ranks`` share it."""

    hidden: int
    inner: int
    kv: int
    layers: int
    ranks: int = 2
    repeats: int = 5


FULL, QUICK = Size(4096, 11008, 1024, 4), Size(64, 96, 32, 2, repeats=2)


class FusedShard(torch.nn.Module):
    """One rank's part, with a native loader that narrows and copies, as vLLM's and SGLang's do."""

    def __init__(self, size: Size, rank: int) -> None:
        super().__init__()
        self.size, self.rank = size, rank
        n, hidden = size.ranks, size.hidden
        shapes = {
            "qkv": ((hidden + 2 * size.kv) // n, hidden),
            "o": (hidden, hidden // n),
            "gate_up": (2 * size.inner // n, hidden),
            "down": (hidden, size.inner // n),
        }
        for layer in range(size.layers):
            for name, shape in shapes.items():
                zeros = torch.zeros(shape, dtype=torch.bfloat16)
                self.register_parameter(f"l{layer}_{name}", torch.nn.Parameter(zeros, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take (canonical name, tensor) pairs."""
        for name, tensor in weights:
            layer, leaf = name.split(".")
            fused, start, dim = self._place(leaf)
            mine = tensor.shape[dim] // self.size.ranks
            source = tensor.narrow(dim, self.rank * mine, mine)
            getattr(self, f"{layer}_{fused}").data.narrow(0, start, source.shape[0]).copy_(source)

    def _place(self, leaf: str) -> tuple[str, int, int]:
        """Fused parameter, first row in it, and the dimension that ranks share, of a canonical tensor."""
        q, kv, inner = (n // self.size.ranks for n in (self.size.hidden, self.size.kv, self.size.inner))
        return {
            "q": ("qkv", 0, 0), "k": ("qkv", q, 0), "v": ("qkv", q + kv, 0), "o": ("o", 0, 1),
            "gate": ("gate_up", 0, 0), "up": ("gate_up", inner, 0), "down": ("down", 0, 1),
        }[leaf]  # fmt: skip


def catalog_of(size: Size) -> Catalog:
    """The canonical tensors of the whole model."""
    h, kv, inner = size.hidden, size.kv, size.inner
    shapes = {"q": (h, h), "k": (kv, h), "v": (kv, h), "o": (h, h), "gate": (inner, h), "up": (inner, h)}
    shapes["down"] = (h, inner)
    names = sorted((f"l{layer}.{leaf}", shape) for layer in range(size.layers) for leaf, shape in shapes.items())
    return Catalog(tuple(TensorEntry(name, "BF16", shape) for name, shape in names))


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Figures by density, and whether the goals are reached; JSON-ready."""
    size = QUICK if quick else FULL
    torch.set_num_threads(1)
    bench = _Bench(size)
    rows = []
    for density in DENSITIES:
        say(f"{density:.2%} changed ...")
        rows.append(bench.row(density))
    result = {
        "quick": quick, "level": _kernel.level(), "load": os.getloadavg()[0], "threads": 1, "ranks": size.ranks,
        "canonical_bytes": bench.catalog.dense_bytes, "rank_bytes": bench.rank_bytes, "rows": rows,
    }  # fmt: skip
    return {**result, "goals": goals(rows)}


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal with its figure in the worst case that it covers, and whether it is reached."""
    at = [row for row in rows if row["density"] == GOAL_DENSITY]
    extra = [row["extra_bytes"] / 2**20 for row in rows]
    return [
        at_least(
            f"GB/s of the rank's weights at {GOAL_DENSITY:.0%}, one core", [r["rank_gb_s"] for r in at], GOAL_GB_S
        ),
        at_most("memory beside the staged payloads, MiB", extra, GOAL_MIB),
        at_most("rows whose bits differ from the dense load", [sum(not row["equal"] for row in rows)], 0),
    ]


class _Bench:
    def __init__(self, size: Size) -> None:
        self.size, self.catalog = size, catalog_of(size)
        self.keys = catalog_keys(RUN, self.catalog)
        self.rng = np.random.default_rng(0)
        self.old = [self._random(entry.numel) for entry in self.catalog.tensors]
        self.model = FusedShard(size, rank=1)
        self.model.load_weights(self._tensors(self.old))
        self.rank = RankWeights(self.model, self.model.load_weights, threads=1)
        self.rank_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self._attach()

    def _attach(self) -> None:
        """As one rank of all: what the others hold is only said, not there."""
        plans = []
        for rank in range(self.size.ranks):
            model = FusedShard(self.size, rank)
            plans.append(RankWeights(model, model.load_weights, threads=1).attach(RUN, self.catalog))
        plans[1] = self.rank.attach(RUN, self.catalog)
        self.rank.assign(RankGroup(self.catalog, plans).assignment(1))

    def _random(self, n: int) -> Elements:
        bits: Elements = self.rng.integers(0, 1 << 16, n, dtype=np.uint16)
        return bits

    def _tensors(self, bits: Sequence[Elements]) -> Iterator[tuple[str, torch.Tensor]]:
        for entry, values in zip(self.catalog.tensors, bits, strict=True):
            yield entry.name, torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).reshape(entry.shape)

    def row(self, density: float) -> dict[str, Any]:
        """One density: seconds of every way, medians, and the bytes compared."""
        new = [self._changed(old, density) for old in self.old]
        payloads = list(self._payloads(new))
        extra, staged = self._extra(payloads), sum(sum(ref.streams.values()) for ref, _ in payloads)
        seconds, equal = self._write(payloads, new)
        self.rank.drop()
        rivals = self._rivals(payloads, new)
        dense, held = self.catalog.dense_bytes, self.rank_bytes
        return {
            "density": density, "payload_bytes": sum(ref.size for ref, _ in payloads), "staged_bytes": staged,
            "extra_bytes": max(0, extra - staged), "seconds": seconds, "rivals": rivals, "equal": equal,
            "rank_gb_s": held / seconds / 1e9, "canonical_gb_s": dense / seconds / 1e9,
        }  # fmt: skip

    def _extra(self, payloads: Sequence[Payload]) -> int:
        """Most bytes that staging, writing and proving need beyond what was there."""
        before = settled()
        self._stage(payloads)
        self._write_all(payloads)
        for ref, _ in payloads:
            self.rank.live(ref)
        found = peak() - before
        self._rewind(payloads)
        return found

    def _stage(self, payloads: Sequence[Payload]) -> None:
        for ref, data in payloads:
            self.rank.stage(ref, data)

    def _rewind(self, payloads: Sequence[Payload]) -> None:
        """Old bits again, and the payloads staged on them."""
        self.rank.drop()
        self.model.load_weights(self._tensors(self.old))
        self._stage(payloads)

    def _changed(self, old: Elements, density: float) -> Elements:
        new: Elements = old.copy()
        count = int(len(old) * density)
        where = self.rng.integers(0, len(old), count)
        new[where] += self.rng.integers(1, 3, count, dtype=np.uint16)
        return new

    def _payloads(self, new: Sequence[Elements]) -> Iterator[Payload]:
        builder = PayloadBuilder()
        for tensor, start, stop in segments(self.catalog):
            entry = self.catalog.tensors[tensor]
            piece, old = whole(tensor, entry.numel), self.old[tensor][start:stop]
            encoded = encode_delta(piece, old, new[tensor][start:stop], start, self.keys[tensor])
            if encoded is not None:
                builder.add(encoded)
            if builder.nbytes > PAYLOAD_BYTES:
                yield _built(builder)
                builder = PayloadBuilder()
        if builder.encoded:
            yield _built(builder)

    def _write(self, payloads: Sequence[Payload], new: Sequence[Elements]) -> tuple[float, bool]:
        """The median write, and whether every one gave the dense load's bits."""
        times, equal = [], True
        for _ in range(self.size.repeats):
            times.append(_seconds(lambda: self._write_all(payloads)))
            equal &= self._holds(new)
            self._rewind(payloads)
        return statistics.median(times), equal

    def _write_all(self, payloads: Sequence[Payload]) -> None:
        for ref, _ in payloads:
            self.rank.write(ref, Op.APPLY)

    def _holds(self, bits: Sequence[Elements]) -> bool:
        dense = FusedShard(self.size, rank=1)
        dense.load_weights(self._tensors(bits))
        pairs = zip(dense.parameters(), self.model.parameters(), strict=True)
        return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)

    def _rivals(self, payloads: Sequence[Payload], new: Sequence[Elements]) -> dict[str, float]:
        """Seconds of other ways to the same bits, and of the floors; the model ends as it began."""
        tensors = list(self._tensors(new))
        found = {"dense load": self._median(lambda: self.model.load_weights(tensors))}
        found["torch scatter"] = self._median(self._scatter())
        self.model.load_weights(self._tensors(self.old))
        plain = [old.copy() for old in self.old]
        deltas = [delta for ref, data in payloads for delta in open_payload(data, ref, self.catalog)]
        found["no placement"] = self._median(lambda: _apply(deltas, plain))
        source, to = (np.zeros(self.rank_bytes, np.uint8) for _ in range(2))
        found["copy"] = self._median(lambda: np.copyto(to, source))
        return found

    def _scatter(self) -> Callable[[], None]:
        """Indices and masks between the bits now (new ones) and the old ones; carrying it out goes there and back."""
        old = FusedShard(self.size, rank=1)
        old.load_weights(self._tensors(self.old))
        work = []
        for one, other in zip(self.model.parameters(), old.parameters(), strict=True):
            flat = one.data.view(torch.int16).reshape(-1)
            mask = flat ^ other.data.view(torch.int16).reshape(-1)
            where = mask.nonzero().reshape(-1)
            work.append((flat, where, mask[where]))

        def carry_out() -> None:
            for flat, where, mask in work:
                flat[where] ^= mask

        return carry_out

    def _median(self, work: Callable[[], object]) -> float:
        return statistics.median(_seconds(work) for _ in range(self.size.repeats))


def _apply(deltas: Sequence[Delta], arrays: Sequence[Elements]) -> None:
    for delta in deltas:
        _kernel.apply(delta.record, delta.slices, arrays[delta.tensor], delta.low)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _built(builder: PayloadBuilder) -> Payload:
    data, ref = builder.build()
    return ref, data
