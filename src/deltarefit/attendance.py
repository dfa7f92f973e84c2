"""A receiver's signs of life and its votes, in the store (docs/format.md §1). Policy only: nothing depends on their
arrival, and a receiver that may not write there follows all the same.
"""

from __future__ import annotations

import contextlib
import threading

from deltarefit import runtime
from deltarefit.errors import RefitError, UsageError
from deltarefit.events import Emit, Event
from deltarefit.manifest import RECEIVER, Held, Member, Vote
from deltarefit.protocol.attempts import Attempt
from deltarefit.runlog import RunLog, attempt_key

MEMBERS = "member"
BEAT_S = 2.0
"""Between two signs of life."""
MOST_BUSY_S = 120.0
"""Longest step (a proof, a write, a wait for generation to stand still) that counts as life."""


def member_key(name: str) -> str:
    return f"{MEMBERS}/{name}"


def vote_key(attempt: int, name: str) -> str:
    return attempt_key(attempt, f"v/{name}")


class Attendance:
    """One receiver's place on the roll, from its first ``beat`` to ``leave``. ``name`` is its own among all that follow
    the run: two with one name count as one."""

    def __init__(self, log: RunLog, name: str, emit: Emit) -> None:
        if not isinstance(name, str) or not RECEIVER.fullmatch(name):
            raise UsageError("bad name of a receiver", expected="up to 64 of A-Z a-z 0-9 _ -", found=repr(name)[:80])
        self.name, self._log, self._emit = name, log, emit
        self._incarnation = runtime.token()[:16]
        self._beats, self._beat_at = 0, float("-inf")
        self._busy_since = float("-inf")
        self._lock = threading.Lock()
        self._refused = False
        self._voted: Vote | None = None

    def beat(self, version: int) -> None:
        """Give a sign of life, unless one was given just now."""
        self._busy_since = runtime.now()
        self._beat(version)

    def beat_beside(self, version: int) -> None:
        """The same from beside a step that takes long, as long as it may still be at work."""
        if runtime.now() - self._busy_since < MOST_BUSY_S:
            self._beat(version)

    def _beat(self, version: int) -> None:
        with self._lock:
            if self._refused or runtime.now() - self._beat_at < BEAT_S:
                return
            self._beats, self._beat_at = self._beats + 1, runtime.now()
            member = Member(self._log.run, self.name, self._incarnation, self._beats, version)
            self._put(member_key(self.name), member)

    def vote(self, attempt: Attempt, held: Held, reason: str = "") -> None:
        """Say what is held of an attempt, once; again if it did not arrive."""
        hashes = tuple(manifest.content_hash() for manifest in attempt.manifests)
        vote = Vote(self._log.run, attempt.number, self.name, self._incarnation, held, hashes, reason[:1000])
        if not self._refused and vote != self._voted and self._put(vote_key(attempt.number, self.name), vote):
            self._voted = vote

    def leave(self) -> None:
        """Nobody need wait for this receiver any more."""
        with self._lock:
            if self._beats and not self._refused:
                with contextlib.suppress(RefitError):
                    self._log.store.delete(member_key(self.name))
            self._beat_at = float("-inf")

    def _put(self, key: str, record: Member | Vote) -> bool:
        try:
            self._log.store.put(key, record.to_bytes())
        except UsageError as error:  # read only: said once, and not tried again
            self._refused = True
            self._emit(Event("alone", text=f"this receiver cannot vote: {error.what}"))
            return False
        except RefitError:
            return False
        return True
