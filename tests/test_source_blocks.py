"""Block-quantized tensors: bit for bit what a naive loop over blocks gives, whole blocks only."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from deltarefit import affine
from deltarefit.errors import UsageError
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.sources import blocks as room
from deltarefit.sources.blocks import Blocks, Quantize
from deltarefit.sources.quantize import fp8_blocks
from deltarefit.sources.tensors import TensorSource
from tests.sources import assert_same, bits_of, flat_bits, put_together, read_pieces
from tests.test_source_tensors import Rank

SHAPE = (300, 200)
BLOCK = (128, 128)


def weights(shape: tuple[int, int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values of very different size per block, one block of zeros."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(shape, generator=generator) * torch.logspace(-6, 6, shape[0])[:, None]
    found[: BLOCK[0], BLOCK[1] :] = 0
    return found.to(dtype)


def naive_fp8(tensor: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = tensor.shape
    quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            largest = tensor[tile].float().abs().max()
            scales[i, j] = largest / 448 if largest else 1.0
            quantized[tile] = (tensor[tile].float() / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantized, scales


def fp4_groups(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A power-of-two scale for 32 neighbours, and two four-bit codes in a byte: the form of MXFP4."""
    groups = tensor.float().reshape(tensor.shape[0], -1, 32)
    scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1).clamp(min=1e-30) / 7)))
    codes = (groups / scales[..., None]).round().to(torch.int8).reshape(tensor.shape)
    packed = (codes[:, ::2] & 15).to(torch.uint8) | ((codes[:, 1::2] & 15).to(torch.uint8) << 4)
    return packed, scales.to(torch.bfloat16)


def catalog(shape: tuple[int, int] = SHAPE, block: tuple[int, int] = BLOCK) -> Catalog:
    grid = tuple(math.ceil(size / edge) for size, edge in zip(shape, block, strict=True))
    return Catalog((TensorEntry("w.weight", "F8_E4M3", shape), TensorEntry("w.weight_scale_inv", "F32", grid)))


def blocks(local: torch.Tensor, starts: tuple[int, int] = (0, 0), function: Quantize = fp8_blocks) -> Blocks:
    return Blocks("w", lambda: local, "w.weight", "w.weight_scale_inv", SHAPE, function, starts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [(128, 128), (1, 32), (64, 200), (300, 7)])
def test_fp8_blocks_are_those_of_a_naive_loop(dtype: torch.dtype, block: tuple[int, int]) -> None:
    given = weights(dtype=dtype)
    found, expected = fp8_blocks(given, block), naive_fp8(given, block)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.array_equal(flat_bits(one), flat_bits(other))


def test_fp8_blocks_by_hand() -> None:
    quantized, scales = fp8_blocks(torch.tensor([[448.0, -224.0], [0.0, 1.0]]), (1, 2))
    assert scales.tolist() == [[1.0], [struct.unpack("<f", struct.pack("<f", 1 / 448))[0]]]
    assert quantized.float().tolist() == [[448.0, -224.0], [0.0, 448.0]]


def test_fp8_blocks_of_values_too_small_for_a_scale_stay_finite() -> None:
    """The scale is zero then, and so is what comes back; there is no NaN."""
    quantized, scales = fp8_blocks(torch.tensor([[1e-45, -1e-45]]), (1, 2))
    assert scales.tolist() == [[0.0]]
    assert quantized.float().tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("step", [None, 1000, 77])
@pytest.mark.parametrize("band", [1, 1 << 20])
@pytest.mark.parametrize(
    "cuts",
    [
        ([0, 300], [0, 200]),
        ([0, 128, 256, 300], [0, 200]),
        ([0, 300], [0, 128, 200]),
        ([0, 128, 128, 300], [0, 128, 200]),
    ],
    ids=["whole", "rows", "columns", "both"],
)
def test_shards_give_the_blocks_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[list[int], list[int]], band: int, step: int | None
) -> None:
    """Two block rows in a band, or all; any range."""
    monkeypatch.setattr(room, "BAND", band)
    full, cat = weights(), catalog()
    shards = [
        blocks(full[top:bottom, left:right].contiguous(), (top, left))
        for top, bottom in zip(cuts[0], cuts[0][1:], strict=False)
        for left, right in zip(cuts[1], cuts[1][1:], strict=False)
    ]
    sources = [TensorSource([], cat, Rank(rank, len(shards)), blocks=[one]) for rank, one in enumerate(shards)]
    affine.check_coverage(cat, [source.pieces for source in sources])
    found = put_together(cat, [pair for source in sources for pair in read_pieces(source, step)])
    quantized, scales = naive_fp8(full, BLOCK)
    assert_same(found, bits_of({"w.weight": quantized, "w.weight_scale_inv": scales}))


def test_packed_groups_of_a_stack_of_matrices() -> None:
    """Two experts of [6, 64] as one matrix of 12 rows, as they lie; four-bit codes, two in a byte."""
    stack = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(2))
    cat = Catalog((TensorEntry("e.blocks", "U8", (2, 6, 2, 16)), TensorEntry("e.scales", "BF16", (2, 6, 2))))
    sources = []
    for rank, (start, stop) in enumerate([(0, 7), (7, 12)]):
        local = stack.reshape(12, 64)[start:stop].clone()
        one = Blocks("e", lambda local=local: local, "e.blocks", "e.scales", (12, 64), fp4_groups, (start, 0), (1, 32))
        sources.append(TensorSource([], cat, Rank(rank, 2), blocks=[one]))
    found = put_together(cat, [pair for source in sources for pair in read_pieces(source, 50)])
    packed, scales = fp4_groups(stack.reshape(12, 64))
    assert_same(found, bits_of({"e.blocks": packed, "e.scales": scales}))


def test_a_new_hold_quantizes_new_bits() -> None:
    local = weights()
    source = TensorSource([], catalog(), blocks=[blocks(local)])
    read_pieces(source)
    local.mul_(-3)
    quantized, scales = naive_fp8(local, BLOCK)
    found = put_together(source.catalog, read_pieces(source))
    assert_same(found, bits_of({"w.weight": quantized, "w.weight_scale_inv": scales}))


def test_a_band_is_quantized_once_for_ranges_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BAND", 1)
    calls: list[int] = []

    def counted(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(tensor.shape[0])
        return fp8_blocks(tensor)

    source = TensorSource([], catalog(), blocks=[blocks(weights(), function=counted)])
    calls.clear()
    with source.hold():
        for start in range(0, 300 * 200, 1000):
            with source.read(0, start, start + 1000):
                pass
    assert calls == [128, 128, 44]


def test_an_empty_shard_owns_nothing() -> None:
    source = TensorSource([], catalog(), blocks=[blocks(torch.empty(0, 200, dtype=torch.bfloat16), (300, 0))])
    assert not source.pieces


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        ((0, 100), (0, 200), "expected a row edge at a multiple of 128 or 300, found 100"),
        ((100, 300), (0, 200), "expected a row edge at a multiple of 128 or 300, found 100"),
        ((0, 129), (0, 200), "expected a row edge at a multiple of 128 or 300, found 129"),
        ((0, 300), (0, 130), "expected a column edge at a multiple of 128 or 200, found 130"),
        ((0, 300), (64, 200), "expected a column edge at a multiple of 128 or 200, found 64"),
    ],
)
def test_shard_edges_inside_a_block_are_refused(rows: tuple[int, int], columns: tuple[int, int], words: str) -> None:
    local = weights()[slice(*rows), slice(*columns)].contiguous()
    with pytest.raises(UsageError, match=f"w is cut inside a block: {words}"):
        TensorSource([], catalog(), blocks=[blocks(local, (rows[0], columns[0]))])


def test_a_shard_beyond_the_end_is_refused() -> None:
    with pytest.raises(UsageError, match="found 384"):
        TensorSource([], catalog(), blocks=[blocks(weights((128, 200)), (256, 0))])


def as_half(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scales = fp8_blocks(tensor)
    return quantized.half(), scales


def whole_scale(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scales = fp8_blocks(tensor)
    return quantized, scales[:1, :1]


def other_catalog(**shapes: tuple[int, ...]) -> Catalog:
    entries = {entry.name: entry for entry in catalog().tensors}
    for name, shape in shapes.items():
        old = entries[f"w.{name}"]
        entries[old.name] = TensorEntry(old.name, old.dtype, shape)
    return Catalog(tuple(entries[name] for name in sorted(entries)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (catalog(), blocks(weights(), function=as_half)), "w gives torch.float16 .* expected F8_E4M3"),
        (lambda: (catalog(), blocks(weights(), function=whole_scale)), r"w gives torch.float32 \(1, 1\) .* \(1, 2\)"),
        (lambda: (Catalog(catalog().tensors[:1]), blocks(weights())), "w goes to w.weight_scale_inv, which is not"),
        (lambda: (catalog(), blocks(weights()[0])), r"w has shape \(200,\), expected rows and columns"),
        (lambda: (other_catalog(weight_scale_inv=(3, 3)), blocks(weights())), "w has 6 blocks, w.weight_scale_inv 9"),
        (lambda: (other_catalog(weight=(299, 200)), blocks(weights())), r"w has 300 rows, w.weight \(299, 200\)"),
        (lambda: (other_catalog(weight=(300, 150)), blocks(weights())), "w has 200 columns, w.weight 150"),
        (lambda: (catalog(), blocks(weights().to("meta"))), "w is on the meta device"),
        (lambda: (catalog(), blocks(weights((200, 300)).t())), "w is not contiguous"),
    ],
    ids=["dtype", "scales", "name", "1-d", "grid", "rows", "columns", "meta", "strides"],
)
def test_blocks_that_do_not_fit_are_refused(make: Callable[[], tuple[Catalog, Blocks]], words: str) -> None:
    cat, one = make()
    with pytest.raises(UsageError, match=words):
        TensorSource([], cat, blocks=[one])
