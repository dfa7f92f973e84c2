"""Tensors that are quantized block by block: a block's elements and its scale are one function of the block's bits.

Blocks stay on the rank that holds them whole: no amax is exchanged. A shard edge inside a block is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deltarefit.affine import rows_of, shard
from deltarefit.elements import Elements
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import Piece
from deltarefit.sources.dtypes import DTYPES, carried
from deltarefit.sources.local import Local

BAND = 1 << 20
"""About as many local elements are quantized at a time."""

Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Blocks:
    """A local matrix of this rank that is published as canonical ``weight`` with canonical ``scales``.

    ``local`` gives the matrix now: contiguous, rows x columns, the same shape every time; it is the part at ``starts``
    of a global matrix of ``shape``. ``function`` takes some whole block rows of it and gives (quantized, scales): as
    many quantized rows, possibly with several elements packed into one, and one row of scales per block row.
    ``weight`` and ``scales`` are seen as matrices with as many rows as the global matrix has, or has block rows; stacks
    of matrices count as one matrix if blocks do not reach from one into the next.
    """

    name: str
    local: Callable[[], torch.Tensor]
    weight: str
    scales: str
    shape: tuple[int, int]
    function: Quantize
    starts: tuple[int, int] = (0, 0)
    block: tuple[int, int] = (128, 128)

    @property
    def grid(self) -> tuple[int, int]:
        """How many blocks the global matrix has, in rows and columns."""
        rows, columns = (_blocks(size, block) for size, block in zip(self.shape, self.block, strict=True))
        return rows, columns

    def objections(self, local: Local, catalog: Catalog) -> Iterator[str]:
        """Everything that speaks against it."""
        missing = [name for name in (self.weight, self.scales) if name not in catalog.index]
        yield from (f"{self.name} goes to {name}, which is not in the catalog" for name in missing)
        if len(local.kind.shape) != 2:
            yield f"{self.name} has shape {local.kind.shape}, expected rows and columns"
        elif not missing and not local.objections:
            edges = list(self._edge_objections(local.kind.shape))
            yield from edges or self._output_objections(local, *_entries(self, catalog))

    def _edge_objections(self, local: tuple[int, ...]) -> Iterator[str]:
        for what, start, size, full, block in zip(
            ("row", "column"), self.starts, local, self.shape, self.block, strict=True
        ):
            for edge in (start, start + size):
                if not 0 <= edge <= full or (edge % block and edge != full):
                    expected = f"a multiple of {block}" + (f" or {full}" if full % block else f", at most {full}")
                    yield f"{self.name} is cut inside a block: expected a {what} edge at {expected}, found {edge}"

    def _output_objections(self, local: Local, weight: TensorEntry, scales: TensorEntry) -> Iterator[str]:
        rows, columns = local.kind.shape
        if (blocks := self.grid[0] * self.grid[1]) != scales.numel:
            yield f"{self.name} has {blocks} blocks, {scales.name} {scales.numel} elements"
        if not self.shape[0] or not self.shape[1] or weight.numel % self.shape[0]:
            yield f"{self.name} has {self.shape[0]} rows, {weight.name} {weight.shape}"
        elif self.shape[1] % _width(self, weight) or self.block[1] % self.packed(weight):
            yield f"{self.name} has {self.shape[1]} columns, {weight.name} {_width(self, weight)}"
        elif rows and columns:
            wanted = (min(rows, self.block[0]), columns // self.packed(weight)), (1, _blocks(columns, self.block[1]))
            with torch.no_grad():
                given = self.function(local.now()[: self.block[0]])
            for entry, shape, tensor in zip((weight, scales), wanted, given, strict=True):
                if (tuple(tensor.shape), DTYPES.get(tensor.dtype)) != (shape, entry.dtype):
                    found = f"{tensor.dtype} {tuple(tensor.shape)}"
                    yield f"{self.name} gives {found} for {entry.name}, expected {entry.dtype} {shape}"

    def packed(self, weight: TensorEntry) -> int:
        """Local elements in one element of ``weight``."""
        return self.shape[1] // _width(self, weight)


def _entries(blocks: Blocks, catalog: Catalog) -> tuple[TensorEntry, TensorEntry]:
    weight, scales = (catalog.tensors[catalog.index[name]] for name in (blocks.weight, blocks.scales))
    return weight, scales


def _width(blocks: Blocks, weight: TensorEntry) -> int:
    return weight.numel // blocks.shape[0]


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def block_shelves(blocks: Blocks, local: Local, catalog: Catalog) -> list[BlockShelf]:
    """The pieces of quantized elements and of scales."""
    rows, columns = local.kind.shape
    if not rows * columns:
        return []
    weight, _ = _entries(blocks, catalog)
    packed, (height, width) = blocks.packed(weight), blocks.block
    matrix = blocks.shape[0], _width(blocks, weight)
    bands = _Bands(blocks, local)
    starts, scale_starts = (blocks.starts[0], blocks.starts[1] // packed), _grid_starts(blocks)
    scale_sizes = _blocks(rows, height), _blocks(columns, width)
    return [
        *_shelve(bands, 0, catalog, blocks.weight, matrix, starts, (rows, columns // packed)),
        *_shelve(bands, 1, catalog, blocks.scales, blocks.grid, scale_starts, scale_sizes),
    ]


def _grid_starts(blocks: Blocks) -> tuple[int, int]:
    return blocks.starts[0] // blocks.block[0], blocks.starts[1] // blocks.block[1]


def _shelve(
    bands: _Bands,
    output: int,
    catalog: Catalog,
    name: str,
    matrix: tuple[int, int],
    starts: tuple[int, int],
    sizes: tuple[int, int],
) -> Iterator[BlockShelf]:
    for _, whole in shard(name, matrix, starts, sizes).boxes:
        for span, _ in rows_of(whole):
            yield BlockShelf(Piece(catalog.index[name], *span), bands, output, sizes[1])


class _Bands:
    """Some whole block rows of a local matrix, quantized; each thread keeps the last."""

    def __init__(self, blocks: Blocks, local: Local) -> None:
        _, columns = local.kind.shape
        self._blocks, self._local = blocks, local
        self._many = max(1, BAND // (blocks.block[0] * columns))
        self._kept = threading.local()

    def rows(self, output: int) -> int:
        """Rows of an output in one band: of quantized elements (0) or of scales (1)."""
        return self._many * (1 if output else self._blocks.block[0])

    def outputs(self, band: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantized elements and scales of a band, flat, as carriers on the CPU."""
        held = self._local.tensor
        if getattr(self._kept, "key", None) != (id(held), band):
            with torch.no_grad():
                given = self._blocks.function(held[band * self.rows(0) : (band + 1) * self.rows(0)])
            self._kept.outputs = tuple(carried(tensor.contiguous()).cpu().reshape(-1) for tensor in given)
            self._kept.key, self._kept.held = (id(held), band), held
        outputs: tuple[torch.Tensor, torch.Tensor] = self._kept.outputs
        return outputs


@dataclass(frozen=True)
class BlockShelf:
    """The quantized elements (``output`` 0) or the scales (1) of one local matrix, ``columns`` in a row of it. An
    interval of a matrix is one piece, in the order of its own rows."""

    piece: Piece
    bands: _Bands
    output: int
    columns: int

    def direct(self, start: int, stop: int) -> Elements | None:
        return None

    def fill(self, start: int, stop: int, out: torch.Tensor) -> None:
        size = self.bands.rows(self.output) * self.columns
        for band in range(start // size, -(-stop // size)):
            low, high = max(start, band * size), min(stop, (band + 1) * size)
            quantized = self.bands.outputs(band)[self.output]
            out[low - start : high - start].copy_(quantized[low - band * size : high - band * size])
