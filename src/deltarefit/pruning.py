"""Delete what nobody needs any more: old payloads, manifests and anchors (docs/late-joiners.md, protocol §3.6, I14).

Kept are the newest anchors that can be read, everything after the oldest of these, everything from the version of a
pin or a member on, and every intent and outcome. The order makes it safe at every instant: tombstones, a grace, a
second look at pins, payloads, the records that name them, old anchors. Whoever comes too late is sent to an anchor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from deltarefit import runtime
from deltarefit.anchors import check_complete
from deltarefit.errors import AlreadyExistsError, IntegrityError, NotFoundError, UnavailableError, UsageError
from deltarefit.events import Emit, Event, ignore
from deltarefit.notary import Notary
from deltarefit.pool import side_by_side
from deltarefit.ports import Store
from deltarefit.retention import MEMBERS, PINS, Doomed, Tombstone, tomb_key, version_of
from deltarefit.runlog import RunLog, anchor_prefix, attempt_key
from deltarefit.trust import Trust

GRACE_S = 300.0
"""Long enough for a catch-up to show a sign of life, whatever it is reading just then."""
DELETED_AT_ONCE = 16
_STAY = ("intent", "outcome")


@dataclass(frozen=True)
class Pruned:
    """What was deleted, or would be. ``floor``: attempts and anchors below it (0: none); ``anchors`` are the versions
    of the anchors that count, newest first; ``held_by`` names the pin or member that kept more, with its version.
    Sizes are bytes as stored."""

    head: int
    floor: int
    anchors: tuple[int, ...]
    held_by: str
    attempts: int
    old_anchors: int
    objects: int
    size: int
    stale_pins: tuple[str, ...]
    dry_run: bool


@dataclass
class _Doomed:
    """All that goes with one attempt or anchor: key and size, in the order in which it is deleted."""

    what: Doomed
    number: int
    objects: list[tuple[str, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(size for _, size in self.objects)


def prune(
    store: Store,
    *,
    keep_anchors: int = 2,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    deep: bool = False,
    threads: int = DELETED_AT_ONCE,
    trust: Trust | None = None,
    emit: Emit = ignore,
) -> Pruned:
    """Prune a run; may be killed at any point and run again, also side by side with others.

    Nothing is deleted unless ``keep_anchors`` anchors can be read; ``deep`` reads and hashes all bytes of these, else
    their objects must be there at full length. ``grace_s`` is how long is waited between tombstones and deleting: pins
    and members that show no beat in that time are taken for dead. With ``grace_s`` 0 none is.
    """
    if keep_anchors < 1 or grace_s < 0 or threads < 1:
        raise UsageError("prune keeps one anchor at least, and waits no negative time", found=(keep_anchors, grace_s))
    return _Pruning(RunLog.open(store, Notary(trust=trust)), keep_anchors, deep, emit).run(grace_s, dry_run, threads)


class _Pruning:
    def __init__(self, log: RunLog, keep: int, deep: bool, emit: Emit) -> None:
        self._log, self._store, self._keep, self._deep, self._emit = log, log.store, keep, deep, emit
        head = log.head()
        self._head = head.number if head else 0
        self._named = head.outcome.anchor if head and head.outcome else 0

    def run(self, grace_s: float, dry_run: bool, threads: int) -> Pruned:
        kept = self._usable_anchors()
        floor, signs = self._floor(kept), self._signs()
        plan = self._plan(floor)
        if dry_run or not plan:
            floor, why = _held(floor, signs)
            return self._pruned(floor, kept, why, [doomed for doomed in plan if doomed.number < floor], (), dry_run)
        self._condemn(plan, floor)
        self._wait(grace_s)
        after = self._signs()
        dead = {key for key in after if grace_s > 0 and signs.get(key) == after[key]}
        floor = min(floor, self._floor(self._usable_anchors()))
        floor, why = _held(floor, {key: after[key] for key in after.keys() - dead})
        plan = [doomed for doomed in plan if doomed.number < floor]
        stale = tuple(sorted(key for key in dead if key.startswith(PINS)))
        with runtime.executor(threads, "prune") as pool:
            self._delete(pool, plan)
            self._delete_keys(pool, stale)
        return self._pruned(floor, kept, why, plan, stale, dry_run)

    # ------------------------------------------------------------------------------------ what must stay

    def _usable_anchors(self) -> list[int]:
        """Anchors that can be read, newest first: as many as are to be kept, and down to one that readers find without
        the hint, which anybody may overwrite."""
        found: list[int] = []
        for anchor, _ in self._log.anchors(self._skip):
            if self._log.tombstone(Doomed.ANCHOR, anchor.version) is not None:
                break
            try:
                check_complete(self._log, anchor, deep=self._deep)
            except (IntegrityError, NotFoundError) as error:
                self._skip(anchor.version, error)
                continue
            found.append(anchor.version)
            if len(found) >= self._keep and anchor.version <= self._named:
                break
        return found

    def _skip(self, version: int, error: Exception) -> None:
        self._emit(Event("skipped", "prune", version, text=f"anchor {version} does not count: {error}"))

    def _signs(self) -> dict[str, bytes]:
        """The bytes of every pin and member: they change with each beat."""
        found = {}
        for key in [key for prefix in (PINS, MEMBERS) for key, _ in self._store.list(prefix)]:
            try:
                found[key] = self._store.get(key, 0, 4096)
            except NotFoundError:
                continue  # let go of meanwhile
        return found

    def _floor(self, kept: list[int]) -> int:
        """What is below may go, as far as anchors say."""
        return min(kept) if len(kept) >= self._keep else 0

    # ------------------------------------------------------------------------------------ what may go

    def _plan(self, floor: int) -> list[_Doomed]:
        """Attempts, then anchors, ascending. Attempts without an outcome stay, and what follows them."""
        attempts = _grouped(Doomed.ATTEMPT, self._numbered("a/", floor), _STAY)
        plan = [doomed for doomed in attempts if self._decided(doomed.number)]
        for doomed in plan:
            doomed.objects.sort(key=lambda entry: ("/pl/" not in entry[0], entry[0]))
        anchors = _grouped(Doomed.ANCHOR, self._numbered("anchor/", floor), ())
        for doomed in anchors:  # the record first: without it the rest is nothing
            record = anchor_prefix(doomed.number) + "anchor"
            doomed.objects.sort(key=lambda entry: (entry[0] != record, entry[0]))
        return [*plan, *anchors]

    def _numbered(self, prefix: str, floor: int) -> Iterator[tuple[int, str, int]]:
        """(number, key, size) of the objects of attempts or anchors below ``floor``; keys are sorted."""
        for key, size in self._store.list(prefix) if floor else ():
            number = key[len(prefix) :].partition("/")[0]
            if not number.isdecimal():
                continue
            if int(number) >= floor:
                return
            yield int(number), key, size

    def _decided(self, number: int) -> bool:
        try:
            return bool(self._store.size(attempt_key(number, "outcome")))
        except NotFoundError:
            return False

    # ------------------------------------------------------------------------------------ deleting

    def _condemn(self, plan: list[_Doomed], floor: int) -> None:
        """From now on nobody who looks starts to read these."""
        for doomed in plan:
            runtime.point("prune condemn")
            tomb = Tombstone(self._log.run, doomed.what, doomed.number, len(doomed.objects), doomed.size, floor)
            key = tomb_key(doomed.what, doomed.number)
            try:
                self._store.create(key, tomb.to_bytes())
            except AlreadyExistsError:
                continue  # by another prune, or an earlier one
            except UnavailableError:
                if self._log.tombstone(doomed.what, doomed.number) is None:
                    raise

    def _wait(self, grace_s: float) -> None:
        self._emit(Event("phase", "grace", self._head, seconds=grace_s))
        runtime.point("prune grace")
        if grace_s:
            runtime.sleep(grace_s)

    def _delete(self, pool: Executor, plan: list[_Doomed]) -> None:
        """In three rounds: a payload is gone before the manifest that names it, a manifest before old anchors."""
        attempts = [doomed.objects for doomed in plan if doomed.what is Doomed.ATTEMPT]
        rounds = [
            [key for objects in attempts for key, _ in objects if "/pl/" in key],
            [key for objects in attempts for key, _ in objects if "/pl/" not in key],
            [doomed.objects[0][0] for doomed in plan if doomed.what is Doomed.ANCHOR],
            [key for doomed in plan if doomed.what is Doomed.ANCHOR for key, _ in doomed.objects[1:]],
        ]
        total, done = sum(map(len, rounds)), 0
        for keys in rounds:
            for start in range(0, len(keys), 1024):
                done += len(keys[start : start + 1024])
                self._delete_keys(pool, keys[start : start + 1024])
                self._emit(Event("progress", "prune", self._head, done=done, total=total))

    def _delete_keys(self, pool: Executor, keys: Iterable[str]) -> None:
        side_by_side(pool, partial(_delete_one, self._store), list(keys))

    def _pruned(
        self, floor: int, kept: list[int], why: str, plan: list[_Doomed], stale: tuple[str, ...], dry_run: bool
    ) -> Pruned:
        attempts = sum(doomed.what is Doomed.ATTEMPT for doomed in plan)
        objects, size = sum(len(doomed.objects) for doomed in plan), sum(doomed.size for doomed in plan)
        return Pruned(
            self._head, floor, tuple(kept), why, attempts, len(plan) - attempts, objects, size, stale, dry_run
        )


def _held(floor: int, signs: dict[str, bytes]) -> tuple[int, str]:
    """The floor under which no pin and no member keeps anything, and which of them keeps most, if any does."""
    why = ""
    for key, data in sorted(signs.items()):
        version = version_of(data)
        if version == 0 and key.startswith(MEMBERS):
            continue  # it holds nothing yet; what it reads on its way, a pin keeps
        if (version or 0) < floor:
            floor, why = version or 0, f"{key} at version {'unknown' if version is None else version}"
    return floor, why


def _delete_one(store: Store, key: str) -> None:
    runtime.point("prune delete")
    store.delete(key)


def _grouped(what: Doomed, listed: Iterable[tuple[int, str, int]], stay: tuple[str, ...]) -> list[_Doomed]:
    found: dict[int, _Doomed] = {}
    for number, key, size in listed:
        if key.count("/") != 2 or key.rpartition("/")[2] not in stay:
            found.setdefault(number, _Doomed(what, number)).objects.append((key, size))
    return [found[number] for number in sorted(found)]
