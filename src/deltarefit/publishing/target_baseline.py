"""A whole-model baseline in any target (a checkpoint directory, memory): moved by the code of every other receiver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from deltarefit.elements import Elements
from deltarefit.errors import AttemptLostError
from deltarefit.events import Emit, Event
from deltarefit.manifest import State
from deltarefit.ports import Store, Target
from deltarefit.receiver import Receiver
from deltarefit.records import Digest
from deltarefit.trust import Trust
from deltarefit.weights import flat


class TargetBaseline:
    """``ports.Baseline`` over a target, for a source whose pieces are the whole tensors of the catalog."""

    def __init__(self, store: Store, target: Target, threads: int, emit: Emit, trust: Trust | None = None) -> None:
        self._target, self._emit = target, emit
        self._zero = Receiver(store, target, threads=threads, emit=self._say, switch_run=True, trust=trust)

    @property
    def part(self) -> Digest:
        header = self._target.read_header()
        return header.digest if header else Digest()

    @contextmanager
    def read(self, piece: int, start: int, stop: int) -> Iterator[Elements]:
        with self._target.window(piece, start, stop) as (array, first):
            yield flat(array, first, stop - start)

    def take(self, piece: int, start: int, values: Elements) -> None:
        """A receiver starts from the anchor itself."""

    def adopt(self, version: int, part: Digest) -> None:
        self.move(version)

    def move(self, version: int) -> None:
        self._leave_streams()
        found = self._zero.follow(once=True)
        if found != version:
            raise AttemptLostError(
                "another publisher moved the head", expected=version, found=found, next_step="Publish again."
            )

    def _leave_streams(self) -> None:
        """A directory that a follower has left in the middle of an attempt that is not committed: nobody else will
        commit for it, so its bits are given up."""
        header, log = self._zero.header(), self._zero.log
        if header is None or header.state is not State.DIRTY or header.run != log.run:
            return
        if not log.attempt(header.target).committed:
            lost = replace(header, state=State.UNKNOWN, version=0, target=0, digest=Digest())
            self._target.write_header(lost)
            self._zero.restart()

    def doubt(self) -> None:
        self._zero.restart()

    def close(self) -> None:
        self._zero.close()

    def _say(self, event: Event) -> None:
        if event.type == "progress":
            self._emit(event)
        else:
            self._emit(replace(event, type="baseline", phase=event.phase or event.type))
