"""Stores: where objects live. ``open_store`` picks one by URL; only then its library is imported."""

from __future__ import annotations

import threading
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
) -> Store:
    """The store at a path, ``file:///dir``, ``memory://name``, ``s3://bucket/prefix``, ``gs://...`` or ``az://...``.

    Two opens of one ``memory://name`` in one process see one store. ``endpoint`` is the URL of an S3 server
    other than Amazon's; plain ``http://`` is allowed if it is given here. All keywords but ``limits`` are for
    ``s3://``; what is not given comes from obstore's own environment chain (``AWS_ACCESS_KEY_ID`` ...).
    Nothing is read or written yet, except that a directory is made. Raises ``UsageError`` for a URL that
    names no store or a directory that may not be written, ``UnavailableError`` for a disk that fails.
    """
    scheme, rest = _split(url)
    settings = {
        "endpoint": endpoint,
        "access_key_id": access_key,
        "secret_access_key": secret_key,
        "session_token": session_token,
        "region": region,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if given and scheme != "s3":
        raise UsageError(
            f"{' and '.join(given)} given for a {scheme}:// store",
            expected="them only with s3://bucket/prefix",
            next_step="Leave them out; gs:// and az:// read their own environment variables.",
        )
    if scheme == "file":
        return _directory(rest)
    if scheme == "memory":
        return _memory(rest)
    return _cloud(scheme, rest, given, limits or Limits())


def _split(url: str) -> tuple[str, str]:
    """(scheme, the rest); a plain path is ``file``. A wrong URL is never echoed: it may hold a password."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "file", url
    if scheme not in ("file", "memory", *_CLOUDS):
        raise _bad_url(f"scheme {scheme[:20]!r}")
    if scheme != "file" and {"@", "?", "#"} & set(rest):
        raise _bad_url("user, password, query or fragment in the URL")
    return scheme, rest


def _bad_url(found: str) -> UsageError:
    return UsageError(
        "bad store URL",
        expected="a path, file:///dir, memory://name, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
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
