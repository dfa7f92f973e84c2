"""A tree of relays, one on each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltarefit.addresses import relay_url, shown
from deltarefit.cli.relaying import LIMIT_BYTES, STREAMS
from deltarefit.cli.trees import DEGREE
from deltarefit.errors import UsageError
from deltarefit.ray.actors import RelayActor
from deltarefit.ray.asking import START_S, Actors
from deltarefit.ray.placing import actor_on, addresses, check_nodes, own_node, ports_on
from deltarefit.ray.plans import Access, RelayPlan
from deltarefit.tree import Tree, TreeRelay, parents_for_follower, parents_of

ROOT = "root"
"""The name of the relay in front of a directory."""


class Relays(Actors):
    """Relays that serve until ``close``. ``tree`` says who fetches from whom; ``access`` is how to reach them."""

    def __init__(self, tree: Tree, access: Access, nodes: Sequence[str]) -> None:
        super().__init__()
        self.tree, self.access = tree, access
        self._on = {node: relay.name for node, relay in zip(nodes, tree.relays, strict=True)}

    @classmethod
    def start(
        cls,
        store: str,
        nodes: Sequence[str] | None = None,
        *,
        degree: int = DEGREE,
        access: Access | None = None,
        cache_bytes: int = LIMIT_BYTES,
        directory: str | None = None,
        port: int = 0,
        streams: int = STREAMS,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = START_S,
    ) -> Relays:
        """One relay on each of these nodes (all that are alive, this one first), in the order of the tree: those with
        good links to the store first. They listen on their nodes' addresses.

        ``store`` is a bucket, or relays that take the token of ``access``, or a directory of the driver's node: that is
        served by one relay more, on that node, which is the root. Each keeps ``cache_bytes`` below ``directory`` of its
        node, where a later start finds them, or among temporary files until ``close``. ``port`` is the first on each
        node (0: any that are free). ``options`` are more of Ray's own, for each actor.

        Raises ``UsageError`` for what cannot be, ``UnavailableError`` if not all run within ``timeout_s``.
        """
        known, access, options = addresses(), access or Access(), options or {}
        own = _directory_of(store)
        placed = [*([own_node()] if own else []), *(known if nodes is None else nodes)]
        check_nodes(placed, known)
        ports = ports_on(placed, known, port, timeout_s)
        scheme = "https" if access.cert else "http"
        urls = [f"{scheme}://{shown(known[node])}:{one}" for node, one in zip(placed, ports, strict=True)]
        first = 1 if own else 0
        tree = _tree(urls[:first] or store.split(","), degree, urls[first:])
        parents = [*([own] if own else []), *(",".join(parents_of(tree, relay.name)) for relay in tree.relays)]
        names = [*([ROOT] if own else []), *(relay.name for relay in tree.relays)]
        relays = cls(tree, access, placed[first:])
        try:
            for name, above, node, one in zip(names, parents, placed, ports, strict=True):
                plan = RelayPlan(name, above, known[node], one, access, cache_bytes, directory, streams)
                relays.add(name, actor_on(node, RelayActor, plan, options))
            for trouble in filter(None, relays.await_started(timeout_s)):
                raise trouble
        except BaseException:
            relays.close()
            raise
        return relays

    def store_for(self, node: str, follower: str) -> str:
        """The store URL of a follower: its own node's relay and what that asks, or what the tree says."""
        if (name := self._on.get(node)) is None:
            return ",".join(parents_for_follower(self.tree, follower))
        return ",".join((self.tree.relays[self.tree.index[name]].url, *parents_of(self.tree, name)))


def _tree(roots: Sequence[str], degree: int, urls: Sequence[str]) -> Tree:
    above = tuple(relay_url(root) if root.startswith("http") else root for root in roots)
    try:
        return Tree("", 1, degree, above, tuple(TreeRelay(f"r{number}", url) for number, url in enumerate(urls)))
    except ValueError as error:
        raise UsageError(f"this is no tree: {error}", next_step="Look at store, nodes and degree.") from None


def _directory_of(store: str) -> str | None:
    """The absolute path, if the store is a directory."""
    if store.startswith("memory://"):
        raise UsageError("memory:// is known to this process only", next_step="Give a directory or a bucket.")
    if "://" in store and not store.startswith("file://"):
        return None
    return str(Path(store.removeprefix("file://")).expanduser().absolute())
