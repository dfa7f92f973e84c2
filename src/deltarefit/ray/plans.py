"""What actors are told when they are started, and again by Ray when they are started anew: all that they need."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltarefit.cli.settings import Remote


@dataclass(frozen=True)
class Access:
    """How relays are reached, and the store behind them. Paths are those on the actors' nodes.

    ``token`` has the role ``follow``; by default a fresh one, which nobody else knows. ``environment`` is set in the
    actors alone: the store's credentials (``AWS_ACCESS_KEY_ID``, ``DELTAREFIT_ENDPOINT`` ...). With ``cert`` (and
    ``key``, if that is another file) relays serve https; ``ca`` is what followers and relays check that against.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    cert: str | None = None
    key: str | None = None
    ca: str | None = None

    def enter(self) -> Remote:
        """In an actor's process: take the environment; the way to open stores."""
        os.environ.update(self.environment)
        os.environ["DELTAREFIT_TOKEN"] = self.token
        return Remote(ca=Path(self.ca) if self.ca else None)


@dataclass(frozen=True)
class RelayPlan:
    """One relay: its name, the store URL of its parents, where it listens, and its cache."""

    name: str
    parents: str
    host: str
    port: int
    access: Access
    cache_bytes: int
    directory: str | None
    streams: int


@dataclass(frozen=True)
class FollowerPlan:
    """One follower: the store URL of its parents, and what it keeps: a directory or an engine's URL."""

    parents: str
    access: Access
    into: str | None
    vllm: str | None
    sglang: str | None
    in_flight: str
    poll_s: float
    prove: bool
    switch_run: bool
    trust: tuple[str, ...]
