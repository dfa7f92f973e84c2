"""Write ``fuzz/seeds``: small valid deltas of every kind, in the input format of fuzz_decoder.cpp.

Run from the repository root: ``PYTHONPATH=src python -m fuzz.make_seeds``.
"""

from __future__ import annotations

from pathlib import Path

from tests.test_kernel import far_delta
from tests.test_kernel_malformed import DELTAS, Delta
from tests.test_kernel_pieces import far_piece

SEEDS = Path(__file__).parent / "seeds"


def narrow(delta: Delta) -> bytes:
    """One byte a column, three for the code."""
    record, slices = delta
    columns = [number.to_bytes(3 if column == 3 else 1, "little") for column, number in enumerate(record)]
    return b"".join([b"\x00", *columns, *slices])


def wide(delta: Delta) -> bytes:
    """Eight bytes a column."""
    record, slices = delta
    return b"".join([b"\x01", *(number.to_bytes(8, "little") for number in record), *slices])


def main() -> None:
    SEEDS.mkdir(exist_ok=True)
    for number, delta in enumerate(DELTAS[::2]):
        (SEEDS / f"small-{number:02}.bin").write_bytes(narrow(delta))
    for kind in (0, 1):
        (SEEDS / f"far-{kind}.bin").write_bytes(wide(far_delta(kind)[:2]))
    (SEEDS / "far-piece.bin").write_bytes(wide(far_piece()))


if __name__ == "__main__":
    main()
