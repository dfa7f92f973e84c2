"""Mode stream into live weights: rank processes behind sockets, and a real model with a loader of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from tests import fleet
from tests import helpers as h
from tests import live_ranks as live
from tests.test_stream import fail, streaming


def change(rng: np.random.Generator, source: h.ArraySource, kind: str, before: h.Model) -> None:
    """A step; a native loader keeps of a boolean only whether it is one."""
    h.step(rng, source.model, kind, before)
    for entry in source.catalog.tensors:
        if entry.dtype == "BOOL":
            source.model[entry.name] &= 1


def play(store: Store, source: h.ArraySource, one: fleet.Follower, rate: float, check: Callable[[], None]) -> None:
    """Versions, failed attempts and dying agents; ``check`` after each version, with agents that live."""
    rng = np.random.default_rng(3)
    base = h.copy_of(source.model)
    for kind, mode in (("some", "stream"), ("back", "stage"), ("nothing", "stream"), ("many", "stream")):
        one.mortal.rate = rate
        for at in (3, 1):
            change(rng, source, "many", base)
            fail(store, source, at)
            fleet.until(lambda: one.failure is not None or one.dirty())
        for name, array in base.items():
            source.model[name][...] = array
        change(rng, source, kind, base)
        version = streaming(store, source, mode=mode)
        one.mortal.rate = 0.0
        fleet.until(lambda version=version: one.failure is not None or one.clean(version))  # type: ignore[misc]
        check()
        base = h.copy_of(source.model)


@pytest.mark.parametrize("rate", [0.0, 0.03])
def test_ranks_of_an_engine(tmp_path: Path, rate: float) -> None:
    rng, store = np.random.default_rng(6), h.new_store()
    source = h.ArraySource(h.random_model(rng, live.SHAPES), live.SHAPES)
    streaming(store, source)
    with (
        contextlib.closing(live.Engine(tmp_path / "engine", 2, source.model)) as engine,
        contextlib.closing(engine.target()) as target,
        fleet.following(store, 1, target=target) as (one,),
    ):

        def check() -> None:
            fleet.until(lambda: not engine.paused)
            assert not engine.wrong(source.model)

        play(store, source, one, rate, check)
        assert one.heard.phases("seed") == 0, "an anchor was loaded though the memory survived"
        assert (one.mortal.deaths > 0) is (rate > 0)
    outcome = RunLog.open(store).version(h.check_linear(store)[-1]).outcome
    assert outcome is not None
    assert outcome.members in (("r1",), ())  # between two agents there is none


@pytest.mark.parametrize("rate", [0.0, 0.03])
def test_a_model_with_its_own_loader(tmp_path: Path, rate: float) -> None:
    pytest.importorskip("torch")
    from tests import mini_ranks as mini
    from tests.test_target_loaded import KINDS, Serving

    shapes: Any = KINDS
    store, source = h.new_store(), h.ArraySource(mini.checkpoint_of(KINDS), shapes)
    streaming(store, source)
    serving = Serving(tmp_path / "checkpoint", source.model)
    with contextlib.closing(serving.target), fleet.following(store, 1, target=serving.target) as (one,):

        def check() -> None:
            fleet.until(lambda: not serving.paused)
            serving.check(source.model)

        play(store, source, one, rate, check)
        assert one.heard.phases("seed") == 0
