"""``deltarefit bench codec``: size and speed of our encoding against the field's, floors and entropy in the same run.

One thread throughout. Every encoding's result is compared with the new bits before its time counts. Ours is the
whole product path: compare, extract, choose, pack, digest sums, zstd, SHA-256 and the records of the attempt; back:
hash,
decompress, validate, apply. Rivals are plain NumPy and zstd (``bench.rivals``). Times are medians; compare ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltarefit import _kernel
from deltarefit.bench.data import Pair, generated_pair, real_pairs
from deltarefit.bench.entropy import bounds
from deltarefit.bench.goals import at_least, at_most
from deltarefit.bench.memory import peaks
from deltarefit.bench.rivals import RIVALS, Rival
from deltarefit.codec import PayloadBuilder, encode_delta, open_payload
from deltarefit.digest import tensor_key
from deltarefit.elements import Elements
from deltarefit.errors import RefitError
from deltarefit.manifest import (
    Catalog,
    Decision,
    Intent,
    Mode,
    Outcome,
    PayloadRef,
    ProducerManifest,
    TensorEntry,
)
from deltarefit.pieces import layout_of, whole
from deltarefit.pipeline import PAYLOAD_BYTES
from deltarefit.records import Digest
from deltarefit.weights import segments

RUN = "00" * 16
DENSITIES = (0.0002, 0.001, 0.01, 0.03, 0.05, 0.1)
DTYPE_OF_WIDTH = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
REPEATS = 5
FULL_COPY = RIVALS[0].name

Say = Callable[[str], None]
Payloads = list[tuple[bytes, PayloadRef]]


@dataclass(frozen=True)
class Case:
    """One pair of checkpoints. ``real`` says that the changes are of AdamW; ``target`` is the bound on wire /
    entropy."""

    name: str
    real: bool
    pair: Pair


def cases(cache: Path, quick: bool) -> Iterator[Case]:
    """Real AdamW steps, then generated densities (bf16), then fp32 and fp8."""
    for rate, pair in real_pairs(cache, quick).items():
        yield Case(f"AdamW lr {rate:g}", True, pair)
    elements = 1 << (18 if quick else 27)
    for density in DENSITIES:
        yield Case(f"bf16 {density:.2%}", False, generated_pair(density, elements))
    yield Case("fp32 3%", False, generated_pair(0.03, elements // 2, "F32"))
    yield Case("fp8 3%", False, generated_pair(0.03, elements, "F8_E4M3"))


def run(cache: Path, quick: bool, say: Say) -> dict[str, Any]:
    """All cases, memory, and whether each goal is reached; JSON-ready. ``say`` gets a line of progress per case."""
    rows = []
    for case in cases(cache, quick):
        say(f"{case.name} ...")
        rows.append(measure(case, 1 if quick else REPEATS))
    say("memory of publish and follow ...")
    memory = peaks(cache, (16 << 20, 64 << 20) if quick else (256 << 20, 1 << 30))
    result = {"quick": quick, "level": _kernel.level(), "cases": rows, "memory": memory}
    return {**result, "goals": goals(result)}


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """One case: sizes in bytes, speeds in GB/s of model bytes (bytes of the new checkpoint)."""
    # Fresh, contiguous, page-backed arrays: a memory-mapped file would be measured at its first touch.
    olds = {name: np.array(old).reshape(-1) for name, (old, _) in sorted(case.pair.items())}
    news = {name: np.array(new).reshape(-1) for name, (_, new) in sorted(case.pair.items())}
    size = sum(new.nbytes for new in news.values())
    bound = bounds({name: (olds[name], news[name]) for name in olds})
    speed = _Speed(size, repeats)
    row: dict[str, Any] = {
        "case": case.name, "real": case.real, "model_bytes": size, "changed": bound.changed, "numel": bound.numel,
        "density": bound.changed / max(bound.numel, 1),
        "bound_difference": bound.positions + bound.differences, "bound_xor": bound.positions + bound.xors,
        "memcpy": speed.of(lambda: _copy(olds, news)),
        "compare_scan": speed.of(lambda: [_kernel.count_changed(olds[name], news[name]) for name in olds]),
        "ours": _ours(olds, news, speed),
        "others": {rival.name: _rival(rival, olds, news, speed) for rival in RIVALS},
    }  # fmt: skip
    return row


class _Speed:
    """Median GB/s of model bytes over some runs of a piece of work."""

    def __init__(self, size: int, repeats: int) -> None:
        self._size, self._repeats = size, repeats

    def of(self, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        seconds = []
        for _ in range(self._repeats):
            before()
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return self._size / 1e9 / max(statistics.median(seconds), 1e-9)


def _copy(olds: Mapping[str, Elements], news: Mapping[str, Elements]) -> None:
    for name, old in olds.items():
        np.copyto(np.empty_like(old), news[name])


def _ours(olds: Mapping[str, Elements], news: Mapping[str, Elements], speed: _Speed) -> dict[str, float]:
    catalog = Catalog(tuple(TensorEntry(n, DTYPE_OF_WIDTH[a.itemsize], a.shape) for n, a in news.items()))
    payloads: Payloads = []

    def encode() -> None:
        payloads[:] = encode_model(catalog, list(olds.values()), list(news.values()))

    encode_speed = speed.of(encode)
    targets = [old.copy() for old in olds.values()]

    def reset() -> None:
        for target, old in zip(targets, olds.values(), strict=True):
            np.copyto(target, old)

    apply_speed = speed.of(lambda: apply_model(catalog, payloads, targets), reset)
    _check_equal("ours", targets, news)
    return {"wire": wire_bytes(payloads), "encode": encode_speed, "apply": apply_speed}


def encode_model(catalog: Catalog, olds: list[Elements], news: list[Elements]) -> Payloads:
    """What a publish does to its segments, on one thread and without a store."""
    keys = [tensor_key(RUN, entry.name) for entry in catalog.tensors]
    payloads, builder = [], PayloadBuilder()
    for tensor, start, stop in segments(catalog):
        piece = whole(tensor, catalog.tensors[tensor].numel)
        delta = encode_delta(piece, olds[tensor][start:stop], news[tensor][start:stop], start, keys[tensor])
        if delta is not None:
            builder.add(delta)
        if builder.nbytes >= PAYLOAD_BYTES:
            payloads.append(builder.build())
            builder = PayloadBuilder()
    return [*payloads, builder.build()] if builder.rows else payloads


def apply_model(catalog: Catalog, payloads: Payloads, targets: list[Elements]) -> None:
    """Check, decompress, validate and apply, on one thread."""
    for data, ref in payloads:
        for delta in open_payload(data, ref, catalog):
            _kernel.apply(delta.record, delta.slices, targets[delta.tensor], delta.start)


def wire_bytes(payloads: Payloads) -> int:
    """Payloads and all records of their attempt."""
    refs = tuple(ref for _, ref in payloads)
    part = sum((ref.post - ref.pre for ref in refs), Digest(1, 1))
    manifest = ProducerManifest(RUN, 2, 1, 0, 1, part, layout_of(()), refs)
    intent = Intent(RUN, 2, 1, Digest(1, 1), Mode.STAGE, RUN)
    outcome = Outcome(RUN, 2, Decision.COMMIT, 1, part, (manifest.content_hash(),), 1, RUN)
    records = sum(len(record.to_bytes()) for record in (manifest, intent, outcome))
    return records + sum(ref.size for ref in refs)


def _rival(rival: Rival, olds: Mapping[str, Elements], news: Mapping[str, Elements], speed: _Speed) -> dict[str, float]:
    pair = {name: (old, news[name]) for name, old in olds.items()}
    parts: list[bytes | memoryview] = []

    def encode() -> None:
        parts[:] = rival.encode(pair)

    encode_speed = speed.of(encode)
    targets = {name: old.copy() for name, old in olds.items()}

    def reset() -> None:
        for name, old in olds.items():
            np.copyto(targets[name], old)

    apply_speed = speed.of(lambda: rival.apply(parts, targets), reset)
    _check_equal(rival.name, list(targets.values()), news)
    wire = sum(memoryview(part).nbytes for part in parts)
    return {"wire": wire, "encode": encode_speed, "apply": apply_speed}


def _check_equal(name: str, targets: list[Elements], news: Mapping[str, Elements]) -> None:
    for target, (tensor, new) in zip(targets, news.items(), strict=True):
        if not np.array_equal(target, new):
            raise RefitError(f"{name} does not give the new bits of {tensor}")


# ------------------------------------------------------------------------------------------------ goals


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each goal with its figure in the worst case that it covers, and whether it is reached."""
    rows = result["cases"]
    bf16 = [row for row in rows if row["real"] or row["case"].startswith("bf16")]
    tight = [row for row in bf16 if row["real"] and 0.01 <= row["density"] <= 0.05]
    loose = [row for row in bf16 if row not in tight]
    at_3 = [row for row in rows if row["case"] == "bf16 3.00%"]
    usual = [row for row in bf16 if row["density"] <= 0.06]
    extra = [max(peak.values()) - result["memory"]["base"] for peak in result["memory"]["sizes"].values()]
    return [
        at_most("wire / entropy, real deltas of 1-5 %", [_excess(row) for row in tight], 1.05),
        at_most("wire / entropy, elsewhere in 0.02-10 %", [_excess(row) for row in loose], 1.12),
        at_least("encode / compare scan", [row["ours"]["encode"] / row["compare_scan"] for row in usual], 0.25),
        at_least("encode / fastest other", [_ratio(row, "encode") for row in usual], 4.0),
        at_least("apply at 3 %, GB/s", [row["ours"]["apply"] for row in at_3], 4.0),
        at_least("apply / fastest other, at 3 %", [_ratio(row, "apply") for row in at_3], 5.0),
        at_most("extra memory of publish and follow, MiB", [value / 2**20 for value in extra], 512.0),
    ]


def _excess(row: dict[str, Any]) -> float:
    return float(row["ours"]["wire"] / row["bound_difference"]) if row["bound_difference"] else 1.0


def _ratio(row: dict[str, Any], what: str) -> float:
    """Ours over the fastest other encoding; a full copy is no encoding."""
    fastest = max(other[what] for name, other in row["others"].items() if name != FULL_COPY)
    return float(row["ours"][what] / fastest)
