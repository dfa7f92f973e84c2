"""A whole model's bits in memory as a target: a copy of a version that lives as long as the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch, NotFoundError, StorageFullError
from deltarefit.manifest import Catalog, Header
from deltarefit.ports import Spool


class MemorySpool:
    """``ports.Spool`` in memory: lives exactly as long as weights that live in this process."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._entries[name] = bytes(data)

    def get(self, name: str) -> bytes | None:
        return self._entries.get(name)

    def clear(self) -> None:
        self._entries.clear()


class MemoryBaseline:
    """``ports.Target`` in memory.

    ``spool`` is where staged payloads and values go, about twice the changed bytes. One that keeps nothing bounds
    memory and costs a load from the newest anchor when an exception comes in the middle of a write.
    """

    def __init__(self, spool: Spool | None = None) -> None:
        self._catalog: Catalog | None = None
        self._arrays: list[Elements] = []
        self._header: Header | None = None
        self._spool = spool if spool is not None else MemorySpool()

    @property
    def catalog(self) -> Catalog | None:
        return self._catalog

    @property
    def spool(self) -> Spool:
        return self._spool

    def read_header(self) -> Header | None:
        return self._header

    def write_header(self, header: Header) -> None:
        self._header = header

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        if self._catalog is not None:
            if self._catalog != catalog:
                raise BaseMismatch("a baseline holds another catalog", next_step="Make a new MemoryBaseline.")
            return
        try:
            self._arrays = [np.zeros(entry.numel, f"<u{entry.width}") for entry in catalog.tensors]
        except MemoryError as error:
            raise StorageFullError("no memory for the baseline", expected=f"{catalog.dense_bytes} bytes") from error
        self._catalog = catalog

    def finish_seed(self) -> None:
        """Nothing to show to anyone."""

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        if self._catalog is None:
            raise NotFoundError("the baseline is empty", next_step="Seed it first.")
        yield self._arrays[tensor][start:stop], 0

    def flush(self) -> None:
        """Memory is as durable as this header."""

    def pause(self) -> None:
        """Nobody runs on a baseline."""

    def resume(self) -> None:
        """Nobody runs on a baseline."""
