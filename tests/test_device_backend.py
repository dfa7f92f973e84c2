"""``DeviceBackend`` against NumPy: every position enumerated, every bit compared. On CUDA too where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltarefit import _kernel
from deltarefit.codec import ADD, ALL, GAPS, RUNS, SET, XOR, Delta, encode_full
from deltarefit.elements import Elements
from deltarefit.errors import IntegrityError, UsageError
from deltarefit.pieces import Piece, whole
from deltarefit.records import Digest
from deltarefit.targets.placing.device import DeviceBackend, MakeScatter, check_table, last_of
from deltarefit.targets.placing.scatter import MAX_DIMS, TorchScatter, Upload, row_of

WAYS: list[tuple[str, MakeScatter | None]] = [("cpu", TorchScatter), ("cpu", None)]
if torch.cuda.is_available():
    WAYS += [("cuda", TorchScatter), ("cuda", None)]
KEY = 0xFEDCBA9876543210
Table = npt.NDArray[np.int64]
Dim = tuple[int, int, int]

every_way = pytest.mark.parametrize(("device", "scatter"), WAYS, ids=lambda way: getattr(way, "__name__", str(way)))


# ------------------------------------------------------------------------------------------ the oracle


def lanes(positions: npt.NDArray[Any], values: Elements, key: int) -> Digest:
    """docs/format.md §5 in plain NumPy."""
    p, v = positions.astype(np.uint64), values.astype(np.uint64)
    t = (np.uint64(key) + (p + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)) ^ v
    u = (t ^ (t >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    u = u ^ (u >> np.uint64(29))
    a0, a1 = u * np.uint64(0xBF58476D1CE4E5B9), u * np.uint64(0x94D049BB133111EB)
    return Digest(*(int((a ^ (a >> np.uint64(32))).sum(dtype=np.uint64)) for a in (a0, a1)))


def places(table: Table) -> tuple[Table, Table]:
    """(canonical positions, storage offsets) of every element of every box."""
    canonical, offsets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for row in table:
        index = np.indices(tuple(row[2::3])).reshape(len(row[2::3]), np.prod(row[2::3]))
        canonical.append(row[0] + (index * row[3::3, None]).sum(axis=0))
        offsets.append(row[1] + (index * row[4::3, None]).sum(axis=0))
    return np.concatenate(canonical), np.concatenate(offsets)


def table_of(boxes: list[tuple[int, int, list[Dim]]], dims: int = MAX_DIMS) -> Table:
    rows = [
        [c, s, *(n for dim in [*listed, *[(1, 0, 0)] * (dims - len(listed))] for n in dim)] for c, s, listed in boxes
    ]
    return np.array(rows, np.int64).reshape(len(boxes), 2 + 3 * dims)


@dataclass
class Case:
    """A delta of a canonical tensor, and a storage that holds some of its elements."""

    delta: Delta
    table: Table
    live: Elements
    storage: Elements
    shift: int
    chunk: int

    @property
    def listed(self) -> Table:
        """Positions of the delta."""
        positions: Table = _kernel.decode(self.delta.record, self.delta.slices)[0].astype(np.int64) + self.delta.low
        return positions

    @property
    def after(self) -> Elements:
        """The canonical tensor when the delta is applied."""
        after: Elements = self.live.copy()
        _kernel.apply(self.delta.record, self.delta.slices, after, self.delta.low)
        return after

    @property
    def held(self) -> Table:
        """Positions of the delta that the storage holds."""
        held: Table = np.intersect1d(self.listed, places(self.table)[0])
        return held

    @property
    def expected(self) -> Elements:
        """The storage when the delta is applied."""
        canonical, offsets = places(self.table)
        out: Elements = self.storage.copy()
        hit = np.isin(canonical, self.listed)
        out[offsets[hit]] = self.after[canonical[hit]].astype(out.dtype) << out.dtype.type(self.shift)
        return out


def tensor_of(storage: Elements, device: str) -> torch.Tensor:
    """A copy on the device, as the integers that torch has for this width."""
    width = storage.dtype.itemsize
    return torch.from_numpy(storage.copy().view("u1" if width == 1 else f"i{width}")).to(device)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def check(backend: DeviceBackend, device: str, case: Case) -> None:
    """All four operations, and nothing else changed."""
    tensor = tensor_of(case.storage, device)
    args = (case.delta, case.table, tensor, case.shift)
    canonical, held = places(case.table)[0], case.held
    pre, post = lanes(held, case.live[held], KEY), lanes(held, case.after[held], KEY)
    assert backend.sums(*args, KEY) == pre
    assert backend.preview(*args, KEY) == (pre, post)
    assert backend.digest(case.table, tensor, case.shift, KEY) == lanes(canonical, case.live[canonical], KEY)
    assert bits(tensor) == case.storage.tobytes(), "something was written too early"
    assert backend.apply(*args) == len(held)
    assert bits(tensor) == case.expected.tobytes()
    assert backend.sums(*args, KEY) == post
    assert backend.digest(case.table, tensor, case.shift, KEY) == lanes(canonical, case.after[canonical], KEY)


# ------------------------------------------------------------------------------------------ cases


@st.composite
def tables(draw: st.DrawFn, far: int = 0) -> Table:
    """Boxes that share no element on either side: one grid, its two sides nested each in an order of its own, cut
    along digits into ranges and interleaved halves, some of which are left out. ``far``: digits are up to so far apart
    besides."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=MAX_DIMS))
    gap = st.integers(0, far) if far else st.sampled_from([0, 0, 0, 1, 2])
    strides, steps = ([0] * len(sizes) for _ in range(2))
    for side, order in ((strides, range(len(sizes))[::-1]), (steps, draw(st.permutations(range(len(sizes)))))):
        reach = 0
        for digit in order:
            side[digit] = reach + 1 + draw(gap)
            reach += (sizes[digit] - 1) * side[digit]
    canonical, storage = draw(st.integers(0, max(far, 9))), draw(st.integers(0, max(far, 9)))
    for digit, size in enumerate(sizes):
        if draw(st.booleans()):
            storage, steps[digit] = storage + (size - 1) * steps[digit], -steps[digit]
    boxes = [(canonical, storage, list(zip(sizes, strides, steps, strict=True)))]
    for _ in range(draw(st.integers(0, 4)) if sizes else 0):
        boxes += _halves(*boxes.pop(draw(st.integers(0, len(boxes) - 1))), draw)
    kept = [box for box in boxes if draw(st.integers(0, 5))]
    shuffled = draw(st.permutations(kept))
    return table_of([(c, s, [dim for dim in dims if dim[0] > 1 or draw(st.booleans())]) for c, s, dims in shuffled])


def _halves(canonical: int, storage: int, dims: list[Dim], draw: st.DrawFn) -> list[tuple[int, int, list[Dim]]]:
    digit = draw(st.integers(0, len(dims) - 1))
    size, stride, step = dims[digit]
    if size == 1:
        return [(canonical, storage, dims)]
    cut, skip = (2, 1) if draw(st.booleans()) else (1, draw(st.integers(1, size - 1)))
    firsts = [(0, -(-size // 2)), (1, size // 2)] if cut == 2 else [(0, skip), (skip, size - skip)]
    return [
        (
            canonical + at * stride,
            storage + at * step,
            [*dims[:digit], (n, cut * stride, cut * step), *dims[digit + 1 :]],
        )
        for at, n in firsts
    ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shift = draw(st.sampled_from([0, 0, 16]))
    width = 2 if shift else draw(st.sampled_from([1, 2, 4, 8]))
    table = draw(tables())
    canonical, offsets = places(table)
    numel = int(canonical.max(initial=0)) + 1 + draw(st.integers(0, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    live = some_bits(rng, width, numel)
    storage = some_bits(rng, 4 if shift else width, int(offsets.max(initial=0)) + 1 + draw(st.integers(0, 5)))
    storage[offsets] = live[canonical].astype(storage.dtype) << storage.dtype.type(shift)
    piece = draw(pieces(numel))
    density = draw(st.sampled_from([0.02, 0.3, 1.0]))
    operation, kind = draw(st.sampled_from([XOR, ADD, SET])), draw(st.sampled_from([-1, GAPS, RUNS, ALL]))
    delta = some_delta(rng, piece, width, density, operation, kind)
    return Case(delta, table, live, storage, shift, draw(st.sampled_from([1, 7, 64, 1 << 12])))


def some_bits(rng: np.random.Generator, width: int, n: int) -> Elements:
    """Random elements, extremes among them: those whose sums leave the range."""
    made: Elements = rng.integers(0, (1 << 8 * width) - 1, n, dtype=f"u{width}", endpoint=True)
    made[rng.random(n) < 0.2] = (1 << 8 * width) - 1
    made[rng.random(n) < 0.2] = 1 << 8 * width - 1
    return made


@st.composite
def pieces(draw: st.DrawFn, numel: int) -> Piece:
    """Part of a tensor: a range, or rows of it."""
    offset = draw(st.integers(0, numel - 1))
    if draw(st.booleans()):
        return Piece(0, offset, (n := draw(st.integers(1, numel - offset))), n)
    run, step = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pitch = (run - 1) * step + draw(st.integers(1, 5))
    rows = (numel - 1 - offset - (run - 1) * step) // pitch + 1
    return Piece(0, offset, run * rows, run, step, pitch) if rows > 0 else Piece(0, offset, 1, 1)


def some_delta(rng: np.random.Generator, piece: Piece, width: int, density: float, operation: int, kind: int) -> Delta:
    old = some_bits(rng, width, piece.length)
    new = np.where(rng.random(piece.length) < density, some_bits(rng, width, piece.length), old)
    new[0] = ~old[0]
    made = _kernel.encode(old, new, piece.origin, KEY, kind=kind, operation=operation, rows=piece.rows)
    assert made is not None
    return Delta(piece.tensor, made[0], tuple(data for _, data in made[1]))


def plain(width: int = 2, numel: int = 200, shift: int = 0) -> Case:
    """A range of a tensor in a storage that holds it as it is, three elements from the start."""
    rng = np.random.default_rng(3)
    live = some_bits(rng, width, numel)
    storage = some_bits(rng, 4 if shift else width, numel + 5)
    storage[3:-2] = live.astype(storage.dtype) << storage.dtype.type(shift)
    delta = some_delta(rng, whole(0, numel), width, 0.3, XOR, -1)
    return Case(delta, table_of([(0, 3, [(numel, 1, 1)])]), live, storage, shift, 64)


# ------------------------------------------------------------------------------------------ tests


@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_the_oracle_is_the_kernel_s_digest(data: st.DataObject, width: int, key: int, start: int) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    array = some_bits(rng, width, 50)
    assert lanes(np.arange(start, start + 50), array, key) == _kernel.digest(array, start, key)
    delta = some_delta(rng, data.draw(pieces(50)), width, 0.5, XOR, -1)
    listed = _kernel.decode(delta.record, delta.slices)[0].astype(np.int64) + delta.low
    assert lanes(listed, array[listed], key) == _kernel.sums(delta.record, delta.slices, array, key, delta.low)


@every_way
@given(case=cases())
@example(case=plain())
@example(case=plain(2, 300, 16))
@settings(max_examples=300, deadline=None)
def test_every_operation_is_bit_exact(device: str, scatter: MakeScatter | None, case: Case) -> None:
    check(DeviceBackend(device, chunk=case.chunk, scatter=scatter), device, case)


@every_way
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("operation", [XOR, ADD, SET])
def test_buffers_serve_one_call_after_another(device: str, scatter: Any, width: int, operation: int) -> None:
    backend = DeviceBackend(device, chunk=100, scatter=scatter)
    rng = np.random.default_rng(operation)
    for kind in (GAPS, RUNS, ALL, GAPS):
        case = plain(width, 1000)
        case.delta = some_delta(rng, whole(0, 1000), width, 0.2, operation, kind)
        check(backend, device, case)


@every_way
def test_sums_are_the_kernel_s_where_the_storage_is_the_tensor(device: str, scatter: Any) -> None:
    case = plain(4, 500)
    backend, tensor, delta = DeviceBackend(device, scatter=scatter), tensor_of(case.storage, device), case.delta
    pre, post, _ = _kernel.preview(delta.record, delta.slices, case.live, KEY)
    assert backend.preview(delta, case.table, tensor, 0, KEY) == (pre, post)
    assert backend.sums(delta, case.table, tensor, 0, KEY) == pre
    assert backend.digest(case.table, tensor, 0, KEY) == _kernel.digest(case.live, 0, KEY)


@every_way
@pytest.mark.parametrize("chunk", [1, 33, 1 << 12])
def test_an_anchor_s_delta_sets_every_element(device: str, scatter: Any, chunk: int) -> None:
    case = plain(2, 300)
    new = some_bits(np.random.default_rng(9), 2, 300)
    case.delta = encode_full(whole(0, 300), new, 0, KEY).delta
    tensor = tensor_of(case.storage, device)
    assert DeviceBackend(device, chunk=chunk, scatter=scatter).apply(case.delta, case.table, tensor, 0) == 300
    assert bits(tensor[3:-2]) == new.tobytes()
    assert bits(tensor) == case.expected.tobytes()


@every_way
@pytest.mark.parametrize("dims", [0, 1, MAX_DIMS])
def test_a_scalar(device: str, scatter: Any, dims: int) -> None:
    case = plain(8, 1)
    case.table = table_of([(0, 3, [])], dims)
    check(DeviceBackend(device, scatter=scatter), device, case)


@every_way
def test_digits_that_are_not_used_may_stand_anywhere(device: str, scatter: Any) -> None:
    case = plain(2, 200)
    case.table = table_of([(0, 3, [(1, 0, 0), (100, 1, 1)]), (100, 103, [(50, 2, 2), (1, 0, 0), (2, 1, 1)])])
    check(DeviceBackend(device, scatter=scatter), device, case)


@every_way
@pytest.mark.parametrize("boxes", [[], [(1000, 0, [(4, 1, 1)])], [(0, 0, [(2, 999, 1)])]])
def test_a_storage_that_holds_no_listed_position(device: str, scatter: Any, boxes: Any) -> None:
    case = plain()
    case.delta = some_delta(np.random.default_rng(1), Piece(0, 5, 80, 80), 2, 0.5, ADD, -1)
    case.table = table_of(boxes)
    backend, tensor = DeviceBackend(device, scatter=scatter), tensor_of(case.storage, device)
    assert backend.apply(case.delta, case.table, tensor, 0) == 0
    assert backend.sums(case.delta, case.table, tensor, 0, KEY) == Digest()
    assert backend.preview(case.delta, case.table, tensor, 0, KEY) == (Digest(), Digest())
    assert (backend.digest(case.table, tensor, 0, KEY) == Digest()) is (not boxes)
    assert bits(tensor) == case.storage.tobytes()


@every_way
def test_low_bits_of_shifted_elements_are_refused_where_they_are_read(device: str, scatter: Any) -> None:
    case = plain(2, 200, 16)
    backend = DeviceBackend(device, scatter=scatter, chunk=50)
    listed, others = case.listed, np.setdiff1d(np.arange(200), case.listed)
    tensor = tensor_of(case.storage, device)
    tensor[3 + int(others[-1])] ^= 1
    assert backend.sums(case.delta, case.table, tensor, 16, KEY) == lanes(listed, case.live[listed], KEY)
    with pytest.raises(IntegrityError, match="wider dtype"):
        backend.digest(case.table, tensor, 16, KEY)
    tensor[3 + int(listed[-1])] ^= 1 << 15
    with pytest.raises(IntegrityError, match="16 zero bits"):
        backend.sums(case.delta, case.table, tensor, 16, KEY)
    with pytest.raises(IntegrityError, match="16 zero bits"):
        backend.preview(case.delta, case.table, tensor, 16, KEY)


@every_way
def test_tensors_made_in_inference_mode_can_be_written(device: str, scatter: Any) -> None:
    case = plain()
    with torch.inference_mode():
        tensor = tensor_of(case.storage, device).clone()
    DeviceBackend(device, scatter=scatter).apply(case.delta, case.table, tensor, 0)
    assert bits(tensor) == case.expected.tobytes()


@every_way
@given(table=tables(far=1 << 44), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_positions_and_offsets_far_beyond_32_bits(device: str, scatter: Any, table: Table, seed: int) -> None:
    """Without a storage: just where each position lies."""
    if scatter is not TorchScatter:
        return
    rng = np.random.default_rng(seed)
    for index in range(len(table)):
        row, (canonical, offsets) = row_of(table, index), places(table[index : index + 1])
        near = canonical[:, None] + np.array([-1, 0, 1, 2])
        spots = np.unique([*near.ravel(), *rng.integers(canonical[0], canonical[-1] + 1, 20)])
        spots = spots[(spots >= canonical[0]) & (spots <= canonical[-1])]
        engine = scatter(torch.device(device), max(len(spots), len(canonical)))
        found, hits = engine.located(torch.from_numpy(spots).to(device), row)
        assert spots[hits.cpu().numpy()].tolist() == canonical.tolist()
        assert found[hits].tolist() == offsets.tolist()
        here, there = engine.enumerated(row, 0, len(canonical))
        assert (here.tolist(), there.tolist()) == (canonical.tolist(), offsets.tolist())


@every_way
def test_positions_and_offsets_beyond_31_bits_in_a_storage(device: str, scatter: Any) -> None:
    """Pages that nobody touches take no memory (on the CPU)."""
    far, rng = (1 << 31) + 77, np.random.default_rng(5)
    live = np.zeros(far + 4000, np.uint8)
    live[far:] = some_bits(rng, 1, 4000)
    table = table_of([(far - 1000, far - 900, [(4000, 1, 1)])])
    storage = torch.zeros(far + 4000, dtype=torch.uint8, device=device)
    storage[far + 100 : far + 3100] = torch.from_numpy(live[far : far + 3000]).to(device)
    delta = some_delta(rng, Piece(0, far, 2500, 2500), 1, 0.1, ADD, -1)
    backend = DeviceBackend(device, scatter=scatter, chunk=100)
    assert backend.digest(table, storage, 0, KEY) == _kernel.digest(live[far - 1000 : far + 3000], far - 1000, KEY)
    assert backend.sums(delta, table, storage, 0, KEY) == _kernel.sums(delta.record, delta.slices, live, KEY, far)
    assert backend.apply(delta, table, storage, 0) == delta.count
    _kernel.apply(delta.record, delta.slices, live, far)
    assert bits(storage[far - 900 : far + 3100]) == live[far - 1000 : far + 3000].tobytes()


def wrong_storages() -> dict[str, tuple[torch.Tensor, int]]:
    return {
        "width": (torch.zeros(300, dtype=torch.int32), 0),
        "float": (torch.zeros(300, dtype=torch.float16), 0),
        "two dims": (torch.zeros((3, 100), dtype=torch.int16), 0),
        "strided": (torch.zeros(600, dtype=torch.int16)[::2], 0),
        "elsewhere": (torch.zeros(300, dtype=torch.int16, device="meta"), 0),
        "shift": (torch.zeros(300, dtype=torch.int32), 8),
        "not shifted": (torch.zeros(300, dtype=torch.int16), 16),
        "too short": (torch.zeros(202, dtype=torch.int16), 0),
    }


@pytest.mark.parametrize("what", wrong_storages())
def test_storages_that_do_not_fit_are_refused(what: str) -> None:
    case, (storage, shift) = plain(), wrong_storages()[what]
    with pytest.raises(UsageError):
        DeviceBackend("cpu").apply(case.delta, case.table, storage, shift)
    assert not storage.is_cpu or not storage.any()


@pytest.mark.parametrize(
    "table",
    [
        table_of([(0, 0, [(4, 0, 1)])]),
        table_of([(0, 0, [(4, 3, 1), (4, 1, 4)])]),
        table_of([(-1, 0, [(4, 1, 1)])]),
        table_of([(0, 0, [(0, 1, 1)])]),
        table_of([(0, 0, [(-3, 1, 1)])]),
        table_of([(0, 2, [(4, 1, -1)])]),
        table_of([(0, 97, [(4, 1, 1)])]),
        table_of([(0, 0, [(4, 1, 1)]), (8, 100, [])]),
        table_of([(0, 0, [(4, 1, 1)])]).astype(np.int32),
        np.zeros((1, 4), np.int64),
        np.zeros(20, np.int64),
        table_of([(0, 0, [])], 7),
    ],
)
def test_tables_that_cannot_be_are_refused(table: Any) -> None:
    with pytest.raises(UsageError):
        check_table(table, 100)


@given(table=tables())
@settings(max_examples=50, deadline=None)
def test_tables_of_boxes_that_fit_exactly_are_taken(table: Table) -> None:
    canonical, offsets = places(table)
    check_table(table, int(offsets.max(initial=0)) + 1)
    assert last_of(table).max(initial=0) == canonical.max(initial=0)
    if len(table):
        with pytest.raises(UsageError):
            check_table(table, int(offsets.max()))


def test_torch_allocates_nothing_that_grows_with_the_change() -> None:
    """Of half a million changes, with a hole in the box so that positions are sorted out: nothing of their size."""
    numel = 1 << 20
    case = plain(2, numel)
    case.table = table_of([(0, 3, [(numel // 4, 4, 4), (3, 1, 1)])])
    case.delta = some_delta(np.random.default_rng(2), whole(0, numel), 2, 0.5, ADD, -1)
    backend, tensor = DeviceBackend("cpu", chunk=numel), tensor_of(case.storage, "cpu")

    def biggest(work: Callable[[], object]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            work()
        return int(max(event.cpu_memory_usage for event in profile.events()))

    assert biggest(lambda: torch.zeros(1000, dtype=torch.int64)) >= 8000, "the profiler does not see allocations"
    assert biggest(lambda: backend.apply(case.delta, case.table, tensor, 0)) < 8000
    assert biggest(lambda: backend.preview(case.delta, case.table, tensor, 0, KEY)) < 8000
    assert biggest(lambda: backend.sums(case.delta, case.table, tensor, 0, KEY)) < 8000
    assert biggest(lambda: backend.digest(case.table, tensor, 0, KEY)) < 8000
    again = some_bits(np.random.default_rng(1), 8, 10)
    assert bits(Upload(80, torch.device("cpu")).send(again)) == again.tobytes()
