"""The baseline of one producer among several: the head's bits of its own pieces, moved along the log.

After a COMMIT its own payloads are applied to it. Whatever else happened (a restart, another sharding, a torn or
damaged baseline) it is rebuilt by canonical position: newest anchor, then every delta of the chain as far as it touches
the pieces. Nothing here is trusted for long: the digest of all elements it owns goes into the next manifest, and the
sum over all producers must be the digest that the log states for the base before anything is committed.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeVar

from deltarefit import _kernel, runtime
from deltarefit.anchors import AnchorSearch
from deltarefit.codec import open_payload
from deltarefit.digest import catalog_keys
from deltarefit.elements import Elements
from deltarefit.errors import AttemptLostError, IntegrityError, NotFoundError
from deltarefit.events import Emit, Event
from deltarefit.manifest import Anchor, Header, PayloadRef, State
from deltarefit.pieces import Piece, layout_of
from deltarefit.pins import CatchUpPin
from deltarefit.ports import Store
from deltarefit.protocol.attempts import Attempt
from deltarefit.publishing.foreign import write_into
from deltarefit.publishing.shards import ShardBits
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, anchor_prefix, payload_prefix
from deltarefit.weights import Segment, cut

T = TypeVar("T")
U = TypeVar("U")
MOST_OPEN = 4
"""Payloads that are open at a time, whatever the number of threads: each takes some 50 MB."""


class ShardBaseline:
    """``ports.Baseline`` of ``pieces`` (sorted) of a run. ``store`` serves payloads: the log's, or a cache of it."""

    def __init__(
        self, log: RunLog, pieces: Sequence[Piece], bits: ShardBits, store: Store, emit: Emit, threads: int = 1
    ) -> None:
        self._log, self._pieces, self._bits, self._emit, self._threads = log, pieces, bits, emit, threads
        self._payloads = log.over(store)
        self._keys = catalog_keys(log.run, log.catalog)
        self._layout = layout_of(pieces)
        self._incarnation = runtime.token()[:16]
        self._of_tensor: dict[int, list[int]] = {}
        for number, piece in enumerate(pieces):
            if piece.length:
                self._of_tensor.setdefault(piece.tensor, []).append(number)
        self._extents = [(piece.length, log.catalog.tensors[piece.tensor].width) for piece in pieces]
        bits.claim(self._extents)
        self._header = self._believable()

    @property
    def part(self) -> Digest:
        """Digest of all elements it owns, at the version it holds."""
        return self._header.digest

    @contextmanager
    def read(self, piece: int, start: int, stop: int) -> Iterator[Elements]:
        """Elements [start, stop) of a piece."""
        yield self._bits.array(piece)[start:stop]

    def take(self, piece: int, start: int, values: Elements) -> None:
        """Bits that are on their way into an anchor; they count once ``adopt`` says so."""
        if self._header.state is not State.UNKNOWN:
            self._write(State.UNKNOWN, 0, Digest())
        self._bits.array(piece)[start : start + values.size] = values

    def adopt(self, version: int, part: Digest) -> None:
        """What was taken is committed as ``version``."""
        self._write(State.CLEAN, version, part)

    def move(self, version: int) -> None:
        """Hold exactly the bits of committed ``version``, which is the head. Raises ``AttemptLostError`` if the head is
        another, ``NotFoundError`` if nothing leads there."""
        head = self._log.head()
        if head is None or head.number != version:
            found = head.number if head else "none"
            raise AttemptLostError(
                "another publisher moved the head", expected=version, found=found, next_step="Publish again."
            )
        pin = CatchUpPin(self._log, "baseline", self._emit)
        with contextlib.ExitStack() as stack:
            stack.callback(pin.release)
            if self._header.state is not State.CLEAN or self._header.version > version:
                self._rebuild(pin)
            commits = list(self._log.commits(self._header.version + 1))
            if any(commit.pruned for commit in commits):
                self._rebuild(pin)
                commits = list(self._log.commits(self._header.version + 1))
            for commit in commits:
                self._apply(commit)

    def doubt(self) -> None:
        """Its bits were proven wrong: forget them, the next ``move`` rebuilds."""
        self._emit(Event("diverged", version=self._header.version, text="the baseline is wrong: rebuilding it"))
        self._write(State.UNKNOWN, 0, Digest())

    def close(self) -> None:
        """Let go of memory or file."""
        self._bits.close()

    # ------------------------------------------------------------------------------------ header

    def _believable(self) -> Header:
        """What the header says, if it is of this run and these pieces and its digest is that of the bits."""
        header = self._bits.read_header()
        ours = header is not None and (header.run, header.catalog) == (self._log.run, self._layout)
        if header is not None and ours and header.state is State.CLEAN and self._digest() == header.digest:
            return header
        return self._new_header(State.UNKNOWN, 0, Digest())

    def _new_header(self, state: State, version: int, digest: Digest, target: int = 0) -> Header:
        return Header(self._log.run, self._layout, state, version, target, digest, 0, self._incarnation)

    def _write(self, state: State, version: int, digest: Digest, target: int = 0) -> None:
        self._header = self._new_header(state, version, digest, target)
        self._bits.write_header(self._header)

    def _digest(self) -> Digest:
        return sum(self._each(self._segment_digest, cut(self._extents), self._threads), Digest())

    def _segment_digest(self, segment: Segment) -> Digest:
        number, start, stop = segment
        piece, array = self._pieces[number], self._bits.array(number)
        key = self._keys[piece.tensor]
        return Digest(*_kernel.digest(array[start:stop], piece.origin + start, key, piece.rows))

    # ------------------------------------------------------------------------------------ moving

    def _apply(self, commit: Attempt) -> None:
        """One version further: own payloads if this layout made any, else whatever touches the pieces."""
        own = [manifest for manifest in commit.manifests if manifest.layout == self._layout]
        before = self._header
        self._write(State.DIRTY, before.version, before.digest, commit.number)
        refs = own[0].payloads if len(own) == 1 else commit.payloads
        self._set(payload_prefix(commit.number), self._touching(refs), "baseline", commit.number)
        self._write(State.CLEAN, commit.number, own[0].part if len(own) == 1 else self._digest())

    def _rebuild(self, pin: CatchUpPin) -> None:
        """From the newest anchor that can be read."""
        search = AnchorSearch(self._log, pin, self._emit)
        while True:
            found = search.start()
            if found is None:
                raise NotFoundError("nothing to rebuild the baseline from: the run has no anchor")
            try:
                self._load(found[0])
                return
            except (IntegrityError, NotFoundError) as error:
                if not search.failed(found[0], error):
                    raise

    def _load(self, anchor: Anchor) -> None:
        self._emit(Event("baseline", "seed", anchor.version, text=f"rebuilding from anchor {anchor.version}"))
        self._write(State.UNKNOWN, 0, Digest())
        self._set(anchor_prefix(anchor.version) + "pl/", self._touching(anchor.payloads), "seed", anchor.version)
        self._write(State.CLEAN, anchor.version, self._digest())

    def _touching(self, refs: Sequence[PayloadRef]) -> list[PayloadRef]:
        """Payloads that may hold something of the pieces: by the range of tensors that each covers."""
        owned = sorted(self._of_tensor)
        return [ref for ref in refs if bisect.bisect_left(owned, ref.first) < bisect.bisect_right(owned, ref.last)]

    def _set(self, prefix: str, refs: Sequence[PayloadRef], phase: str, version: int) -> None:
        """Payloads of one version in any order: no element is in two of them."""
        total, done = sum(ref.size for ref in refs), 0
        written = self._each(partial(self._write_payload, prefix), refs, min(self._threads, MOST_OPEN))
        with closing(written):  # a listener may raise: no thread may write on after that
            for size in written:
                done += size
                self._emit(Event("progress", phase, version, done=done, total=total))

    def _write_payload(self, prefix: str, ref: PayloadRef) -> int:
        opened = partial(open_payload, ref=ref, catalog=self._log.catalog)
        deltas = self._payloads.fetch(prefix + ref.sha256, opened, most=ref.size)
        runtime.point("baseline write")
        for delta in deltas:
            for number in self._of_tensor.get(delta.tensor, ()):
                write_into(self._pieces[number], self._bits.array(number), delta)
        return ref.size

    def _each(self, work: Callable[[T], U], items: Iterable[T], threads: int) -> Generator[U, None, None]:
        """``map`` on so many threads. When an error is raised, or this is closed, nothing of it runs any more."""
        if threads == 1:
            yield from map(work, items)
            return
        with runtime.executor(threads, "baseline") as pool:
            yield from pool.map(work, items)
