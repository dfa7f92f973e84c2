"""Which keys may sign what: the receiver's side of signed records (docs/security.md). Pure.

``verify`` looks at nothing but lines: signature, place and hash. Only what passed is parsed, and then ``allow`` holds
its content against what its key may do.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from deltarefit.errors import SignatureError, UsageError
from deltarefit.manifest import (
    Anchor,
    Batch,
    Catalog,
    Decision,
    Intent,
    Outcome,
    PayloadRef,
    ProducerManifest,
    Run,
)
from deltarefit.records import Record
from deltarefit.signing import (
    SECRET_BYTES,
    Kind,
    Secret,
    Signature,
    check_key_id,
    check_secret,
    fits_ed25519,
    fits_hmac,
    message,
)
from deltarefit.tree import Tree

FORMAT = "deltarefit-trust/1"
_STEP = "Ask whoever runs the trainer which keys sign this run; do not follow it before that is clear."


class Role(str, enum.Enum):
    """What a key may sign. Any trusted key may ABORT: that loses a publish, and never bits."""

    COORDINATOR = "coordinator"
    """The run, intents, COMMIT, the end of a dead producer's list, anchors, the tree of relays."""
    PRODUCER = "producer"
    """Manifests and batches of its own producers and tensors."""
    ANCHOR = "anchor"
    """Anchors."""


@dataclass(frozen=True)
class TrustedKey:
    """A key that verifies, and its limits; None: no limit. ``producers`` are their numbers; ``tensors`` the first and
    last catalog index, or a prefix of names; ``first_attempt`` and ``last_attempt`` bound the attempts it may sign
    for (``run`` counts as attempt 1)."""

    kind: Kind
    key: str
    material: bytes | Secret
    roles: frozenset[Role] = frozenset(Role)
    producers: frozenset[int] | None = None
    tensors: tuple[int, int] | str | None = None
    first_attempt: int = 1
    last_attempt: int | None = None
    revoked: bool = False

    def __post_init__(self) -> None:
        check_key_id(self.key)
        if self.kind is Kind.HMAC and isinstance(self.material, Secret):
            check_secret(self.kind, self.material)
        elif self.kind is not Kind.ED25519 or not isinstance(self.material, bytes):
            raise UsageError(f"key {self.key} has not the material of its kind", expected=self.kind.value)
        elif len(self.material) != SECRET_BYTES:
            raise UsageError(f"the public key {self.key}", expected="32 bytes", found=len(self.material))

    def fits(self, signature: Signature, run: str, place: str, record: bytes | memoryview) -> bool:
        """Whether it made this signature, for this run and place."""
        if signature.kind is not self.kind:
            return False
        data = message(self.kind, self.key, run, place, record)
        if isinstance(self.material, Secret):
            return fits_hmac(self.material, data, signature.value)
        return fits_ed25519(self.material, data, signature.value)

    def valid_at(self, attempt: int) -> bool:
        return self.first_attempt <= attempt and (self.last_attempt is None or attempt <= self.last_attempt)


@dataclass(frozen=True)
class Trust:
    """The keys that are trusted. ``run``, if given, is the only run that is."""

    keys: tuple[TrustedKey, ...]
    run: str | None = None

    def __post_init__(self) -> None:
        names = [key.key for key in self.keys]
        if not names or len(set(names)) != len(names):
            raise UsageError("trusted keys", expected="at least one, each name once", found=names)

    def verify(self, signature: Signature | None, run: str, place: str, record: bytes | memoryview) -> TrustedKey:
        """The key that signed these bytes for this place. Raises ``SignatureError``; parses nothing."""
        if signature is None:
            raise _refused(f"{place} is not signed", expected=f"a signature by {self._names()}")
        key = next((key for key in self.keys if key.key == signature.key), None)
        if key is None:
            raise _refused(f"{place} is signed by an unknown key", expected=self._names(), found=signature.key)
        if key.revoked:
            raise _refused(f"{place} is signed by a revoked key", found=key.key)
        if not key.fits(signature, run, place, record):
            what = f"{place}: the signature does not fit"
            found = f"changed bytes, another place or another run, or not a {key.kind.value} key"
            raise _refused(what, expected=f"one by {key.key}", found=found)
        attempt = _attempt_of(place)
        if attempt is not None and not key.valid_at(attempt):
            last = "" if key.last_attempt is None else key.last_attempt
            what = f"{place}: key {key.key} may not sign for attempt {attempt}"
            raise _refused(what, expected=f"attempts {key.first_attempt}..{last}")
        return key

    def allow(self, key: TrustedKey, record: Record, place: str, catalog: Catalog | None) -> None:
        """``SignatureError`` if ``key`` signed what it may not."""
        if isinstance(record, Run | Tree) and record.run and self.run not in (None, record.run):
            raise _refused("a run that is not the trusted one", expected=self.run, found=record.run)
        if not _has_role(key, record):
            held = ", ".join(sorted(role.value for role in key.roles)) or "no role"
            raise _refused(f"{place}: key {key.key} may not sign this", found=held)
        if isinstance(record, ProducerManifest | Batch) and record.payloads:
            _check_tensors(key, record.payloads, place, catalog)

    def _names(self) -> str:
        return "one of " + ", ".join(key.key for key in self.keys)


def merged(trusts: Iterable[Trust]) -> Trust:
    """All keys of several; they must agree on the run, if they name one."""
    parts = tuple(trusts)
    runs = {part.run for part in parts} - {None}
    if len(runs) > 1:
        raise UsageError("trust files name different runs", found=sorted(str(run) for run in runs))
    return Trust(tuple(key for part in parts for key in part.keys), next(iter(runs), None))


def _has_role(key: TrustedKey, record: Record) -> bool:
    coordinator = Role.COORDINATOR in key.roles
    if isinstance(record, Outcome):
        return coordinator or record.decision is Decision.ABORT
    if isinstance(record, Anchor):
        return coordinator or Role.ANCHOR in key.roles
    if isinstance(record, Batch) and coordinator and record.end and not record.payloads:
        return True
    if isinstance(record, ProducerManifest | Batch):
        mine = key.producers is None or record.producer in key.producers
        return mine and Role.PRODUCER in key.roles
    return coordinator and isinstance(record, Run | Intent | Tree)


def _check_tensors(key: TrustedKey, payloads: tuple[PayloadRef, ...], place: str, catalog: Catalog | None) -> None:
    if key.tensors is None:
        return
    for ref in payloads:
        if not _within(key.tensors, ref, catalog):
            found = f"a payload of tensors {ref.first} to {ref.last}"
            raise _refused(f"{place}: key {key.key} may not change these tensors", expected=key.tensors, found=found)


def _within(tensors: tuple[int, int] | str, ref: PayloadRef, catalog: Catalog | None) -> bool:
    """Names are sorted: where the first and the last begin with a prefix, all between them do."""
    if isinstance(tensors, str):
        entries = catalog.tensors if catalog is not None else ()
        return ref.last < len(entries) and all(entries[end].name.startswith(tensors) for end in (ref.first, ref.last))
    return tensors[0] <= ref.first and ref.last <= tensors[1]


def _attempt_of(place: str) -> int | None:
    """None for trees of relays, which have epochs and belong to no attempt."""
    parts = place.split("/")
    if parts[0] == "tree":
        return None
    return int(parts[1]) if len(parts) > 2 and parts[1].isdecimal() else 1


def _refused(what: str, expected: object = None, found: object = None) -> SignatureError:
    return SignatureError(what, expected=expected, found=found, next_step=_STEP)


# ---------------------------------------------------------------------------------------------- trust files


def parse_trust(text: str, read_secret: Callable[[str], Secret], where: str) -> Trust:
    """The keys that a trust file lists (docs/security.md). ``read_secret`` reads a key file that it names. Raises
    ``UsageError``, which never shows a value that may be secret."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {type(error).__name__}") from None
    fields = _object(body, {"format", "keys"}, {"run"}, where)
    if fields["format"] != FORMAT:
        raise UsageError(f"{where}: unknown format", expected=FORMAT)
    keys = _typed(fields["keys"], list, where, "keys")
    run = fields.get("run")
    return Trust(
        tuple(_key(entry, read_secret, f"{where}: key {number}") for number, entry in enumerate(keys)),
        None if run is None else _typed(run, str, where, "run"),
    )


def _key(entry: Any, read_secret: Callable[[str], Secret], where: str) -> TrustedKey:
    optional = {"public", "secret_file", "roles", "producers", "tensors", "first_attempt", "last_attempt", "revoked"}
    fields = _object(entry, {"id", "kind"}, optional, where)
    kind = _one_of(Kind, fields["kind"], where)
    source = "public" if kind is Kind.ED25519 else "secret_file"
    if set(fields) & {"public", "secret_file"} != {source}:
        raise UsageError(f"{where}: a key of kind {kind.value}", expected=f"the field {source}, and only that")
    text = _typed(fields[source], str, where, source)
    producers, last = fields.get("producers"), fields.get("last_attempt")
    return TrustedKey(
        kind,
        _typed(fields["id"], str, where, "id"),
        read_secret(text) if kind is Kind.HMAC else _hex(text, where),
        frozenset(_one_of(Role, r, where) for r in _typed(fields.get("roles", list(Role)), list, where, "roles")),
        None if producers is None else frozenset(_numbers(producers, where, "producers")),
        _tensors(fields.get("tensors"), where),
        _typed(fields.get("first_attempt", 1), int, where, "first_attempt"),
        None if last is None else _typed(last, int, where, "last_attempt"),
        _typed(fields.get("revoked", False), bool, where, "revoked"),
    )


def _tensors(value: Any, where: str) -> tuple[int, int] | str | None:
    if value is None or isinstance(value, str):
        return value
    numbers = _numbers(value, where, "tensors")
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise UsageError(f"{where}: tensors", expected="[first, last], or a prefix of names")
    return numbers[0], numbers[1]


def _numbers(value: Any, where: str, name: str) -> list[int]:
    return [_typed(number, int, where, name) for number in _typed(value, list, where, name)]


def _typed(value: Any, kind: type, where: str, name: str) -> Any:
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise UsageError(f"{where}: bad {name}", expected=kind.__name__, found=type(value).__name__)
    return value


def _one_of(kinds: Any, value: Any, where: str) -> Any:
    try:
        return kinds(value)
    except ValueError:
        raise UsageError(f"{where}: unknown value", expected=[kind.value for kind in kinds]) from None


def _hex(text: str, where: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise UsageError(f"{where}: a public key", expected="64 hex digits") from None


def _object(body: Any, needed: set[str], optional: set[str], where: str) -> dict[str, Any]:
    names = set(body) if isinstance(body, dict) else None
    if names is None or not needed <= names <= needed | optional:
        raise UsageError(f"{where}: wrong fields", expected=f"{sorted(needed)}, and perhaps {sorted(optional)}")
    fields: dict[str, Any] = body
    return fields
