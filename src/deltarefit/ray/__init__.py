"""Relays and followers as actors of a Ray cluster, next to its rollout servers (docs/relays.md §7)::

    with Relays.start("s3://bucket/run7") as relays, Followers.start(relays, servers) as followers:
        followers.wait_for(version, timeout_s=600)

They run what ``deltarefit relay`` and ``deltarefit follow`` run. An actor that dies is started anew by Ray on its node:
a follower goes on from the header beside its weights, a relay from its cache. Needs the ``ray`` extra.
"""

from deltarefit.errors import UsageError

try:
    from deltarefit.ray.followers import Followers, Server
    from deltarefit.ray.placing import nodes_of
    from deltarefit.ray.plans import Access
    from deltarefit.ray.relays import Relays
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("deltarefit"):
        raise
    _step = "Run: pip install 'deltarefit[ray]'"
    raise UsageError("deltarefit.ray needs a package that is missing", found=error.name, next_step=_step) from None

__all__ = ["Access", "Followers", "Relays", "Server", "nodes_of"]
