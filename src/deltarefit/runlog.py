"""The log of one run in a store: keys, reading attempts, finding the head and anchors (docs/format.md §1).

Every record read is checked: its own hash, its run, its place, and that the records of an attempt belong together.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from deltarefit import runtime
from deltarefit.catalogs import check_catalog
from deltarefit.createonce import check_create_once
from deltarefit.errors import (
    AlreadyExistsError,
    BaseMismatch,
    FormatError,
    IntegrityError,
    NotFoundError,
    SignatureError,
)
from deltarefit.manifest import (
    MAX_PAYLOAD_BYTES,
    Anchor,
    Batch,
    Catalog,
    Decision,
    Hint,
    Intent,
    Mode,
    Outcome,
    ProducerManifest,
    Run,
)
from deltarefit.notary import Notary, at_most, check_signer, signer_of
from deltarefit.ports import Store
from deltarefit.protocol.attempts import Attempt, check_attempt
from deltarefit.records import Digest, Record, split_signature
from deltarefit.retention import Doomed, Tombstone, is_condemned, tomb_key

R = TypeVar("R", bound=Record)
T = TypeVar("T")

RUN, HINT = "run", "head"
UNSIGNED = Notary()
LATE_VISIBILITY_S = 10.0
"""How long a record that must exist may stay invisible before that is called an error (F13)."""
MOST_SETTLED = 256
"""Most aborted attempts that are remembered."""
MOST_SEARCHED = 1000
"""Most versions that are compared with a digest whose version is not known."""


def attempt_key(number: int, name: str) -> str:
    return f"a/{number:010d}/{name}"


def batch_key(number: int, producer: int, batch: int) -> str:
    return attempt_key(number, f"b/{producer}/{batch}")


def payload_prefix(number: int) -> str:
    return attempt_key(number, "pl/")


def anchor_prefix(version: int) -> str:
    return f"anchor/{version:010d}/"


class RunLog:
    """One run's log. ``run`` and ``catalog`` never change. ``notary`` signs what is written and says which keys may
    have signed what is read."""

    def __init__(self, store: Store, run: Run, catalog: Catalog, notary: Notary = UNSIGNED) -> None:
        self.store = store
        self.run = run.run
        self.catalog = catalog
        self.notary = notary
        self._kept_of = 0
        self._manifests: list[ProducerManifest] = []
        self._batches: dict[int, list[Batch]] = {}
        self._settled: dict[int, Attempt] = {}

    @classmethod
    def open(cls, store: Store, notary: Notary = UNSIGNED) -> RunLog:
        """The run in ``store``; ``NotFoundError`` if nothing was published there."""
        try:
            run = notary.read(store, Run, RUN)
        except NotFoundError as error:
            raise NotFoundError(
                f"no run at {store.url}", next_step="Publish a checkpoint there first, or check the address."
            ) from error
        return cls(store, run, _read_catalog(store, run.catalog), notary)

    @classmethod
    def open_or_create(cls, store: Store, catalog: Catalog, notary: Notary = UNSIGNED) -> RunLog:
        """The run in ``store``, created if there is none. ``BaseMismatch`` if it has another catalog, ``UsageError`` if
        one of run and ``notary`` signs and the other does not."""
        try:
            log = cls.open(store, notary)
        except NotFoundError:
            log = cls._create(store, catalog, notary)
        check_signer(notary, signer_of(store, RUN), store.url)
        check_catalog(catalog, log.catalog)
        return log

    @classmethod
    def _create(cls, store: Store, catalog: Catalog, notary: Notary) -> RunLog:
        check_create_once(store)
        store.put(f"catalog/{catalog.identity}", catalog.to_bytes())
        # Taken: another publisher was first, or this is our own success seen twice. What stands there counts.
        with contextlib.suppress(AlreadyExistsError):
            store.create(RUN, notary.bytes_of(Run(runtime.token(), catalog.identity), "", RUN))
        return cls.open(store, notary)

    def over(self, store: Store) -> RunLog:
        """The same run, read through another store (a cache)."""
        return RunLog(store, Run(self.run, self.catalog.identity), self.catalog, self.notary)

    def bytes_of(self, key: str, record: Record) -> bytes:
        """What is stored of a record at ``key``: signed, if this log signs."""
        return self.notary.bytes_of(record, self.run, key, self.catalog)

    def read(self, kind: type[R], key: str) -> R | None:
        """The record at ``key``, or None if there is none. With trusted keys ``SignatureError`` unless one of them
        signed it for this place of this run, and may."""
        try:
            record = self.notary.read(self.store, kind, key, self.run, self.catalog)
        except NotFoundError:
            return None
        run = getattr(record, "run", self.run)
        if run != self.run:
            raise BaseMismatch(f"{key} belongs to another run", expected=self.run, found=run)
        return record

    def fetch(
        self,
        key: str,
        check: Callable[[bytes], T],
        damaged: Callable[[IntegrityError], None] = lambda _: None,
        *,
        most: int = MAX_PAYLOAD_BYTES,
    ) -> T:
        """What ``check`` makes of an object that a record names. Not visible yet: waited for (F13). Damaged, which
        ``check`` says by ``IntegrityError``: told to ``damaged`` and fetched a second time (F15). Of an object longer
        than ``most`` bytes one more is fetched, and no more."""
        try:
            return check(_visible(self.store, key, most))
        except IntegrityError as error:
            damaged(error)
            return check(_visible(self.store, key, most))

    def attempt(self, number: int) -> Attempt:
        """All records of one attempt. Read in the order intent, outcome, manifests: each implies the ones before it
        in time, so a COMMIT without its manifest is late visibility, which is waited for, unless a tombstone says that
        it was pruned: then it is returned without manifests."""
        if (settled := self._settled.get(number)) is not None:
            return settled
        deadline = runtime.now() + LATE_VISIBILITY_S
        while True:
            try:
                return self._kept(self._attempt_now(number))
            except IntegrityError as error:
                if isinstance(error, FormatError | SignatureError) or runtime.now() > deadline:
                    raise
                runtime.sleep(0.2)

    def _kept(self, attempt: Attempt) -> Attempt:
        """Aborted attempts to which nothing can be added are remembered: while many fail in a row, each publish passes
        all of them."""
        if attempt.outcome and not attempt.committed and (attempt.ended or not attempt.streams):
            if len(self._settled) >= MOST_SETTLED:
                self._settled.clear()
            self._settled[attempt.number] = attempt
        return attempt

    def _attempt_now(self, number: int) -> Attempt:
        intent = self.read(Intent, attempt_key(number, "intent"))
        if intent is None:
            return Attempt(number)
        outcome = self.read(Outcome, attempt_key(number, "outcome"))
        batches = self._batches_now(number, intent, outcome)
        manifests = self._manifests_now(number, intent.producers, outcome)
        for record in (intent, outcome, *manifests):
            if record is not None and record.attempt != number:
                raise FormatError(f"a record of attempt {record.attempt} stands in the place of {number}")
        attempt = Attempt(number, intent, manifests, outcome, batches)
        if attempt.pruned and self.tombstone(Doomed.ATTEMPT, number) is not None:
            self._manifests.clear()
            return Attempt(number, intent, (), outcome)
        try:
            check_attempt(attempt)
        except IntegrityError:
            self._manifests.clear()
            raise
        return attempt

    def _manifests_now(self, number: int, producers: int, outcome: Outcome | None) -> tuple[ProducerManifest, ...]:
        """The manifests that are there. Those of the attempt that is read again and again are kept: nothing changes
        them, and a COMMIT proves them by their hashes. One that is not signed as it must be counts as not there until
        the attempt is committed: whoever closes or passes an attempt must not be held up by what a producer sealed."""
        self._keep_of(number)
        while len(self._manifests) < producers:
            try:
                manifest = self.manifest(number, len(self._manifests))
            except SignatureError:
                if outcome is not None and outcome.decision is Decision.COMMIT:
                    raise
                break
            if manifest is None:
                break
            self._manifests.append(manifest)
        return tuple(self._manifests)

    def _keep_of(self, number: int) -> None:
        if self._kept_of != number:
            self._kept_of, self._manifests, self._batches = number, [], {}

    def _batches_now(self, number: int, intent: Intent, outcome: Outcome | None) -> tuple[tuple[Batch, ...], ...]:
        """What each producer has announced so far; nothing once it is committed, for then its manifests say it."""
        if intent.mode is not Mode.STREAM or (outcome is not None and outcome.decision is Decision.COMMIT):
            return ()
        self._keep_of(number)
        for producer in range(intent.producers):
            self.batches(number, producer, self._batches.setdefault(producer, []))
        return tuple(tuple(self._batches[producer]) for producer in range(intent.producers))

    def batches(self, number: int, producer: int, known: list[Batch]) -> None:
        """Add to ``known`` what a producer has announced in an attempt beyond that."""
        while not (known and known[-1].end):
            batch = self.batch(number, producer, len(known))
            if batch is None:
                return
            known.append(batch)

    def batch(self, number: int, producer: int, place: int) -> Batch | None:
        """What stands at one place of a producer's list."""
        batch = self.read(Batch, key := batch_key(number, producer, place))
        if batch is not None and (batch.attempt, batch.producer, batch.number) != (number, producer, place):
            raise FormatError(f"{key} is a batch of another place", found=f"{batch.attempt}/{batch.producer}")
        return batch

    def check_sealed(self, number: int, manifests: Sequence[ProducerManifest]) -> None:
        """Before COMMIT, with trusted keys: what was gathered stands in the log as receivers will read it, signed by
        keys that may. Else they would refuse the version for ever. Raises ``IntegrityError``."""
        for given in manifests if self.notary.trust is not None else ():
            key = attempt_key(number, f"p/{given.producer}")
            found = self.notary.read(self.store, ProducerManifest, key, self.run, self.catalog, _visible)
            if found != given:
                raise IntegrityError(f"{key} is not what producer {given.producer} says that it sealed")

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
        """Unsigned: it decides nothing."""
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
        known = self.attempt(hinted) if hinted else None
        newest = known if known and known.committed else None
        for commit in self.commits(newest.number + 1 if newest else 1):
            newest = commit
        return newest

    def version(self, number: int) -> Attempt:
        """The committed attempt ``number``; ``NotFoundError`` if it is not a version of this run."""
        attempt = self.attempt(number)
        if not attempt.committed:
            reason = f" ({attempt.outcome.reason})" if attempt.outcome and attempt.outcome.reason else ""
            state = "open" if attempt.open else f"aborted{reason}" if attempt.intent else "not there"
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
        """The newest anchor whose record is whole, with the commit of its version. If none is, what is wrong with the
        newest one is raised."""
        errors: list[IntegrityError] = []
        found = next(self.anchors(lambda _, error: errors.append(error)), None)
        if found is None and errors:
            raise errors[0]
        return found

    def anchors(self, damaged: Callable[[int, IntegrityError], None]) -> Iterator[tuple[Anchor, Attempt]]:
        """Every anchor that hint or outcomes name, newest first, each with the commit of its version; those with a
        tombstone come last. Records that are wrong are told to ``damaged``. Payloads are not looked at."""
        doomed = []
        for version in self._anchor_versions():
            try:
                found = self._anchored(version)
            except IntegrityError as error:
                damaged(version, error)
                continue
            if found is not None and self.tombstone(Doomed.ANCHOR, version) is None:
                yield found
            elif found is not None:
                doomed.append(found)
        yield from doomed

    def _anchored(self, version: int) -> tuple[Anchor, Attempt] | None:
        anchor = self.anchor(version)
        if anchor is None or not (commit := self.attempt(version)).committed or commit.outcome is None:
            return None
        if anchor.digest != commit.outcome.digest:
            what = f"anchor {version} does not have the digest of its version"
            raise IntegrityError(what, expected=commit.outcome.digest, found=anchor.digest)
        return anchor, commit

    def _anchor_versions(self) -> Iterator[int]:
        """What the head's COMMIT names, then one commit after the other backwards; the hint's where it belongs."""
        head = self.head()
        outcome, hinted, seen = head.outcome if head else None, self.hint().anchor, {0}
        for _ in range(MOST_SEARCHED):
            if outcome is None:
                return
            named = {outcome.anchor, hinted} if hinted > outcome.anchor else {outcome.anchor}
            yield from sorted(named - seen, reverse=True)
            seen |= named
            outcome = self.read(Outcome, attempt_key(outcome.base, "outcome")) if outcome.base else None

    def tombstone(self, what: Doomed, number: int) -> Tombstone | None:
        """What says that an attempt or an anchor was pruned, or is about to be. Unsigned, and never trusted with bits;
        a damaged one counts: it was put by somebody who prunes."""
        key = tomb_key(what, number)
        try:
            return UNSIGNED.read(self.store, Tombstone, key)
        except NotFoundError:
            return None
        except FormatError:
            return Tombstone(self.run, what, number, 0, 0, 0)


def _visible(store: Store, key: str, most: int) -> bytes:
    """An object that must be there; waited for while it is not, unless it was pruned."""
    deadline = runtime.now() + LATE_VISIBILITY_S
    while True:
        try:
            return at_most(store, key, most)
        except NotFoundError:
            if runtime.now() > deadline or is_condemned(key, store.size):
                raise
            runtime.sleep(0.2)


def _read_catalog(store: Store, identity: str) -> Catalog:
    """The catalog that the run names. Proven by its hash before it is parsed: no signature could say more."""

    def proven(store: Store, key: str, most: int) -> bytes:
        data = _visible(store, key, most)
        if (found := hashlib.sha256(split_signature(data, key)[0]).hexdigest()) != identity:
            raise FormatError("the catalog is not the one of this run", expected=identity, found=found)
        return data

    return UNSIGNED.read(store, Catalog, f"catalog/{identity}", get=proven)
