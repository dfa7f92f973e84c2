"""The log of one run in a store: keys, reading attempts, finding the head and anchors (docs/format.md §1).

Every record read is checked: its own hash, its run, its place, and that the records of an attempt belong together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from deltarefit import runtime
from deltarefit.errors import AlreadyExistsError, BaseMismatch, FormatError, IntegrityError, NotFoundError
from deltarefit.manifest import Anchor, Catalog, Hint, Intent, Outcome, ProducerManifest, Run, TensorEntry
from deltarefit.ports import Store
from deltarefit.protocol.messages import Attempt, check_attempt
from deltarefit.records import Digest, Record

R = TypeVar("R", bound=Record)
T = TypeVar("T")

RUN, HINT = "run", "head"
LATE_VISIBILITY_S = 10.0
"""How long a record that must exist may stay invisible before that is called an error (F13)."""
MOST_SEARCHED = 1000
"""Most versions that are compared with a digest whose version is not known."""


def attempt_key(number: int, name: str) -> str:
    return f"a/{number:010d}/{name}"


def payload_prefix(number: int) -> str:
    return attempt_key(number, "pl/")


def anchor_prefix(version: int) -> str:
    return f"anchor/{version:010d}/"


class RunLog:
    """One run's log. ``run`` and ``catalog`` never change."""

    def __init__(self, store: Store, run: Run, catalog: Catalog) -> None:
        self.store = store
        self.run = run.run
        self.catalog = catalog
        self._manifests_of = 0
        self._manifests: list[ProducerManifest] = []

    @classmethod
    def open(cls, store: Store) -> RunLog:
        """The run in ``store``; ``NotFoundError`` if nothing was published there."""
        try:
            run = _record(store, Run, RUN)
        except NotFoundError as error:
            raise NotFoundError(
                f"no run at {store.url}", next_step="Publish a checkpoint there first, or check the address."
            ) from error
        return cls(store, run, _read_catalog(store, run.catalog))

    @classmethod
    def open_or_create(cls, store: Store, catalog: Catalog) -> RunLog:
        """The run in ``store``, created if there is none. ``BaseMismatch`` if it has another catalog."""
        try:
            log = cls.open(store)
        except NotFoundError:
            log = cls._create(store, catalog)
        check_catalog(catalog, log.catalog)
        return log

    @classmethod
    def _create(cls, store: Store, catalog: Catalog) -> RunLog:
        store.put(f"catalog/{catalog.identity}", catalog.to_bytes())
        # Taken: another publisher was first, or this is our own success seen twice. What stands there counts.
        with contextlib.suppress(AlreadyExistsError):
            store.create(RUN, Run(runtime.token(), catalog.identity).to_bytes())
        return cls.open(store)

    def over(self, store: Store) -> RunLog:
        """The same run, read through another store (a cache)."""
        return RunLog(store, Run(self.run, self.catalog.identity), self.catalog)

    def read(self, kind: type[R], key: str) -> R | None:
        """The record at ``key``, or None if there is none."""
        try:
            record = _record(self.store, kind, key)
        except NotFoundError:
            return None
        run = getattr(record, "run", self.run)
        if run != self.run:
            raise BaseMismatch(f"{key} belongs to another run", expected=self.run, found=run)
        return record

    def fetch(
        self, key: str, check: Callable[[bytes], T], damaged: Callable[[IntegrityError], None] = lambda _: None
    ) -> T:
        """What ``check`` makes of an object that a record names. Not visible yet: waited for (F13). Damaged, which
        ``check`` says by ``IntegrityError``: told to ``damaged`` and fetched a second time (F15)."""
        try:
            return check(_visible(self.store, key))
        except IntegrityError as error:
            damaged(error)
            return check(_visible(self.store, key))

    def attempt(self, number: int) -> Attempt:
        """All records of one attempt. Read in the order intent, outcome, manifests: each implies the ones before it
        in time, so a COMMIT without its manifest is only ever late visibility, which is waited for."""
        deadline = runtime.now() + LATE_VISIBILITY_S
        while True:
            try:
                return self._attempt_now(number)
            except IntegrityError as error:
                if isinstance(error, FormatError) or runtime.now() > deadline:
                    raise
                runtime.sleep(0.2)

    def _attempt_now(self, number: int) -> Attempt:
        intent = self.read(Intent, attempt_key(number, "intent"))
        if intent is None:
            return Attempt(number)
        outcome = self.read(Outcome, attempt_key(number, "outcome"))
        manifests = self._manifests_now(number, intent.producers)
        for record in (intent, outcome, *manifests):
            if record is not None and record.attempt != number:
                raise FormatError(f"a record of attempt {record.attempt} stands in the place of {number}")
        attempt = Attempt(number, intent, manifests, outcome)
        try:
            check_attempt(attempt)
        except IntegrityError:
            self._manifests.clear()
            raise
        return attempt

    def _manifests_now(self, number: int, producers: int) -> tuple[ProducerManifest, ...]:
        """The manifests that are there. Those of the attempt that is read again and again are kept: nothing changes
        them, and a COMMIT proves them by their hashes."""
        if self._manifests_of != number:
            self._manifests_of, self._manifests = number, []
        while len(self._manifests) < producers:
            manifest = self.manifest(number, len(self._manifests))
            if manifest is None:
                break
            self._manifests.append(manifest)
        return tuple(self._manifests)

    def manifest(self, number: int, producer: int) -> ProducerManifest | None:
        """What producer ``producer`` sealed in an attempt, if it did."""
        return self.read(ProducerManifest, attempt_key(number, f"p/{producer}"))

    def hint(self) -> Hint:
        """Where to start looking. Wrong or missing hints only cost time."""
        try:
            return self.read(Hint, HINT) or Hint(0, 0)
        except FormatError:
            return Hint(0, 0)

    def put_hint(self, head: int, anchor: int) -> None:
        self.store.put(HINT, Hint(head, anchor).to_bytes())

    def attempts(self, first: int) -> Iterator[Attempt]:
        """Every attempt from ``first`` to the tail."""
        while (attempt := self.attempt(first)).intent is not None:
            yield attempt
            first += 1

    def commits(self, first: int = 1) -> Iterator[Attempt]:
        """Every committed attempt from ``first`` on."""
        return (attempt for attempt in self.attempts(first) if attempt.committed)

    def head(self) -> Attempt | None:
        """The newest committed attempt, or None."""
        hinted = self.hint().head
        start = hinted if hinted and self.attempt(hinted).committed else 1
        newest = None
        for commit in self.commits(start):
            newest = commit
        return newest

    def version(self, number: int) -> Attempt:
        """The committed attempt ``number``; ``NotFoundError`` if it is not a version of this run."""
        attempt = self.attempt(number)
        if not attempt.committed:
            state = "open" if attempt.open else "aborted" if attempt.intent else "not there"
            raise NotFoundError(f"version {number} is not committed", found=f"attempt {number} is {state}")
        return attempt

    def find_version(self, digest: Digest, most: int = MOST_SEARCHED) -> Outcome | None:
        """The newest version that has this digest, among the ``most`` newest; None if none has."""
        head = self.head()
        outcome = head.outcome if head else None
        for _ in range(most):
            if outcome is None or outcome.digest == digest:
                return outcome
            outcome = self.read(Outcome, attempt_key(outcome.base, "outcome")) if outcome.base else None
        return None

    def anchor(self, version: int) -> Anchor | None:
        """The anchor record of ``version``, if it was written."""
        anchor = self.read(Anchor, anchor_prefix(version) + "anchor") if version else None
        if anchor is not None and anchor.version != version:
            raise FormatError(f"the anchor of version {anchor.version} stands in the place of {version}")
        return anchor

    def newest_anchor(self) -> tuple[Anchor, Attempt] | None:
        """The newest anchor that hint or head know of, with the commit of its version."""
        head = self.head()
        if head is None or head.outcome is None:
            return None
        for version in sorted({self.hint().anchor, head.outcome.anchor}, reverse=True):
            anchor = self.anchor(version)
            if anchor is not None and (commit := self.attempt(version)).committed:
                return anchor, commit
        return None


def _record(store: Store, kind: type[R], key: str, get: Callable[[Store, str], bytes] = lambda s, k: s.get(k)) -> R:
    """The record at ``key``; read a second time if the first copy is damaged (F15)."""
    try:
        return kind.from_bytes(get(store, key), key)
    except FormatError:
        return kind.from_bytes(get(store, key), key)


def _visible(store: Store, key: str) -> bytes:
    """An object that must be there; waited for while it is not."""
    deadline = runtime.now() + LATE_VISIBILITY_S
    while True:
        try:
            return store.get(key)
        except NotFoundError:
            if runtime.now() > deadline:
                raise
            runtime.sleep(0.2)


def _read_catalog(store: Store, identity: str) -> Catalog:
    catalog = _record(store, Catalog, f"catalog/{identity}", _visible)
    if catalog.identity != identity:
        raise FormatError("the catalog is not the one of this run", expected=identity, found=catalog.identity)
    return catalog


def check_catalog(found: Catalog, expected: Catalog) -> None:
    """``BaseMismatch`` that names the first tensor in which two catalogs differ."""
    if difference := first_difference(found, expected):
        name, theirs, ours = difference
        step = "Publish a checkpoint of the same model, or start a new run in another store."
        raise BaseMismatch(f"tensor {name} is not that of this run", expected=ours, found=theirs, next_step=step)


def first_difference(one: Catalog, other: Catalog) -> tuple[str, str, str] | None:
    """Name of the first tensor that differs, and what it is in either catalog."""
    if one.identity == other.identity:
        return None
    first, second = ({entry.name: entry for entry in catalog.tensors} for catalog in (one, other))
    names = sorted(first.keys() | second.keys())
    name = next(name for name in names if first.get(name) != second.get(name))
    return name, _describe(first.get(name)), _describe(second.get(name))


def _describe(entry: TensorEntry | None) -> str:
    if entry is None:
        return "no such tensor"
    tied = f", tied to {list(entry.aliases)}" if entry.aliases else ""
    return f"{entry.dtype} {list(entry.shape)}{tied}"
