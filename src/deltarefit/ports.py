"""The contracts: where bits come from (Source, Exchange), where they go (Target, Spool), what carries them (Store).

Docstrings are the contract; ``deltarefit.testing.StoreContract`` is the suite that every store passes.
Elements are unsigned integers of 1, 2, 4 or 8 bytes throughout (design §5): no port knows a float.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from deltarefit.elements import Elements
from deltarefit.manifest import Catalog, Header, PayloadRef
from deltarefit.pieces import Piece
from deltarefit.protocol.messages import Op
from deltarefit.records import Digest


class Store(Protocol):
    """Immutable and create-once objects under ``/``-separated keys. Thread-safe.

    Raises ``NotFoundError`` for a missing key, ``AlreadyExistsError`` for a taken create-once key,
    ``StorageFullError`` on ENOSPC and ``UnavailableError`` for everything that a retry may cure.
    """

    @property
    def url(self) -> str:
        """Where it is, without any secret; for messages."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write the whole object, replacing any. Atomic and durable on return; may be called twice."""

    def create(self, key: str, data: bytes) -> None:
        """Write the object only if the key is free; exactly one of any number of racing callers wins.

        ``UnavailableError`` leaves the answer unknown, and ``AlreadyExistsError`` may be this caller's own
        success seen again after an internal retry: the caller reads back and compares its nonce (protocol §3.5).
        """

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """The object, or ``length`` bytes of it from ``start``. Visible as soon as ``put``/``create`` returned."""

    def size(self, key: str) -> int:
        """Its length in bytes."""

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """(key, size) of every object below ``prefix``, sorted by key. Only for tools, never for safety."""

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""


@runtime_checkable
class Watched(Protocol):
    """A store that tells of new objects before anybody asks for them. Hints: one that is missed costs time only."""

    def news(self, after: str, seconds: float) -> tuple[str, Sequence[tuple[str, int]]]:
        """(cursor, (key, size) of objects that appeared) since cursor ``after`` ("": from now on); waits up to
        ``seconds`` for the first. A cursor that the store does not know any more begins anew."""

    def wait(self, key: str, seconds: float) -> bool:
        """Whether the object is there, or has become so within ``seconds``."""


@runtime_checkable
class LocalFiles(Protocol):
    """A store whose objects are files on this machine."""

    def file(self, key: str) -> Path | None:
        """Where a whole, durable object lies, to be opened at once and only read; None if there is none."""


class Spool(Protocol):
    """Named byte strings that live exactly as long as a target's weights. Names are hex digits and dots."""

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Durable on return (as durable as the weights); replaces."""

    def get(self, name: str) -> bytes | None:
        """The bytes, or None."""

    def clear(self) -> None:
        """Remove all; called once the header is CLEAN."""


class Exchange(Protocol):
    """Small messages among the ranks of one trainer: about a kilobyte for each payload, piece or tensor. Nothing waits.

    A key is written by one rank, the last ``put`` counts. Raises ``UnavailableError`` if the medium is gone.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < size. Rank 0 coordinates."""

    @property
    def size(self) -> int:
        """How many ranks publish together."""

    def put(self, key: str, data: bytes) -> None:
        """Say ``data``, which is not empty, to all ranks."""

    def get(self, key: str) -> bytes | None:
        """What was said under ``key``, or None if nothing was yet."""

    def delete(self, key: str) -> None:
        """Forget a message that every rank has read."""


class Source(Protocol):
    """A trainer rank's side: the canonical bits that this rank owns, piece by piece.

    Over all ranks of ``exchange``, pieces cover every element of the catalog exactly once. Catalog and pieces stay the
    same for the life of the source.
    """

    @property
    def catalog(self) -> Catalog:
        """All canonical tensors of the model, parameters and buffers alike, tied ones once. The same on every rank."""

    @property
    def exchange(self) -> Exchange:
        """The ranks that publish together."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """What this rank owns, sorted."""

    def files(self) -> Mapping[str, bytes]:
        """Small side files an anchor carries so that a seeded directory opens as it is (config, tokenizer). Asked of
        rank 0 only."""

    def hold(self) -> AbstractContextManager[None]:
        """The time of one publish; entered by every rank before its first ``read``. Checks on entry that the tensors
        are still those of the catalog (``BaseMismatch`` names the one that is not), runs residual conversions, and
        raises ``IntegrityError`` at the end if the bits were written to while they were held."""

    def read(self, piece: int, start: int, stop: int) -> AbstractContextManager[Elements]:
        """Elements [start, stop) of ``pieces[piece]``, in the order of the piece, shape (stop - start,), contiguous;
        valid inside the block. Called from several threads."""


class Baseline(Protocol):
    """The bits of the head that one producer owns, against which it diffs. Receiver number zero of the run: it moves
    only along the log (protocol §3.6), so that COMMIT moves policy version and baseline together."""

    @property
    def part(self) -> Digest:
        """Digest of all elements that the producer owns, at the version held."""

    def read(self, piece: int, start: int, stop: int) -> AbstractContextManager[Elements]:
        """Elements [start, stop) of a piece of the source, shape (stop - start,); valid inside the block. Called from
        several threads."""

    def take(self, piece: int, start: int, values: Elements) -> None:
        """Elements that are being published whole, from ``start`` on. They count once ``adopt`` says so."""

    def adopt(self, version: int, part: Digest) -> None:
        """Everything was taken, and is committed as ``version``."""

    def move(self, version: int) -> None:
        """Hold exactly the bits of ``version``, the head. Raises ``AttemptLostError`` if the head is another."""

    def doubt(self) -> None:
        """The bits held were proven wrong: prove or rebuild them before the next use."""

    def close(self) -> None:
        """Let go of threads, memory and files."""


class Target(Protocol):
    """Live bits that are written in place, with a state header and a spool that share their fate.

    The receiver alone decides what is written; a target only gives access. Writing happens inside ``window``.
    """

    @property
    def catalog(self) -> Catalog | None:
        """Its canonical tensors, or None while it is empty (a directory not yet seeded)."""

    @property
    def spool(self) -> Spool:
        """Bytes that must survive as long as the weights do."""

    def read_header(self) -> Header | None:
        """The state header, or None if there is none."""

    def write_header(self, header: Header) -> None:
        """Durable (as durable as the weights) and atomic on return."""

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        """Make room for ``catalog`` (content undefined) and take the side files. Idempotent for one catalog.
        Called with a header that is not CLEAN already written. All space is claimed here: ``StorageFullError``
        now, not SIGBUS later. A target that has fixed tensors raises ``BaseMismatch`` unless they fit."""

    def finish_seed(self) -> None:
        """All bits are in and proven: put the seeded content where users look. Idempotent."""

    def window(self, tensor: int, start: int, stop: int) -> AbstractContextManager[tuple[Elements, int]]:
        """Writable access to elements [start, stop) of one tensor: an array of any strides, and the row-major
        index in that array at which element ``start`` lies (0 for an exact window; ``start`` where the whole,
        perhaps strided, tensor is given). Bounded memory: released when the block ends. Called from several
        threads at once; windows that are written to do not overlap then, windows that are only read may."""

    def flush(self) -> None:
        """Every byte written so far is as durable as the header will be."""

    def pause(self) -> None:
        """Stop users of the weights; returns when none runs. Called before DIRTY; may be called twice."""

    def resume(self) -> None:
        """Let users run again; called after CLEAN, and after a failure that wrote nothing."""


@runtime_checkable
class LiveTarget(Protocol):
    """Live weights that only their own processes can reach, such as those of a serving engine's ranks: the receiver
    hands payloads over and they are carried out where the weights are. Header, seed, pause and resume are as in
    ``Target``.

    Sums and digests count every canonical element once, whatever the number of ranks and copies; copies that do not
    agree are an ``IntegrityError``. ``UnavailableError`` for what a retry may cure, a restarted engine among it.
    """

    @property
    def catalog(self) -> Catalog | None:
        """The catalog attached to, or None."""

    def attach(self, run: str, catalog: Catalog) -> None:
        """Find out where each tensor of ``catalog`` lies, and whether anything was left there by an earlier receiver.
        Comes before everything else; idempotent. Raises ``BaseMismatch`` for another model's catalog, ``UsageError``
        for weights that cannot be kept bit-exact; nothing was written then."""

    def proof(self) -> Digest | None:
        """Digest of the checkpoint that the native loader put there, read from where it was loaded; None if that cannot
        be read any more. Equal to ``digest()`` before anything was written, it proves the placement."""

    def read_header(self) -> Header | None:
        """The state header, or None if there is none: the engine was started since."""

    def write_header(self, header: Header) -> None:
        """As durable as the weights, and atomic, on return."""

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        """All elements are about to be set. Side files are not needed."""

    def finish_seed(self) -> None:
        """All bits are in and proven."""

    def stage(self, ref: PayloadRef, data: bytes) -> tuple[Digest, Digest]:
        """Keep a payload, checked against ``ref``, beside the weights; sums of the live bits at its positions as they
        are, and as they will be. Weights are only read, while they serve."""

    def staged(self, ref: PayloadRef) -> bool:
        """Whether a payload is still kept."""

    def live(self, ref: PayloadRef) -> Digest:
        """Sums of the live bits at a staged payload's positions."""

    def write(self, ref: PayloadRef, op: Op) -> None:
        """APPLY or SET: bring every rank that still has the old bits to the new ones, in place; a rank that has them is
        left alone. SKIP: nothing."""

    def fill(self, ref: PayloadRef, data: bytes) -> None:
        """Set all elements of an anchor's payload."""

    def digest(self) -> Digest:
        """Digest of all live bits."""

    def drop(self) -> None:
        """Forget staged payloads."""

    def pause(self) -> None:
        """Stop generation; returns when none runs."""

    def resume(self) -> None:
        """Let generation go on, with nothing cached that older bits computed."""

    def watch(self) -> None:
        """Raises ``UnavailableError`` if the weights' holder is gone or another than before; cheap."""
