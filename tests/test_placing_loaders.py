"""Sparse deltas through the recorded placement give what the native loader makes of the new checkpoint, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltarefit.targets.placing.plan import make_plan  # noqa: E402
from deltarefit.targets.placing.storages import storages_of  # noqa: E402
from tests import helpers as h  # noqa: E402
from tests import mini_ranks as mini  # noqa: E402
from tests.mini_base import Mini  # noqa: E402
from tests.mini_loaders import CASES  # noqa: E402
from tests.placing_oracle import COMPUTED, check_plan, planned, probed  # noqa: E402

SIZED = [pytest.param(case, size, id=f"{name}-{size}") for name, case in CASES.items() for size in case.sizes]


def attached(case: type[Mini], size: int, model: h.Model, directory: Path | None) -> mini.Ranks:
    """The ranks of an engine that was loaded with ``model``; recording their loaders leaves every byte alone."""
    models = mini.rank_models(case, size, model)
    before = [mini.all_bytes(one) for one in models]
    path = None if directory is None else mini.saved(directory, case.kinds, model)
    catalog = mini.catalog_of(case.kinds, case.aliases)
    ranks = mini.Ranks(mini.loads(models), catalog, checkpoint=path, unfilled=lambda name: name in case.scratch)
    assert [mini.all_bytes(one) for one in models] == before
    return ranks


def check(ranks: mini.Ranks, case: type[Mini], model: h.Model) -> None:
    """Live bytes are those of fresh ranks that the native loader filled; the digest is that of the checkpoint."""
    assert ranks.digest() == h.digest_of(mini.RUN, ranks.catalog, model)
    for live, fresh in zip(ranks.models, mini.rank_models(case, len(ranks.models), model), strict=True):
        assert mini.live_bytes(live) == mini.live_bytes(fresh)


@pytest.mark.parametrize(("case", "size"), SIZED)
def test_sparse_deltas_give_what_the_native_loader_makes(case: type[Mini], size: int, tmp_path: Path) -> None:
    rng, model = np.random.default_rng(size), mini.checkpoint_of(case.kinds)
    ranks = attached(case, size, model, tmp_path)
    assert ranks.modes == case.modes
    check(ranks, case, model)
    for density in (0.2, 1.0, 0.0, 0.02):
        new = mini.changed(rng, case.kinds, model, density)
        for payload in mini.payloads(ranks.catalog, model, new):
            ranks.write(payload)
        ranks.drop()
        model = new
        check(ranks, case, model)


@pytest.mark.parametrize(("case", "size"), SIZED)
def test_the_same_deltas_again_take_them_back(case: type[Mini], size: int, tmp_path: Path) -> None:
    model = mini.checkpoint_of(case.kinds)
    ranks = attached(case, size, model, tmp_path)
    before = [mini.live_bytes(one) for one in ranks.models]
    made = mini.payloads(ranks.catalog, model, mini.changed(np.random.default_rng(1), case.kinds, model))
    for payload in made:
        ranks.write(payload)
    assert [mini.live_bytes(one) for one in ranks.models] != before
    ranks.drop()
    for payload in made:
        _, ref = payload
        assert ranks.stage(payload) == (ref.post, ref.pre)
        for rank in ranks.ranks:
            rank.write(ref, mini.Op.APPLY)
    ranks.digest()
    assert [mini.live_bytes(one) for one in ranks.models] == before


@pytest.mark.parametrize(("case", "size"), SIZED)
def test_an_anchor_fills_an_engine_whose_checkpoint_is_gone(case: type[Mini], size: int) -> None:
    ranks = attached(case, size, mini.checkpoint_of(case.kinds), None)
    model = mini.checkpoint_of(case.kinds, seed=1)
    for payload in mini.anchor(ranks.catalog, model):
        ranks.fill(payload)
    check(ranks, case, model)


@pytest.mark.parametrize(("case", "size"), SIZED)
def test_the_plan_is_what_probes_find(case: type[Mini], size: int) -> None:
    model = mini.checkpoint_of(case.kinds)
    catalog = mini.catalog_of(case.kinds, case.aliases)
    for one in mini.rank_models(case, size, model):
        check_plan(one, catalog)


@pytest.mark.parametrize(("name", "computed"), [("Mamba", {"A"}), ("Casts", {"f16", "narrow"}), ("Linear", set())])
def test_probes_tell_copies_from_what_is_computed(name: str, computed: set[str]) -> None:
    case = CASES[name]
    [engine] = mini.rank_models(case, 1, mini.checkpoint_of(case.kinds))
    found = probed(engine, mini.catalog_of(case.kinds))
    for number, storage in enumerate(storages_of(engine)):
        cells = [found[number, at] == COMPUTED for at in range(storage.numel)]
        assert cells == [storage.names[0] in computed] * storage.numel, storage.names


def test_probes_leave_out_what_is_constant() -> None:
    case = CASES["Vocab"]
    engine = mini.rank_models(case, 4, mini.checkpoint_of(case.kinds))[3]
    assert probed(engine, mini.catalog_of(case.kinds)) == {}


def test_probes_see_a_plan_that_is_wrong_by_one_element() -> None:
    case = CASES["Linear"]
    [engine] = mini.rank_models(case, 1, mini.checkpoint_of(case.kinds))
    catalog = mini.catalog_of(case.kinds)
    plan = make_plan(engine, engine.load_weights, catalog)
    part = plan.parts[0]
    wrong = replace(part, box=replace(part.box, canonical=part.box.canonical + 1))
    assert planned(plan) == probed(engine, catalog)
    assert planned(replace(plan, parts=(wrong, *plan.parts[1:]))) != probed(engine, catalog)
