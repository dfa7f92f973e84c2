"""Products that are broken on purpose, for storms that must show it: each function changes this process for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltarefit.landing import Windows
from deltarefit.manifest import PayloadRef
from deltarefit.protocol import follower
from deltarefit.protocol.messages import Op
from deltarefit.publishing import share
from deltarefit.publishing.touched import Touched
from deltarefit.records import Digest


def never_set(live: Digest, ref: PayloadRef) -> Op:
    return Op.SKIP if live == ref.post else Op.APPLY


def only_never_set() -> None:
    """What was begun is applied again from its start."""
    follower._op = never_set


def unguarded() -> None:
    """What was begun is applied again from its start, and believed."""
    only_never_set()

    def believed(self: follower.Follower, event: follower.Written) -> Any:
        return self._written(follower.Written(tuple(ref.post for ref in self.refs)))

    follower._HANDLERS[follower.Phase.WRITING, follower.Written] = believed


def done_bitmap() -> None:
    """A payload is marked once it is written, and then passed over; one that was begun is applied again."""
    unguarded()
    follower._op = lambda live, ref: Op.APPLY
    write = Windows.write

    def marked(self: Windows, ref: PayloadRef, op: Op) -> None:
        spool = self.weights.target.spool
        if spool.get(ref.sha256[:60] + ".d0e") is None:
            write(self, ref, op)
            spool.put(ref.sha256[:60] + ".d0e", b"1")

    Windows.write = marked  # type: ignore[method-assign]


def no_union() -> None:
    """The next attempt sets only what it changes itself, not what failed ones may have left."""
    share.touched_since = lambda *arguments: Touched()


BROKEN: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "unguarded": unguarded,
    "done-bitmap": done_bitmap,
    "never-set": only_never_set,
    "no-union": no_union,
}


SHOWS = {
    "unguarded": "wrong",
    "done-bitmap": "wrong",
    "never-set": "loads",
    "no-union": "loads",
}
"""By what a storm shows the damage: wrong bits, or loads of memory that survived."""
