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
from deltarefit.notary import at_most
from deltarefit.pieces import Piece
from deltarefit.protocol import messages as m
from deltarefit.protocol.attempts import Attempt, payloads_of
from deltarefit.publishing.creating import create_record
from deltarefit.publishing.foreign import indices_of
from deltarefit.runlog import RunLog, payload_prefix

Index = npt.NDArray[np.int64]


class Touched:
    """Elements of one producer's pieces, by piece: one bit each, whatever the number of failures."""

    def __init__(self) -> None:
        self._bits: dict[int, npt.NDArray[np.uint8]] = {}

    def add(self, piece: int, length: int, index: Index) -> None:
        """Ascending elements ``index`` of a piece of ``length``."""
        bits = self._bits.setdefault(piece, np.zeros(-(-length // 8), np.uint8))
        for bit in range(8):  # of one bit no byte is met twice
            bits[index[index & 7 == bit] >> 3] |= np.uint8(1 << bit)

    def add_all(self, piece: int, length: int) -> None:
        """Every element of a piece."""
        self._bits[piece] = np.full(-(-length // 8), 0xFF, np.uint8)

    def within(self, piece: int, start: int, stop: int) -> Index:
        """Those of elements [start, stop) of a piece, ascending, counted from ``start``."""
        bits = self._bits.get(piece)
        if bits is None:
            return np.empty(0, np.int64)
        first = start // 8 * 8
        some = np.unpackbits(bits[first // 8 : -(-stop // 8)], bitorder="little")
        return np.flatnonzero(some[start - first : stop - first])


def touched_since(
    log: RunLog, base: int, number: int, pieces: Sequence[Piece], watch: Callable[[], None] = lambda: None
) -> Touched:
    """What streams between version ``base`` and attempt ``number`` have announced of ``pieces``. Their lists must be
    ended (``UnavailableError``). A payload that cannot be read may hold anything of the tensors it is about.
    ``watch`` is called again and again meanwhile, and may raise."""
    touched = Touched()
    for earlier in range(base + 1, number):
        watch()
        attempt = log.attempt(earlier)
        if attempt.intent is None:  # it was there: a store that has not caught up says nothing (F13)
            raise UnavailableError(f"attempt {earlier} is not visible any more", next_step="Publish again.")
        if attempt.streams:
            for ref in _announced(attempt):
                watch()
                _add(log, earlier, ref, pieces, touched)
    return touched


def _announced(attempt: Attempt) -> Iterable[PayloadRef]:
    if not attempt.ended:
        raise UnavailableError(f"attempt {attempt.number} is not at its end", next_step="Publish again.")
    return (ref for listed in attempt.batches for ref in payloads_of(listed))


def _add(log: RunLog, number: int, ref: PayloadRef, pieces: Sequence[Piece], touched: Touched) -> None:
    concerned = [(k, one) for k, one in enumerate(pieces) if one.length and ref.first <= one.tensor <= ref.last]
    deltas = _opened(log, payload_prefix(number) + ref.sha256, ref) if concerned else []
    for k, piece in concerned:
        if deltas is None:
            touched.add_all(k, piece.length)
            continue
        for delta in deltas:
            if delta.tensor == piece.tensor and (index := indices_of(piece, delta)).size:
                touched.add(k, piece.length, index)


def _opened(log: RunLog, key: str, ref: PayloadRef) -> list[Delta] | None:
    """Not waited for: it was in the store before it was announced, and what is not seen counts as everything."""
    try:
        return open_payload(at_most(log.store, key, ref.size), ref, log.catalog)
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
