"""A model whose loader is a function, for tests of what loaders may do: followed to the bit, or refused untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from deltarefit.errors import UsageError
from tests import helpers as h
from tests import mini_ranks as mini
from tests.mini_base import rubbish
from tests.placing_oracle import check_plan

BF16, F32 = torch.bfloat16, torch.float32
Take = Callable[["Engine", str, torch.Tensor], object]
W = {"w": ("BF16", (6, 4))}
TWO = {"a": ("BF16", (6, 4)), "b": ("BF16", (6, 4))}


class Engine(torch.nn.Module):
    """A model of these tensors, with a loader that is a function; ``at_end`` is called when the checkpoint ends."""

    def __init__(self, take: Take, at_end: Callable[[Any], object] = lambda engine: None, **tensors: Any) -> None:
        super().__init__()
        self.take, self.at_end = take, at_end
        self.kept: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        for name, w in weights:
            self.take(self, name, w)
        self.at_end(self)
        self.kept.clear()


def room(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return rubbish(shape, dtype)


def keep(engine: Engine, name: str, w: torch.Tensor) -> None:
    engine.kept[name] = w


def attached(make: Callable[[], Engine], kinds: Any, model: h.Model, **options: Any) -> mini.Ranks:
    """A loaded engine; recording has left every byte as it was."""
    aliases = options.pop("aliases", None)
    engine = make()
    mini.filled(engine, engine.load_weights, mini.tensors_of(kinds, model, aliases))
    before = mini.all_bytes(engine)
    try:
        return mini.Ranks([(engine, engine.load_weights)], mini.catalog_of(kinds, aliases), **options)
    finally:
        assert mini.all_bytes(engine) == before


def follow(
    make: Callable[[], Engine],
    kinds: Any = W,
    modes: Mapping[str, str] | None = None,
    probe: bool = True,
    **options: Any,
) -> mini.Ranks:
    """Steps of deltas give what the native loader makes of the new checkpoint."""
    model, rng = mini.checkpoint_of(kinds), np.random.default_rng(3)
    ranks = attached(make, kinds, model, **options)
    assert ranks.modes == (modes or {})
    for payload in mini.anchor(ranks.catalog, model):
        ranks.fill(payload)
    for density in (0.3, 0.0, 1.0):
        new = mini.changed(rng, kinds, model, density)
        for payload in mini.payloads(ranks.catalog, model, new):
            ranks.write(payload)
        model = new
        assert ranks.digest() == h.digest_of(mini.RUN, ranks.catalog, model)
        fresh = make()
        mini.filled(fresh, fresh.load_weights, mini.tensors_of(kinds, model, options.get("aliases")))
        assert mini.live_bytes(ranks.models[0]) == mini.live_bytes(fresh)
    if probe:
        check_plan(make(), ranks.catalog)
    return ranks


def refused(make: Callable[[], Engine], kinds: Any = W, match: str | None = None, **options: Any) -> None:
    """Attaching raises, and the engine holds what it held, in the memory it had."""
    engine = make()
    before, bytes_, numbers = dict(engine.named_parameters()), mini.all_bytes(engine), places(engine)
    with pytest.raises(UsageError, match=match):
        mini.Ranks([(engine, engine.load_weights)], mini.catalog_of(kinds), **options)
    now = dict(engine.named_parameters())
    assert all(now[name] is tensor for name, tensor in before.items())
    assert len(now) == len(before)
    assert places(engine) == numbers
    assert mini.all_bytes(engine) == bytes_


def places(engine: Engine) -> list[int]:
    return [tensor.data_ptr() for tensor in engine.parameters()]
