"""Who follows this run, and what they hold of an attempt: the receivers' side of a COMMIT (protocol §3.5).

A receiver gives signs of life by counting up a number in the store; that it changes is observed on our own clock, so
that nobody compares clocks. One that is silent is evicted: it delays one commit, and its place is cleared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from deltarefit import runtime
from deltarefit.attendance import MEMBERS, member_key, vote_key
from deltarefit.errors import RefitError, UsageError
from deltarefit.manifest import RECEIVER, Held, Member, Vote
from deltarefit.pool import side_by_side
from deltarefit.protocol.votes import Enough, Policy, TooFew, tally
from deltarefit.runlog import RunLog

LOOKS = 16
"""Receivers that are looked at side by side."""
SILENCE_S = 10.0
"""A receiver without a sign of life for so long is taken for dead."""


def policy_of(votes: str | int, min_receivers: int) -> Policy | None:
    """What ``Publisher`` was asked for; None: nobody is asked. ``UsageError`` for what is no policy."""
    if isinstance(votes, bool) or not (votes in ("all", "none") or (isinstance(votes, int) and votes > 0)):
        raise UsageError("votes", expected="'all', 'none' or a number above 0", found=repr(votes)[:80])
    if isinstance(min_receivers, bool) or not isinstance(min_receivers, int) or min_receivers < 0:
        raise UsageError("min_receivers", expected="a number from 0 on", found=repr(min_receivers)[:80])
    if votes == "none" and min_receivers:
        raise UsageError("min_receivers needs votes", found="votes 'none'", next_step="Ask for votes, or for none.")
    if votes == "none":
        return None
    return Policy(None if votes == "all" else int(votes), min_receivers)


@dataclass
class _Seen:
    """A receiver's last sign of life, and when it was new to us."""

    sign: tuple[str, int]
    at: float


class Roll:
    """The receivers of a run as one trainer sees them, publish after publish."""

    def __init__(self, log: RunLog) -> None:
        self._log, self._at = log, 0.0
        self.known = False
        """Whether the roll could be read at all yet: nobody there and nobody seen are two things."""
        self._seen: dict[str, _Seen] = {}

    def look(self) -> None:
        """Look who is there. What cannot be read now counts as silence, once anything could be."""
        self._at = runtime.now()
        with contextlib.suppress(RefitError):
            names = [key.removeprefix(f"{MEMBERS}/") for key, _ in self._log.store.list(MEMBERS)]
            for name in self._seen.keys() - set(names):
                del self._seen[name]
            with runtime.executor(LOOKS, "roll") as pool:
                side_by_side(pool, self._note, [name for name in names if RECEIVER.fullmatch(name)])
            self.known = True

    def _note(self, name: str) -> None:
        with contextlib.suppress(RefitError):
            member = self._log.read(Member, member_key(name))
            if member is None:
                return
            sign = (member.incarnation, member.beat)
            if name not in self._seen or self._seen[name].sign != sign:
                self._seen[name] = _Seen(sign, self._at)

    def living(self) -> dict[str, bool]:
        """Registered receivers, and whether they gave a sign of life lately, when that was last looked for."""
        return {name: self._at - seen.at < SILENCE_S for name, seen in self._seen.items()}

    def clear(self, evicted: Sequence[str]) -> None:
        """Take the silent among ``evicted`` off the roll; one that comes back registers again."""
        for name, lives in self.living().items():
            if not lives and name in evicted:
                with contextlib.suppress(RefitError):
                    self._log.store.delete(member_key(name))


class Ballot:
    """The votes on one attempt."""

    def __init__(self, log: RunLog, roll: Roll, attempt: int, manifests: tuple[str, ...], held: Held) -> None:
        self._log, self._roll, self._attempt, self._manifests, self._held = log, roll, attempt, manifests, held
        self._votes: dict[str, Held] = {}
        self._since = runtime.now()

    def count(self, policy: Policy, *, expired: bool) -> Enough | TooFew | None:
        """Look again; what the policy makes of it, or None to wait."""
        self._roll.look()
        if not self._roll.known and not expired and runtime.now() - self._since < SILENCE_S:
            return None
        living = self._roll.living()
        for name in living:
            if self._votes.get(name) is not self._held:
                self._read(name)
        return tally(policy, living, self._votes, self._held, expired=expired)

    def _read(self, name: str) -> None:
        with contextlib.suppress(RefitError):
            vote = self._log.read(Vote, vote_key(self._attempt, name))
            if vote and (vote.attempt, vote.receiver, vote.manifests) == (self._attempt, name, self._manifests):
                self._votes[name] = vote.held
