"""A source of tensors that several ranks hold alike: checks, when asked or every so often, that they still do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deltarefit.manifest import Catalog
from deltarefit.ports import Exchange
from deltarefit.sources.replicas import Replicas, Replicated
from deltarefit.sources.tensors import Part, TensorSource


class ReplicatedSource(TensorSource):
    """``TensorSource`` with ``replicated``, what this rank holds as others do. With ``check_every`` n, every n-th hold
    begins with ``check_replicas``."""

    def __init__(
        self,
        parts: Sequence[Part],
        catalog: Catalog,
        exchange: Exchange,
        *,
        replicated: Sequence[Replicated],
        check_every: int,
        **options: Any,
    ) -> None:
        self._replicas, self._check_every, self._holds = Replicas(replicated, exchange), check_every, 0
        super().__init__(parts, catalog, exchange, **options)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """As ``TensorSource.hold``, and the check if it is due."""
        with super().hold():
            self._holds += 1
            if self._check_every and (self._holds - 1) % self._check_every == 0:
                self.check_replicas()
            yield

    def check_replicas(self, timeout: float = 600.0) -> None:
        """Compare the bits of everything that more than one rank holds, through ``exchange``. All ranks call this at
        the same step. ``IntegrityError`` names what differs; see ``Replicas.check``."""
        self._replicas.check(timeout)
