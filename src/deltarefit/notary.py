"""Records on their way into a store and out of it: signed, bounded, and verified before they are parsed.

A reader takes what the store hands out apart into lines and nothing more. With trusted keys the signature comes first;
a record that is not signed as it must be is never parsed, and nothing that it names is ever fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from deltarefit.errors import FormatError, SignatureError, UsageError
from deltarefit.manifest import Catalog, Hint, Intent, Member, Outcome, Run, Vote
from deltarefit.ports import Store
from deltarefit.records import MAX_RECORD_BYTES, MAX_SIGNATURE_BYTES, Record, split_signature
from deltarefit.retention import Pin, Tombstone
from deltarefit.signing import Signature, Signer
from deltarefit.trust import Trust

R = TypeVar("R", bound=Record)
Get = Callable[[Store, str, int], bytes]
"""Reads an object, of which at most so many bytes matter."""

UNSIGNED = (Hint, Vote, Member, Pin, Tombstone, Catalog)
"""Records that decide nothing about bits: where to look first, what receivers say of themselves, what may be deleted.
A catalog is proven by its hash, which the signed run names."""
_SMALL: dict[type[Record], int] = {
    **dict.fromkeys((Run, Hint, Intent, Member, Pin, Tombstone), 8192),
    Outcome: 64 << 20,
}
"""Most bytes of a record without its signature, where ``MAX_RECORD_BYTES`` would be absurd."""


def at_most(store: Store, key: str, most: int) -> bytes:
    """An object, or its first ``most`` + 1 bytes: whoever gets so many knows that it is too long, and has no more."""
    return store.get(key, 0, most + 1)


@dataclass(frozen=True)
class Notary:
    """Signs what is written to a run with ``signer``, and reads only what keys of ``trust`` signed. None: unsigned, and
    signatures that stand there are ignored."""

    signer: Signer | None = None
    trust: Trust | None = None

    def bytes_of(self, record: Record, run: str, place: str, catalog: Catalog | None = None) -> bytes:
        """What is stored at key ``place`` of ``run`` (empty for the record that names the run). ``SignatureError`` if
        readers with the same trusted keys would refuse it: what stands in a create-once place stops them for good."""
        data = record.to_bytes()
        if isinstance(record, UNSIGNED):
            return data
        signature = self.signer.sign(run, place, data) if self.signer is not None else None
        if self.trust is not None:
            self.trust.allow(self.trust.verify(signature, run, place, data), record, place, catalog)
        return data + (signature.to_line() if signature is not None else b"")

    def read(
        self, store: Store, kind: type[R], place: str, run: str = "", catalog: Catalog | None = None, get: Get = at_most
    ) -> R:
        """The record at key ``place``; read a second time if the first copy is damaged (F15). ``catalog`` is needed for
        keys that are bound to tensors. Raises ``FormatError`` and, with ``trust``, ``SignatureError``."""
        most = _SMALL.get(kind, MAX_RECORD_BYTES) + MAX_SIGNATURE_BYTES
        try:
            return self.checked(kind, get(store, place, most), most, place, run, catalog)
        except (FormatError, SignatureError):
            return self.checked(kind, get(store, place, most), most, place, run, catalog)

    def checked(self, kind: type[R], data: bytes, most: int, place: str, run: str, catalog: Catalog | None = None) -> R:
        """The record in ``data``, at most ``most`` bytes with its signature. Raises as ``read`` does."""
        if len(data) > most:
            raise FormatError(f"{place}: too large", expected=f"<= {most} bytes")
        plain, line = split_signature(data, place)
        signature = Signature.parse(line, place) if line else None
        if self.trust is None or issubclass(kind, UNSIGNED):
            return kind.from_bytes(bytes(plain) if line else data, place)
        key = self.trust.verify(signature, run, place, plain)
        record = kind.from_bytes(bytes(plain), place)
        self.trust.allow(key, record, place, catalog)
        return record


def signer_of(store: Store, place: str) -> str:
    """The id of the key that a small record says it was signed with, empty if none; read a second time if it is
    damaged. Not verified."""

    def look() -> str:
        line = split_signature(at_most(store, place, _SMALL[Run] + MAX_SIGNATURE_BYTES), place)[1]
        return Signature.parse(line, place).key if line else ""

    try:
        return look()
    except FormatError:
        return look()


def check_signer(notary: Notary, signed: str, url: str, *, alone: bool = True) -> None:
    """``UsageError`` unless a publisher signs where the run is signed (its first record tells, by the key ``signed``),
    and only there, and with that key unless it says which ones are trusted, or is one rank of several (not ``alone``):
    receivers would refuse for ever what it publishes."""
    if notary.signer is None and signed:
        raise UsageError(f"the run at {url} is signed", next_step="Give the key: --sign KEYFILE, sign=... in Python.")
    if alone and notary.signer is not None and signed and notary.trust is None and notary.signer.key != signed:
        step = "Give that key; or if receivers trust yours, too, say so: --trust FILE, trust=... in Python."
        raise UsageError(
            f"the run at {url} was begun with another key", expected=signed, found=notary.signer.key, next_step=step
        )
    if notary.signer is not None and not signed:
        step = "Start a signed run in another store, or publish without a key."
        raise UsageError(f"the run at {url} is not signed", next_step=step)
