"""Pins: what keeps a catch-up's anchor and chain from being pruned while it reads them (docs/late-joiners.md).

A pin is put before its holder looks for tombstones. What has none then is not deleted while the pin beats, for whoever
prunes puts tombstones first and looks for pins after.
"""

from __future__ import annotations

from deltarefit import runtime
from deltarefit.errors import RefitError, UnavailableError
from deltarefit.events import Emit, Event
from deltarefit.retention import Pin, pin_key
from deltarefit.runlog import RunLog

BEAT_S = 5.0
"""Between two beats, as far as there is progress. What shows no beat for the grace of a prune is taken for dead."""


class CatchUpPin:
    """The pin of one reader of a run. Holds nothing at first.

    Pins are courtesy: without one a catch-up may have to start again from a newer anchor, and its bits are right all
    the same. So where the store does not take it, that is said once, and reading goes on without.
    """

    def __init__(self, log: RunLog, name: str, emit: Emit) -> None:
        self._log, self._name, self._emit = log, name, emit
        self._key = pin_key(name, runtime.token()[:16])
        self._version: int | None = None
        self._beat = 0
        self._put_at = 0.0
        self._refused = False

    @property
    def version(self) -> int | None:
        """From where on objects are kept; None: nothing is held."""
        return self._version

    def hold(self, version: int) -> None:
        """Keep anchor ``version`` and all that follows. Visible to others on return, if the store takes pins."""
        due = runtime.now() - self._put_at >= BEAT_S
        if self._version is None or version < self._version or due:
            self._version = version
            self._put()

    def hear(self, event: Event) -> None:
        """Progress was made: beat, if it is time."""
        if self._version is not None and event.type == "progress":
            self.hold(self._version)

    def release(self) -> None:
        """Nothing is read any more. Never raises what the store does: the pin goes stale by itself."""
        if self._version is None:
            return
        self._version = None
        if self._refused:
            return
        try:
            self._log.store.delete(self._key)
        except RefitError as error:
            self._emit(Event("unpinned", fields={"pin": self._key, "why": error.what}))

    def _put(self) -> None:
        if self._refused:
            return
        self._beat += 1
        self._put_at = runtime.now()
        try:
            self._log.store.put(self._key, Pin(self._log.run, self._name, self._version or 0, self._beat).to_bytes())
        except UnavailableError:
            return  # tried again when the next beat is due
        except RefitError as error:
            self._refused = True
            text = f"cannot pin what is being read, so a prune may make this start again: {error.what}"
            self._emit(Event("unpinned", version=self._version or 0, text=text))
