"""The union rule (protocol §3.2): what attempts that failed since the base may have written into receivers.

In mode stream receivers write before anything is decided. Whatever the next attempt publishes, it must set every
element that an aborted one has announced, also those whose bits are the base's again: some receiver may still hold
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from deltarefit.codec import Delta, open_payload
from deltarefit.errors import IntegrityError, NotFoundError, UnavailableError
from deltarefit.manifest import Batch, PayloadRef
from deltarefit.pieces import Piece
from deltarefit.protocol import messages as m
from deltarefit.protocol.attempts import Attempt, payloads_of
from deltarefit.publishing.creating import create_record
from deltarefit.publishing.foreign import indices_of
from deltarefit.runlog import RunLog, payload_prefix

Index = npt.NDArray[np.int64]
_NOTHING: Index = np.empty(0, np.int64)


class Touched:
    """Elements of one producer's pieces, by piece."""

    def __init__(self, found: dict[int, list[Index]] | None = None) -> None:
        self._of = {number: np.unique(np.concatenate(parts)) for number, parts in (found or {}).items() if parts}

    def __bool__(self) -> bool:
        return bool(self._of)

    def within(self, piece: int, start: int, stop: int) -> Index:
        """Those of elements [start, stop) of a piece, ascending, counted from ``start``."""
        index = self._of.get(piece, _NOTHING)
        low, high = np.searchsorted(index, (start, stop))
        return index[low:high] - start


def touched_since(
    log: RunLog, base: int, number: int, pieces: Sequence[Piece], watch: Callable[[], None] = lambda: None
) -> Touched:
    """What streams between version ``base`` and attempt ``number`` have announced of ``pieces``. Their lists must be
    ended (``UnavailableError``). A payload that cannot be read may hold anything of the tensors it is about.
    ``watch`` is called again and again meanwhile, and may raise."""
    found: dict[int, list[Index]] = {}
    for earlier in range(base + 1, number):
        watch()
        attempt = log.attempt(earlier)
        if attempt.intent is None:  # it was there: a store that has not caught up says nothing (F13)
            raise UnavailableError(f"attempt {earlier} is not visible any more", next_step="Publish again.")
        if attempt.streams:
            for ref in _announced(attempt):
                watch()
                _add(log, earlier, ref, pieces, found)
    return Touched(found)


def _announced(attempt: Attempt) -> Iterable[PayloadRef]:
    if not attempt.ended:
        raise UnavailableError(f"attempt {attempt.number} is not at its end", next_step="Publish again.")
    return (ref for listed in attempt.batches for ref in payloads_of(listed))


def _add(log: RunLog, number: int, ref: PayloadRef, pieces: Sequence[Piece], found: dict[int, list[Index]]) -> None:
    deltas = _opened(log, payload_prefix(number) + ref.sha256, ref)
    for piece_number, piece in enumerate(pieces):
        if not piece.length or not ref.first <= piece.tensor <= ref.last:
            continue
        if deltas is None:
            found.setdefault(piece_number, []).append(np.arange(piece.length))
        else:
            parts = [indices_of(piece, delta) for delta in deltas if delta.tensor == piece.tensor]
            found.setdefault(piece_number, []).extend(part for part in parts if part.size)


def _opened(log: RunLog, key: str, ref: PayloadRef) -> list[Delta] | None:
    try:
        return log.fetch(key, lambda data: open_payload(data, ref, log.catalog), most=ref.size)
    except (IntegrityError, NotFoundError):
        return None


def end_lists(log: RunLog, number: int, nonce: str) -> None:
    """See to it that nothing more is announced in attempt ``number``, which is aborted: a producer that is still at it
    finds its place taken."""
    attempt = log.attempt(number)
    intent = attempt.intent
    for producer in range(intent.producers if intent else 0):
        known = list(attempt.batches[producer])
        while not (known and known[-1].end):
            last = Batch(log.run, number, producer, len(known), (), True, nonce)
            if isinstance(create_record(log, number, f"b/{producer}/{len(known)}", last), m.Created):
                break
            log.batches(number, producer, known)
