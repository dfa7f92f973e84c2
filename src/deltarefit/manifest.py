"""The records of a run: catalog, intent, producer manifest, outcome, anchor, header (docs/format.md §3).

All are frozen and have canonical bytes (``records``). Hashes are SHA-256 in lower-case hex; digests are the
additive two-lane sums of ``digest``. Records carry no paths: tensors go by catalog index, objects by hash.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass, field
from functools import cached_property

from deltarefit.records import Digest, Record

MAX_TENSORS = 1 << 22
MAX_DIMS = 16
MAX_ELEMENTS = 1 << 48
MAX_PRODUCERS = 1 << 16
MAX_PAYLOAD_BYTES = 256 << 20
"""Most bytes of one payload object."""
MAX_DELTAS = 1 << 20
"""Most deltas of one payload."""
MAX_STREAM_BYTES = 1 << 30
"""Most bytes of all streams of one payload after decompression."""
MAX_FILES_BYTES = 1 << 30
"""Most bytes of all side files of an anchor; they are held in memory together."""

WIDTHS: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "F4": 1, "F6_E2M3": 1, "F6_E3M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element by safetensors dtype name. Sub-byte formats travel as the bytes they are stored in."""
TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2", "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16",
    "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip
"""What torch calls them, where it has them; a torch may have fewer."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_RUN_ID = re.compile(r"[0-9a-f]{32}")
RECEIVER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Names of receivers: one part of a key."""
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def _require(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


@dataclass(frozen=True)
class TensorEntry(Record):
    """One canonical tensor. ``shape`` counts elements of ``WIDTHS[dtype]`` bytes; ``aliases`` are tied names."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(0 < len(self.name) <= 1024, f"tensor name of {len(self.name)} characters")
        _require(self.dtype in WIDTHS, f"unknown dtype {self.dtype[:40]!r} of tensor {self.name!r}")
        _require(len(self.shape) <= MAX_DIMS, f"tensor {self.name!r} has {len(self.shape)} dimensions")
        _require(math.prod(self.shape) <= MAX_ELEMENTS, f"tensor {self.name!r} is too large: {self.shape}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.width


@dataclass(frozen=True)
class Catalog(Record):
    """The ordered list of canonical tensors, sorted by name; a tensor's index in it is its id on the wire."""

    tensors: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        _require(len(self.tensors) <= MAX_TENSORS, f"{len(self.tensors)} tensors")
        names = [entry.name for entry in self.tensors]
        _require(names == sorted(names), "catalog is not sorted by name")
        every = names + [alias for entry in self.tensors for alias in entry.aliases]
        _require(len(set(every)) == len(every), "a tensor name stands twice in the catalog")

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the catalog's bytes: two parties with one identity mean the same tensors by one index."""
        return self.content_hash()

    @cached_property
    def index(self) -> dict[str, int]:
        """Tensor id by name, aliases included."""
        found = {entry.name: number for number, entry in enumerate(self.tensors)}
        found.update({a: number for number, entry in enumerate(self.tensors) for a in entry.aliases})
        return found

    @cached_property
    def numel(self) -> int:
        return sum(entry.numel for entry in self.tensors)

    @cached_property
    def dense_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors)


@dataclass(frozen=True)
class Run(Record):
    """Create-once ``run``: the identity of a run, in every record and in the digest keys, and its one catalog."""

    run: str
    catalog: str

    def __post_init__(self) -> None:
        _require(bool(_RUN_ID.fullmatch(self.run)), "run id is not 32 hex digits")
        _require(bool(_SHA256.fullmatch(self.catalog)), "catalog is not a SHA-256")


class Mode(str, enum.Enum):
    """When receivers write (protocol §3.5)."""

    STAGE = "stage"
    """After COMMIT; nothing of an attempt that aborts is ever written."""
    STREAM = "stream"
    """On arrival, while they are paused; COMMIT waits for their votes."""


@dataclass(frozen=True)
class Intent(Record):
    """Create-once ``a/<n>/intent``: attempt ``n`` is open, its deltas apply to version ``base`` (0: to nothing), and
    come from ``producers`` producers."""

    run: str
    attempt: int
    base: int
    base_digest: Digest
    mode: Mode
    nonce: str
    producers: int = 1

    def __post_init__(self) -> None:
        _require(1 <= self.producers <= MAX_PRODUCERS, f"{self.producers} producers")
        _require(self.attempt > self.base, f"attempt {self.attempt} is not after base {self.base}")


@dataclass(frozen=True)
class PayloadRef(Record):
    """A payload object, named by hash. ``streams`` gives every stream's size after decompression; ``pre`` and
    ``post`` are the digest sums of its positions before and after (protocol §3.3). ``changed`` counts the positions
    that its deltas list; a delta that lists a whole range may list elements that did not change. ``first`` and ``last``
    are the catalog indices of the tensors of its first and last delta: a reader of others need not fetch it.
    ``overwrites``: every delta sets absolute values, and the positions may hold anything that failed attempts left
    there (the union rule, protocol §3.2); ``pre`` is of the base version all the same."""

    sha256: str
    size: int
    streams: dict[str, int] = field(hash=False)
    deltas: int
    changed: int
    first: int
    last: int
    pre: Digest
    post: Digest
    overwrites: bool = False

    def __post_init__(self) -> None:
        _require(bool(_SHA256.fullmatch(self.sha256)), "payload name is not a SHA-256")
        _require(self.first <= self.last, f"payload of tensors {self.first} to {self.last}")
        _require(self.size <= MAX_PAYLOAD_BYTES, f"payload of {self.size} bytes")
        _require(self.deltas <= MAX_DELTAS, f"payload of {self.deltas} deltas")
        _require(sum(self.streams.values()) <= MAX_STREAM_BYTES, "payload streams are too large")


@dataclass(frozen=True)
class ProducerManifest(Record):
    """Create-once ``a/<n>/p/<p>``: all payloads of producer ``p``. ``step`` is the trainer's own number.

    ``part`` is the digest of all elements that the producer owns, as they will be: over all producers it adds up to the
    new version's. ``layout`` names what it owns (``pieces.layout_of``): a producer of the same layout that rebuilds its
    baseline needs the payloads of no other. ``changed`` counts elements whose bits differ; deltas may list more.
    """

    run: str
    attempt: int
    base: int
    producer: int
    step: int
    part: Digest
    layout: str
    payloads: tuple[PayloadRef, ...]
    changed: int = 0

    def __post_init__(self) -> None:
        _require(self.producer < MAX_PRODUCERS, f"producer {self.producer}")
        _require(bool(_SHA256.fullmatch(self.layout)), "layout is not a SHA-256")

    @property
    def listed(self) -> int:
        return sum(payload.changed for payload in self.payloads)

    @property
    def payload_bytes(self) -> int:
        return sum(payload.size for payload in self.payloads)

    @property
    def shift(self) -> Digest:
        """What this producer's deltas add to the digest of the base."""
        return sum((p.post - p.pre for p in self.payloads), Digest())


@dataclass(frozen=True)
class Batch(Record):
    """Create-once ``a/<n>/b/<p>/<k>``: payloads that producer ``p`` has put into the store, in mode stream, before its
    manifest. Numbered from 0 without a gap; ``end``: none follows. Whoever opens the next attempt ends the lists of
    those that were aborted, with a batch of its own nonce and no payloads, so that what may have been written is known
    for good."""

    run: str
    attempt: int
    producer: int
    number: int
    payloads: tuple[PayloadRef, ...]
    end: bool
    nonce: str


class Held(str, enum.Enum):
    """What a receiver votes."""

    STAGED = "STAGED"
    """All payloads are verified beside the weights; they apply to the live bits."""
    APPLIED = "APPLIED"
    """The live bits are those of the attempt."""
    REFUSED = "REFUSED"


@dataclass(frozen=True)
class Vote(Record):
    """``a/<n>/v/<receiver>``: what a receiver has of an attempt. Policy only: no vote makes an attempt safe, and none
    that is lost makes it unsafe. ``manifests`` are the hashes of the manifests it speaks of."""

    run: str
    attempt: int
    receiver: str
    incarnation: str
    held: Held
    manifests: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Member(Record):
    """Replaceable ``member/<receiver>``: a receiver that follows. ``beat`` counts up while it lives; nobody compares
    clocks. ``version`` is what it holds."""

    run: str
    receiver: str
    incarnation: str
    beat: int
    version: int

    def __post_init__(self) -> None:
        _require(bool(RECEIVER.fullmatch(self.receiver)), "bad name of a receiver")


class Decision(str, enum.Enum):
    COMMIT = "COMMIT"
    ABORT = "ABORT"


@dataclass(frozen=True)
class Outcome(Record):
    """Create-once ``a/<n>/outcome``: the joint commit, or the end of a failed attempt. First writer wins.

    ``manifests`` are the SHA-256 of the producer manifests' bytes, in order; ``digest`` the digest of the new version;
    ``anchor`` the newest anchor that the writer knows (0: none). ``members`` are the receivers whose votes were
    counted, ``evicted`` others that were there. An ABORT has a ``reason`` and otherwise zeros.
    """

    run: str
    attempt: int
    decision: Decision
    base: int
    digest: Digest
    manifests: tuple[str, ...]
    anchor: int
    nonce: str
    reason: str = ""
    members: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(self.attempt > self.base, f"attempt {self.attempt} is not after base {self.base}")
        _require(all(_SHA256.fullmatch(m) for m in self.manifests), "manifest name is not a SHA-256")


@dataclass(frozen=True)
class FileRef(Record):
    """A side file of a checkpoint directory, stored by hash. ``name`` is one plain path component."""

    name: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        _require(bool(_FILE.fullmatch(self.name)), f"unsafe file name {self.name[:80]!r}")
        _require(bool(_SHA256.fullmatch(self.sha256)), "file hash is not a SHA-256")
        _require(self.size <= MAX_PAYLOAD_BYTES, f"side file {self.name!r} of {self.size} bytes")


@dataclass(frozen=True)
class Anchor(Record):
    """Create-once ``anchor/<v>/anchor``, written last: the full version ``v`` as payloads that set every element."""

    run: str
    version: int
    digest: Digest
    payloads: tuple[PayloadRef, ...]
    files: tuple[FileRef, ...]

    def __post_init__(self) -> None:
        _require(sum(file.size for file in self.files) <= MAX_FILES_BYTES, "side files are too large")


@dataclass(frozen=True)
class Hint(Record):
    """Replaceable ``head``: where to start looking for the tail and for an anchor. May be stale, never trusted."""

    head: int
    anchor: int


class State(str, enum.Enum):
    UNKNOWN = "UNKNOWN"
    """No version: empty, being seeded, or proven wrong."""
    CLEAN = "CLEAN"
    """Holds exactly the bits of ``version``."""
    DIRTY = "DIRTY"
    """Between ``version`` and ``target``: some payloads of ``target`` may be written, one may be torn; in mode stream,
    of every attempt between the two."""


@dataclass(frozen=True)
class Header(Record):
    """The state of one copy of the weights; lives and dies with them (protocol §3.2).

    ``digest`` belongs to ``version``. ``progress`` is reserved (0).
    ``incarnation`` changes whenever the memory that holds the weights is new.
    """

    run: str
    catalog: str
    state: State
    version: int
    target: int
    digest: Digest
    progress: int
    incarnation: str
