"""How the ranks of a simulated trainer talk: a dictionary that all of them reach as long as they live."""

from __future__ import annotations

from deltarefit.errors import UnavailableError
from deltarefit.simulation.world import Process


class SimExchange:
    """``ports.Exchange`` of one rank. ``said`` is shared by all ranks of one start of the trainer."""

    def __init__(self, process: Process, said: dict[str, bytes], rank: int, size: int, silent: float) -> None:
        self.rank, self.size = rank, size
        self._process, self._said, self._silent = process, said, silent

    def put(self, key: str, data: bytes) -> None:
        self._call(f"say {key}")
        self._said[key] = data

    def get(self, key: str) -> bytes | None:
        self._process.alive()
        return self._said.get(key)

    def delete(self, key: str) -> None:
        self._call(f"unsay {key}")
        self._said.pop(key, None)

    def _call(self, what: str) -> None:
        process = self._process
        process.step(what)
        process.rest(process.world.random.random() * 0.01)
        if process.world.chance(self._silent):
            raise UnavailableError(f"{what}: the exchange does not answer")
