"""Where shards lie and who else holds them: against chunks cut one after the other, for every small case."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from deltarefit.errors import UnavailableError, UsageError
from deltarefit.exchange import Alone
from deltarefit.sources.fsdp import FsdpSource
from deltarefit.sources.placements import Axis, _shifts, _with_copies, place_in
from deltarefit.sources.process_group import TorchExchange, default_exchange
from deltarefit.sources.state_dict import StateDictSource


def chunk(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """``torch.chunk``, with the empty ones it leaves out."""
    parts = list(tensor.chunk(count, dim)) if tensor.shape[dim] else []
    return parts + [tensor.narrow(dim, 0, 0)] * (count - len(parts))


def cells(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in sizes)))


def held(shape: tuple[int, ...], axes: list[Axis]) -> list[int]:
    """Flat positions of the interval that is computed."""
    place = place_in("w", shape, axes)
    index = torch.arange(math.prod(shape)).reshape(shape)
    for dim, (start, size) in enumerate(zip(place.starts, place.sizes, strict=True)):
        index = index.narrow(dim, min(start, index.shape[dim]), size)
    return index.flatten().tolist()


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 2), (3, 2), (2, 4), (4, 4), (1, 3), (3, 1)])
def test_fsdp_over_tensor_parallelism_cuts_what_tensor_parallelism_left(dp: int, tp: int) -> None:
    for size in range(41):
        whole = torch.arange(size)
        for i, j in cells((size,), (dp, tp)):
            axes = [Axis(dp, i, _StridedShard(0, split_factor=tp)), Axis(tp, j, Shard(0))]
            assert held((size,), axes) == chunk(chunk(whole, tp, 0)[j], dp, 0)[i].tolist(), (size, i, j)


def test_plain_shards_of_one_dimension_go_from_left_to_right() -> None:
    for size, i, j in itertools.product(range(20), range(2), range(3)):
        expected = chunk(chunk(torch.arange(size), 2, 0)[i], 3, 0)[j].tolist()
        assert held((size,), [Axis(2, i, Shard(0)), Axis(3, j, Shard(0))]) == expected


def test_three_mesh_dimensions_in_every_order_that_factors_can_tell() -> None:
    """Over (2, 3, 5): the split factor of a dimension is the number of shards made before it."""
    orders: dict[tuple[Placement, ...], tuple[int, ...]] = {
        (Shard(0), Shard(0), Shard(0)): (0, 1, 2),
        (_StridedShard(0, split_factor=15), Shard(0), Shard(0)): (1, 2, 0),
        (_StridedShard(0, split_factor=5), _StridedShard(0, split_factor=5), Shard(0)): (2, 0, 1),
        (_StridedShard(0, split_factor=15), _StridedShard(0, split_factor=5), Shard(0)): (2, 1, 0),
        (_StridedShard(0, split_factor=3), Shard(0), Shard(0)): (1, 0, 2),
    }
    sizes = (2, 3, 5)
    for placements, order in orders.items():
        for coordinates in cells((), sizes):
            expected = torch.arange(67)
            for dim in order:
                expected = chunk(expected, sizes[dim], 0)[coordinates[dim]]
            axes = [Axis(*axis) for axis in zip(sizes, coordinates, placements, strict=True)]
            assert held((67,), axes) == expected.tolist(), (placements, coordinates)


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    st.lists(st.tuples(st.integers(1, 4), st.integers(-3, 2)), min_size=1, max_size=3),
)
def test_all_ranks_of_a_mesh_hold_every_element_as_often_as_it_is_replicated(
    shape: tuple[int, ...], mesh: list[tuple[int, int]]
) -> None:
    """Dimension numbers beyond the tensor's stand for Replicate."""
    dims = len(shape)
    placements = [Shard(dim) if -dims <= dim < dims else Replicate() for _, dim in mesh]
    sizes = tuple(size for size, _ in mesh)
    found: list[int] = []
    for coordinates in cells(shape, sizes):
        found += held(shape, [Axis(*axis) for axis in zip(sizes, coordinates, placements, strict=True)])
    times = math.prod(size for size, p in zip(sizes, placements, strict=True) if isinstance(p, Replicate))
    assert sorted(found) == sorted(list(range(math.prod(shape))) * times)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ([Axis(2, 0, Partial())], "w cannot be published"),
        ([Axis(2, 0, _StridedShard(0, split_factor=3)), Axis(2, 0, Shard(0))], r"expected one of \[1, 2\]"),
        ([Axis(2, 0, Shard(0)), Axis(2, 0, _StridedShard(0, split_factor=2))], r"expected one of \[1\]"),
        ([Axis(2, 0, _StridedShard(0, split_factor=2)), Axis(2, 0, Shard(1))], r"expected one of \[1\]"),
    ],
)
def test_what_cannot_be_told_is_refused(axes: list[Axis], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        place_in("w", (8, 8), axes)


# ------------------------------------------------------------------------------------------ copies of a mesh


@pytest.mark.parametrize(
    ("pattern", "count", "shifts"),
    [
        ([0, 1], 6, [0, 2, 4]),
        ([0, 2], 4, [0, 1]),
        ([0, 3], 6, [0, 1, 2]),
        ([0, 1, 4, 5], 8, [0, 2]),
        ([0, 1, 2], 3, [0]),
        ([0, 3], 4, None),
        ([0, 1], 3, None),
    ],
)
def test_copies_of_a_mesh_fill_the_ranks_or_do_not(pattern: list[int], count: int, shifts: list[int] | None) -> None:
    assert _shifts(pattern, count) == shifts


def test_everyone_in_a_group_computes_the_same_group() -> None:
    """Tensor parallelism in pairs, nothing known of the other dimension: 3 copies of a mesh of 2, in odd ranks."""
    ranks = [10, 11, 12, 13, 14, 15]
    groups = {
        first + number: _with_copies("w", [first + number], [first, first + 1], ranks)
        for first in (10, 12, 14)
        for number in range(2)
    }
    assert groups == {10: (0, 2, 4), 11: (1, 3, 5), 12: (0, 2, 4), 13: (1, 3, 5), 14: (0, 2, 4), 15: (1, 3, 5)}
    with pytest.raises(UsageError, match="its mesh reaches beyond the ranks that publish"):
        _with_copies("w", [9], [9, 10], ranks)
    with pytest.raises(UsageError, match="copies of its mesh do not fill"):
        _with_copies("w", [10], [10, 13], [10, 11, 12, 13])


# ------------------------------------------------------------------------------------------ the exchange


def test_messages_are_bytes_and_exchanges_do_not_hear_each_other() -> None:
    store = dist.HashStore()
    one, two = (TorchExchange(store, rank, 2, name="bytes") for rank in range(2))
    assert one.get("k") is None
    one.put("k", b"\0\xff")
    one.put("k", b"1")
    assert one.get("k") == b"1"
    assert two.get("k") is None
    one.delete("k")
    one.delete("k")
    assert one.get("k") is None


def test_one_process_is_alone_and_has_no_store() -> None:
    assert isinstance(default_exchange(), Alone)
    with pytest.raises(UsageError, match="is not initialised"):
        TorchExchange(None, 0, 1)


def test_one_of_many_is_not_alone_for_want_of_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would take itself for the only one."""
    words = r"torch.distributed is not initialised; expected .* since WORLD_SIZE is 2; found none"
    model = torch.nn.Linear(2, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for make in (default_exchange, lambda: FsdpSource(model), lambda: StateDictSource(model)):
        with pytest.raises(UsageError, match=words):
            make()
    assert StateDictSource(model, exchange=Alone()).exchange.size == 1
    for one in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", one)
        assert isinstance(default_exchange(), Alone)


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_outside_are_refused(rank: int) -> None:
    with pytest.raises(UsageError, match="no such rank"):
        TorchExchange(dist.HashStore(), rank, 2)


def test_a_dead_store_is_unavailable() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    exchange = TorchExchange(client, 0, 1, name="dead")
    exchange.put("k", b"1")
    assert exchange.get("k") == b"1"
    del server
    words = (
        r"the key-value store of torch.distributed does not answer \(cannot hear k: .*\)\. The process that serves it"
    )
    with pytest.raises(UnavailableError, match=words):
        exchange.get("k")
    with pytest.raises(UnavailableError, match="cannot say k"):
        exchange.put("k", b"2")
    with pytest.raises(UnavailableError, match="cannot forget k"):
        exchange.delete("k")


def test_the_jobs_own_connection_is_left_alone() -> None:
    """Its timeout stays, and a wait in it, as process groups wait when they start, holds up no message."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    waiting = threading.Thread(target=lambda: client.get("late"))
    waiting.start()
    try:
        timeout = client.timeout
        exchange = TorchExchange(client, 0, 1, name="wait")
        assert client.timeout == timeout
        exchange.put("k", b"1")
        assert exchange.get("k") == b"1"
        assert waiting.is_alive()
    finally:
        server.set("late", "now")
        waiting.join(10)
    assert not waiting.is_alive()
