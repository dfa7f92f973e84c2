"""Stores: where objects live. ``open_store`` picks one by URL; only then its library is imported."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from deltarefit.errors import UsageError
from deltarefit.storekeys import check_prefix
from deltarefit.stores.limits import Limits

if TYPE_CHECKING:
    from deltarefit.ports import Store
    from deltarefit.stores.object import ObjectStore

__all__ = ["Limits", "open_store"]

_CLOUDS = ("s3", "gs", "az")
_RELAYS = ("http", "https")
STALL_S = 5.0
"""A relay of several that sends nothing for so long is asked whether it lives."""
_memories: dict[str, ObjectStore] = {}
_memories_lock = threading.Lock()


def open_store(
    url: str,
    *,
    endpoint: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    region: str | None = None,
    limits: Limits | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    own_id: str = "",
) -> Store:
    """The store at a path, ``file:///dir``, ``memory://name``, ``s3://bucket/prefix``, ``gs://...`` or ``az://...``,
    or the relay at ``https://host:port`` or ``http://host:port``. Several joined by commas show the same objects, and
    are asked in that order.

    Two opens of one ``memory://name`` in one process see one store. ``endpoint`` is the URL of an S3 server
    other than Amazon's; plain ``http://`` is allowed if it is given here. ``token`` and ``tls`` are for
    relays, and ``own_id`` for one that is a relay itself (``RelayStore``); ``limits`` are for all. The rest is for
    ``s3://``; what is not given comes from obstore's own environment chain (``AWS_ACCESS_KEY_ID`` ...).
    Nothing is read or written yet, except that a directory is made. Raises ``UsageError`` for a URL that
    names no store or a directory that may not be written, ``UnavailableError`` for a disk that fails.
    """
    settings = {
        "endpoint": endpoint,
        "access_key_id": access_key,
        "secret_access_key": secret_key,
        "session_token": session_token,
        "region": region,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    parts = [(_split(part), part) for part in (url.split(",") if "://" in url else [url])]
    schemes = {scheme for (scheme, _), _ in parts}
    _check_keywords(given, ("s3",), schemes)
    _check_keywords({n: v for n, v in (("token", token), ("tls", tls)) if v is not None}, _RELAYS, schemes)
    several = len(parts) > 1
    stores = [_one(scheme, rest, part, given, _patience(limits, several=several), token, tls, own_id)
              for (scheme, rest), part in parts]  # fmt: skip
    if not several and not schemes & set(_RELAYS):
        return stores[0]
    from deltarefit.stores.fallback import Fallback

    return Fallback(stores)


def _patience(limits: Limits | None, *, several: bool) -> Limits:
    return limits or (Limits(request_s=STALL_S, retries=1) if several else Limits())


def _one(
    scheme: str,
    rest: str,
    url: str,
    settings: dict[str, str],
    limits: Limits,
    token: str | None,
    tls: ssl.SSLContext | None,
    own_id: str,
) -> Store:
    if scheme == "file":
        return _directory(rest)
    if scheme == "memory":
        return _memory(rest)
    if scheme in _RELAYS:
        return _relay(url, limits, token, tls, own_id)
    return _cloud(scheme, rest, settings if scheme == "s3" else {}, limits)


def _check_keywords(given: Mapping[str, object], of: Sequence[str], schemes: set[str]) -> None:
    if given and not schemes & set(of):
        raise UsageError(
            f"{' and '.join(given)} given for a {' and '.join(sorted(schemes))}:// store",
            expected=f"them only with {' or '.join(of)}://",
            next_step="Leave them out; gs:// and az:// read their own environment variables.",
        )


def _relay(url: str, limits: Limits, token: str | None, tls: ssl.SSLContext | None, own_id: str) -> Store:
    try:
        from deltarefit.stores.relay import RelayStore
    except ModuleNotFoundError as error:
        if error.name != "urllib3":
            raise
        step = "Run: pip install 'deltarefit[relay]'"
        raise UsageError("relays need a package that is not installed", found=error.name, next_step=step) from None
    return RelayStore(url, token=token, tls=tls, limits=limits, own_id=own_id)


def _split(url: str) -> tuple[str, str]:
    """(scheme, the rest); a plain path is ``file``. A wrong URL is never echoed: it may hold a password."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "file", url
    if scheme not in ("file", "memory", *_CLOUDS, *_RELAYS):
        raise _bad_url(f"scheme {scheme[:20]!r}")
    if scheme != "file" and {"@", "?", "#"} & set(rest):
        raise _bad_url("user, password, query or fragment in the URL")
    return scheme, rest


def _bad_url(found: str) -> UsageError:
    return UsageError(
        "bad store URL",
        expected="a path, file:///dir, memory://name, s3://bucket/prefix, gs://..., az://... or https://host:port",
        found=found,
        next_step="Give credentials as arguments or in the environment, never in the URL.",
    )


def _directory(rest: str) -> Store:
    from deltarefit.stores.directory import DirectoryStore

    if not rest:
        raise _bad_url("an empty path")
    return DirectoryStore(Path(rest).expanduser())


def _memory(name: str) -> Store:
    from deltarefit.stores.object import memory_store

    if not name:
        raise _bad_url("memory:// without a name")
    with _memories_lock:
        if name not in _memories:
            _memories[name] = memory_store(f"memory://{name}")
        return _memories[name]


def _cloud(scheme: str, rest: str, settings: dict[str, str], limits: Limits) -> Store:
    from deltarefit.stores.object import cloud_store

    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise _bad_url(f"{scheme}:// without a bucket")
    endpoint = settings.get("endpoint")
    if endpoint is not None and (urlsplit(endpoint).scheme not in ("http", "https") or {"@", "?", "#"} & set(endpoint)):
        raise UsageError(
            "bad endpoint",
            expected="http://host:port or https://host without user, password, query or fragment",
            next_step="Give credentials as access_key and secret_key, or in the environment.",
        )
    return cloud_store(scheme, bucket, check_prefix(prefix), settings, limits)
