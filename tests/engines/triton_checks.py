"""The Triton kernel in Triton's interpreter, on the CPU, against the oracle of ``tests.test_device_backend``.

Run by ``test_triton``, with TRITON_INTERPRET=1 and in a process of its own: Triton must know before its first import
that it shall interpret, and other tests want no interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltarefit.codec import ADD, ALL, GAPS, RUNS, SET, XOR
from deltarefit.errors import IntegrityError
from deltarefit.pieces import Piece, whole
from deltarefit.records import Digest
from deltarefit.targets.placing.device import DeviceBackend
from deltarefit.targets.placing.scatter import Table
from deltarefit.targets.placing.triton_scatter import TritonScatter, enumerated, located
from tests.test_device_backend import (
    KEY,
    Case,
    bits,
    cases,
    check,
    lanes,
    places,
    plain,
    some_delta,
    table_of,
    tables,
    tensor_of,
)


def small(block: int, tasks: int) -> object:
    """Makes kernels of small blocks and few tasks, so that a little work takes many of both."""
    return lambda device, chunk: TritonScatter(device, chunk, block=block, tasks=tasks)


def backend(chunk: int = 64, block: int = 32, tasks: int = 3) -> DeviceBackend:
    return DeviceBackend("cpu", chunk=chunk, scatter=small(block, tasks))


@given(case=cases(), block=st.sampled_from([8, 64]), tasks=st.sampled_from([2, 5, 100]))
@example(case=plain(), block=32, tasks=2)
@example(case=plain(2, 300, 16), block=32, tasks=2)
@settings(max_examples=80, deadline=None)
def test_every_operation_is_bit_exact(case: Case, block: int, tasks: int) -> None:
    check(backend(max(case.chunk, 50), block, tasks), "cpu", case)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("operation", [XOR, ADD, SET])
def test_buffers_serve_one_call_after_another(width: int, operation: int) -> None:
    one, rng = backend(100), np.random.default_rng(operation)
    for kind in (GAPS, RUNS, ALL, GAPS):
        case = plain(width, 200)
        case.delta = some_delta(rng, whole(0, 200), width, 0.2, operation, kind)
        check(one, "cpu", case)


@pytest.mark.parametrize("dims", [0, 1, 6])
def test_a_scalar(dims: int) -> None:
    case = plain(8, 1)
    case.table = table_of([(0, 3, [])], dims)
    check(backend(), "cpu", case)


def test_digits_that_are_not_used_may_stand_anywhere() -> None:
    case = plain(2, 200)
    case.table = table_of([(0, 3, [(1, 0, 0), (100, 1, 1)]), (100, 103, [(50, 2, 2), (1, 0, 0), (2, 1, 1)])])
    check(backend(), "cpu", case)


@pytest.mark.parametrize("boxes", [[], [(1000, 0, [(4, 1, 1)])], [(0, 0, [(2, 999, 1)])]])
def test_a_storage_that_holds_no_listed_position(boxes: list[tuple[int, int, list[tuple[int, int, int]]]]) -> None:
    case = plain()
    case.delta = some_delta(np.random.default_rng(1), Piece(0, 5, 80, 80), 2, 0.5, ADD, -1)
    case.table, tensor = table_of(boxes), tensor_of(case.storage, "cpu")
    assert backend().apply(case.delta, case.table, tensor, 0) == 0
    assert backend().preview(case.delta, case.table, tensor, 0, KEY) == (Digest(), Digest())
    assert (backend().digest(case.table, tensor, 0, KEY) == Digest()) is (not boxes)
    assert bits(tensor) == case.storage.tobytes()


def test_low_bits_of_shifted_elements_are_refused_where_they_are_read() -> None:
    case, listed = (one := plain(2, 200, 16)), one.listed
    tensor, other = tensor_of(case.storage, "cpu"), int(np.setdiff1d(np.arange(200), listed)[-1])
    tensor[3 + other] ^= 1
    assert backend().sums(case.delta, case.table, tensor, 16, KEY) == lanes(listed, case.live[listed], KEY)
    with pytest.raises(IntegrityError, match="wider dtype"):
        backend().digest(case.table, tensor, 16, KEY)
    tensor[3 + int(listed[-1])] ^= 1 << 15
    with pytest.raises(IntegrityError, match="16 zero bits"):
        backend().sums(case.delta, case.table, tensor, 16, KEY)
    with pytest.raises(IntegrityError, match="16 zero bits"):
        backend().preview(case.delta, case.table, tensor, 16, KEY)


@triton.jit
def _where(row, ranks, offsets, hits, here, there, n, dims: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, block)
    found, good = located(row, tl.load(ranks + at, mask=at < n, other=0), dims)
    tl.store(offsets + at, found, mask=at < n)
    tl.store(hits + at, good.to(tl.int64), mask=at < n)
    rank, offset = enumerated(row, at.to(tl.int64), dims)
    tl.store(here + at, rank, mask=at < n)
    tl.store(there + at, offset, mask=at < n)


@given(table=tables(far=1 << 44), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_positions_and_offsets_far_beyond_32_bits(table: Table, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for index in range(len(table)):
        canonical, offsets = places(table[index : index + 1])
        spots = np.unique([*canonical, *(canonical + 1)[:-1], *rng.integers(canonical[0], canonical[-1] + 1, 20)])
        row = torch.from_numpy(np.insert(table[index], 2, 0))
        found, hits, here, there = (torch.zeros(len(spots), dtype=torch.int64) for _ in range(4))
        ranks = torch.from_numpy(spots - canonical[0])
        block = triton.next_power_of_2(len(spots))
        _where[(1,)](row, ranks, found, hits, here, there, len(spots), dims=6, block=block)
        assert spots[hits.bool().numpy()].tolist() == canonical.tolist()
        assert found[hits.bool()].tolist() == offsets.tolist()
        assert (here[: len(canonical)] + canonical[0]).tolist() == canonical.tolist()
        assert there[: len(canonical)].tolist() == offsets.tolist()
