"""How the ranks of one trainer talk: not at all (one rank), or through the run's store.

Trainers with ``torch.distributed`` use its key-value store instead (``sources.process_group``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from deltarefit.errors import NotFoundError
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece, whole
from deltarefit.ports import Exchange, Store


class Alone:
    """``ports.Exchange`` of a single rank."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._said: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self._said[key] = data

    def get(self, key: str) -> bytes | None:
        return self._said.get(key)

    def delete(self, key: str) -> None:
        self._said.pop(key, None)


class StoreExchange:
    """``ports.Exchange`` in a store, below ``x/<session>/``.

    ``session`` is a name that all ranks share and that no earlier start of the trainer used (a job id with its restart
    count): an old session's messages would be taken for this one's.
    """

    def __init__(self, store: Store, session: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._prefix = store, f"x/{session}/"

    def put(self, key: str, data: bytes) -> None:
        self._store.put(self._prefix + key, data)

    def get(self, key: str) -> bytes | None:
        try:
            return self._store.get(self._prefix + key)
        except NotFoundError:
            return None

    def delete(self, key: str) -> None:
        self._store.delete(self._prefix + key)


class WholeTensors:
    """What all sources of a single rank share: each tensor of ``catalog`` is one piece. Nothing guards the bits."""

    @property
    def catalog(self) -> Catalog:
        """Given by the source itself."""
        raise NotImplementedError

    @property
    def exchange(self) -> Exchange:
        """There is nobody to talk to."""
        return Alone()

    @property
    def pieces(self) -> Sequence[Piece]:
        """One per tensor, with the tensor's index."""
        return [whole(number, entry.numel) for number, entry in enumerate(self.catalog.tensors)]

    def hold(self) -> AbstractContextManager[None]:
        """Whoever writes to the bits while they are read is not noticed here."""
        return nullcontext()
