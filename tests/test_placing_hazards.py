"""What loaders do that could fool a recording: each is placed bit-exactly or goes through the native loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import mini_ranks as mini  # noqa: E402
from tests.mini_engine import BF16, TWO, Engine, W, follow, keep, refused, room  # noqa: E402

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


def test_a_copy_of_what_was_made_of_another_tensor() -> None:
    def take(m: Engine, name: str, w: torch.Tensor) -> None:
        if name == "a":
            m.p.data.copy_(w * 2)
        else:
            m.q.data.copy_(w)
            m.r.data.copy_(m.p.data)

    modes = {"a": "opaque", "b": "opaque"}
    follow(lambda: Engine(take, p=room(6, 4), q=room(6, 4), r=room(6, 4)), TWO, modes)


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
        (lambda w: w.t().flip(0).t(), {}),
        (lambda w: w.t().roll(1, 1).t(), {}),
        (lambda w: torch.nn.functional.pad(w[:, :3], (0, 1)), {"w": "opaque"}),
        (lambda w: w.view(torch.int16).view(BF16), {"w": "opaque"}),
        (lambda w: w.float(), {"w": "opaque"}),
        (lambda w: w * 1, {"w": "opaque"}),
        (lambda w: -w, {"w": "opaque"}),
        (lambda w: torch.where(w > 0, w, w), {"w": "opaque"}),
        (lambda w: w if w[0, 0].item() >= 0 else w * 2, {"w": "opaque"}),
        (lambda w: w if w.abs().max() >= 0 else w * 2, {"w": "opaque"}),
        (lambda w: w if torch.equal(w, w) else w * 2, {"w": "opaque"}),
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
