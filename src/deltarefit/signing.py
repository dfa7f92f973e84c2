"""Signatures of records: ed25519, or HMAC-SHA-256 within one domain of trust (docs/format.md §2, docs/security.md).

Pure: keys come in as bytes and go nowhere. What is signed is not only a record but also where it stands: the same bytes
in another place or another run need another signature. ed25519 needs the package ``cryptography`` (extra ``sign``).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from deltarefit.errors import FormatError, UsageError
from deltarefit.records import FORMAT

KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Names of keys."""
SECRET_BYTES = 32
_LINE = re.compile(rb"signature/1 ([a-z0-9-]+) ([A-Za-z0-9_-]+) ([0-9a-f]+)\n")
_TAG = f"{FORMAT} signature/1"

T = TypeVar("T")


class Kind(str, enum.Enum):
    """Kinds of keys."""

    ED25519 = "ed25519"
    """Who verifies cannot sign."""
    HMAC = "hmac-sha256"
    """One secret for all: who verifies can sign as well."""


_VALUE_BYTES = {Kind.ED25519: 64, Kind.HMAC: 32}


class Secret:
    """Bytes that nothing prints: not ``str``, ``repr`` or a format, and that no serializer takes."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return "***"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not written anywhere")


@dataclass(frozen=True)
class Signature:
    """The third line of a record. ``value`` has 64 bytes (ed25519) or 32 (HMAC-SHA-256)."""

    kind: Kind
    key: str
    value: bytes

    def to_line(self) -> bytes:
        return f"signature/1 {self.kind.value} {self.key} {self.value.hex()}\n".encode()

    @classmethod
    def parse(cls, line: bytes, where: str) -> Signature:
        """Read exactly what ``to_line`` wrote; ``where`` names the record. Raises ``FormatError``."""
        found = _LINE.fullmatch(line)
        kind = next((kind for kind in Kind if found and found[1] == kind.value.encode()), None)
        if found is None or kind is None or not KEY_ID.fullmatch(key := found[2].decode()):
            raise FormatError(f"{where}: what follows the record is no signature", found=repr(line[:80]))
        if len(found[3]) != 2 * _VALUE_BYTES[kind]:
            what = f"{where}: a signature of the wrong length"
            raise FormatError(what, expected=f"{_VALUE_BYTES[kind]} bytes", found=f"{len(found[3]) / 2:g}")
        return cls(kind, key, bytes.fromhex(found[3].decode()))


def message(kind: Kind, key: str, run: str, place: str, record: bytes | memoryview) -> bytes:
    """What is signed: format, kind and id of the key, run (empty for the record that names it), the place in the store,
    and the SHA-256 of the record's canonical bytes. No part can hold the zero byte that ends it."""
    head = "\0".join((_TAG, kind.value, key, run, place, ""))
    return head.encode() + hashlib.sha256(record).digest()


@dataclass(frozen=True)
class Signer:
    """A key that signs, under the name ``key`` by which receivers know it. ``secret`` has 32 bytes (ed25519), or at
    least as many (HMAC)."""

    kind: Kind
    key: str
    secret: Secret

    def __post_init__(self) -> None:
        check_key_id(self.key)
        check_secret(self.kind, self.secret)

    def sign(self, run: str, place: str, record: bytes | memoryview) -> Signature:
        """Sign a record's canonical bytes for one place in one run."""
        data, secret = message(self.kind, self.key, run, place, record), self.secret.reveal()
        if self.kind is Kind.HMAC:
            return Signature(self.kind, self.key, hmac.digest(secret, data, "sha256"))
        return Signature(self.kind, self.key, _private(secret).sign(data))

    def public(self) -> bytes:
        """What verifies an ed25519 key's signatures, 32 bytes. ``UsageError`` for HMAC, which has nothing public."""
        if self.kind is Kind.HMAC:
            raise UsageError("an HMAC key has no public part", next_step="Hand the key file itself to who verifies.")
        return bytes(_private(self.secret.reveal()).public_key().public_bytes_raw())


def check_key_id(key: str) -> None:
    """``UsageError`` unless ``key`` may name a key."""
    if not KEY_ID.fullmatch(key):
        expected = "1 to 64 letters, digits, - and _, a letter or digit first"
        raise UsageError("bad name of a key", expected=expected, found=repr(key)[:80])


def check_secret(kind: Kind, secret: Secret) -> None:
    """``UsageError`` for a secret of the wrong length; it is not shown."""
    found = len(secret.reveal())
    if found < SECRET_BYTES or (kind is Kind.ED25519 and found != SECRET_BYTES):
        least = "" if kind is Kind.ED25519 else "at least "
        raise UsageError(f"the secret of an {kind.value} key", expected=f"{least}{SECRET_BYTES} bytes", found=found)


def fits_hmac(secret: Secret, data: bytes, value: bytes) -> bool:
    return hmac.compare_digest(hmac.digest(secret.reveal(), data, "sha256"), value)


def fits_ed25519(public: bytes, data: bytes, value: bytes) -> bool:
    ed25519, invalid = _needed(_library)
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(value, data)
    except (invalid, ValueError):
        return False
    return True


def _private(secret: bytes) -> Any:
    return _needed(_library)[0].Ed25519PrivateKey.from_private_bytes(secret)


def _library() -> tuple[Any, type[Exception]]:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519, InvalidSignature


def _needed(load: Callable[[], T]) -> T:
    try:
        return load()
    except ImportError as error:
        step = "pip install 'deltarefit[sign]', or use keys of kind hmac."
        raise UsageError("ed25519 needs the package cryptography", found=str(error), next_step=step) from error
