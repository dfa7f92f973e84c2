"""How long a call to a remote store may take."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds for one call to a remote store, and how the call is cut into requests.

    A request that fails in a way that a retry may cure (5xx, refused or dropped connection, timeout of a
    read) is sent again up to ``retries`` times, but not later than ``retry_s`` after the first. So one
    request ends within ``retry_s + request_s``; ``part_bytes`` must fit in ``request_s`` on the slowest link.
    """

    connect_s: float = 5.0
    request_s: float = 60.0
    retries: int = 5
    retry_s: float = 30.0
    part_bytes: int = 8 << 20
    concurrency: int = 4

    def call_s(self, parts: int) -> float:
        """The longest that a call of so many requests can take, with a second to spare."""
        return 1.0 + math.ceil(parts / self.concurrency) * (self.retry_s + self.request_s)
