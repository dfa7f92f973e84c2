"""Before the first publish: do the ranks of this trainer own every element of one catalog exactly once?

Refused before anything is written, on every rank, with what rank 0 found.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from deltarefit import runtime
from deltarefit.affine import check_coverage
from deltarefit.catalogs import first_difference
from deltarefit.errors import BaseMismatch, NotFoundError, UsageError
from deltarefit.manifest import Catalog
from deltarefit.notary import Notary, check_signer, signer_of
from deltarefit.pieces import Piece
from deltarefit.ports import Source, Store
from deltarefit.publishing.trainers import Trainers
from deltarefit.records import MAX_RECORD_BYTES
from deltarefit.runlog import LATE_VISIBILITY_S, RUN, UNSIGNED, RunLog

_COLUMNS = 7
_HEAD = struct.Struct("<64sQ")
"""A hello begins with the catalog's identity and the length of the packed catalog that follows; then the pieces."""


def meet(store: Store, source: Source, trainers: Trainers, notary: Notary = UNSIGNED) -> RunLog:
    """The run in ``store``, created if there is none, once rank 0 has judged what all ranks own. Raises ``UsageError``
    for elements with two owners or none, and if only one of run and rank signs, ``BaseMismatch`` for ranks with
    different catalogs or a run of another model.
    """

    def judge(hellos: list[bytes]) -> str:
        check_coverage(source.catalog, [_pieces_of(rank, hello, source) for rank, hello in enumerate(hellos)])
        return RunLog.open_or_create(store, source.catalog, notary).run

    run = trainers.meet(_hello(source), judge)
    log = _opened(store, notary)
    if log is None or log.run != run:
        raise BaseMismatch(
            f"rank {trainers.rank} sees another store than rank 0",
            expected=f"run {run}",
            found=f"{f'run {log.run}' if log else 'no run'} at {store.url}",
            next_step="Give every rank the same store, one that all of them can reach.",
        )
    check_signer(notary, signer_of(store, RUN), store.url, alone=trainers.rank == 0)
    return log


def _opened(store: Store, notary: Notary) -> RunLog | None:
    """The run that rank 0 found or made, waited for (F13); never made here: this may be another store."""
    deadline = runtime.now() + LATE_VISIBILITY_S
    while True:
        try:
            return RunLog.open(store, notary)
        except NotFoundError:
            if runtime.now() > deadline:
                return None
            runtime.sleep(0.2)


def _hello(source: Source) -> bytes:
    pieces = source.pieces
    if list(pieces) != sorted(pieces):
        raise UsageError("the pieces of a source are not sorted", expected="sorted(pieces)", found=pieces[:4])
    table = np.array([_row(piece) for piece in pieces], "<u8").reshape(len(pieces), _COLUMNS)
    packed = zlib.compress(source.catalog.to_bytes())
    return _HEAD.pack(source.catalog.identity.encode(), len(packed)) + packed + table.tobytes()


def _row(piece: Piece) -> tuple[int, ...]:
    return piece.tensor, piece.offset, piece.length, piece.run, piece.step, piece.pitch, int(piece.overwrite)


def _pieces_of(rank: int, hello: bytes, source: Source) -> list[Piece]:
    identity, size = _HEAD.unpack_from(hello)
    if identity != source.catalog.identity.encode():
        _refuse(rank, hello[_HEAD.size : _HEAD.size + size], source.catalog)
    table = np.frombuffer(hello[_HEAD.size + size :], "<u8").reshape(-1, _COLUMNS)
    return [Piece(t, o, n, run, step, pitch, bool(ow)) for t, o, n, run, step, pitch, ow in table.tolist()]


def _refuse(rank: int, packed: bytes, ours: Catalog) -> None:
    """Name the first tensor in which another rank's catalog differs from rank 0's."""
    theirs = Catalog.from_bytes(zlib.decompressobj().decompress(packed, MAX_RECORD_BYTES), "catalog")
    if difference := first_difference(theirs, ours):
        name, found, expected = difference
        raise BaseMismatch(
            f"rank {rank} has another catalog: tensor {name} differs",
            expected=f"{expected} (rank 0)",
            found=f"{found} (rank {rank})",
            next_step="Give every rank the same model, names and dtypes.",
        )
