"""Nodes of the cluster: which there are, their addresses, and their free ports."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deltarefit.errors import UnavailableError, UsageError

PORTS = range(20000, 30000)
"""Where a free port is looked for: not where Ray's own workers or outgoing connections get theirs, so that it is still
free when a relay comes back to it."""
NUM_CPUS = 0.1
"""What an actor claims, so that it fits beside rollout workers. It bounds nothing."""


def addresses() -> dict[str, str]:
    """The address of every node that is alive, by its id; this one's first, then in the order of their ids."""
    if not ray.is_initialized():
        raise UsageError("there is no Ray cluster", next_step="Call ray.init() first.")
    own = own_node()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    return {node: alive[node] for node in sorted(alive, key=lambda node: (node != own, node))}


def own_node() -> str:
    """The driver's node."""
    return str(ray.get_runtime_context().get_node_id())


def nodes_of(placement_group: Any) -> list[str]:
    """The nodes of a placement group that is placed, in the order of its bundles, each once: for ``Relays.start``."""
    table = ray.util.placement_group_table(placement_group)
    if table["state"] != "CREATED":
        step = "Wait for it: ray.get(placement_group.ready(), timeout=...)"
        raise UnavailableError("the placement group is not placed", found=table["state"], next_step=step)
    return list(dict.fromkeys(node for _, node in sorted(table["bundles_to_node_id"].items())))


def check_nodes(nodes: Sequence[str], known: Mapping[str, str]) -> None:
    """``UsageError`` for a node that is not alive, or no node."""
    for node in nodes:
        if node not in known:
            step = "Take a NodeID of ray.nodes(), or get_node_id() of ray.get_runtime_context() on the node."
            raise UsageError("no such node is alive", found=repr(node)[:80], next_step=step)


def actor_on(node: str, kind: type, plan: object, options: Mapping[str, Any]) -> Any:
    """A handle of an actor on this node, which is started anew there whenever it dies."""
    given = {"num_cpus": NUM_CPUS, "max_restarts": -1, **options, "scheduling_strategy": _on(node)}
    return ray.remote(**given)(kind).remote(plan)


def ports_on(nodes: Sequence[str], known: Mapping[str, str], first: int, timeout_s: float) -> list[int]:
    """A port for each: from ``first`` on, or with 0 any that are free."""
    counts = Counter(nodes)
    if first:
        found = {node: list(range(first, first + count)) for node, count in counts.items()}
    else:
        free = ray.remote(num_cpus=0)(_free_ports)
        asked = [free.options(scheduling_strategy=_on(node)).remote(known[node], n) for node, n in counts.items()]
        try:
            found = dict(zip(counts, ray.get(asked, timeout=timeout_s), strict=True))
        except (GetTimeoutError, TaskUnschedulableError):
            step = "Look at `ray status`, or give port=."
            raise UnavailableError(f"a node tells no free port within {timeout_s:g} s", next_step=step) from None
    return [found[node].pop(0) for node in nodes]


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _free_ports(host: str, count: int) -> list[int]:
    """On the node itself."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            try:
                one.bind((host, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise UnavailableError(f"no {count} free ports on {host}", expected=f"in {PORTS.start}-{PORTS.stop - 1}")
