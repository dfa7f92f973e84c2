"""Canonical bytes of frozen records: one JSON line, one line with its SHA-256 (docs/format.md §2).

A record class is a frozen dataclass whose field types are int, str, bool, ``Digest``, ``StrEnum``-like enums,
nested records, ``tuple[T, ...]`` of these and ``dict[str, int]``. Reading is strict: unknown, missing or
repeated keys, other types, numbers outside 0..2^64-1 and non-canonical bytes are errors, so that equal records
have equal bytes and any flipped bit is found.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import types
import typing
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast

from deltarefit.errors import FormatError

FORMAT = "deltarefit/1"
MAX_RECORD_BYTES = 256 << 20
MAX_SIGNATURE_BYTES = 512
MAX_STRING = 4096
_UINT64 = 1 << 64

R = TypeVar("R", bound="Record")


class Digest(tuple[int, int]):
    """Two 64-bit lanes of an additive digest (docs/format.md §5); adds and subtracts modulo 2^64 per lane."""

    __slots__ = ()

    def __new__(cls, lane0: int = 0, lane1: int = 0) -> Digest:
        return super().__new__(cls, (lane0 % _UINT64, lane1 % _UINT64))

    def __getnewargs__(self) -> tuple[int, int]:
        return self[0], self[1]

    def __add__(self, other: tuple[int, int]) -> Digest:  # type: ignore[override]
        return Digest(self[0] + other[0], self[1] + other[1])

    def __sub__(self, other: tuple[int, int]) -> Digest:
        return Digest(self[0] - other[0], self[1] - other[1])

    def __str__(self) -> str:
        return f"{self[0]:016x}{self[1]:016x}"

    __repr__ = __str__

    @classmethod
    def parse(cls, text: object) -> Digest:
        if not isinstance(text, str) or len(text) != 32 or set(text) - set("0123456789abcdef"):
            raise FormatError("bad digest", expected="32 lower-case hex digits", found=repr(text)[:80])
        return cls(int(text[:16], 16), int(text[16:], 16))


class Record:
    """Base of all records; see the module docstring."""

    __slots__ = ()

    def to_bytes(self) -> bytes:
        body = {"format": FORMAT, "type": type(self).__name__, **_plain_fields(self)}
        line = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"

    @classmethod
    def from_bytes(cls: type[R], data: bytes, where: str = "record") -> R:
        """Read exactly what ``to_bytes`` wrote; ``where`` names the object in errors. Raises ``FormatError``."""
        body = _checked_body(data, where)
        if body.pop("format", None) != FORMAT:
            raise FormatError(f"{where}: unknown format", expected=FORMAT, next_step="Update deltarefit.")
        if (kind := body.pop("type", None)) != cls.__name__:
            raise FormatError(f"{where}: wrong record", expected=cls.__name__, found=repr(kind)[:80])
        record = _read_record(cls, body, where)
        if record.to_bytes() != data:
            raise FormatError(f"{where}: bytes are not canonical")
        return record

    def content_hash(self) -> str:
        """Hash of the record's bytes, by which other records name it."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def split_signature(data: bytes, where: str) -> tuple[memoryview, bytes]:
    """The canonical bytes of a record as they are stored, and the signature line that follows them (empty: none).
    Nothing is parsed or copied; ``FormatError`` for what cannot be a record with one signature."""
    end = data.find(b"\n") + 66
    if end < 67 or len(data) < end:
        raise FormatError(f"{where}: truncated or not a record", found=f"{len(data)} bytes")
    line = data[end : end + MAX_SIGNATURE_BYTES]
    if end + len(line) < len(data) or (line and line.find(b"\n") != len(line) - 1):
        raise FormatError(f"{where}: more than a record and one signature", found=f"{len(data) - end} more bytes")
    return memoryview(data)[:end], line


def _checked_body(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_RECORD_BYTES:
        raise FormatError(f"{where}: too large", expected=f"<= {MAX_RECORD_BYTES} bytes", found=len(data))
    if len(data) < 67 or data[-1:] != b"\n" or data[-66:-65] != b"\n":
        raise FormatError(f"{where}: truncated or not a record", found=f"{len(data)} bytes")
    line, stated = data[:-66], data[-65:-1]
    if hashlib.sha256(line).hexdigest().encode() != stated:
        raise FormatError(f"{where}: corrupt, its SHA-256 does not match", next_step="Fetch it again.")
    try:
        body = json.loads(line, object_pairs_hook=_unique, parse_float=_refuse, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise FormatError(f"{where}: not an object")
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a key stands twice")
    return body


def _refuse(text: str) -> Any:
    raise ValueError(f"number {text[:20]} is not an integer")


def _plain_fields(record: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(record, f.name)) for f in dataclasses.fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, Digest):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Record):
        return _plain_fields(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


@lru_cache(maxsize=64)
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _read_record(cls: type[R], body: Any, where: str) -> R:
    hints = _hints(cast(Hashable, cls))
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if not isinstance(body, dict) or sorted(body) != sorted(names):
        found = sorted(body) if isinstance(body, dict) else type(body).__name__
        raise FormatError(f"{where}: wrong fields", expected=sorted(names), found=str(found)[:200])
    try:
        return cls(**{name: _read(hints[name], body[name], f"{where}: {name}") for name in names})
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from error


def _read(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise FormatError(f"{where}: not a list")
        inner = typing.get_args(hint)[0]
        return tuple(_read(inner, item, where) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise FormatError(f"{where}: not an object")
        return {_read(str, key, where): _read(int, item, where) for key, item in value.items()}
    if isinstance(hint, types.GenericAlias):  # pragma: no cover - guards against a new kind of field
        raise TypeError(f"{where}: unsupported field type {hint}")
    return _read_scalar(hint, value, where)


def _read_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Digest:
        return Digest.parse(value)
    if issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError as error:
            raise FormatError(f"{where}: unknown value", found=repr(value)[:80]) from error
    if issubclass(hint, Record):
        return _read_record(hint, value, where)
    if type(value) is not hint:
        raise FormatError(f"{where}: wrong type", expected=hint.__name__, found=type(value).__name__)
    if hint is int and not 0 <= value < _UINT64:
        raise FormatError(f"{where}: out of range", expected="0 .. 2^64 - 1", found=value)
    if hint is str and len(value) > MAX_STRING:
        raise FormatError(f"{where}: too long", expected=f"<= {MAX_STRING} characters", found=len(value))
    return value
