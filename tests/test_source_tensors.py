"""Local tensors as a source: every bit in its place, everything odd refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit import affine
from deltarefit.affine import AffineMap, Box
from deltarefit.errors import BaseMismatch, IntegrityError, UsageError
from deltarefit.exchange import Alone
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.sources import tensors as room
from deltarefit.sources.dtypes import CARRIERS, DTYPES
from deltarefit.sources.gather import gather
from deltarefit.sources.residual import Residual
from deltarefit.sources.tensors import Part, TensorSource
from tests.sources import assert_same, bits_of, flat_bits, put_together, read_pieces

ALL_DTYPES = sorted(DTYPES, key=str)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits: NaN payloads, infinities, -0.0, subnormals."""
    rng = np.random.default_rng(seed)
    most = 2 if dtype == torch.bool else 1 << 8 * dtype.itemsize
    bits = rng.integers(0, most, shape, dtype=f"u{dtype.itemsize}" if most < 1 << 64 else "u8", endpoint=most == 2)
    if dtype == torch.bool:
        bits &= 1
    signed = torch.from_numpy(bits.reshape(shape).view(f"i{dtype.itemsize}") if dtype.itemsize > 1 else bits)
    return signed.view(CARRIERS[dtype.itemsize]).view(dtype)


def entry(name: str, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> TensorEntry:
    return TensorEntry(name, DTYPES[tensor.dtype], tuple(tensor.shape) if shape is None else shape)


def whole(name: str, tensor: torch.Tensor) -> Part:
    shape = tuple(tensor.shape)
    return Part(name, lambda: tensor, affine.shard(name, shape, [0] * len(shape), shape))


def catalog(*entries: TensorEntry) -> Catalog:
    return Catalog(tuple(sorted(entries, key=lambda e: e.name)))


def source_of(**tensors: torch.Tensor) -> TensorSource:
    parts = [whole(name, tensor) for name, tensor in tensors.items()]
    return TensorSource(parts, catalog(*(entry(name, tensor) for name, tensor in tensors.items())))


class Rank(Alone):
    """One of several ranks, silent."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


# ------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_is_read_without_a_copy(dtype: torch.dtype) -> None:
    tensors = {"a.scalar": random_tensor(dtype, ()), "b.weight": random_tensor(dtype, (13, 7), 1)}
    source = source_of(**tensors, **{"c.empty": random_tensor(dtype, (0, 3))})
    found = put_together(source.catalog, read_pieces(source))
    assert_same(found, bits_of({**tensors, "c.empty": torch.empty(0, dtype=dtype)}))
    with source.hold(), source.read(1, 5, 50) as array:
        assert np.shares_memory(array, tensors["b.weight"].view(CARRIERS[dtype.itemsize]).numpy())


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_every_dtype_keeps_its_bits_where_a_transpose_must_be_copied(dtype: torch.dtype, step: int) -> None:
    local = random_tensor(dtype, (6, 10))
    map_ = affine.derive((6, 10), {"t": affine.probe((6, 10)).T.copy()})
    source = TensorSource([Part("w", lambda: local, map_)], catalog(TensorEntry("t", DTYPES[dtype], (10, 6))))
    found = put_together(source.catalog, read_pieces(source, step))
    assert_same(found, {"t": flat_bits(local).reshape(6, 10).T.reshape(-1)})


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], np.ndarray]:
    """A local shape, and some of its positions in canonical order: dimensions permuted, sliced with steps."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    index = affine.probe(shape)
    cuts = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        cuts.append(slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 3))))
    turned = [dim for dim in range(len(shape)) if draw(st.booleans())]
    return shape, np.flip(index[tuple(cuts)], turned).transpose(draw(st.permutations(range(len(shape))))).copy()


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_any_range_of_any_layout(layout: tuple[tuple[int, ...], np.ndarray], data: st.DataObject) -> None:
    shape, index = layout
    local = random_tensor(torch.bfloat16, shape)
    map_ = affine.derive(shape, {"t": index})
    source = TensorSource([Part("w", lambda: local, map_)], catalog(TensorEntry("t", "BF16", index.shape)))
    expected = flat_bits(local)[index.reshape(-1)]
    assert_same(put_together(source.catalog, read_pieces(source)), {"t": expected})
    with source.hold():
        for number, piece in enumerate(source.pieces):
            start = data.draw(st.integers(0, piece.length))
            stop = data.draw(st.integers(start, piece.length))
            with source.read(number, start, stop) as array:
                places = [piece.position(p) for p in range(start, stop)]
                assert array.tolist() == expected[places].tolist()


@given(st.lists(st.integers(1, 4), min_size=0, max_size=4), st.data())
def test_gather_gives_any_range_of_a_strided_box(sizes: list[int], data: st.DataObject) -> None:
    numel = int(np.prod(sizes, dtype=int))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    strides = tuple(int(np.prod(sizes[k + 1 :], dtype=int)) * 3 for k in range(len(sizes)))
    local = torch.arange(3 * numel + 2, dtype=torch.int32)
    out = torch.full((stop - start,), -1, dtype=torch.int32)
    gather(local, Box(tuple(sizes), 2, strides, 0, strides), start, stop, out)
    assert out.tolist() == [2 + 3 * p for p in range(start, stop)]


def test_gather_goes_backwards_where_strides_are_negative() -> None:
    local = torch.arange(24, dtype=torch.int16)
    expected = torch.flip(local.view(4, 6)[:, ::2], [0, 1]).flatten()
    for start, stop in ((0, 12), (1, 11), (4, 5), (2, 6)):
        out = torch.empty(stop - start, dtype=torch.int16)
        gather(local, Box((4, 3), 22, (-6, -2), 0, (3, 1)), start, stop, out)
        assert out.tolist() == expected[start:stop].tolist()


def test_several_parts_make_one_tensor() -> None:
    """Two locals concatenated by columns into one canonical tensor."""
    a, b = random_tensor(torch.float16, (4, 3)), random_tensor(torch.float16, (4, 5), 1)
    parts = [
        Part("a", lambda: a, affine.shard("t", (4, 8), (0, 0), (4, 3))),
        Part("b", lambda: b, affine.shard("t", (4, 8), (0, 3), (4, 5))),
    ]
    source = TensorSource(parts, catalog(TensorEntry("t", "F16", (4, 8))))
    assert list(source.pieces) == sorted(source.pieces)
    assert_same(put_together(source.catalog, read_pieces(source)), {"t": flat_bits(torch.cat([a, b], 1))})


def test_one_tensor_goes_to_two_names() -> None:
    local = random_tensor(torch.float32, (4, 2))
    map_ = AffineMap((4, 2), (("k", Box((8,), 0, (1,), 0, (1,))), ("v", Box((4,), 1, (2,), 0, (1,)))))
    source = TensorSource(
        [Part("kv", lambda: local, map_)], catalog(TensorEntry("k", "F32", (4, 2)), TensorEntry("v", "F32", (4,)))
    )
    found = put_together(source.catalog, read_pieces(source))
    assert_same(found, {"k": flat_bits(local), "v": flat_bits(local[:, 1])})


def test_ranks_cover_a_tensor_once() -> None:
    full = random_tensor(torch.bfloat16, (7, 4))
    cat, sources = catalog(entry("t", full)), []
    for rank, (start, stop) in enumerate([(0, 3), (3, 6), (6, 7), (7, 7)]):
        local = full[start:stop].clone()
        map_ = affine.shard("t", (7, 4), (start, 0), (stop - start, 4))
        sources.append(TensorSource([Part("t", lambda local=local: local, map_)], cat, Rank(rank, 4)))
    affine.check_coverage(cat, [source.pieces for source in sources])
    read = [pair for source in sources for pair in read_pieces(source)]
    assert_same(put_together(cat, read), {"t": flat_bits(full)})
    assert [source.exchange.rank for source in sources] == [0, 1, 2, 3]
    assert not sources[3].pieces


@pytest.mark.parametrize("step_bytes", [64, 1 << 20])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_cast_gives_the_bits_of_a_cast_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, step_bytes: int, transposed: bool
) -> None:
    monkeypatch.setattr(room, "STEP_BYTES", step_bytes)
    local = random_tensor(torch.float32, (30, 11))
    index = affine.probe((30, 11))
    map_ = affine.derive((30, 11), {"t": index.T.copy() if transposed else index})
    shape = (11, 30) if transposed else (30, 11)
    source = TensorSource(
        [Part("w", lambda: local, map_, lambda x: x.to(torch.bfloat16))], catalog(TensorEntry("t", "BF16", shape))
    )
    expected = flat_bits(local.to(torch.bfloat16)).reshape(30, 11)
    for step in (None, 13):
        found = put_together(source.catalog, read_pieces(source, step))
        assert_same(found, {"t": (expected.T if transposed else expected).reshape(-1)})


def test_a_function_sees_no_more_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "STEP_BYTES", 400)
    seen: list[int] = []

    def negate(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.numel())
        return -x

    local = random_tensor(torch.float32, (1000,))
    part = replace(whole("t", local), function=negate)
    source = TensorSource([part], catalog(entry("t", local)))
    seen.clear()
    assert_same(put_together(source.catalog, read_pieces(source)), {"t": flat_bits(-local)})
    assert seen == [100] * 10


def test_many_threads_read_at_once() -> None:
    local = random_tensor(torch.float32, (64, 65))
    map_ = affine.derive((64, 65), {"t": affine.probe((64, 65)).T.copy()})
    source = TensorSource(
        [Part("w", lambda: local, map_, lambda x: x.to(torch.bfloat16))], catalog(TensorEntry("t", "BF16", (65, 64)))
    )
    expected = flat_bits(local.T.to(torch.bfloat16))
    barrier = threading.Barrier(4)

    def work(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        barrier.wait(10)
        for _ in range(100):
            start, stop = sorted(rng.integers(0, expected.size, 2).tolist())
            with source.read(0, start, stop) as array:
                if not np.array_equal(array, expected[start:stop]):
                    return False
        return True

    with source.hold(), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_side_files_are_given_or_asked_for() -> None:
    local = torch.ones(2)
    cat = catalog(entry("t", local))
    assert TensorSource([whole("t", local)], cat).files() == {}
    assert TensorSource([whole("t", local)], cat, files={"a": b"1"}).files() == {"a": b"1"}
    assert TensorSource([whole("t", local)], cat, files=lambda: {"a": b"2"}).files() == {"a": b"2"}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("config.json", "found str 'config.json'"),
        ([("a", b"1")], "found list"),
        ({"a": "1"}, "found 'a': str"),
        ({1: b"1"}, "found 1: bytes"),
    ],
)
def test_side_files_that_are_not_bytes_by_name_are_refused(files: Any, words: str) -> None:
    local = torch.ones(2)
    cat = catalog(entry("t", local))
    with pytest.raises(UsageError, match="files are not bytes by name; .*" + words):
        TensorSource([whole("t", local)], cat, files=files)
    with pytest.raises(UsageError, match="files are not bytes by name; .*" + words):
        TensorSource([whole("t", local)], cat, files=lambda: files).files()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_ranges_outside_of_a_piece_are_refused(start: int, stop: int) -> None:
    source = source_of(t=torch.ones(6))
    with source.hold(), pytest.raises(UsageError, match="no range of piece 0"), source.read(0, start, stop):
        pass


# ------------------------------------------------------------------------------------------ holding


class Rebound:
    """A tensor that a trainer may replace."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def part(self, name: str, shape: tuple[int, ...]) -> Part:
        return Part(name, lambda: self.tensor, affine.shard(name, shape, [0] * len(shape), shape))


def test_tensors_are_fetched_anew_for_each_hold() -> None:
    model = Rebound(torch.zeros(4))
    source = TensorSource([model.part("t", (4,))], catalog(TensorEntry("t", "F32", (4,))))
    model.tensor = torch.ones(4)
    assert_same(put_together(source.catalog, read_pieces(source)), {"t": flat_bits(torch.ones(4))})
    model.tensor.add_(1)
    assert_same(put_together(source.catalog, read_pieces(source)), {"t": flat_bits(torch.full((4,), 2.0))})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.zeros(5), r"t is float32 \(5,\) on cpu, was float32 \(4,\) on cpu"),
        (torch.zeros(4, dtype=torch.bfloat16), r"t is bfloat16 \(4,\) on cpu, was float32 \(4,\)"),
        (torch.zeros(4, device="meta"), r"t is float32 \(4,\) on meta, was float32 \(4,\) on cpu"),
        (torch.zeros(8)[::2], r"t is not contiguous"),
    ],
    ids=["shape", "dtype", "device", "strides"],
)
def test_a_tensor_of_another_kind_is_refused_by_name(other: torch.Tensor, words: str) -> None:
    model = Rebound(torch.zeros(4))
    source = TensorSource([model.part("t", (4,))], catalog(TensorEntry("t", "F32", (4,))))
    good, model.tensor = model.tensor, other
    with pytest.raises(BaseMismatch, match=words), source.hold():
        pass
    model.tensor = good
    read_pieces(source)


def test_a_write_while_held_is_named_at_the_end() -> None:
    a, b = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    source = source_of(a=a, b=b)
    with pytest.raises(IntegrityError, match="b was written to"), source.hold(), torch.no_grad():
        b.add_(1)
    read_pieces(source)


@pytest.mark.parametrize("element", [0, 1, 998, 999])
def test_one_element_written_through_torch_is_enough(element: int) -> None:
    tensor = torch.zeros(1000)
    source = source_of(t=tensor)
    with pytest.raises(IntegrityError, match="t was written to"), source.hold():
        tensor[element] = 1


def test_writes_that_pass_torch_by_are_seen_in_a_sample() -> None:
    tensor = torch.zeros(100_000)
    source = source_of(t=tensor)
    with pytest.raises(IntegrityError, match="t was written to"), source.hold():
        tensor.numpy()[::100] += 1


def test_an_error_inside_a_hold_is_not_hidden_and_ends_it() -> None:
    tensor = torch.zeros(4)
    source = source_of(t=tensor)

    def fail() -> None:
        with source.hold():
            tensor.add_(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    read_pieces(source)


def test_nothing_is_read_outside_of_a_hold_and_holds_do_not_nest() -> None:
    source = source_of(t=torch.zeros(4))
    with pytest.raises(UsageError, match=r"t was read outside of hold\(\)"), source.read(0, 0, 1):
        pass
    with source.hold(), pytest.raises(UsageError, match="held already"), source.hold():
        pass
    with pytest.raises(UsageError, match="outside of hold"), source.read(0, 0, 1):
        pass


# ------------------------------------------------------------------------------------------ refused when made


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        make()
    return str(caught.value)


FLOATS = TensorEntry("t", "F32", (4, 2))


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, 4).t(), "w is not contiguous (shape (4, 2), strides (1, 4))"),
        (torch.zeros(1, 2).expand(4, 2), "w is not contiguous"),
        (torch.zeros(4, 2, device="meta"), "w is on the meta device"),
        (torch.zeros(4, 2, dtype=torch.complex128), "w has dtype torch.complex128"),
        (torch.zeros(4, 2).to_sparse(), "w is not a dense strided tensor"),
        (torch.zeros(4, 2, dtype=torch.complex64).conj(), "w is a lazy conjugate"),
        (inference_tensor(), "w was made under inference_mode"),
    ],
    ids=["transposed", "expanded", "meta", "dtype", "sparse", "conj", "inference"],
)
def test_tensors_that_cannot_be_read_are_refused_by_name(tensor: torch.Tensor, words: str) -> None:
    part = Part("w", lambda: tensor, affine.shard("t", (4, 2), (0, 0), (4, 2)))
    assert words in refused(lambda: TensorSource([part], catalog(FLOATS)))


@pytest.mark.parametrize(
    ("map_", "function", "words"),
    [
        (affine.shard("t", (4, 2), (0, 0), (2, 2)), None, "w has shape (4, 2), its map is of (2, 2)"),
        (affine.shard("u", (4, 2), (0, 0), (4, 2)), None, "w goes to u, which is not in the catalog"),
        (affine.shard("t", (5, 2), (1, 0), (4, 2)), None, "w reaches beyond the end of t (4, 2)"),
        (AffineMap((4, 2), (("t", Box((8,), 1, (1,), 0, (1,))),)), None, "w reaches beyond the end of t"),
        (affine.shard("t", (4, 2), (0, 0), (4, 2)), torch.Tensor.bfloat16, "w gives BF16, t is F32 in the catalog"),
        (affine.shard("t", (4, 2), (0, 0), (4, 2)), torch.Tensor.cdouble, "w gives None, t is F32 in the catalog"),
        (affine.shard("t", (4, 2), (0, 0), (4, 2)), lambda x: x[:1], "w: its function changes shape (8,) to (1,)"),
        (affine.shard("t", (4, 2), (0, 0), (4, 2)), lambda x: x / x.numel(), "w: its function is not elementwise"),
    ],
    ids=["shape", "name", "canonical", "local", "dtype", "no dtype", "reshaped", "not elementwise"],
)
def test_maps_and_functions_that_do_not_fit_are_refused_by_name(
    map_: AffineMap, function: room.Function | None, words: str
) -> None:
    part = Part("w", lambda: torch.ones(4, 2), map_, function)
    assert words in refused(lambda: TensorSource([part], catalog(FLOATS)))


def test_another_dtype_than_the_catalogs_is_refused() -> None:
    local = torch.zeros(4, 2, dtype=torch.float16)
    part = Part("w", lambda: local, affine.shard("t", (4, 2), (0, 0), (4, 2)))
    assert "w gives F16, t is F32 in the catalog" in refused(lambda: TensorSource([part], catalog(FLOATS)))


def test_all_objections_are_listed() -> None:
    parts = [Part(name, lambda: torch.zeros(2).cdouble(), affine.shard("t", (2,), (0,), (2,))) for name in ("a", "b")]
    words = refused(lambda: TensorSource(parts, catalog(TensorEntry("t", "F32", (2,)))))
    assert "a has dtype" in words
    assert "b has dtype" in words


def test_of_many_objections_eight_are_listed() -> None:
    tensors = {f"t{number:02}": torch.zeros(2) for number in range(11)}
    source = source_of(**tensors)
    for tensor in tensors.values():
        tensor.data = torch.zeros(3)
    with pytest.raises(BaseMismatch, match=r"found t00 is .*; t07 is [^;]* and 3 more\."), source.hold():
        pass
    cat = catalog(*(TensorEntry(name, "F32", (2,)) for name in tensors))
    parts = [Part(n, lambda: torch.zeros(2).cdouble(), affine.shard(n, (2,), (0,), (2,))) for n in tensors]
    words = refused(lambda: TensorSource(parts, cat))
    assert words.count("has dtype") == 8
    assert words.endswith(" and 3 more")


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (7, 15), (3, 5)])
def test_two_names_for_one_memory_are_refused(start: int, stop: int) -> None:
    memory = torch.zeros(16)
    tensors = {"a": memory[:8], "b": memory[start:stop], "c": torch.zeros(3)}
    words = refused(lambda: source_of(**tensors))
    assert "shares memory with" in words
    assert "c " not in words
    source_of(a=memory[:8], b=memory[8:])


def test_parts_of_one_name_may_share_memory() -> None:
    local = torch.arange(8.0)
    halves = [affine.restrict(affine.shard("t", (8,), (0,), (8,)), start, start + 4) for start in (0, 4)]
    source = TensorSource([Part("w", lambda: local, half) for half in halves], catalog(entry("t", local)))
    assert_same(put_together(source.catalog, read_pieces(source)), {"t": flat_bits(local)})


# ------------------------------------------------------------------------------------------ residuals


def residual_source(rank: int, convert: Callable[[], dict[str, torch.Tensor]]) -> TensorSource:
    local = torch.ones(3)
    parts = [whole("a", local)] if rank == 0 else []
    cat = catalog(entry("a", local), TensorEntry("m", "BF16", (2, 3)), TensorEntry("n", "F32", ()))
    return TensorSource(parts, cat, Rank(rank, 2), residuals=[Residual(("n", "m"), convert, owner=1)])


def test_a_residual_is_converted_everywhere_and_owned_once() -> None:
    calls: list[int] = []
    merged = {"m": random_tensor(torch.bfloat16, (3, 2)).t(), "n": torch.tensor(2.0)}

    def convert() -> dict[str, torch.Tensor]:
        calls.append(len(calls))
        return merged

    sources = [residual_source(rank, convert) for rank in range(2)]
    affine.check_coverage(sources[0].catalog, [source.pieces for source in sources])
    assert [piece.overwrite for source in sources for piece in source.pieces] == [False, True, True]
    read = [pair for source in sources for pair in read_pieces(source, 4)]
    assert calls == [0, 1]
    assert_same(put_together(sources[0].catalog, read), bits_of({"a": torch.ones(3), **merged}))
    with pytest.raises(UsageError, match="m was read outside"), sources[1].read(0, 0, 1):
        pass


def test_residuals_are_converted_in_the_order_given() -> None:
    order: list[str] = []

    def making(name: str) -> Callable[[], dict[str, torch.Tensor]]:
        def convert() -> dict[str, torch.Tensor]:
            order.append(name)
            return {name: torch.zeros(1)}

        return convert

    cat = catalog(*(TensorEntry(name, "F32", (1,)) for name in "abc"))
    source = TensorSource([], cat, residuals=[Residual((name,), making(name)) for name in "bca"])
    read_pieces(source)
    assert order == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"m": torch.zeros(2, 3).bfloat16()}, "n is missing"),
        ({"m": torch.zeros(2, 3).bfloat16(), "n": torch.tensor(1.0), "o": torch.zeros(1)}, "o was not announced"),
        ({"m": torch.zeros(2, 3), "n": torch.tensor(1.0)}, r"m is torch.float32 \(2, 3\), expected BF16 \(2, 3\)"),
        ({"m": torch.zeros(3, 2).bfloat16(), "n": torch.tensor(1.0)}, r"m is torch.bfloat16 \(3, 2\), expected BF16"),
    ],
    ids=["missing", "extra", "dtype", "shape"],
)
def test_a_residual_that_gives_something_else_is_refused(given_: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(BaseMismatch, match=words), residual_source(1, lambda: given_).hold():
        pass
    with residual_source(0, dict).hold():
        pass


def test_a_residual_written_to_while_held_is_named() -> None:
    merged = {"m": torch.zeros(2, 3).bfloat16(), "n": torch.tensor(1.0)}
    with pytest.raises(IntegrityError, match="n was written to"), residual_source(1, lambda: merged).hold():
        merged["n"].add_(1)


@pytest.mark.parametrize(
    ("names", "words"),
    [(("x",), "residual x is not in the catalog"), (("t", "t"), "residual t is given twice")],
)
def test_residuals_that_do_not_fit_the_catalog_are_refused(names: tuple[str, ...], words: str) -> None:
    assert words in refused(lambda: TensorSource([], catalog(FLOATS), residuals=[Residual(names, dict)]))
