"""A trainer of several ranks in one process: threads, a shared message board, and a model cut into pieces at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np

from deltarefit import Published, Publisher
from deltarefit.elements import Elements
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece
from deltarefit.ports import Exchange, Store
from tests import helpers as h

T = TypeVar("T")
WAIT_S = 60.0


class Board:
    """What the ranks of one trainer have said."""

    def __init__(self, size: int) -> None:
        self.said: dict[str, bytes] = {}
        self.ranks = [BoardExchange(self, rank, size) for rank in range(size)]


class BoardExchange:
    """``ports.Exchange`` of one rank on a board."""

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self.rank, self.size, self._board = rank, size, board

    def put(self, key: str, data: bytes) -> None:
        self._board.said[key] = bytes(data)

    def get(self, key: str) -> bytes | None:
        return self._board.said.get(key)

    def delete(self, key: str) -> None:
        self._board.said.pop(key, None)


class Forwarding:
    """A store over another, for tests that replace a method."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class PieceSource:
    """``ports.Source`` of some pieces of a model in NumPy arrays, which the test changes in place."""

    def __init__(self, model: h.Model, catalog: Catalog, pieces: Sequence[Piece], exchange: Exchange) -> None:
        self.model, self.catalog, self.pieces, self.exchange = model, catalog, sorted(pieces), exchange
        self.on_hold: Callable[[], AbstractContextManager[None]] = nullcontext

    def files(self) -> dict[str, bytes]:
        return dict(h.FILES)

    def hold(self) -> AbstractContextManager[None]:
        return self.on_hold()

    @contextmanager
    def read(self, piece: int, start: int, stop: int) -> Iterator[Elements]:
        there = self.pieces[piece]
        flat = self.model[self.catalog.tensors[there.tensor].name].reshape(-1)
        yield flat[positions(there)[start:stop]]


def positions(piece: Piece) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Canonical positions of a piece, in its order, by its definition."""
    p, run = np.arange(piece.length), max(piece.run, 1)
    return piece.offset + p // run * piece.pitch + p % run * piece.step


def cut(rng: np.random.Generator, catalog: Catalog, ranks: int) -> list[list[Piece]]:
    """Pieces of every tensor dealt to ranks: whole, rows, columns, every other element, or nothing for some."""
    dealt: list[list[Piece]] = [[] for _ in range(ranks)]
    for tensor, entry in enumerate(catalog.tensors):
        for number, piece in enumerate(_pieces(rng, tensor, entry.shape, entry.numel)):
            dealt[(number + int(rng.integers(ranks))) % ranks].append(piece)
    return [sorted(pieces) for pieces in dealt]


def _pieces(rng: np.random.Generator, tensor: int, shape: tuple[int, ...], numel: int) -> list[Piece]:
    kind = str(rng.choice(["whole", "range", "columns", "comb"]))
    if numel < 4 or kind == "whole":
        return [Piece(tensor, 0, numel, numel)] if numel else []
    if kind == "range":
        at = int(rng.integers(1, numel))
        return [Piece(tensor, 0, at, at), Piece(tensor, at, numel - at, numel - at)]
    width = shape[-1]
    if kind == "columns" and len(shape) > 1 and width > 1 and numel > width:
        at, rows = int(rng.integers(1, width)), numel // width
        return [Piece(tensor, 0, rows * at, at, 1, width), Piece(tensor, at, rows * (width - at), width - at, 1, width)]
    odd = numel // 2
    return [Piece(tensor, 0, numel - odd, numel - odd, 2), Piece(tensor, 1, odd, odd, 2)]


class Trainer:
    """All ranks of one trainer over one model. ``each`` runs something on every rank at once, on threads."""

    def __init__(
        self, store: Store, model: h.Model, catalog: Catalog, dealt: Sequence[Sequence[Piece]], **options: Any
    ) -> None:
        self.board = Board(len(dealt))
        self.sources = [
            PieceSource(model, catalog, pieces, exchange)
            for pieces, exchange in zip(dealt, self.board.ranks, strict=True)
        ]
        options = {"threads": 1, "deadline_s": 20.0, **options}
        baselines = options.pop("baselines", [None] * len(dealt))
        stores = options.pop("stores", [store] * len(dealt))
        made = self.each(lambda rank: Publisher(stores[rank], self.sources[rank], baseline=baselines[rank], **options))
        self.publishers: list[Publisher] = made

    def each(self, work: Callable[[int], T]) -> list[T]:
        """Results by rank; the first rank's error is raised after all ended."""
        return [result for result in self.outcomes(work) if not _raise(result)]  # type: ignore[misc]

    def outcomes(self, work: Callable[[int], T]) -> list[T | Exception]:
        """Results or errors by rank; every rank must end within ``WAIT_S``."""

        def one(rank: int) -> T | Exception:
            try:
                return work(rank)
            except Exception as error:
                return error

        pool = ThreadPoolExecutor(len(self.sources))
        futures = [pool.submit(one, rank) for rank in range(len(self.sources))]
        try:
            return [future.result(WAIT_S) for future in futures]
        finally:
            pool.shutdown(wait=False)

    def publish(self, step: int = 0) -> list[Published]:
        return self.each(lambda rank: self.publishers[rank].publish(step))

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def _raise(result: object) -> bool:
    if isinstance(result, Exception):
        raise result
    return False


__all__ = ["Board", "PieceSource", "Trainer", "cut", "positions"]
