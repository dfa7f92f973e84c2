"""What comes from the environment, and how a verb gets at its store. No setting is read from it anywhere
else.

Credentials are never options: they are taken from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what else the
store's own library knows; a relay's token from DELTAREFIT_TOKEN or a file that only its owner can read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltarefit.errors import NotFoundError, UsageError
from deltarefit.keyfiles import read_guarded
from deltarefit.ports import Store
from deltarefit.runlog import RUN
from deltarefit.stores import open_store
from deltarefit.tls import client_context

MAX_TOKEN_FILE = 4096
_ENDPOINT = ("DELTAREFIT_ENDPOINT", "AWS_ENDPOINT_URL")
_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")
_STORE_NAMES = ("a", "anchor", "catalog", "head", "~tmp")


@dataclass(frozen=True)
class Remote:
    """How to reach a store that is not a directory: what the options say, else what the environment says."""

    endpoint: str | None = None
    region: str | None = None
    token_file: Path | None = None
    ca: Path | None = None
    client_cert: Path | None = None

    def open(self, url: str, own_id: str = "") -> Store:
        """The store, for verbs that may start a new run in it. A directory is made. ``own_id`` for a relay."""
        urls = url.split(",") if "://" in url else [url]
        if any(re.match("https?://", one) for one in urls):
            return self._with_relays(urls, own_id)
        return self._open(url)

    def _with_relays(self, urls: Sequence[str], own_id: str) -> Store:
        """Relays, and what stands beside them."""
        tls = None
        if any(one.startswith("https://") for one in urls):
            ca = self.ca or _path(_environment("DELTAREFIT_CA"))
            tls = client_context(ca, self.client_cert)
        for one in urls:
            _directory_of(one)
        s3 = any(one.startswith("s3://") for one in urls)
        return open_store(
            ",".join(urls),
            endpoint=self.endpoint or _environment(*_ENDPOINT) if s3 else None,
            region=self.region or _environment(*_REGION) if s3 else None,
            token=self._token(),
            tls=tls,
            own_id=own_id,
        )

    def _token(self) -> str | None:
        if self.token_file is None:
            return _environment("DELTAREFIT_TOKEN")
        lines = read_guarded(self.token_file, MAX_TOKEN_FILE, 0o077).decode("utf-8", "replace").split()
        if len(lines) != 1:
            raise UsageError(f"{self.token_file} is no token", expected="one word", found=f"{len(lines)}")
        return lines[0]

    def _open(self, url: str) -> Store:
        path = _directory_of(url)
        if path is not None and path.is_dir() and _has_other_files(path):
            step = "Choose an empty or new directory for the run."
            raise UsageError(f"{url} is not a store", found="a directory with other files", next_step=step)
        if not url.startswith("s3://"):
            return open_store(url, endpoint=self.endpoint, region=self.region)
        endpoint = self.endpoint or _environment(*_ENDPOINT)
        region = self.region or _environment(*_REGION)
        return open_store(url, endpoint=endpoint, region=region)

    def existing(self, url: str) -> Store:
        """The store, for verbs that need a run in it: a mistyped directory is not made."""
        path = None if "," in url and "://" in url else _directory_of(url)
        if path is not None and not (path / RUN).is_file():
            found = "a directory without a run" if path.is_dir() else "no such directory"
            step = "Publish a checkpoint there first, or check the address."
            raise NotFoundError(f"no run at {url}", found=found, next_step=step)
        return self.open(url)


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/deltarefit`` or ``~/.cache/deltarefit``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deltarefit"


def engine_key() -> str | None:
    """The API key of serving engines: ``$DELTAREFIT_ENGINE_KEY``."""
    return _environment("DELTAREFIT_ENGINE_KEY")


def baseline_directory(given: Path | None, run: str) -> Path:
    """Where the baseline of a run is kept."""
    return given if given is not None else cache_directory() / "baseline" / run


def _environment(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _has_other_files(path: Path) -> bool:
    """Whether a directory holds what no store does; a first publish that was killed leaves only our own names."""
    names = {entry.name for entry in path.iterdir()}
    return RUN not in names and any(name not in _STORE_NAMES and not name.startswith("doctor-") for name in names)


def _directory_of(url: str) -> Path | None:
    """The directory that a store URL names, or None for another kind of store."""
    if re.match(r"[A-Za-z0-9]+:/(?!/)", url):
        raise UsageError(
            f"bad store address {url.partition('/')[0]}/...", expected="two slashes, as in s3://bucket/prefix"
        )
    return None if "://" in url and not url.startswith("file://") else Path(url.removeprefix("file://")).expanduser()
