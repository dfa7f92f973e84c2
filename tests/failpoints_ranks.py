"""The world of ``failpoints`` with a trainer of two ranks, each a process of its own. When one dies or hangs, the other
ends within its deadline; then the whole trainer is started again, as a job scheduler would.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from deltarefit import Publisher, runtime
from deltarefit.errors import RefitError
from deltarefit.pieces import Piece
from tests import failpoints as f
from tests import killing as k
from tests.failing import Fault, Process
from tests.ranks import Board, PieceSource

SPEED, RANK_DEADLINE_S = 25.0, 12.0
DEALT = ([Piece(0, 0, 150, 150)], [Piece(0, 150, 150, 150), Piece(2, 0, 20, 20)])
"""Of ``helpers.SMALL``: half of the first tensor, the rest."""
ROUNDS = 4
PLACES = ("trainer", "payload put", "baseline", "anchor")
Ended = list[int | BaseException]


@dataclass
class RanksWorld(f.World):
    """Receivers are as in ``World``: only the trainer is another."""

    speed: float = SPEED

    def publish(self) -> None:
        for _ in range(ROUNDS):
            if self.newer and self.plan.struck.is_set():
                self.step_on()
            versions = self._round()
            if all(isinstance(version, int) for version in versions):
                assert len(set(versions)) == 1, versions
                self.said.append(versions[0])  # type: ignore[arg-type]
                return
            for error in versions:
                assert isinstance(error, int | RefitError | k.Killed), repr(error)
        raise AssertionError(f"no version after {ROUNDS} rounds: {versions}")

    def _round(self) -> Ended:
        """What every rank ended with; a rank that hangs is given up."""
        board = Board(len(DEALT))
        processes = [Process(self.plan, self.speed) for _ in DEALT]
        ended: list[Ended] = [[] for _ in DEALT]
        threads = [
            threading.Thread(target=self._rank, args=(board, rank, processes[rank], ended[rank]), daemon=True)
            for rank in range(len(DEALT))
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + f.DEADLINE_S
        while any(t.is_alive() and not p.hung.is_set() for t, p in zip(threads, processes, strict=True)):
            assert time.monotonic() < until, "a rank waits for ever"
            time.sleep(0.002)
        for thread, process, mine in zip(threads, processes, ended, strict=True):
            if process.hung.is_set():
                self.hanging, self.ended = thread, mine  # type: ignore[assignment]
        return [mine[0] if mine else k.Killed("it hangs") for mine in ended]

    def _rank(self, board: Board, rank: int, process: Process, ended: Ended) -> None:
        source = PieceSource(self.source.model, self.source.catalog, DEALT[rank], board.ranks[rank])
        options = {"threads": 1, "payload_bytes": f.PAYLOAD_BYTES, "deadline_s": RANK_DEADLINE_S}
        try:
            with runtime.using(process):
                publisher = Publisher(self.store, source, **options)  # type: ignore[arg-type]
                ended.append(publisher.publish().version)
                publisher.close()
        except BaseException as error:
            ended.append(error)

    def awake(self, where: str) -> None:
        assert self.hanging is not None
        self.hanging.join(f.DEADLINE_S)
        assert not self.hanging.is_alive()
        assert isinstance(self.ended[0], int | RefitError), f"{where}: ended with {self.ended}"
        f.check_world(self, where)


def trainer_cases(base: f.Base, fault: Fault) -> Iterator[f.Case]:
    """Of points that ranks come to."""
    for case in f.cases(f.recorded(base, 1, RanksWorld), 1, fault, RanksWorld):
        if case.name.startswith(PLACES):
            yield case
