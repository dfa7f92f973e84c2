"""What an engine derives from weights and keeps out of sight would stay stale: it is found, and the engine refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from deltarefit.targets.placing.rank import RankWeights  # noqa: E402
from deltarefit.targets.placing.storages import MAX_VISITED  # noqa: E402
from tests import mini_ranks as mini  # noqa: E402
from tests.mini_engine import BF16, F32, TWO, Engine, follow, keep, refused, room  # noqa: E402

# ------------------------------------------------------------------------------------------ kept out of sight


class Plain:
    """An object that holds what it is given."""

    def __init__(self, **held: object) -> None:
        vars(self).update(held)

    @property
    def never(self) -> None:
        raise AssertionError("a property was asked")

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"asked for {name}")


class Slotted:
    __slots__ = ("unset", "w_t")

    def __init__(self, w_t: torch.Tensor) -> None:
        self.w_t = w_t


class Slots(Slotted):
    __slots__ = ()


HIDDEN = {
    "object": (lambda t: Plain(w_t=t), "impl.w_t"),
    "slots": (Slots, "impl.w_t"),
    "slots of a base": (lambda t: Plain(a=Slots(t)), "impl.a.w_t"),
    "nested": (lambda t: {"x": [(0, {"y": Plain(z=[None, t])})]}, "impl.x.0.1.y.z.1"),
    "module in a list": (lambda t: [Engine(keep, w_t=t)], "impl.0.w_t"),
    "module in an object": (lambda t: Plain(m=torch.nn.Sequential(Engine(keep, w_t=t))), "impl.m.0.w_t"),
    "list with variables": (lambda t: type("Many", (list,), {})(), "impl.w_t"),
}


@pytest.mark.parametrize("how", HIDDEN)
def test_derived_weights_outside_of_modules_are_left_unfilled(how: str) -> None:
    holder, name = HIDDEN[how]

    def make() -> Engine:
        engine = Engine(lambda m, name, w: m.p.data.copy_(w), p=room(6, 4))
        engine.impl = holder(room(4, 6))
        if isinstance(engine.impl, list) and not engine.impl:
            engine.impl.w_t = room(4, 6)
        return engine

    refused(make, match=f"does not fill from the catalog; found {name}\\.")
    follow(make, unfilled=lambda found: found == name)


@pytest.mark.parametrize("how", HIDDEN)
def test_views_outside_of_modules_are_filled(how: str) -> None:
    holder, _ = HIDDEN[how]

    def make() -> Engine:
        engine = Engine(lambda m, name, w: m.p.data.copy_(w), p=room(6, 4))
        engine.impl = holder(engine.p.data.t()[1:3])
        return engine

    follow(make)


def in_one_storage(parts: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], Engine]:
    """An engine with one flat storage, of which one part is the weight, and another a buffer."""

    def make() -> Engine:
        weight, derived = parts(room(48))
        engine = Engine(lambda m, name, w: m.p.data.copy_(w), p=weight)
        engine.register_buffer("w_t", derived)
        return engine

    return make


APART = {
    "after": lambda flat: (flat[:24].view(6, 4), flat[24:].view(4, 6)),
    "before": lambda flat: (flat[24:].view(6, 4), flat[:24].view(4, 6)),
    "columns": lambda flat: (flat.view(6, 8)[:, :4], flat.view(6, 8)[:, 4:]),
    "every other": lambda flat: (flat[::2].view(6, 4), flat[1::2]),
    "within a gap": lambda flat: (flat.view(6, 8)[:, 4:], flat[8:12]),
    "around": lambda flat: (flat[12:36].view(6, 4), flat[::36]),
    "other dtype": lambda flat: (flat[:24].view(6, 4), flat[24:].view(F32)),
    "expanded": lambda flat: (flat.view(6, 8)[:, :4], flat[12:13].expand(4, 6)),
}
MET = {
    "one element": lambda flat: (flat[:24].view(6, 4), flat[23:]),
    "columns": lambda flat: (flat.view(6, 8)[:, :4], flat.view(6, 8)[:, 3:]),
    "whole": lambda flat: (flat[:24].view(6, 4), flat),
    "other dtype": lambda flat: (flat[:24].view(6, 4), flat[22:].view(F32)),
    "expanded": lambda flat: (flat[:24].view(6, 4), flat[3:4].expand(4, 6)),
}


@pytest.mark.parametrize("how", APART)
def test_what_only_shares_a_storage_is_left_unfilled(how: str) -> None:
    refused(in_one_storage(APART[how]), match="does not fill from the catalog; found w_t")
    follow(in_one_storage(APART[how]), unfilled=lambda name: name == "w_t", probe=False)


@pytest.mark.parametrize("how", MET)
def test_what_shares_elements_is_filled(how: str) -> None:
    follow(in_one_storage(MET[how]), probe=False)


def test_what_is_no_part_of_the_model_is_not_searched() -> None:
    """Nor is a search without an end; messages between ranks are not weights."""

    def make() -> Engine:
        engine = Engine(lambda m, name, w: m.p.data.copy_(w), p=room(6, 4))
        group = type("Group", (), {"__module__": "engine.distributed.groups"})()
        group.buffer = room(3)
        loop = Plain(engine=engine, torch=torch, kind=Slotted, dtype=BF16, group=group, call=lambda: engine)
        loop.itself = loop
        loop.many = [[] for _ in range(MAX_VISITED)]
        loop.many.append([room(3)])  # past the end
        engine.impl = loop
        return engine

    follow(make)


# ------------------------------------------------------------------------------------------ passing failures


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_memory_that_runs_out_is_no_reason(kind: type[BaseException]) -> None:
    failing = [False]

    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.extra = name
        if name == "b" and failing[0]:
            raise kind("passing")
        getattr(m, name).data.copy_(w)

    engine = Engine(take, a=room(6, 4), b=room(6, 4))
    engine.extra = "as it was"
    weights, catalog = RankWeights(engine, engine.load_weights, threads=1), mini.catalog_of(TWO)
    before, failing[0] = mini.all_bytes(engine), True
    with pytest.raises(kind, match="passing"):
        weights.attach("run", catalog)
    assert (mini.all_bytes(engine), engine.extra) == (before, "as it was")
    failing[0] = False
    modes = weights.attach("run", catalog)["modes"]
    assert [mode for mode, _ in modes.values()] == ["xor", "xor"]
