"""Writes the golden vectors: ``python -m tests.golden.make``. Only a change to docs/format.md may change them.

The payload's deltas come from the oracle, not from the kernel; records are literal values here; digests and keys are
the oracle's. Compressed bytes may differ between versions of zstd, so a payload is fixed for reading only.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deltarefit import codec
from deltarefit.codec import PayloadBuilder
from deltarefit.digest import tensor_key
from deltarefit.manifest import (
    Anchor,
    Batch,
    Catalog,
    Decision,
    FileRef,
    Header,
    Held,
    Hint,
    Intent,
    Member,
    Mode,
    Outcome,
    PayloadRef,
    ProducerManifest,
    Run,
    State,
    TensorEntry,
    Vote,
)
from deltarefit.records import Digest, Record
from deltarefit.tree import Tree, TreeRelay
from tests import oracle

HERE = Path(__file__).parent
RUN = "00112233445566778899aabbccddeeff"
SHA = "5a" * 32
FLAT = oracle.FLAT
GAPS, RUNS, ALL = oracle.GAPS, oracle.RUNS, oracle.ALL
XOR, ADD, SET = oracle.XOR, oracle.ADD, oracle.SET

CATALOG = Catalog(
    (
        TensorEntry("block.0.weight", "BF16", (20, 30), ("tied.weight",)),
        TensorEntry("block.1.weight", "F32", (40,)),
        TensorEntry("block.2.mask", "BOOL", (64,)),
        TensorEntry("block.3.steps", "I64", (5,)),
        TensorEntry("block.4.empty", "F16", (0, 3)),
        TensorEntry("block.5.scale", "F8_E4M3", ()),
        TensorEntry("block.6.weight", "BF16", (2000,)),
        TensorEntry("block.7.columns", "BF16", (12, 20)),
        TensorEntry("block.8.halves", "U8", (60,)),
        TensorEntry("block.9.grid", "F32", (4, 5, 6)),
    )
)


def bits(tensor: int, width: int, size: int) -> Any:
    """Known arrays, by a rule that needs no generator of random numbers: a multiplicative sequence."""
    values = [(i * i + 7 * tensor + 3) * 0x9E3779B97F4A7C15 >> 20 for i in range(1, size + 1)]
    return np.array([value % (1 << 8 * width) for value in values], f"<u{width}")


def old_arrays() -> list[Any]:
    return [bits(number, entry.width, entry.numel) for number, entry in enumerate(CATALOG.tensors)]


def new_arrays() -> list[Any]:
    """Single changes near and far, runs, everything, differences of one and of thousands, both signs; in pieces."""
    new = [array.copy() for array in old_arrays()]
    new[0][[0, 1, 5, 290, 599]] ^= np.array([1, 0x8000, 0xFFFF, 0x0100, 2], "u2")
    new[1][10:25] ^= np.uint32(0xDEADBEEF)
    new[1][30:31] ^= np.uint32(1)
    new[2][:] ^= np.uint8(1)
    new[3][[0, 4]] = [2**64 - 1, 0]
    new[5][:] ^= np.uint8(0x80)
    new[7][[0, 6, 7, 8, 19, 20, 31, 239]] ^= np.array([1, 2, 4, 8, 16, 32, 0x8000, 0xFFFF], "u2")
    new[8][[0, 1, 2, 31, 56, 59]] ^= np.array([255, 1, 2, 3, 4, 128], "u1")
    new[9][[1, 33, 63, 36]] += np.array([1, 2**32 - 1, 70000, 2], "u4")
    new[6][[3, 4, 700, 701, 1400, 1999]] += np.array([1, 65535, 2, 65534, 5000, 32768], "u2")
    return new


CHOICES: list[tuple[int, int, int, oracle.Rows, dict[str, int]]] = [
    (0, 0, 300, FLAT, {"kind": GAPS, "gap_planes": 1, "operation": XOR}),
    (0, 300, 600, FLAT, {"kind": GAPS, "gap_planes": 2, "operation": SET}),
    (1, 0, 40, FLAT, {"kind": RUNS, "gap_planes": 1, "run_planes": 2, "operation": XOR}),
    (2, 0, 64, FLAT, {"kind": ALL, "operation": ADD}),
    (3, 0, 5, FLAT, {"kind": GAPS, "gap_planes": 1, "operation": ADD, "value_planes": 6}),
    (5, 0, 1, FLAT, {"kind": ALL, "operation": SET}),
    (6, 0, 2000, FLAT, {"kind": GAPS, "gap_planes": 2, "operation": ADD, "packing": oracle.TWO_BIT}),
    (7, 0, 50, (0, 8, 1, 20), {"kind": GAPS, "gap_planes": 1, "operation": XOR}),
    (7, 50, 96, (0, 8, 1, 20), {"kind": ALL, "operation": SET}),
    (7, 0, 144, (8, 12, 1, 20), {"kind": RUNS, "gap_planes": 1, "run_planes": 1, "operation": ADD}),
    (8, 0, 30, (0, 1, 1, 2), {"kind": GAPS, "gap_planes": 1, "operation": XOR}),
    (8, 0, 30, (1, 1, 1, 2), {"kind": GAPS, "gap_planes": 1, "operation": ADD, "packing": oracle.TWO_BIT}),
    (9, 0, 9, (1, 3, 2, 30), {"kind": GAPS, "gap_planes": 1, "operation": ADD}),
    (9, 1, 4, (6, 2, 1, 30), {"kind": ALL, "operation": XOR}),
]
"""(tensor, start, stop, rows, how it is encoded): flat ranges, two column shards, two interleaved halves, parts of two
grids whose rows interleave."""


def payload() -> tuple[bytes, PayloadRef]:
    builder, old, new = PayloadBuilder(), old_arrays(), new_arrays()
    for tensor, start, stop, rows, choice in CHOICES:
        key = tensor_key(RUN, CATALOG.tensors[tensor].name)
        places = [oracle.position(rows, p) for p in range(start, stop)]
        made = oracle.encode(old[tensor][places], new[tensor][places], start, key, **choice, rows=rows)
        encoded = codec._encoded(tensor, made)
        assert encoded is not None
        builder.add(encoded)
    return builder.build()


REF = PayloadRef(SHA, 123, {"gap1.0": 7, "table": 112, "two": 2}, 1, 7, 3, 6, Digest(1, 2**63), Digest(2**64 - 1, 0))
RECORDS: dict[str, Record] = {
    "catalog": CATALOG,
    "run": Run(RUN, CATALOG.identity),
    "intent": Intent(RUN, 12, 9, Digest(3, 4), Mode.STAGE, "ab" * 16),
    "manifest": ProducerManifest(RUN, 12, 9, 0, 4096, Digest(7, 8), SHA, (REF,)),
    "manifest without changes": ProducerManifest(RUN, 12, 9, 1, 4096, Digest(0, 9), "a5" * 32, ()),
    "commit": Outcome(RUN, 12, Decision.COMMIT, 9, Digest(5, 6), (SHA,), 1, "ab" * 16),
    "intent of two": Intent(RUN, 12, 9, Digest(3, 4), Mode.STAGE, "ab" * 16, 2),
    "commit of two": Outcome(RUN, 12, Decision.COMMIT, 9, Digest(7, 17), (SHA, "a5" * 32), 1, "ab" * 16),
    "abort": Outcome(RUN, 12, Decision.ABORT, 9, Digest(), (), 0, "cd" * 16, "no space left: é\n\u2028"),
    "anchor": Anchor(RUN, 12, Digest(5, 6), (REF,), (FileRef("config.json", SHA, 99),)),
    "intent of a stream": Intent(RUN, 12, 9, Digest(3, 4), Mode.STREAM, "ab" * 16),
    "batch": Batch(RUN, 12, 0, 3, (REF, replace(REF, overwrites=True)), False, "ab" * 16),
    "end of a list": Batch(RUN, 12, 0, 4, (), True, "cd" * 16),
    "vote": Vote(RUN, 12, "node-7", "0123456789abcdef", Held.APPLIED, (SHA,)),
    "refusal": Vote(RUN, 12, "node-8", "0123456789abcdef", Held.REFUSED, (SHA,), "no space left"),
    "member": Member(RUN, "node-7", "0123456789abcdef", 41, 9),
    "commit with votes": Outcome(
        RUN, 12, Decision.COMMIT, 9, Digest(5, 6), (SHA,), 1, "ab" * 16, "", ("node-7",), ("node-8",)
    ),
    "hint": Hint(12, 1),
    "tree": Tree(
        RUN,
        3,
        2,
        ("s3://bucket/run7", "https://mirror.example:8470"),
        (
            TreeRelay("site-a", "https://10.0.0.1:8470"),
            TreeRelay("site-b", "https://[2001:db8::1]:9000"),
            TreeRelay("rack_1", "http://rack1.site-a.example:8470"),
        ),
    ),
    "header": Header(RUN, SHA, State.DIRTY, 9, 12, Digest(3, 4), 0, "0123456789abcdef"),
}


def vectors() -> dict[str, Any]:
    old, new = old_arrays(), new_arrays()
    names = [entry.name for entry in CATALOG.tensors]
    keys = {name: tensor_key(RUN, name) for name in names}
    digests = {name: str(Digest(*oracle.digest(array, 0, keys[name]))) for name, array in zip(names, old, strict=True)}
    return {
        "records": {name: record.to_bytes().decode() for name, record in RECORDS.items()},
        "keys": {name: f"{key:016x}" for name, key in keys.items()},
        "digests": digests,
        "old": {name: array.tobytes().hex() for name, array in zip(names, old, strict=True)},
        "new": {name: array.tobytes().hex() for name, array in zip(names, new, strict=True)},
    }


def main() -> None:
    data, ref = payload()
    (HERE / "payload.bin").write_bytes(data)
    manifest = ProducerManifest(RUN, 2, 1, 0, 1, Digest(), SHA, (ref,))
    (HERE / "payload.manifest").write_bytes(manifest.to_bytes())
    (HERE / "vectors.json").write_text(json.dumps(vectors(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
