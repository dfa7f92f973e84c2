"""Named tensors as a source: conversions followed to the bit, what they compute left to one rank, the odd refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit import affine
from deltarefit.errors import BaseMismatch, UsageError
from deltarefit.sources import ownership
from deltarefit.sources.modules import slots, unwrapped
from deltarefit.sources.state_dict import StateDictSource, named
from deltarefit.sources.tracing import trace
from tests.sources import assert_same, bits_of, put_together, read_pieces
from tests.test_source_tensors import Rank, random_tensor

Tensors = Mapping[str, torch.Tensor]


def check(source: StateDictSource, expected: Tensors) -> None:
    """Everything is owned once, in the expected shapes, dtypes and bits."""
    affine.check_coverage(source.catalog, [source.pieces])
    assert {e.name: e.shape for e in source.catalog.tensors} == {n: tuple(t.shape) for n, t in expected.items()}
    assert_same(put_together(source.catalog, read_pieces(source)), bits_of(expected))


def residual_names(source: StateDictSource) -> set[str]:
    return {source.catalog.tensors[piece.tensor].name for piece in source.pieces if piece.overwrite}


def some(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: random_tensor(torch.float32, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


# ------------------------------------------------------------------------------------------ tensors by name


def test_a_mapping_is_published_as_it_is() -> None:
    tensors = {**some(b=(3, 4), a=(5,)), "steps": torch.tensor(7), "mask": torch.tensor([True, False])}
    source = StateDictSource(tensors, files={"config.json": b"{}"})
    check(source, tensors)
    assert source.files() == {"config.json": b"{}"}
    assert [piece.flat for piece in source.pieces] == [True] * 4


def test_a_function_is_asked_once_for_each_hold() -> None:
    asked: list[int] = []

    def ask() -> dict[str, torch.Tensor]:
        asked.append(len(asked))
        return {name: torch.full((2,), float(len(asked))) for name in "abc"}

    source = StateDictSource(ask)
    assert len(asked) == 1
    for times in (2.0, 3.0):
        assert_same(
            put_together(source.catalog, read_pieces(source)), bits_of({n: torch.full((2,), times) for n in "abc"})
        )
    assert len(asked) == 3


def test_tensors_that_are_gone_are_named() -> None:
    tensors = some(a=(2,), b=(3,))
    source = StateDictSource(tensors)
    del tensors["b"]
    with pytest.raises(BaseMismatch, match="tensors are gone; found b"):
        read_pieces(source)


class Model(torch.nn.Module):
    """Parameters, a tied one, buffers of both kinds, no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_parameter("nothing", None)


def test_a_module_gives_parameters_and_persistent_buffers_tied_ones_once() -> None:
    model = Model()
    source = StateDictSource(model, dtype=torch.bfloat16)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    buffers = {name for name, _ in model.named_buffers()}
    cast = {name: t if name in buffers else t.bfloat16() for name, t in state.items()}
    check(source, cast)
    assert "scratch" not in source.catalog.index
    assert source.catalog.tensors[source.catalog.index["embed.weight"]].aliases == ("head.weight",)
    assert sorted(named(model)) == sorted(state)
    with torch.no_grad():
        model.layers[1].weight = torch.nn.Parameter(torch.ones(4, 4))
        model.norm.running_mean.add_(1)
    check(
        source, {**cast, "layers.1.weight": torch.ones(4, 4).bfloat16(), "norm.running_mean": model.norm.running_mean}
    )


def test_wrappers_are_looked_through() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    names = [slot.names for slot in slots(unwrapped(model))]
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    compiled = torch.compile(model, backend="eager")
    assert any("_checkpoint_wrapped_module" in name for name, _ in compiled.named_modules())
    assert [slot.names for slot in slots(unwrapped(compiled))] == names
    assert type(unwrapped(compiled)) is Model


def test_ties_are_found_or_told() -> None:
    weight = random_tensor(torch.float32, (4, 2))
    tensors = {"a.head": weight, "b.embed": weight.view(4, 2), "c.other": weight.clone()}
    found = StateDictSource(tensors)
    assert [(e.name, e.aliases) for e in found.catalog.tensors] == [("a.head", ("b.embed",)), ("c.other", ())]
    told = StateDictSource(tensors, tied={"a.head": "b.embed", "z.alias": "c.other"})
    assert [(e.name, e.aliases) for e in told.catalog.tensors] == [("b.embed", ("a.head",)), ("c.other", ("z.alias",))]
    check(told, {"b.embed": weight, "c.other": weight})


def test_dtypes_by_name() -> None:
    tensors = some(a=(3,), b=(3,))
    source = StateDictSource(tensors, dtype={"a": torch.float16})
    check(source, {"a": tensors["a"].half(), "b": tensors["b"]})


# ------------------------------------------------------------------------------------------ conversions


def qkv(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused projections of two groups, taken apart, and a transpose."""
    fused = tensors["qkv"].reshape(2, 4, 3, 5)
    q, k, v = fused.split([2, 1, 1], dim=1)
    return {"q": q.reshape(12, 5), "k": k.reshape(6, 5), "v": v.flatten(0, 2), "o": tensors["o"].t()}


def experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for number, expert in enumerate(tensors["stack"].unbind(0)):
        found[f"{number}.up"], found[f"{number}.gate"] = expert[1::2].contiguous(), expert[::2].clone()
    return found


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "cat": torch.cat([tensors["a"], tensors["b"]], dim=-1),
        "stack": torch.stack([tensors["a"], tensors["a"].clone()], 1),
        "twice": tensors["a"].expand(2, 3, 4).reshape(6, 4),
    }


def patched(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    room = torch.empty(3, 4)
    room[:, :2] = tensors["a"][:, 2:]
    room[:, 2:].copy_(tensors["a"][:, :2])
    return {"room": room, "row": torch.zeros(2, 4).index_put_((torch.tensor(0),), tensors["a"][0])[:1] * 1}


def casts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    half = tensors["a"].to(torch.float16)
    return {
        "half": half.t(),
        "again": half.float()[1:],
        "mixed": torch.cat([half.float(), tensors["a"]]),
        "promoted": torch.cat([half, tensors["a"]]),
        "into": torch.empty(3, 4, dtype=torch.bfloat16).copy_(tensors["a"]),
    }


COPIES: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]], set[str]]] = {
    "qkv": (qkv, {"qkv": (24, 5), "o": (4, 6)}, set()),
    "experts": (experts, {"stack": (3, 8, 5)}, set()),
    "joined": (joined, {"a": (3, 4), "b": (3, 2)}, set()),
    "patched": (patched, {"a": (3, 4)}, {"row"}),
    "casts": (casts, {"a": (3, 4)}, set()),
}


@pytest.mark.parametrize("case", COPIES)
def test_copies_and_casts_stay_local_and_give_the_conversions_bits(case: str) -> None:
    conversion, shapes, computed = COPIES[case]
    tensors = some(**shapes)
    source = StateDictSource(tensors, conversion=conversion)
    assert residual_names(source) == computed
    check(source, {name: tensor.contiguous() for name, tensor in conversion(tensors).items()})


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_chain_of_views_and_copies_is_followed(data: st.DataObject) -> None:
    """Random programs, with the same steps on real values as the truth."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    steps = data.draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=6))

    def conversion(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = tensors["w"]
        for kind, number in steps:
            found = STEPS[kind](found, number)
        return {"out": found}

    tensors = some(w=shape)
    source = StateDictSource(tensors, conversion=conversion)
    assert not residual_names(source)
    check(source, {"out": conversion(tensors)["out"].contiguous()})


STEPS: list[Callable[[torch.Tensor, int], torch.Tensor]] = [
    lambda x, n: x.transpose(n % x.ndim, 0),
    lambda x, n: x.reshape(-1),
    lambda x, n: x.clone(),
    lambda x, n: x.narrow(n % x.ndim, 0, max(1, x.shape[n % x.ndim] - 1)),
    lambda x, n: x.unsqueeze(n % (x.ndim + 1)),
    lambda x, n: torch.cat([x, x], n % x.ndim) if x.numel() < 200 else x,
    lambda x, n: x.contiguous().view(-1, 1),
    lambda x, n: torch.stack(x.unbind(n % x.ndim), 0) if x.ndim > 1 else x,
]


@pytest.mark.parametrize(
    ("conversion", "reason"),
    [
        (lambda t: {"x": t["a"] + 1}, "made by aten.add.Tensor"),
        (lambda t: {"x": t["a"] @ t["b"]}, "made by aten.mm"),
        (lambda t: {"x": torch.cat([t["a"], -t["a"]])}, "made by aten.neg"),
        (lambda t: {"x": t["a"].clone().mul_(2)}, "made by aten.mul_"),
        (lambda t: {"x": t["a"][[2, 0, 1]]}, "made by aten.index"),
        (lambda t: {"x": torch.nn.functional.pad(t["a"], (0, 1))}, "made by aten.constant_pad_nd"),
        (lambda t: {"x": torch.zeros(3, 4)}, "some elements come from no tensor, or from several"),
        (lambda t: {"x": torch.empty(4, 4).copy_(t["a"][0])[:2].narrow(0, 0, 1).add(0)}, "made by aten.add.Tensor"),
        (lambda t: {"x": overlapping(t["a"])}, "element 4 is owned 2 times"),
        (lambda t: {"x": holed(t["a"])}, "some elements come from no tensor, or from several"),
        (lambda t: {"x": moved_within(t["a"].clone())}, "some elements come from no tensor, or from several"),
        (lambda t: {"x": t["a"].view(torch.int32)}, "bits seen as another dtype"),
    ],
)
def test_what_is_computed_is_known_by_the_operation(conversion: Any, reason: str) -> None:
    found = trace(conversion, {"a": ((3, 4), torch.float32), "b": ((4, 3), torch.float32)})
    assert reason in str(found["x"].reason)
    assert not found["x"].origins


def overlapping(a: torch.Tensor) -> torch.Tensor:
    """As many elements as there is room for, but one row twice and one never."""
    room = torch.empty(3, 4)
    room[:2] = a[:2]
    room[1:2] = a[2:]
    return room


def holed(a: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(3, 4)
    room[:2] = a[1:]
    return room


def moved_within(a: torch.Tensor) -> torch.Tensor:
    a[:1] = a[1:2]
    return a


def test_what_is_computed_is_residual_and_follows_the_tensors() -> None:
    tensors = some(w=(4, 3), a=(2, 3), b=(4, 2), n=(3,))
    for tensor in tensors.values():
        tensor.nan_to_num_(0.5, 0.5, -0.5)

    def merge(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"w": t["w"] + t["b"] @ t["a"], "n": t["n"], "norm": t["n"] + 1}

    source = StateDictSource(tensors, conversion=merge, dtype=torch.bfloat16)
    assert residual_names(source) == {"w", "norm"}
    for _ in range(2):
        check(source, {name: tensor.bfloat16() for name, tensor in merge(tensors).items()})
        tensors["b"].add_(1)


def test_only_rank_zero_computes() -> None:
    calls: list[int] = []

    def conversion(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        calls.append(int(t["a"].is_meta))
        return {"x": t["a"] * 2, "a": t["a"]}

    tensors = some(a=(3,))
    sources = [StateDictSource(tensors, conversion=conversion, exchange=Rank(rank, 3)) for rank in range(3)]
    catalog = sources[0].catalog
    affine.check_coverage(catalog, [source.pieces for source in sources])
    calls.clear()
    read = [pair for source in sources for pair in read_pieces(source)]
    assert calls == [0]
    assert_same(put_together(catalog, read), bits_of(conversion(tensors)))


# ------------------------------------------------------------------------------------------ several ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_replicated_tensors_are_owned_once_large_ones_by_all(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "SPLIT_BYTES", 400)
    tensors = some(**{f"small.{n}": (4, 5) for n in range(12)}, large=(11, 30), flat=(1, 200), empty=(0, 3))
    sources = [StateDictSource(tensors, exchange=Rank(rank, size)) for rank in range(size)]
    catalog = sources[0].catalog
    affine.check_coverage(catalog, [source.pieces for source in sources])
    read = [pair for source in sources for pair in read_pieces(source)]
    assert_same(put_together(catalog, read), bits_of(tensors))
    shares = [[p for p in source.pieces if catalog.tensors[p.tensor].name == "large"] for source in sources]
    assert all(len(share) == 1 and abs(share[0].length - 330 / size) <= 30 for share in shares)
    assert all(share[0].offset % 30 == 0 for share in shares)
    assert (size > 1) == all(len(source.pieces) < 12 for source in sources), "small ones are not spread"


@given(
    st.lists(st.integers(0, 9), max_size=3).map(tuple), st.integers(1, 12), st.sampled_from([1, 4, 64]), st.text("ab")
)
def test_owners_share_a_tensor_out(shape: tuple[int, ...], replicas: int, split: int, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "SPLIT_BYTES", split)
        ranges = [ownership.owned_range(name, shape, 2, replica, replicas) for replica in range(replicas)]
    numel = int(np.prod(shape, dtype=int))
    assert sorted(p for start, stop in ranges for p in range(start, stop)) == list(range(numel))
    if numel * 2 >= split and numel >= replicas:
        assert all(start < stop for start, stop in ranges)


def test_parts_that_the_caller_places() -> None:
    full = some(w=(5, 4), v=(6,))
    cuts = [(0, 2), (2, 5), (5, 5)]
    sources = []
    for rank, (start, stop) in enumerate(cuts):
        local = {"w": full["w"][start:stop].clone(), "v": full["v"]}
        sources.append(
            StateDictSource(
                local,
                placements={"w": ((5, 4), (start, 0))},
                exchange=Rank(rank, 3),
                conversion=lambda t: {"turned": t["w"].t(), "v": t["v"]},
            )
        )
    catalog = sources[0].catalog
    affine.check_coverage(catalog, [source.pieces for source in sources])
    read = [pair for source in sources for pair in read_pieces(source)]
    assert_same(put_together(catalog, read), bits_of({"turned": full["w"].t(), "v": full["v"]}))


# ------------------------------------------------------------------------------------------ refused


def test_a_misspelt_name_is_told_eight_that_are_there() -> None:
    tensors = {f"t{number:02}": torch.zeros(2) for number in range(11)}
    with pytest.raises(UsageError, match=r"KeyError 'qkv.wieght'; it is given: t00, .*, t07 and 3 more\."):
        StateDictSource(tensors, conversion=lambda t: {"x": t["qkv.wieght"]})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"conversion": lambda t: {"x": torch.ones(int(t["a"].sum()))}}, "the conversion cannot be followed"),
        ({"conversion": lambda t: {"x": torch.from_numpy(t["a"].numpy())}}, "the conversion cannot be followed"),
        ({"conversion": lambda t: {"x": t["a"].t().mul_(2)}}, "the conversion writes to a, which it was given"),
        ({"conversion": lambda t: {"x": t["b"].copy_(t["a"])}}, "the conversion writes to b, which it was given"),
        ({"conversion": lambda t: {"x": t["c"]}}, "KeyError 'c'; it is given: a, b. Take"),
        ({"conversion": lambda t: None}, "does not return tensors by name; .* found NoneType"),
        ({"conversion": lambda t: [*t.values()]}, "does not return tensors by name; .* found list"),
        ({"conversion": lambda t: {"x": 1}}, "does not return tensors by name; .* found x: int"),
        ({"dtype": "bfloat16"}, "dtype is not a torch.dtype; found 'bfloat16'. Write torch.bfloat16"),
        ({"dtype": {"a": "float16"}}, "dtype of a is not a torch.dtype; found 'float16'"),
        ({"dtype": {"z": torch.float16}}, "dtypes are given for tensors that are not there; found z"),
        ({"dtype": torch.complex128}, "a has dtype torch.complex128"),
        ({"tied": {"a": "z"}}, "tied to a tensor that is not there; found a to z"),
        ({"tied": {"a": "b"}}, "a is not the same memory as b"),
        ({"placements": {"a": ((4, 2), (2, 0))}}, "a: a shard reaches outside"),
        (
            {"placements": {"a": ((8, 2), (0, 0))}, "conversion": lambda t: {"x": t["b"] + 1}},
            r"computes values needs whole tensors; .* found x \(made by aten.add.Tensor\); a is in parts",
        ),
    ],
    ids=[
        "value",
        "numpy",
        "written",
        "copied",
        "no such name",
        "returns nothing",
        "returns a list",
        "returns a number",
        "no dtype",
        "no dtype by name",
        "dtype name",
        "dtype",
        "tied to nothing",
        "not tied",
        "placement",
        "parts",
    ],
)
def test_what_cannot_be_published_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        StateDictSource(some(a=(4, 2), b=(4, 2)), **options)
