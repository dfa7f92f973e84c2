"""What a receiver may believe of the weights that it finds: their header, if their bits bear it out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deltarefit.errors import BaseMismatch, IntegrityError
from deltarefit.manifest import Header, State
from deltarefit.ports import LiveTarget, Target
from deltarefit.protocol.follower import Follower
from deltarefit.records import Digest
from deltarefit.runlog import RunLog


class Say(Protocol):
    """Tells an event."""

    def __call__(self, type_: str, phase: str = "", version: int = 0, **rest: object) -> None: ...


@dataclass(frozen=True)
class Beginning:
    """One start on one target. ``digest`` is of all its live bits; ``prove`` and ``switch_run`` as in ``Receiver``."""

    log: RunLog
    target: Target | LiveTarget
    digest: Callable[[], Digest]
    say: Say
    prove: bool
    switch_run: bool

    def read_header(self) -> Header | None:
        """The header; None, as on first start, if it is damaged."""
        try:
            return self.target.read_header()
        except IntegrityError as error:
            self.say("diverged", text=str(error))
            return None

    def header(self, ours: Follower) -> Header | None:
        """The header that ``ours`` may start from. ``BaseMismatch`` if the weights are another run's, and for live ones
        that are nothing known: neither is written to."""
        header = self.read_header()
        if header is not None and header.run != self.log.run and not self.switch_run:
            step = "Give each run an empty directory (or model) of its own, or say that its weights may be replaced: "
            raise BaseMismatch(
                "the target holds weights of another run",
                expected=self.log.run,
                found=header.run,
                next_step=step + "follow --switch-run, Receiver(switch_run=True).",
            )
        if isinstance(self.target, LiveTarget) and (header is None or header.catalog != ours.catalog):
            return self._adopted(self.target, ours)
        known = header is not None and (header.run, header.catalog) == (ours.run, ours.catalog)
        if header is None or header.state is not State.CLEAN or not known or not self.prove:
            return header
        return header if self._proven(header) else None

    def _proven(self, header: Header) -> bool:
        started = time.perf_counter()
        try:
            found = self.digest()
        except IntegrityError as error:  # of the live bits alone: nothing was read from the store
            self.say("diverged", version=header.version, text=str(error))
            return False
        self.say("proven", "prove", header.version, seconds=time.perf_counter() - started)
        if found != header.digest:
            self.say("diverged", version=header.version, text="live bits differ from the header's digest")
        return found == header.digest

    def _adopted(self, target: LiveTarget, ours: Follower) -> Header | None:
        """A live target that has no header: nothing is written before its bits prove that every tensor lies where
        ``attach`` found it. A version that the chain leads on from is adopted as it is."""
        if (head := self.log.head()) is not None:  # whoever watches must not take an old version for the newest
            self.say("head", version=head.number)
        found = target.digest()
        version = self.log.find_version(found)
        if version is None and found != target.proof():
            raise BaseMismatch(
                "the live weights are neither a version of this run nor the checkpoint that the engine was started "
                "from",
                found=found,
                next_step="Start the engine from a checkpoint of the model. Nothing was written.",
            )
        anchor = self.log.newest_anchor()
        if version is None or (anchor is not None and anchor[0].version > version.attempt):
            return None
        header = Header(ours.run, ours.catalog, State.CLEAN, version.attempt, 0, found, 0, ours.incarnation)
        target.write_header(header)
        self.say("adopted", version=version.attempt)
        return header
