"""A rank's plan and its life: random loaders, layouts after loading, moved weights, interrupted writes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from deltarefit.affine import Box  # noqa: E402
from deltarefit.errors import (  # noqa: E402
    BaseMismatch,
    DigestMismatch,
    IntegrityError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from deltarefit.protocol.messages import Op  # noqa: E402
from deltarefit.targets.placing.host import HostBackend  # noqa: E402
from deltarefit.targets.placing.plan import Mode, make_plan  # noqa: E402
from deltarefit.targets.placing.rank import RankWeights  # noqa: E402
from deltarefit.targets.placing.storages import places_of, storages_of  # noqa: E402
from tests import helpers as h  # noqa: E402
from tests import mini_ranks as mini  # noqa: E402
from tests.mini_base import Mini  # noqa: E402
from tests.mini_loaders import CASES  # noqa: E402
from tests.placing_oracle import COMPUTED, planned, probed  # noqa: E402

KINDS = {"w": ("BF16", (6, 4)), "x": ("F32", (5,))}


class Pair(Mini):
    """Two plain parameters, and one more that is derived from the first."""

    kinds = KINDS
    scratch = ("derived",)

    def build(self) -> None:
        self.room("w", 6, 4)
        self.room("x", 5, dtype=torch.float32)
        self.derived = torch.zeros(6, 4, dtype=torch.bfloat16)


def pair(model: h.Model, kind: type[Mini] = Pair, **options: Any) -> mini.Ranks:
    models = mini.rank_models(kind, 1, model)
    catalog = mini.catalog_of(kind.kinds, kind.aliases)
    return mini.Ranks(mini.loads(models), catalog, unfilled=lambda name: name in kind.scratch, **options)


def a_step(kinds: Any, seed: int = 1) -> tuple[h.Model, h.Model]:
    model = mini.checkpoint_of(kinds)
    return model, mini.changed(np.random.default_rng(seed), kinds, model)


# ------------------------------------------------------------------------------------------ random loaders

CHAINS = ("narrow", "t", "flat", "contiguous", "flip", "cat", "roll", "gather", "fan", "step", "stack", "clone")


def moved(what: str, w: torch.Tensor, number: int) -> torch.Tensor:
    """One thing that loaders do to what they are given."""
    n = w.shape[0] if w.dim() else 0
    if not n:
        return w
    rows = torch.arange(n)[torch.randperm(n, generator=torch.Generator().manual_seed(number))]
    return {
        "narrow": lambda: w.narrow(0, number % n, n - number % n),
        "t": lambda: w.movedim(0, -1),
        "flat": lambda: w.reshape(-1, *w.shape[2:]),
        "contiguous": lambda: w.contiguous(),
        "flip": lambda: w.flip(number % w.dim()),
        "cat": lambda: torch.cat([w[number % n :], w[: number % n]]),
        "roll": lambda: w.roll(number, 0),
        "gather": lambda: w[rows],
        "fan": lambda: w.repeat_interleave(1 + number % 2, dim=0),
        "step": lambda: w[:: 1 + number % 2],
        "stack": lambda: torch.stack(w.unbind(0), min(1, w.dim() - 1)),
        "clone": lambda: w.clone(),
    }[what]()


class Chained(Mini):
    """A loader that does one thing after the other, and copies to a part of a larger parameter."""

    kinds: ClassVar = {"w": ("BF16", (4, 3, 2))}
    steps: tuple[tuple[str, int], ...] = ()

    def build(self) -> None:
        shape = self.done(torch.zeros(4, 3, 2)).shape
        self.room("p", *(n + 1 for n in shape), 2)

    def done(self, w: torch.Tensor) -> torch.Tensor:
        for what, number in self.steps:
            w = moved(what, w, number)
        return w

    def take(self, name: str, w: torch.Tensor) -> None:
        w = self.done(w)
        self.p.data[(*(slice(1, None) for _ in w.shape), 1)].copy_(w)


@settings(max_examples=60, deadline=None)
@example([("t", 0), ("flip", 0)])
@given(st.lists(st.tuples(st.sampled_from(CHAINS), st.integers(0, 7)), max_size=5))
def test_random_loaders(steps: list[tuple[str, int]]) -> None:
    kind = type("Random", (Chained,), {"steps": tuple(steps)})
    model, new = a_step(kind.kinds)
    [engine] = mini.rank_models(kind, 1, model)
    ranks = mini.Ranks(mini.loads([engine]), mini.catalog_of(kind.kinds))
    plan = make_plan(engine, engine.load_weights, ranks.catalog)
    copies = {cell: copy for cell, copy in probed(engine, ranks.catalog).items() if copy != COMPUTED}
    if plan.modes[0][0] is Mode.XOR:
        assert planned(plan) == copies
    for payload in mini.anchor(ranks.catalog, model):
        ranks.fill(payload)
    for payload in mini.payloads(ranks.catalog, model, new):
        ranks.write(payload)
    assert ranks.digest() == h.digest_of(mini.RUN, ranks.catalog, new)
    assert mini.live_bytes(engine) == mini.live_bytes(mini.rank_models(kind, 1, new)[0])


# ------------------------------------------------------------------------------------------ layouts after loading


def test_a_layout_that_the_engine_made_after_loading() -> None:
    """The engine turned a parameter of 6 × 4 round in place: element (i, j) lies where (j, i) of 4 × 6 would."""

    def turned(model: Mini) -> Mini:
        model.w.data.view(-1).copy_(model.w.data.t().contiguous().view(-1))
        return model

    model, new = a_step(KINDS)
    [engine] = mini.rank_models(Pair, 1, model)
    box = Box((6, 4), 0, (4, 1), 0, (1, 6))
    ranks = mini.Ranks(
        [(turned(engine), engine.load_weights)],
        mini.catalog_of(KINDS),
        layouts=lambda storages: {k: (box,) for k, one in enumerate(storages) if one.names[0] == "w"},
        unfilled=lambda name: name in Pair.scratch,
    )
    assert ranks.digest() == h.digest_of(mini.RUN, ranks.catalog, model)
    for payload in mini.payloads(ranks.catalog, model, new):
        ranks.write(payload)
    assert mini.live_bytes(engine) == mini.live_bytes(turned(mini.rank_models(Pair, 1, new)[0]))


def test_an_unknown_layout_is_refused_by_name() -> None:
    def layouts(storages: Any) -> Any:
        return {k: "packed for the CPU" for k, one in enumerate(storages) if "w" in one.names}

    with pytest.raises(UsageError, match="w: packed for the CPU"):
        pair(mini.checkpoint_of(KINDS), layouts=layouts)


def test_a_layout_that_loses_elements_is_opaque() -> None:
    def layouts(storages: Any) -> Any:
        return {k: (Box((20,), 0, (1,), 0, (1,)),) for k, one in enumerate(storages) if "w" in one.names}

    ranks = pair(mini.checkpoint_of(KINDS), layouts=layouts)
    assert ranks.modes == {"w": "opaque"}


# ------------------------------------------------------------------------------------------ moved weights


def test_moved_weights_are_not_written_until_they_are_found_again() -> None:
    model, new = a_step(KINDS)
    ranks = pair(model)
    [rank], [engine] = ranks.ranks, ranks.models
    [payload] = mini.payloads(ranks.catalog, model, new, 1)
    ranks.stage(payload)
    engine.w.data = engine.w.data.clone()
    before = mini.live_bytes(engine)
    for call in (lambda: rank.write(payload[1], Op.APPLY), lambda: rank.fill(*reversed(payload)), rank.digest):
        with pytest.raises(UnavailableError, match=r"moved its weights.*found w"):
            call()
    assert mini.live_bytes(engine) == before
    rank.header = b"header"
    rank.attach(mini.RUN, ranks.catalog)
    rank.assign(ranks.group.assignment(0))
    assert rank.header == b"header"
    assert rank.staged(payload[1])
    ranks.write(payload)
    assert mini.live_bytes(engine) == mini.live_bytes(mini.rank_models(Pair, 1, new)[0])


@pytest.mark.parametrize("size", [2, 4])
def test_attaching_again_changes_nothing(size: int, tmp_path: Path) -> None:
    case = CASES["Mamba"]
    model, new = a_step(case.kinds)
    models = mini.rank_models(case, size, model)
    path = mini.saved(tmp_path, case.kinds, model)
    ranks = mini.Ranks(mini.loads(models), mini.catalog_of(case.kinds), checkpoint=path)
    [payload] = mini.payloads(ranks.catalog, model, new, 1)
    ranks.write(payload)
    for number, rank in enumerate(ranks.ranks):
        rank.header = b"header"
        rank.attach(mini.RUN, ranks.catalog)
        rank.assign(ranks.group.assignment(number))
        assert rank.header == b"header"
        assert rank.staged(payload[1])
    assert ranks.live(payload) == payload[1].post
    assert ranks.digest() == h.digest_of(mini.RUN, ranks.catalog, new)


def test_storages_are_found_once_whatever_lies_in_them() -> None:
    [engine] = mini.rank_models(CASES["Tied"], 1, mini.checkpoint_of(CASES["Tied"].kinds))
    engine.list, engine.dict = [engine.table.data.t(), 5], {"late": torch.ones(3), "n": 1}
    engine.register_parameter("absent", None)
    engine.register_buffer("nowhere", torch.empty(3, device="meta"))
    engine.register_buffer("sparse", torch.eye(3).to_sparse())
    engine.register_buffer("nothing", torch.empty(0))
    found = {one.names: one.loaded for one in storages_of(engine)}
    assert found == {("rows", "head.weight"): True, ("table", "list.0"): True, ("dict.late",): False}
    assert "sparse" not in places_of(engine)


# ------------------------------------------------------------------------------------------ payloads of one rank


def test_calls_out_of_order_say_so() -> None:
    model, new = a_step(KINDS)
    [engine] = mini.rank_models(Pair, 1, model)
    rank = RankWeights(engine, engine.load_weights)
    [payload] = mini.payloads(mini.catalog_of(KINDS), model, new, 1)
    for call in (lambda: rank.stage(payload[1], payload[0]), rank.digest, rank.proof):
        with pytest.raises(UsageError, match="not attached"):
            call()
    ranks = pair(model)
    assert ranks.ranks[0].live(payload[1]) is None
    with pytest.raises(NotFoundError, match="not staged"):
        ranks.ranks[0].write(payload[1], Op.APPLY)
    with pytest.raises(IntegrityError):
        ranks.ranks[0].stage(payload[1], payload[0][:-1])


@pytest.mark.parametrize("op", [Op.APPLY, Op.SET])
def test_what_is_written_is_not_written_again(op: Op) -> None:
    model, new = a_step(KINDS)
    ranks = pair(model)
    [payload] = mini.payloads(ranks.catalog, model, new, 1)
    ranks.stage(payload)
    ranks.ranks[0].write(payload[1], Op.SKIP)
    assert ranks.live(payload) == payload[1].pre
    for _ in range(3):
        ranks.ranks[0].write(payload[1], op)
        assert ranks.live(payload) == payload[1].post


class Failing:
    """``HostBackend.apply`` that dies at the n-th call, before or after its effect."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: int, after: bool) -> None:
        self.calls, real = itertools.count(1), HostBackend.apply

        def apply(*arguments: Any) -> int:
            dies = next(self.calls) == fails
            hits = 0 if dies and not after else real(*arguments)
            if dies:
                raise OSError("sudden death")
            return hits

        patch.setattr(HostBackend, "apply", apply)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fails", [1, 2, 3, 4])
def test_an_interrupted_write(fails: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole on one side or the other, it goes on; in between, it says so and writes nothing more."""
    model, new = a_step(KINDS)
    ranks = pair(model)
    [payload] = mini.payloads(ranks.catalog, model, new, 1)
    ranks.stage(payload)
    [rank], [engine] = ranks.ranks, ranks.models
    before, after_ = mini.live_bytes(engine), mini.live_bytes(mini.rank_models(Pair, 1, new)[0])
    with monkeypatch.context() as patch:
        Failing(patch, fails, after)
        with pytest.raises(OSError, match="sudden death"):
            rank.write(payload[1], Op.APPLY)
    torn = mini.live_bytes(engine)
    if torn not in (before, after_):
        with pytest.raises(IntegrityError, match="interrupted"):
            rank.write(payload[1], Op.SET)
        assert mini.live_bytes(engine) == torn
    else:
        rank.write(payload[1], Op.SET)
        assert ranks.live(payload) == payload[1].post
        assert mini.live_bytes(engine) == after_


def test_what_is_derived_is_refreshed_once_after_writes() -> None:
    model, new = a_step(KINDS)
    calls: list[int] = []
    ranks = pair(model, after=lambda: calls.append(1))
    assert ranks.digest() == h.digest_of(mini.RUN, ranks.catalog, model)
    assert not calls
    made = mini.payloads(ranks.catalog, model, new)
    for payload in made:
        ranks.stage(payload)
    for payload in made:
        ranks.ranks[0].write(payload[1], Op.APPLY)
    for payload in made:
        assert ranks.live(payload) == payload[1].post
    assert len(calls) == 1


# ------------------------------------------------------------------------------------------ copies and shadows


def test_copies_that_drifted_apart_are_named() -> None:
    case = CASES["Linear"]
    ranks = mini.Ranks(
        mini.loads(mini.rank_models(case, 4, mini.checkpoint_of(case.kinds))), mini.catalog_of(case.kinds)
    )
    ranks.models[2].p["norm"].data.view(torch.int32)[3] ^= 1
    with pytest.raises(DigestMismatch, match=r"norm.*rank 2"):
        ranks.digest()


@pytest.mark.parametrize("name", ["Mamba", "Casts", "Scales", "Tied"])
def test_a_checkpoint_that_is_not_what_is_live(name: str, tmp_path: Path) -> None:
    """The proof of opaque tensors runs the native loader and takes back what it wrote."""
    case = CASES[name]
    model, new = a_step(case.kinds)
    [engine] = mini.rank_models(case, 1, model)
    before, path = mini.all_bytes(engine), mini.saved(tmp_path, case.kinds, new)
    with pytest.raises(BaseMismatch, match="does not make the live bits"):
        mini.Ranks(mini.loads([engine]), mini.catalog_of(case.kinds, case.aliases), checkpoint=path)
    assert mini.all_bytes(engine) == before


def test_opaque_bits_that_someone_else_changed(tmp_path: Path) -> None:
    case = CASES["Mamba"]
    model = mini.checkpoint_of(case.kinds)
    [engine] = mini.rank_models(case, 1, model)
    path = mini.saved(tmp_path, case.kinds, model)
    ranks = mini.Ranks(mini.loads([engine]), mini.catalog_of(case.kinds), checkpoint=path)
    ranks.digest()
    engine.A.data.view(torch.int32)[3] ^= 1
    with pytest.raises(IntegrityError, match="A changed, and not by a refit"):
        ranks.digest()


@pytest.mark.parametrize(
    ("kinds", "match"),
    [
        ({**CASES["Mamba"].kinds, "A_log": ("BF16", (8,))}, "A_log of the engine's checkpoint is another"),
        ({**CASES["Mamba"].kinds, "extra": ("BF16", (8,))}, "extra"),
    ],
)
def test_a_foreign_catalog_is_refused_untouched(kinds: Any, match: str, tmp_path: Path) -> None:
    case = CASES["Mamba"]
    model = mini.checkpoint_of(case.kinds)
    [engine] = mini.rank_models(case, 1, model)
    before, path = mini.all_bytes(engine), mini.saved(tmp_path, case.kinds, model)
    with pytest.raises((BaseMismatch, UsageError), match=match):
        mini.Ranks(mini.loads([engine]), mini.catalog_of(kinds), checkpoint=path)
    assert mini.all_bytes(engine) == before


def test_an_engine_of_unknown_bits_has_no_digest() -> None:
    """Without a checkpoint nothing is known of opaque bits until an anchor gave them."""
    case = CASES["Mamba"]
    model = mini.checkpoint_of(case.kinds)
    ranks = mini.Ranks(mini.loads(mini.rank_models(case, 1, model)), mini.catalog_of(case.kinds))
    with pytest.raises(UsageError, match=r"nobody knows.*A_log"):
        ranks.digest()
    assert ranks.ranks[0].proof() is None


def test_random_bits_stay_bits() -> None:
    """NaN payloads and signs of zero are bits like others: widened ones too."""
    case = CASES["Casts"]
    kinds = {name: case.kinds[name] for name in ("bias", "gate")}
    kind = type("Wide", (case,), {"kinds": kinds, "scratch": ("f16", "narrow", "steps")})

    def build(self: Mini) -> None:
        self.room("bias", 6, dtype=torch.float32)
        self.room("gate", 4, 3, dtype=torch.float32)

    kind.build = build
    model = {name: np.zeros(shape, "u2") for name, (_, shape) in kinds.items()}
    ranks = pair(model, kind)
    assert ranks.modes == {"bias": "xor-shifted", "gate": "xor-shifted"}
    for first in range(0, 1 << 16, 18 * 911):
        new = {name: np.resize(np.arange(first, first + 18, dtype="u2"), a.shape) for name, a in model.items()}
        for payload in mini.payloads(ranks.catalog, model, new):
            ranks.write(payload)
        ranks.drop()
        model = new
        assert mini.live_bytes(ranks.models[0]) == mini.live_bytes(mini.rank_models(kind, 1, model)[0])


def test_payloads_do_not_outlive_the_classes_that_they_were_summed_by() -> None:
    model, new = a_step(KINDS)
    ranks = pair(model)
    [rank], [engine] = ranks.ranks, ranks.models
    [payload] = mini.payloads(ranks.catalog, model, new, 1)
    ranks.stage(payload)
    assignment = ranks.group.assignment(0)
    rank.attach(mini.RUN, ranks.catalog)
    rank.assign(assignment)
    assert rank.staged(payload[1])
    rank.assign({**assignment, "classes": [class_ + 7 for class_ in assignment["classes"]]})
    assert not rank.staged(payload[1])
    assert mini.live_bytes(engine) == mini.live_bytes(mini.rank_models(Pair, 1, model)[0])
