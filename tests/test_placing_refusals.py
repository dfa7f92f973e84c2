"""Several tensors in one place, and engines that are refused: before anything is written, naming what is in the way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from deltarefit.errors import UsageError  # noqa: E402
from tests import mini_ranks as mini  # noqa: E402
from tests.mini_engine import BF16, F32, TWO, Engine, Take, follow, keep, refused, room  # noqa: E402

# ------------------------------------------------------------------------------------------ several tensors


def test_constants_among_what_is_joined() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(torch.cat([w, torch.zeros(2, 4, dtype=BF16)]) if not w.is_meta else w.new_empty(0))

    def joined(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(torch.cat([w, w.new_zeros(2, 4)]))

    refused(lambda: Engine(take, p=room(8, 4)), match="the loader does not take it")
    follow(lambda: Engine(joined, p=room(8, 4)), modes={"w": "opaque"})


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_sum_of_two_tensors_loads_them_together(order: str) -> None:
    def end(m: Engine) -> None:
        if len(m.kept) == 2:
            m.p.data.copy_(m.kept[order[0]] + m.kept[order[1]])

    follow(lambda: Engine(keep, end, p=room(6, 4)), TWO, {"a": "opaque", "b": "opaque"})


def test_a_chain_of_sums_loads_all_of_them_together() -> None:
    kinds = dict.fromkeys("abcd", TWO["a"])

    def end(m: Engine) -> None:
        for one, other, to in (("a", "b", "p"), ("c", "d", "q"), ("b", "c", "r")):
            if {one, other} <= m.kept.keys():
                getattr(m, to).data.copy_(m.kept[one] + m.kept[other])

    follow(lambda: Engine(keep, end, p=room(6, 4), q=room(6, 4), r=room(6, 4)), kinds, dict.fromkeys("abcd", "opaque"))


def test_a_filled_buffer_in_between() -> None:
    def end(m: Engine) -> None:
        fused = torch.empty_like(m.kept["a"]).new_empty(12, 4)
        fused[:6], fused[6:] = m.kept["b"], m.kept["a"]
        m.p.data.copy_(fused)

    follow(lambda: Engine(keep, end, p=room(12, 4)), TWO)


def test_tied_parameters_are_written_once() -> None:
    def make() -> Engine:
        engine = Engine(lambda m, name, w: getattr(m, "q" if name == "head" else "p").data.copy_(w), p=room(6, 4))
        engine.register_parameter("q", engine.p)
        return engine

    follow(make, {"embed": ("BF16", (6, 4))}, aliases={"embed": ("head",)})


def test_tied_parameters_that_the_catalog_keeps_apart_are_refused() -> None:
    def make() -> Engine:
        engine = Engine(lambda m, name, w: getattr(m, name).data.copy_(w), a=room(6, 4))
        engine.register_parameter("b", engine.a)
        return engine

    refused(make, TWO, match="keeps a and b in one place")


def test_views_of_a_parameter_count_once() -> None:
    def make() -> Engine:
        engine = Engine(lambda m, name, w: m.p.data.copy_(w), p=room(6, 4))
        engine.register_buffer("part", engine.p.data[2:])
        engine.cache = [engine.p.data.t()]
        return engine

    follow(make)


def test_tensors_that_load_nothing() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        if name == "a":
            m.p.data.copy_(w)

    follow(lambda: Engine(take, p=room(6, 4)), TWO, {"b": "skipped"})


def test_parameters_that_are_parts_of_one_storage() -> None:
    def make() -> Engine:
        flat = room(80)
        parts = {"a": flat[5:29].view(6, 4), "b": flat[40:64].view(4, 6).t()}
        return Engine(lambda m, name, w: getattr(m, name).data.copy_(w), **parts)

    follow(make, TWO)


def test_parameters_with_gaps() -> None:
    def make() -> Engine:
        parts = {"a": room(12, 9)[::2, 1:9:2], "b": room(4, 6).t()}
        return Engine(lambda m, name, w: getattr(m, name).data.copy_(w), **parts)

    follow(make, TWO)


def test_storages_of_several_dtypes() -> None:
    kinds = {"a": ("BF16", (6, 4)), "b": ("F32", (5,)), "c": ("U8", (4,))}

    def make() -> Engine:
        flat = room(100, dtype=torch.uint8)
        parts = {"a": flat[:48].view(BF16).view(6, 4), "b": flat[48:68].view(F32), "c": flat[72:76]}
        return Engine(lambda m, name, w: getattr(m, name).data.copy_(w), **parts)

    follow(make, kinds, {"b": "opaque", "c": "opaque"}, probe=False)


# ------------------------------------------------------------------------------------------ refused


def rebind_data(m: Engine, name: str, w: torch.Tensor) -> None:
    m.p.data = torch.zeros(6, 4, dtype=BF16)


def rebind_parameter(m: Engine, name: str, w: torch.Tensor) -> None:
    m.p = torch.nn.Parameter(torch.zeros(6, 4, dtype=BF16), requires_grad=False)


def make_parameter(m: Engine, name: str, w: torch.Tensor) -> None:
    m.p.data.copy_(w)
    m.late = torch.nn.Parameter(torch.zeros(6, 4, dtype=BF16), requires_grad=False)


def reshape(m: Engine, name: str, w: torch.Tensor) -> None:
    m.p.data = m.p.data.view(4, 6)


@pytest.mark.parametrize("take", [rebind_data, rebind_parameter, make_parameter, reshape])
def test_rebound_parameters(take: Take) -> None:
    refused(lambda: Engine(take, p=room(6, 4)), match="rebinds or moves")


@pytest.mark.parametrize(
    "rebind",
    [
        lambda m, name, w: setattr(m.p, "data", w),
        lambda m, name, w: m.p.data.set_(w),
        lambda m, name, w: m.p.set_(w.untyped_storage(), 0, (6, 4), (4, 1)),
        lambda m, name, w: m.p.data.resize_(4, 6).copy_(w.view(4, 6)),
        lambda m, name, w: m.p.data.swap_(w),
    ],
)
def test_parameters_bound_to_the_source(rebind: Take) -> None:
    refused(lambda: Engine(rebind, p=room(6, 4)))


def test_unknown_names() -> None:
    refused(lambda: Engine(lambda m, name, w: {"a": m.p}[name].data.copy_(w), p=room(6, 4)), TWO, match="b: .*KeyError")


@pytest.mark.parametrize("shape", [(4, 6), (6, 5), (7, 4), (24,), (6, 4, 1), (0, 4)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    refused(lambda: Engine(lambda m, name, w: m.p.data.copy_(w), p=room(6, 4)), {"w": ("BF16", shape)})


def test_tensors_left_unfilled() -> None:
    def make() -> Engine:
        return Engine(lambda m, name, w: m.p.data.copy_(w), p=room(6, 4), left=room(3))

    refused(make, match="does not fill from the catalog; found left")
    follow(make, unfilled=lambda name: name == "left")


def test_a_missing_tensor() -> None:
    def make() -> Engine:
        return Engine(lambda m, name, w: getattr(m, name).data.copy_(w), a=room(6, 4), b=room(6, 4))

    refused(make, {"a": TWO["a"]}, match="found b")


def test_a_loader_that_always_raises() -> None:
    def end(m: Engine) -> None:
        raise ValueError("no such luck")

    refused(lambda: Engine(keep, end, p=room(6, 4)), match="cannot be followed: ValueError: no such luck")


# ------------------------------------------------------------------------------------------ threads


def test_a_pool_of_threads() -> None:
    def end(m: Engine) -> None:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(m.p.data.copy_, w) for w in m.kept.values()]:
                future.result()

    refused(lambda: Engine(keep, end, p=room(6, 4)), match="cannot be followed")


def test_threads_that_stay() -> None:
    gate = threading.Event()

    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)
        threading.Thread(target=gate.wait, args=(20,), daemon=True).start()

    try:
        refused(lambda: Engine(take, p=room(6, 4)), match="starts threads")
    finally:
        gate.set()


# ------------------------------------------------------------------------------------------ one writes over another


def computed_under(m: Engine, name: str, w: torch.Tensor) -> None:
    if name == "a":
        m.p.data.copy_(w * 2)
    else:
        m.p.data[2:4].copy_(w[2:4])
        m.q.data.copy_(w)


def cleared_under(m: Engine, name: str, w: torch.Tensor) -> None:
    if name == "a":
        m.p.data.fill_(0)
        m.p.data[:2].copy_(w[:2] * 2)
        m.q.data.copy_(w * 3)
    else:
        m.p.data[2:].copy_(w[2:])


def cleared_over(m: Engine, name: str, w: torch.Tensor) -> None:
    if name == "a":
        m.p.data.copy_(w)
    else:
        m.p.data[4:].zero_()
        m.q.data.copy_(w)


@pytest.mark.parametrize("take", [computed_under, cleared_under, cleared_over])
def test_what_is_written_over_is_loaded_with_what_writes_over_it(take: Take) -> None:
    """Loaded alone, one of them would undo what is live of the other."""
    follow(lambda: Engine(take, p=room(6, 4), q=room(6, 4)), TWO, {"a": "opaque", "b": "opaque"}, probe=False)


def test_weights_outside_of_the_modules_are_refused() -> None:
    """The loader reaches them, and a follower never would."""

    class Holder:
        weight = room(6, 4)

    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)
        m.holder.weight.copy_(w)

    def make() -> Engine:
        engine = Engine(take, p=room(6, 4))
        engine.holder = Holder()
        return engine

    before = Holder.weight.clone()
    refused(make, match="outside")
    assert torch.equal(Holder.weight.view(torch.int16), before.view(torch.int16))


def test_buffers_that_a_loader_keeps_are_no_weights() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.room = torch.empty(6, 4, dtype=BF16)
        m.room.copy_(w)
        m.p.data.copy_(m.room)
        del m.room

    follow(lambda: Engine(take, p=room(6, 4)))


def replace_module(m: Engine, name: str, w: torch.Tensor) -> None:
    m.child = Engine(keep, p=room(6, 4))


def retype(m: Engine, name: str, w: torch.Tensor) -> None:
    m.child.p.data = m.child.p.data.view(torch.int16)


@pytest.mark.parametrize("take", [replace_module, retype])
def test_replaced_parts(take: Take) -> None:
    def make() -> Engine:
        engine = Engine(take)
        engine.child = Engine(keep, p=room(6, 4))
        return engine

    refused(make, match="rebinds or moves")


def test_parameters_without_memory_yet() -> None:
    def make() -> Engine:
        engine = Engine(lambda m, name, w: m.p.data.copy_(w), p=room(6, 4))
        engine.register_parameter("late", torch.nn.UninitializedParameter())
        return engine

    engine = make()
    with pytest.raises(UsageError, match="late has no memory yet"):
        mini.Ranks([(engine, engine.load_weights)], mini.catalog_of({"w": TWO["a"]}))
