"""What comes from the environment, and how a verb gets at its store. No setting is read from it anywhere
else.

Credentials are never options: they are taken from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what else the
store's own library knows.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from deltarefit.errors import NotFoundError, UsageError
from deltarefit.ports import Store
from deltarefit.runlog import RUN
from deltarefit.stores import open_store

_STORE_NAMES = ("a", "anchor", "catalog", "head", "~tmp")


@dataclass(frozen=True)
class Remote:
    """How to reach a store that is not a directory: what the options say, else what the environment says."""

    endpoint: str | None = None
    region: str | None = None

    def open(self, url: str) -> Store:
        """The store, for verbs that may start a new run in it. A directory is made."""
        path = _directory_of(url)
        if path is not None and path.is_dir() and _has_other_files(path):
            step = "Choose an empty or new directory for the run."
            raise UsageError(f"{url} is not a store", found="a directory with other files", next_step=step)
        if not url.startswith("s3://"):
            return open_store(url, endpoint=self.endpoint, region=self.region)
        endpoint = self.endpoint or _environment("DELTAREFIT_ENDPOINT", "AWS_ENDPOINT_URL")
        region = self.region or _environment("AWS_REGION", "AWS_DEFAULT_REGION")
        return open_store(url, endpoint=endpoint, region=region)

    def existing(self, url: str) -> Store:
        """The store, for verbs that need a run in it: a mistyped directory is not made."""
        path = _directory_of(url)
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
