"""The ranks of a ``torch.distributed`` job talk through its key-value store. Never a collective: nobody can hang.

The store is a small server in the rank that started the job (``TCPStore``, or ``torchrun``'s own), apart from the
process groups that move tensors: messages pass while those are busy, and a dead rank blocks no other.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from deltarefit.errors import UnavailableError, UsageError
from deltarefit.exchange import Alone
from deltarefit.ports import Exchange

_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_TIMEOUT = timedelta(seconds=30)


class TorchExchange:
    """``ports.Exchange`` in a c10d store, under a prefix of its own.

    Exchanges of one ``name`` are numbered, so all their ranks make the same ones in the same order; ranks that publish
    apart from each other have names of their own. Publishers tell their meetings apart, so a store that outlives a
    restart of the job does no harm. ``store`` None: the default store of ``torch.distributed``, which must be
    initialised. A store that does not answer within 30 seconds is an ``UnavailableError``.
    """

    def __init__(self, store: Store | None, rank: int, size: int, name: str = "all") -> None:
        if not 0 <= rank < size:
            raise UsageError("no such rank", expected=f"0 <= rank < {size}", found=rank)
        self.rank, self.size = rank, size
        given = _default_store() if store is None else store
        self._store = PrefixStore(f"deltarefit/{name}/{next(_numbers[name])}", _connected(given))

    def put(self, key: str, data: bytes) -> None:
        with _answers(f"cannot say {key}"):
            self._store.set(key, data)  # type: ignore[arg-type] # takes bytes as they are

    def get(self, key: str) -> bytes | None:
        """What was said. A key that is deleted between the two questions reads as empty bytes: nobody says those."""
        with _answers(f"cannot hear {key}"):
            return (bytes(self._store.get(key)) or None) if self._store.check([key]) else None

    def delete(self, key: str) -> None:
        with _answers(f"cannot forget {key}"):
            self._store.delete_key(key)


class _answers:  # noqa: N801 - reads as a phrase
    """Turns what a store raises into ``UnavailableError``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | OSError | ValueError):
            raise UnavailableError(
                f"the key-value store of torch.distributed does not answer ({self._what}: {error})",
                next_step="The process that serves it (rank 0's host) may have ended: restart all ranks.",
            ) from error


def default_exchange() -> Exchange:
    """All ranks of ``torch.distributed``, or one rank alone where it is not initialised.

    ``UsageError`` if it is not, but the launcher said (``WORLD_SIZE``) that there are more: each would take itself for
    the only one, and all would publish into one run.
    """
    if not dist.is_available() or not dist.is_initialized():
        _refuse_many(os.environ.get("WORLD_SIZE", ""))
        return Alone()
    if dist.get_world_size() == 1:
        return Alone()
    return TorchExchange(None, dist.get_rank(), dist.get_world_size())


def _refuse_many(told: str) -> None:
    if told.strip().isdecimal() and int(told) > 1:
        raise UsageError(
            "torch.distributed is not initialised",
            expected=f"an initialised process group, since WORLD_SIZE is {int(told)}",
            found="none",
            next_step="Call torch.distributed.init_process_group before making the source, or pass exchange=.",
        )


def _connected(store: Store) -> Store:
    """A connection of its own, where torch can give one: a wait elsewhere must not hold up messages, and its timeout
    must not change."""
    if not hasattr(store, "clone"):
        return store
    own: Store = store.clone()
    own.set_timeout(_TIMEOUT)
    return own


def _default_store() -> Store:
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised",
            next_step="Call init_process_group first, or give a store.",
        )
    return dist.distributed_c10d._get_default_store()
