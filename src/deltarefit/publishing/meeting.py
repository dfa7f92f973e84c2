"""Before the first publish: do the ranks of this trainer own every element of one catalog exactly once?

Refused before anything is written, on every rank, with what rank 0 found.
"""

from __future__ import annotations

import numpy as np

from deltarefit.affine import check_coverage
from deltarefit.errors import BaseMismatch, UsageError
from deltarefit.pieces import Piece
from deltarefit.ports import Source, Store
from deltarefit.publishing.trainers import Trainers
from deltarefit.runlog import RunLog

_COLUMNS = 7


def meet(store: Store, source: Source, trainers: Trainers) -> RunLog:
    """The run in ``store``, created if there is none, once rank 0 has judged what all ranks own. Raises ``UsageError``
    for elements with two owners or none, ``BaseMismatch`` for ranks with different catalogs or a run of another model.
    """

    def judge(hellos: list[bytes]) -> str:
        check_coverage(source.catalog, [_pieces_of(rank, hello, source) for rank, hello in enumerate(hellos)])
        return RunLog.open_or_create(store, source.catalog).run

    run = trainers.meet(_hello(source), judge)
    log = RunLog.open_or_create(store, source.catalog)
    if log.run != run:
        raise BaseMismatch("ranks see different stores", expected=f"run {run} (rank 0)", found=log.run)
    return log


def _hello(source: Source) -> bytes:
    pieces = source.pieces
    if list(pieces) != sorted(pieces):
        raise UsageError("the pieces of a source are not sorted")
    table = np.array([_row(piece) for piece in pieces], "<u8").reshape(len(pieces), _COLUMNS)
    return source.catalog.identity.encode() + table.tobytes()


def _row(piece: Piece) -> tuple[int, ...]:
    return piece.tensor, piece.offset, piece.length, piece.run, piece.step, piece.pitch, int(piece.overwrite)


def _pieces_of(rank: int, hello: bytes, source: Source) -> list[Piece]:
    identity = hello[:64].decode("ascii", "replace")
    if identity != source.catalog.identity:
        step = "Give every rank the same model, names and dtypes."
        raise BaseMismatch(
            f"rank {rank} has another catalog", expected=source.catalog.identity, found=identity, next_step=step
        )
    table = np.frombuffer(hello, "<u8", offset=64).reshape(-1, _COLUMNS)
    return [Piece(t, o, n, run, step, pitch, bool(ow)) for t, o, n, run, step, pitch, ow in table.tolist()]
