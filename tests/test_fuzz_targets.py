"""The fuzz targets themselves (``fuzz/targets.py``), without a fuzzer: on their seeds, on random changes of these, and
on parsers that are broken on purpose, which a target must notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fuzz.feed import Feed
from fuzz.targets import KINDS, TARGETS

from deltarefit import codec, composition, manifest, records, safetensors_layout
from deltarefit.errors import FormatError
from deltarefit.targets import agent_client

RUNS = 400


def mutated(name: str, seed: int, runs: int = RUNS) -> list[bytes]:
    """Seeds, and seeds with some bytes exchanged."""
    rng, seeds = np.random.default_rng(seed), TARGETS[name][1]()
    made = []
    for number in range(runs):
        data = bytearray(seeds[number % len(seeds)])
        for at in rng.integers(0, len(data), int(rng.integers(0, 6))):
            data[at] = rng.integers(256)
        made.append(bytes(data) + rng.bytes(int(rng.integers(0, 40))))
    return seeds + made


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_passes(name: str) -> None:
    for data in [b"", *mutated(name, 1)]:
        TARGETS[name][0](data)


def test_every_record_class_is_fuzzed() -> None:
    names = {kind.__name__ for kind in KINDS}
    assert {"Run", "Catalog", "Intent", "ProducerManifest", "Outcome", "Anchor", "Header", "Hint"} <= names
    assert {"Batch", "Vote", "Member", "DirectoryLayout"} & names


def noticed(name: str) -> bool:
    for data in mutated(name, 2, 4000):
        try:
            TARGETS[name][0](data)
        except Exception:
            return True
    return False


def broken_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(codec, "_check_table", lambda deltas, ref, catalog, where: None)


def broken_record(patch: pytest.MonkeyPatch) -> None:
    def read(cls: Any, body: Any, where: str) -> Any:
        return cls(**{name: records._read(records._hints(cls)[name], value, where) for name, value in body.items()})

    patch.setattr(records, "_read_record", read)


def broken_header(patch: pytest.MonkeyPatch) -> None:
    def stored(name: str, info: Any, where: str) -> Any:
        entry = manifest.TensorEntry(name, info["dtype"], tuple(info["shape"]))
        return (*info["data_offsets"], entry)

    patch.setattr(safetensors_layout, "_stored", stored)


def broken_decompression(patch: pytest.MonkeyPatch) -> None:
    def decompress(tensor: Any, size: int, where: str) -> bytes:
        import zstandard

        return zstandard.ZstdDecompressor().decompress(bytes(tensor["data"]), max_output_size=1 << 20)

    patch.setattr(codec, "_decompress", decompress)


def broken_reply(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent_client.AgentClient, "_read", lambda self, found, parse: parse(found))


def broken_composition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(composition, "_joined", lambda first, touched, second, base: (second.operations, second.values))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("streams", broken_table),
        ("record", broken_record),
        ("layout", broken_header),
        ("payload", broken_decompression),
        ("agent", broken_reply),
        ("compose", broken_composition),
    ],
)
def test_a_broken_parser_is_noticed(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert noticed(name), f"{name} did not notice {broken.__name__}"


def test_decisions_end_with_the_bytes() -> None:
    feed = Feed(b"\x05")
    assert (feed.below(4), feed.below(4), feed.integer(), feed.rest()) == (1, 0, 0, b"")
    assert Feed(b"\x03" + bytes(9)).edited({"a": [1, {"b": 2}]})
    assert FormatError.exit_code == 4
