"""Additive two-lane digests: keys per tensor, sums over arrays (docs/format.md §5; protocol §3.4).

A digest is a sum over positions, so tensors, payloads, shards and ranks add up to the digest of the whole model in any
order, and a delta moves it by (post - pre) without a look at the rest.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from deltarefit import _kernel
from deltarefit.elements import Elements
from deltarefit.manifest import Catalog
from deltarefit.records import Digest


def tensor_key(run: str, name: str) -> int:
    """The 64-bit digest key of one tensor of one run."""
    text = b"deltarefit-digest/1\0" + run.encode() + b"\0" + name.encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


@lru_cache(maxsize=16)
def catalog_keys(run: str, catalog: Catalog) -> tuple[int, ...]:
    """``tensor_key`` of every catalog entry, by index."""
    return tuple(tensor_key(run, entry.name) for entry in catalog.tensors)


def array_digest(array: Elements, start: int, key: int) -> Digest:
    """Digest of all elements of ``array``, whose element 0 is position ``start`` of a tensor with this key."""
    return Digest(*_kernel.digest(array, start, key))
