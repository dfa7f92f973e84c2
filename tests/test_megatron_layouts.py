"""The closed forms of Megatron layouts give exactly the positions that import code gives, for every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from deltarefit.affine import AffineMap
from deltarefit.errors import UsageError
from deltarefit.sources import megatron_layouts as layouts
from deltarefit.sources.megatron_layouts import Cut, DeltaNet, Heads, Mamba, matrix, slab
from tests import megatron_oracle as oracle
from tests.megatron_checks import Shapes, check_once, positions
from tests.megatron_oracle import Ids

MAX_BOXES = 6


def check(
    shapes: Shapes,
    emit: Callable[[Cut], AffineMap],
    expected: Callable[[dict[str, Ids], int], Sequence[Ids]],
    ranks: int,
) -> None:
    """For all ranks: the same positions as the oracle, in few boxes; over all ranks: everything exactly once."""
    hf, first = oracle.numbered(dict(shapes))
    maps = [emit(Cut(rank, ranks)) for rank in range(ranks)]
    for found, local in zip(maps, expected(hf, ranks), strict=True):
        assert [n for n in found.shape if n != 1] == [n for n in local.shape if n != 1]
        assert np.array_equal(positions(found, first), local.reshape(-1))
        assert len(found.boxes) <= MAX_BOXES
    check_once(shapes, [[found] for found in maps])


TP = [1, 2, 4, 8]


@pytest.mark.parametrize("ranks", TP)
@pytest.mark.parametrize("shape", [(16, 6), (16, 16), (24,)])
def test_column_parallel(ranks: int, shape: tuple[int, ...]) -> None:
    to = matrix("w", shape[1] if len(shape) > 1 else 1)
    check(
        {"w": shape}, lambda cut: layouts.column_parallel(to, shape[0], cut), lambda hf, n: np.split(hf["w"], n), ranks
    )


@pytest.mark.parametrize("ranks", TP)
@pytest.mark.parametrize("shape", [(6, 16), (16, 16)])
def test_row_parallel(ranks: int, shape: tuple[int, ...]) -> None:
    to = matrix("w", shape[1])
    check(
        {"w": shape}, lambda cut: layouts.row_parallel(to, shape[0], cut), lambda hf, n: np.split(hf["w"], n, 1), ranks
    )


def test_replicated() -> None:
    for shape in ((7,), (3, 5)):
        to = matrix("w", shape[1] if len(shape) > 1 else 1)
        check({"w": shape}, lambda cut, s=shape, to=to: layouts.whole(to, s[0]), lambda hf, n: [hf["w"]], 1)


@pytest.mark.parametrize("ranks", TP)
@pytest.mark.parametrize("vocab", [1, 17, 32, 63, 64])
def test_vocabulary_padding_goes_nowhere(ranks: int, vocab: int) -> None:
    emit = lambda cut: layouts.vocabulary(matrix("w", 3), vocab, 64, cut)  # noqa: E731
    check({"w": (vocab, 3)}, emit, lambda hf, n: oracle.chunks(oracle.pad_rows(hf["w"], 64), n), ranks)
    assert layouts.vocabulary(matrix("w", 3), 32, 64, Cut(1, 2)).boxes == ()


@pytest.mark.parametrize("ranks", TP)
@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(8, 8, 4), (8, 2, 4), (8, 1, 4), (16, 2, 2), (24, 8, 8), (8, 4, 3)]
)
def test_qkv(ranks: int, width: int, gate: bool, heads: int, groups: int, dim: int) -> None:
    """Weights and biases, with and without output gate; more ranks than groups cut inside a group, or a head."""
    rows = {"q": heads * dim * (2 if gate else 1), "k": groups * dim, "v": groups * dim}
    shapes = {name: (n, width) if width > 1 else (n,) for name, n in rows.items()}
    spec = Heads(heads, groups, dim, gate)
    if ranks > groups and spec.block % (ranks // groups):
        with pytest.raises(UsageError, match="cannot be cut evenly"):
            layouts.qkv(*(matrix(name, width) for name in "qkv"), spec, Cut(0, ranks))
        return
    fused = lambda hf: oracle.fuse_qkv(hf["q"], hf["k"], hf["v"], heads, groups, dim, gate)  # noqa: E731
    emit = lambda cut: layouts.qkv(*(matrix(name, width) for name in "qkv"), spec, cut)  # noqa: E731
    check(shapes, emit, lambda hf, n: oracle.chunks(fused(hf), n), ranks)


@pytest.mark.parametrize("ranks", TP)
@pytest.mark.parametrize(("width", "interleave"), [(1, 0), (5, 0), (64, 0), (5, 4), (1, 8), (256, 32)])
def test_gated(ranks: int, width: int, interleave: int) -> None:
    rows = 8 * (interleave or 8)
    shape = (rows, width) if width > 1 else (rows,)
    gate, up = matrix("gate", width), matrix("up", width)
    check(
        {"gate": shape, "up": shape},
        lambda cut: layouts.gated(gate, up, rows, cut, interleave),
        lambda hf, n: oracle.gated_ranks(hf["gate"], hf["up"], n, interleave),
        ranks,
    )


EXPERTS, ROWS, WIDTH = 4, 8, 6


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("width", [WIDTH, ROWS, 2 * ROWS])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts(ranks: int, width: int, transposed: bool) -> None:
    """[E, 2·ffn, hidden] and [E, hidden, ffn], or the last two the other way round; also where those are equal."""
    turn = lambda t: np.swapaxes(t, -1, -2) if transposed else t  # noqa: E731
    stacked = {"fc1": (EXPERTS, 2 * ROWS, width), "fc2": (EXPERTS, width, ROWS)}
    shapes = {name: (s[0], s[2], s[1]) if transposed else s for name, s in stacked.items()}
    hf, first = oracle.numbered(shapes)
    for expert in range(EXPERTS):
        fc1 = slab("fc1", expert, 2 * ROWS, width, transposed=transposed)
        gate, up = turn(hf["fc1"])[expert][:ROWS], turn(hf["fc1"])[expert][ROWS:]
        for rank, local in enumerate(oracle.gated_ranks(gate, up, ranks)):
            found = layouts.gated(fc1, fc1.rows(ROWS), ROWS, Cut(rank, ranks))
            assert np.array_equal(positions(found, first), local.reshape(-1))
        fc2 = slab("fc2", expert, width, ROWS, transposed=transposed)
        for rank, local in enumerate(np.split(turn(hf["fc2"])[expert], ranks, 1)):
            found = layouts.row_parallel(fc2, width, Cut(rank, ranks))
            assert np.array_equal(positions(found, first), local.reshape(-1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_alternating_gate_and_up(ranks: int) -> None:
    """[E, hidden, 2·ffn] with gate in even columns and up in odd ones, and its bias [E, 2·ffn] (GPT-OSS)."""
    hf, first = oracle.numbered({"w": (EXPERTS, WIDTH, 2 * ROWS), "b": (EXPERTS, 2 * ROWS)})
    for expert in range(EXPERTS):
        weight, bias = hf["w"][expert].T, hf["b"][expert]
        for name, tensor, width in (("w", weight, WIDTH), ("b", bias, 1)):
            to = slab(name, expert, 2 * ROWS, width, transposed=width > 1)
            for rank, local in enumerate(oracle.gated_ranks(tensor[::2], tensor[1::2], ranks)):
                found = layouts.gated(to.rows(0, 2), to.rows(1, 2), ROWS, Cut(rank, ranks))
                assert np.array_equal(positions(found, first), local.reshape(-1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("width", [WIDTH, ROWS])
def test_experts_in_one_tensor(ranks: int, width: int) -> None:
    names = [f"{side}{expert}" for side in ("gate", "up", "down") for expert in range(3)]
    hf, first = oracle.numbered({n: (width, ROWS) if n[0] == "d" else (ROWS, width) for n in names})
    by_side = [[hf[f"{side}{expert}"] for expert in range(3)] for side in ("gate", "up", "down")]
    pairs = [(matrix(f"gate{e}", width), matrix(f"up{e}", width)) for e in range(3)]
    downs = [matrix(f"down{e}", ROWS) for e in range(3)]
    for rank, (first_layers, second_layers) in enumerate(oracle.old_grouped(*by_side, ranks)):
        cut = Cut(rank, ranks)
        assert np.array_equal(positions(layouts.experts_in(pairs, ROWS, cut), first), first_layers.reshape(-1))
        assert np.array_equal(positions(layouts.experts_out(downs, width, cut), first), second_layers.reshape(-1))


@pytest.mark.parametrize("ranks", TP)
@pytest.mark.parametrize("width", [1, 5])
def test_mamba(ranks: int, width: int) -> None:
    net = Mamba(heads=16, dim=2, groups=8, state=3)
    sizes = [net.inner, net.inner, net.shared, net.shared, net.heads]
    shape = lambda rows: (rows, width) if width > 1 else (rows,)  # noqa: E731
    split = lambda parts: lambda hf, n: oracle.parts_ranks(np.split(hf["w"], np.cumsum(parts)[:-1]), n)  # noqa: E731
    to = matrix("w", width)
    check({"w": shape(sum(sizes))}, lambda cut: layouts.mamba_in_proj(to, net, cut), split(sizes), ranks)
    check({"w": shape(sum(sizes[1:4]))}, lambda cut: layouts.mamba_conv(to, net, cut), split(sizes[1:4]), ranks)


NETS = [DeltaNet(8, 16, 4, 3), DeltaNet(8, 8, 3, 5)]


@pytest.mark.parametrize("ranks", TP)
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("net", NETS)
def test_gated_delta_net(ranks: int, width: int, net: DeltaNet) -> None:
    shape = lambda rows: (rows, width) if width > 1 else (rows,)  # noqa: E731
    numbers = (net.key_heads, net.value_heads, net.key_dim, net.value_dim)
    check(
        {"qkvz": shape(2 * net.keys + 2 * net.values), "ba": shape(2 * net.value_heads)},
        lambda cut: layouts.delta_net_grouped(matrix("qkvz", width), matrix("ba", width), net, cut),
        lambda hf, n: oracle.parts_ranks(oracle.grouped_delta_net(hf["qkvz"], hf["ba"], *numbers), n),
        ranks,
    )
    qkv = lambda hf: np.split(hf["qkv"], [net.keys, 2 * net.keys])  # noqa: E731
    rows = {"qkv": 2 * net.keys + net.values, "z": net.values, "b": net.value_heads, "a": net.value_heads}
    check(
        {name: shape(n) for name, n in rows.items()},
        lambda cut: layouts.delta_net_separate(*(matrix(name, width) for name in rows), net, cut),
        lambda hf, n: oracle.parts_ranks([*qkv(hf), hf["z"], hf["b"], hf["a"]], n),
        ranks,
    )
    conv = lambda cut: layouts.delta_net_conv(matrix("qkv", width), net, cut)  # noqa: E731
    check({"qkv": shape(rows["qkv"])}, conv, lambda hf, n: oracle.parts_ranks(qkv(hf), n), ranks)


@pytest.mark.parametrize("ranks", TP)
def test_rotary_pairs(ranks: int) -> None:
    emit = lambda cut: layouts.rotary_pairs(matrix("w", 5), 8, 6, cut)  # noqa: E731
    check({"w": (48, 5)}, emit, lambda hf, n: np.split(oracle.pairs_from_halves(hf["w"], 8, 6), n), ranks)


@pytest.mark.parametrize("ranks", TP)
def test_halves_swapped(ranks: int) -> None:
    emit = lambda cut: layouts.halves_swapped(matrix("w", 12), 8, cut)  # noqa: E731
    swapped = lambda t: np.concatenate([t[:, 6:], t[:, :6]], 1)  # noqa: E731
    check({"w": (8, 12)}, emit, lambda hf, n: np.split(swapped(hf["w"]), n), ranks)


@pytest.mark.parametrize("ranks", TP)
@pytest.mark.parametrize("heads", [8, 2, 1])
def test_norm_over_all_heads(ranks: int, heads: int) -> None:
    """Split by heads; ranks beyond the heads have the same one as their neighbour, and know which copy they are."""
    hf, first = oracle.numbered({"w": (heads * 3,)})
    owners = []
    for rank in range(ranks):
        found, copies = layouts.head_norm(matrix("w"), heads, 3, Cut(rank, ranks))
        expected = np.split(hf["w"], min(heads, ranks))[rank * min(heads, ranks) // ranks]
        assert np.array_equal(positions(found, first), expected)
        assert copies.size == max(1, ranks // heads)
        owners += [found] if copies.rank == 0 else []
    check_once({"w": (heads * 3,)}, [[owner] for owner in owners])


@pytest.mark.parametrize(
    "emit",
    [
        lambda: layouts.column_parallel(matrix("w", 2), 6, Cut(0, 4)),
        lambda: layouts.row_parallel(matrix("w", 6), 2, Cut(0, 4)),
        lambda: layouts.vocabulary(matrix("w", 6), 5, 6, Cut(0, 4)),
        lambda: layouts.qkv(matrix("q"), matrix("k"), matrix("v"), Heads(6, 3, 4), Cut(0, 2)),
        lambda: layouts.qkv(matrix("q"), matrix("k"), matrix("v"), Heads(6, 3, 4), Cut(0, 4)),
        lambda: layouts.gated(matrix("g"), matrix("u"), 64, Cut(0, 4), 32),
        lambda: layouts.head_norm(matrix("w"), 3, 4, Cut(0, 4)),
        lambda: layouts.mamba_in_proj(matrix("w"), Mamba(8, 2, 1, 4), Cut(0, 2)),
    ],
)
def test_what_megatron_cannot_split_is_refused(emit: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="cannot be cut evenly"):
        emit()


def test_the_oracle_can_tell() -> None:
    """A wrong head size gives other positions: the comparison is not empty."""
    shapes = {"q": (32, 5), "k": (8, 5), "v": (8, 5)}
    right, wrong = Heads(8, 2, 4), replace(Heads(8, 2, 4), heads=4, groups=1, dim=8)
    expected = lambda hf, n: oracle.chunks(oracle.fuse_qkv(hf["q"], hf["k"], hf["v"], 8, 2, 4), n)  # noqa: E731
    emit = lambda spec: lambda cut: layouts.qkv(*(matrix(name, 5) for name in "qkv"), spec, cut)  # noqa: E731
    check(shapes, emit(right), expected, 2)
    with pytest.raises(AssertionError):
        check(shapes, emit(wrong), expected, 1)
