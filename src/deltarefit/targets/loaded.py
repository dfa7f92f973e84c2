"""A live torch model with a loader of its own as a target: fused, transposed, padded or sharded weights, in place.

Where ``targets.module`` writes tensors that are the canonical ones themselves, this target runs the model's native
loader once, without storage, to find out where canonical bits go (``targets.placing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from deltarefit.errors import NotFoundError, UsageError
from deltarefit.manifest import Catalog, Header, PayloadRef, State
from deltarefit.protocol.messages import Op
from deltarefit.records import Digest
from deltarefit.targets.placing.rank import RankWeights
from deltarefit.targets.placing.recorder import Load
from deltarefit.targets.ranks import RankGroup, Row


class LoadedModuleTarget:
    """``ports.LiveTarget`` over a model in this process; header and staged payloads live in it, as the weights do.

    ``load`` takes (checkpoint name, tensor) pairs, as ``model.load_weights`` of vLLM and SGLang do. ``checkpoint`` is
    the directory that the weights were loaded from: it proves the placement, and gives the bits of tensors that the
    loader does not store as they are. ``after`` refreshes what the model derives from its weights. ``unfilled`` says
    which tensors of the model no checkpoint fills. ``on_pause`` and ``on_resume`` stop and start whoever runs the
    model; both may be called twice.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load: Load,
        *,
        checkpoint: str | None = None,
        after: Callable[[], None] = lambda: None,
        unfilled: Callable[[str], bool] = lambda name: False,
        on_pause: Callable[[], None] = lambda: None,
        on_resume: Callable[[], None] = lambda: None,
        **rank: Any,
    ) -> None:
        self._rank = RankWeights(model, load, checkpoint=checkpoint, after=after, unfilled=unfilled, **rank)
        self._on_pause, self._on_resume = on_pause, on_resume
        self._group: RankGroup | None = None

    @property
    def catalog(self) -> Catalog | None:
        return self._group.catalog if self._group else None

    @property
    def report(self) -> list[Row]:
        """How each canonical tensor reaches the model. Empty before ``attach``."""
        return self._group.report if self._group else []

    def attach(self, run: str, catalog: Catalog) -> None:
        """As ``ports.LiveTarget``. Users stand still where the loader has to run, which may set what a forward pass
        reads."""
        with nullcontext() if self._rank.ready_for(catalog.identity) else self._standing_still():
            self._group = RankGroup(catalog, [self._rank.attach(run, catalog)])
            self._rank.assign(self._group.assignment(0))

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        self._on_pause()
        try:
            yield
        finally:
            header = self.read_header()
            if header is None or header.state is State.CLEAN:
                self._on_resume()

    def proof(self) -> Digest | None:
        return self._rank.proof()

    def read_header(self) -> Header | None:
        return None if self._rank.header is None else Header.from_bytes(self._rank.header)

    def write_header(self, header: Header) -> None:
        self._rank.header = header.to_bytes()

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        """Nothing: the model has its tensors."""

    def finish_seed(self) -> None:
        """Nothing to show: the model has held the bits all along."""

    def stage(self, ref: PayloadRef, data: bytes) -> tuple[Digest, Digest]:
        sums = self._rank.stage(ref, data)
        pre, post = ({class_: pair[k] for class_, pair in sums.items()} for k in range(2))
        return self._total(pre, alike=not ref.overwrites), self._total(post)

    def staged(self, ref: PayloadRef) -> bool:
        return self._rank.staged(ref)

    def live(self, ref: PayloadRef) -> Digest:
        if (sums := self._rank.live(ref)) is None:
            raise NotFoundError(f"payload {ref.sha256[:12]} is not staged", next_step="Stage it.")
        return self._total(sums)

    def write(self, ref: PayloadRef, op: Op) -> None:
        self._rank.write(ref, op)

    def fill(self, ref: PayloadRef, data: bytes) -> None:
        self._rank.fill(ref, data)

    def digest(self) -> Digest:
        return self._total(self._rank.digest())

    def drop(self) -> None:
        self._rank.drop()

    def pause(self) -> None:
        self._on_pause()

    def resume(self) -> None:
        self._on_resume()

    def watch(self) -> None:
        """This process holds the weights."""

    def close(self) -> None:
        """Let go of the threads. The model is left as it is."""
        self._rank.close()

    def _total(self, sums: Mapping[int, Digest], *, alike: bool = True) -> Digest:
        if self._group is None:
            raise UsageError("the target is not attached to a run", next_step="Attach it first.")
        return self._group.total([sums], alike=alike)
