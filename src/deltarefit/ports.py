"""The three contracts: where bits come from (Source), where they go (Target), what carries them (Store).

Docstrings are the contract; ``deltarefit.testing.StoreContract`` is the suite that every store passes.
Elements are unsigned integers of 1, 2, 4 or 8 bytes throughout (design §5): no port knows a float.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from deltarefit.elements import Elements
from deltarefit.manifest import Catalog, Header


class Store(Protocol):
    """Immutable and create-once objects under ``/``-separated keys. Thread-safe.

    Raises ``NotFoundError`` for a missing key, ``AlreadyExistsError`` for a taken create-once key,
    ``StorageFullError`` on ENOSPC and ``UnavailableError`` for everything that a retry may cure.
    """

    @property
    def url(self) -> str:
        """Where it is, without any secret; for messages."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write the whole object, replacing any. Atomic and durable on return; may be called twice."""

    def create(self, key: str, data: bytes) -> None:
        """Write the object only if the key is free; exactly one of any number of racing callers wins.

        ``UnavailableError`` leaves the answer unknown, and ``AlreadyExistsError`` may be this caller's own
        success seen again after an internal retry: the caller reads back and compares its nonce (protocol §3.5).
        """

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """The object, or ``length`` bytes of it from ``start``. Visible as soon as ``put``/``create`` returned."""

    def size(self, key: str) -> int:
        """Its length in bytes."""

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """(key, size) of every object below ``prefix``, sorted by key. Only for tools, never for safety."""

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""


class Spool(Protocol):
    """Named byte strings that live exactly as long as a target's weights. Names are hex digits and dots."""

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Durable on return (as durable as the weights); replaces."""

    def get(self, name: str) -> bytes | None:
        """The bytes, or None."""

    def clear(self) -> None:
        """Remove all; called once the header is CLEAN."""


class Source(Protocol):
    """A trainer's side: canonical tensors by catalog index. Bits stay fixed while a publish reads them."""

    @property
    def catalog(self) -> Catalog:
        """All canonical tensors, parameters and buffers alike, tied ones once."""

    def files(self) -> Mapping[str, bytes]:
        """Small side files an anchor carries so that a seeded directory opens as it is (config, tokenizer)."""

    def read(self, tensor: int, start: int, stop: int) -> AbstractContextManager[Elements]:
        """Elements [start, stop) of one tensor in canonical order, shape (stop - start,); valid inside the block.
        Called from several threads."""


class Target(Protocol):
    """Live bits that are written in place, with a state header and a spool that share their fate.

    The receiver alone decides what is written; a target only gives access. Writing happens inside ``window``.
    """

    @property
    def catalog(self) -> Catalog | None:
        """Its canonical tensors, or None while it is empty (a directory not yet seeded)."""

    @property
    def spool(self) -> Spool:
        """Bytes that must survive as long as the weights do."""

    def read_header(self) -> Header | None:
        """The state header, or None if there is none."""

    def write_header(self, header: Header) -> None:
        """Durable (as durable as the weights) and atomic on return."""

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        """Make room for ``catalog`` (content undefined) and take the side files. Idempotent for one catalog.
        Called with a header that is not CLEAN already written. All space is claimed here: ``StorageFullError``
        now, not SIGBUS later. A target that has fixed tensors raises ``BaseMismatch`` unless they fit."""

    def finish_seed(self) -> None:
        """All bits are in and proven: put the seeded content where users look. Idempotent."""

    def window(self, tensor: int, start: int, stop: int) -> AbstractContextManager[tuple[Elements, int]]:
        """Writable access to elements [start, stop) of one tensor: an array of any strides, and the row-major
        index in that array at which element ``start`` lies (0 for an exact window; ``start`` where the whole,
        perhaps strided, tensor is given). Bounded memory: released when the block ends. Called from several
        threads on disjoint ranges."""

    def flush(self) -> None:
        """Every byte written so far is as durable as the header will be."""

    def pause(self) -> None:
        """Stop users of the weights; returns when none runs. Called before DIRTY; may be called twice."""

    def resume(self) -> None:
        """Let users run again; called after CLEAN, and after a failure that wrote nothing."""
