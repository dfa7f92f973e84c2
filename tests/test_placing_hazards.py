"""What loaders do that could fool a recording: each is placed bit-exactly, goes through the native loader, or is refused
before anything is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltarefit.errors import UsageError  # noqa: E402
from tests import helpers as h  # noqa: E402
from tests import mini_ranks as mini  # noqa: E402
from tests.mini_loaders import rubbish  # noqa: E402
from tests.placing_oracle import check_plan  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32
Take = Callable[["Engine", str, torch.Tensor], object]
W = {"w": ("BF16", (6, 4))}
TWO = {"a": ("BF16", (6, 4)), "b": ("BF16", (6, 4))}


class Engine(torch.nn.Module):
    """A model of these tensors, with a loader that is a function; ``at_end`` is called when the checkpoint has ended."""

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


# ------------------------------------------------------------------------------------------ the destination


def test_fill_before_the_copy() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.fill_(0)
        m.p.data[1:7].copy_(w)

    follow(lambda: Engine(take, p=room(8, 4)))


def test_fill_after_the_copy() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)
        m.p.data[4:].zero_()

    ranks = follow(lambda: Engine(take, p=room(6, 4)), modes={"w": "opaque"})
    assert "writes to the same place again" in ranks.reason("w")


def test_fill_beside_the_copy() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data[:6].copy_(w)
        m.p.data[6:].fill_(-torch.inf)

    follow(lambda: Engine(take, p=room(8, 4)))


@pytest.mark.parametrize(
    "again",
    [
        lambda p: p.copy_(p),
        lambda p: p.copy_(p * 2),
        lambda p: p.mul_(3),
        lambda p: p.add_(p),
        lambda p: p.copy_(p.clone()),
        lambda p: torch.neg(p, out=p),
        lambda p: p.copy_(p.flip(0)),
        lambda p: torch._foreach_mul_([p], 2.0),
    ],
)
def test_a_second_write_that_looks_at_the_first(again: Callable[[torch.Tensor], object]) -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)
        again(m.p.data)

    follow(lambda: Engine(take, p=room(6, 4)), modes={"w": "opaque"})


def test_a_copy_of_what_was_loaded_elsewhere() -> None:
    """The second parameter would keep old bits if only the first were written."""

    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)
        m.twin.data.copy_(m.p.data)
        m.twice.data.copy_(m.p.data.float() + 1)

    ranks = follow(lambda: Engine(take, p=room(6, 4), twin=room(6, 4), twice=room(6, 4)), modes={"w": "opaque"})
    assert "loaded before" in ranks.reason("w")


def test_values_of_weights_that_go_to_python() -> None:
    """A number that the loader keeps would stay that of old bits if only the weights were written."""

    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)
        m.largest = m.p.data.float().nan_to_num().abs().max().item()

    ranks = follow(lambda: Engine(take, p=room(6, 4)), modes={"w": "opaque"})
    [engine] = ranks.models
    assert engine.largest == engine.p.data.float().nan_to_num().abs().max().item() != 0


def test_attributes_made_of_weights() -> None:
    """Nothing refreshes such a tensor but a native load."""

    def make() -> Engine:
        engine = Engine(lambda m, name, w: (m.p.data.copy_(w), setattr(m, "twice", m.p.data * 2)), p=room(6, 4))
        engine.twice = torch.ones(6, 4)
        return engine

    refused(make, match="found twice")


def test_recording_leaves_attributes_alone() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)
        m.first, m.last = w[0, 0].item(), w

    engine = Engine(take, p=room(6, 4))
    engine.first = 5.0
    mini.Ranks([(engine, engine.load_weights)], mini.catalog_of(W))
    assert engine.first == 5.0
    assert not hasattr(engine, "last")


def test_writes_that_overlap() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data[:4].copy_(w[:4])
        m.p.data[2:].copy_(w[2:])

    follow(lambda: Engine(take, p=room(6, 4)), modes={"w": "opaque"})


def test_the_same_write_twice() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)
        m.p.data.copy_(w)

    follow(lambda: Engine(take, p=room(6, 4)))


def test_elements_that_land_on_each_other() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.as_strided((6, 4), (2, 1)).copy_(w)

    ranks = follow(lambda: Engine(take, p=room(14)), modes={"w": "opaque"})
    assert ranks.reason("w") == "elements land on each other"


def test_expanded_sources() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)
        m.q.data[:] = w[:, None]

    follow(lambda: Engine(take, p=room(3, 6, 4), q=room(6, 5, 4)))


def test_one_element_in_too_many_places() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(w)

    ranks = follow(lambda: Engine(take, p=room(300)), {"w": ("BF16", ())}, {"w": "opaque"})
    assert "too many places" in ranks.reason("w")


# ------------------------------------------------------------------------------------------ the source


@pytest.mark.parametrize(
    ("change", "modes"),
    [
        (lambda w: w.mul_(2), {"w": "opaque"}),
        (lambda w: w[:2].zero_(), {"w": "opaque"}),
        (lambda w: w.copy_(w.flip(0)), {"w": "opaque"}),
        (lambda w: w.zero_(), {"w": "skipped"}),
        (lambda w: w.fill_(3), {"w": "skipped"}),
        (lambda w: w.clone().zero_(), {}),
    ],
)
def test_a_source_that_is_changed_in_place(change: Callable[[torch.Tensor], object], modes: Any) -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        change(w)
        m.p.data.copy_(w)

    follow(lambda: Engine(take, p=room(6, 4)), modes=modes)


@pytest.mark.parametrize(
    ("made", "modes"),
    [
        (lambda w: w.to("cpu"), {}),
        (lambda w: w.cpu().contiguous(), {}),
        (lambda w: w.to("cpu", copy=True), {}),
        (lambda w: w.t().contiguous().t(), {}),
        (lambda w: torch.empty_like(w).copy_(w), {}),
        (lambda w: torch.cat([w[3:], w[:3]]), {}),
        (lambda w: torch.stack(w.unbind(1), 1), {}),
        (lambda w: w[torch.tensor([5, 0, 1, 2, 4, 3])], {}),
        (lambda w: w.index_select(0, torch.tensor([5, 5, 1, 2, 4, 3])), {"w": "opaque"}),
        (lambda w: w.roll(1, 0), {}),
        (lambda w: torch.nn.functional.pad(w[:, :3], (0, 1)), {"w": "opaque"}),
        (lambda w: w.view(torch.int16).view(BF16), {"w": "opaque"}),
        (lambda w: w.float(), {"w": "opaque"}),
        (lambda w: w * 1, {"w": "opaque"}),
        (lambda w: -w, {"w": "opaque"}),
        (lambda w: torch.where(w > 0, w, w), {"w": "opaque"}),
        (lambda w: w if w[0, 0].item() >= 0 else w * 2, {"w": "opaque"}),
        (lambda w: w if w.abs().max() >= 0 else w * 2, {"w": "opaque"}),
        (lambda w: w if torch.equal(w, w) else w, {"w": "opaque"}),
    ],
)
def test_what_is_made_of_a_source(made: Callable[[torch.Tensor], torch.Tensor], modes: Any) -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(made(w))

    follow(lambda: Engine(take, p=room(6, 4)), modes=modes)


def test_a_value_that_decides_where_another_tensor_goes() -> None:
    def end(m: Engine) -> None:
        first, second = ("p", "q") if m.kept["a"][0, 0].item() >= 0 else ("q", "p")
        getattr(m, first).data.copy_(m.kept["a"])
        getattr(m, second).data.copy_(m.kept["a"].neg())

    follow(lambda: Engine(keep, end, p=room(6, 4), q=room(6, 4)), {"a": TWO["a"]}, {"a": "opaque"})


def test_numpy_in_between_is_refused() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.copy_(torch.from_numpy(w.float().numpy()))

    refused(lambda: Engine(take, p=room(6, 4)), match="does not fill from the catalog; found p")


def test_attributes_of_tensors() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        w.shard_id = 1
        m.p.data[w.shard_id].copy_(w)
        m.p.data[0].copy_(w.data)

    follow(lambda: Engine(take, p=room(2, 6, 4)))


# ------------------------------------------------------------------------------------------ ways to write


@pytest.mark.parametrize(
    ("write", "modes"),
    [
        (lambda p, w: torch._foreach_copy_([p[:2], p[2:]], [w[:2], w[2:]]), {}),
        (lambda p, w: p.__setitem__(..., w), {}),
        (lambda p, w: p.__setitem__(slice(None, None, 2), w[::2]) or p[1::2].copy_(w[1::2]), {}),
        (lambda p, w: p.view(-1).copy_(w.view(-1)), {}),
        (lambda p, w: p.index_copy_(0, torch.arange(6), w), {"w": "opaque"}),
        (lambda p, w: p.__setitem__(torch.tensor([5, 0, 1, 2, 4, 3]), w), {"w": "opaque"}),
        (lambda p, w: torch.add(w, 0, out=p), {"w": "opaque"}),
        (lambda p, w: p.view(torch.uint8).copy_(w.view(torch.uint8)), {"w": "opaque"}),
        (lambda p, w: p.view(torch.int16).copy_(w.view(torch.int16)), {"w": "opaque"}),
    ],
)
def test_ways_to_write(write: Callable[..., object], modes: Any) -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        write(m.p.data, w)

    follow(lambda: Engine(take, p=room(6, 4)), modes=modes)


def test_a_tensor_seen_as_another_dtype_of_its_width() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        m.p.data.view(torch.int16).copy_(w)

    follow(lambda: Engine(take, p=room(6, 4)), {"w": ("I16", (6, 4))})


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
