"""Followers: one for each rollout server, on its node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltarefit.errors import UnavailableError, UsageError
from deltarefit.ray.actors import FollowerActor
from deltarefit.ray.asking import START_S, Actors, Silent
from deltarefit.ray.placing import actor_on, addresses, check_nodes
from deltarefit.ray.plans import Access, FollowerPlan
from deltarefit.ray.relays import Relays

POLL_S = 0.2


@dataclass(frozen=True)
class Server:
    """One rollout server: the id of its Ray node, and what to keep at the newest version there: the checkpoint
    directory ``into``, or the live weights of the engine at the URL ``vllm`` or ``sglang``."""

    node: str
    into: str | None = None
    vllm: str | None = None
    sglang: str | None = None

    def __post_init__(self) -> None:
        given = sum(what is not None for what in (self.into, self.vllm, self.sglang))
        if given != 1:
            raise UsageError("what to keep is not clear", expected="one of into, vllm and sglang", found=given)

    @property
    def name(self) -> str:
        """Node and directory or URL."""
        return f"{self.node[:12]}:{self.into or self.vllm or self.sglang}"


class Followers(Actors):
    """Followers that follow until ``close``. They keep their relays: Ray ends an actor of which nobody has a handle."""

    def __init__(self, source: Relays | str) -> None:
        super().__init__()
        self.source = source

    @classmethod
    def start(
        cls,
        source: Relays | str,
        servers: Sequence[Server],
        *,
        access: Access | None = None,
        in_flight: str = "keep",
        poll_s: float = 1.0,
        prove: bool = True,
        switch_run: bool = False,
        trust: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        timeout_s: float = START_S,
    ) -> Followers:
        """One follower for each server. ``source`` is a tree of relays, whose ``access`` is taken: each follower asks
        its own node's relay first. Or it is the URL of a store. The rest is as in ``deltarefit follow``; ``trust`` are
        paths of trust files on the servers' nodes. More servers may be given to another ``start``.

        Returns when all actors run; whether they can follow shows ``status``, as they wait for a first version, a
        store, or an engine that is not there yet. Raises ``UsageError`` for what cannot be, ``UnavailableError`` if
        not all run within ``timeout_s``.
        """
        check_nodes([server.node for server in servers], addresses())
        if len({server.name for server in servers}) < len(servers):
            raise UsageError("a server stands twice", expected="one follower for each")
        if isinstance(source, Relays) and access is not None:
            raise UsageError("access with relays", expected="that of the relays", next_step="Leave it out.")
        how = access or (source.access if isinstance(source, Relays) else Access())
        followers = cls(source)
        try:
            for server in servers:
                parents = source.store_for(server.node, server.name) if isinstance(source, Relays) else source
                plan = FollowerPlan(parents, how, server.into, server.vllm, server.sglang, in_flight, poll_s, prove,
                                    switch_run, tuple(trust))  # fmt: skip
                followers.add(server.name, actor_on(server.node, FollowerActor, plan, options or {}))
            followers.await_started(timeout_s)
        except BaseException:
            followers.close()
            raise
        return followers

    def versions(self) -> dict[str, int]:
        """The version that each server holds, by its name; 0: none, or not known at the moment."""
        return {one["name"]: one.get("version", 0) for one in self.status()}

    def wait_for(self, version: int, timeout_s: float) -> None:
        """Until every server holds this version or a later one. Raises ``UnavailableError`` that names those that do
        not after ``timeout_s``, and at once the error of a follower that follows no more."""
        deadline = time.monotonic() + timeout_s
        while True:
            for error in self.ask("trouble"):
                if error is not None and not isinstance(error, Silent):
                    raise error
            behind = {name: held for name, held in self.versions().items() if held < version}
            if not behind:
                return
            if time.monotonic() >= deadline:
                step = "Look at status(), and at the actors' logs."
                raise UnavailableError(f"version {version} is not held everywhere", found=behind, next_step=step)
            time.sleep(POLL_S)
