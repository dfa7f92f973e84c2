"""Which of several ranks that hold the same elements publishes them: every rank comes to the same answer alone.

Large tensors are cut by rows, so that diffing scales with all ranks; small ones go whole to one rank, chosen by a
stable hash of the name, so that they spread.
"""

from __future__ import annotations

import hashlib
import math

from deltarefit.affine import AffineMap, restrict

SPLIT_BYTES = 1 << 20
"""Local tensors below this size have one owner."""


def owned_range(name: str, shape: tuple[int, ...], width: int, replica: int, replicas: int) -> tuple[int, int]:
    """[start, stop) of the row-major local elements that replica number ``replica`` of ``replicas`` owns.

    ``shape`` is that of the local tensor, ``width`` the bytes of an element. Rows are those of the first dimension
    that has one for each replica; without such a dimension single elements are dealt out.
    """
    numel = math.prod(shape)
    if numel * width < SPLIT_BYTES:
        return (0, numel) if _hash(name) % replicas == replica else (0, 0)
    row = numel
    for size in shape:
        row //= size
        if numel // row >= replicas:
            break
    rows = numel // row
    start, stop = rows * replica // replicas, rows * (replica + 1) // replicas
    return start * row, stop * row


def owned(part: AffineMap, name: str, width: int, replica: int, replicas: int) -> AffineMap:
    """The part of a local tensor's map that this replica publishes."""
    start, stop = owned_range(name, tuple(part.shape), width, replica, replicas)
    return restrict(part, start, stop)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
