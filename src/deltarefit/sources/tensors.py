"""A rank's local torch tensors as a source: each part says where its elements go, ``TensorSource`` reads them.

Three kinds of things are published. A *part* is a tensor whose elements keep their bits, or change them one by one
(casts), on their way to canonical positions. *Blocks* change together with a scale that they share. A *residual* needs
code that sees more than this rank's elements. Everything that shards a model ends in these three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from deltarefit.affine import AffineMap, Box, rows_of
from deltarefit.elements import Elements
from deltarefit.errors import UsageError
from deltarefit.exchange import Alone
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import Piece
from deltarefit.ports import Exchange
from deltarefit.sources.arguments import Files, checked_files, listed
from deltarefit.sources.blocks import Blocks, block_shelves
from deltarefit.sources.dtypes import CARRIERS, DTYPES, carried, elements
from deltarefit.sources.gather import Buffers, contiguous, gather
from deltarefit.sources.local import Local, check_unwritten, hold_all, release_all, shared_memory
from deltarefit.sources.residual import Residual, Residuals

STEP_BYTES, DEVICE_STEP_BYTES = 1 << 20, 8 << 20
"""Bytes that are gathered and converted at a time: what stays in a CPU's cache, or is worth a device's launch."""
SAMPLE = 64
"""Elements on which a part's function is tried."""

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A local tensor of this rank, and where those of its elements go that this rank owns.

    ``name`` is the trainer's own, for messages; parts of one name are parts of one tensor. ``local`` gives the tensor
    now (``param.to_local()``), contiguous, and of the same shape and dtype every time. ``function`` is elementwise and
    deterministic, keeps the shape and gives the canonical dtype; None: bits go as they are.
    """

    name: str
    local: Callable[[], torch.Tensor]
    map: AffineMap
    function: Function | None = None


class Shelf(Protocol):
    """Where one piece is read from."""

    @property
    def piece(self) -> Piece:
        """What is read."""

    def direct(self, start: int, stop: int) -> Elements | None:
        """Elements of the piece without a copy, if they lie that way."""

    def fill(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Put them into ``out``, 1-D, on the CPU, of the carrier dtype of their width."""


class TensorSource:
    """``ports.Source`` over parts, blocks and residuals. Thread-safe while held.

    Reading never copies what lies contiguous on the CPU in canonical bits; all else goes through buffers,
    step by step, pinned where tensors are on a device, gathered there first. What is read outside of ``hold`` is
    refused. Raises ``UsageError`` that lists (the first eight of) what cannot be published: tensors that are not
    contiguous, on the meta device, of dtypes that safetensors does not have or in shared memory, maps of another
    shape, functions that are not elementwise or give another dtype than the catalog's.

    ``files`` are the side files of an anchor by name, as bytes, or a function that gives them. Work on a
    device that was queued on other streams than the current one is waited for when a hold begins.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        catalog: Catalog,
        exchange: Exchange | None = None,
        *,
        files: Files = None,
        blocks: Sequence[Blocks] = (),
        residuals: Sequence[Residual] = (),
    ) -> None:
        self._catalog, self._exchange = catalog, exchange or Alone()
        self._files = files if callable(files) else checked_files({} if files is None else files)
        locals_ = [Local(part.name, part.local) for part in parts]
        block_locals = [Local(block.name, block.local) for block in blocks]
        self._residuals = Residuals(residuals, catalog, self._exchange.rank)
        wrong = [why for local in (*locals_, *block_locals) for why in local.objections]
        wrong += shared_memory((*locals_, *block_locals))
        wrong += [why for part, local in zip(parts, locals_, strict=True) for why in _objections(part, local, catalog)]
        wrong += [why for b, local in zip(blocks, block_locals, strict=True) for why in b.objections(local, catalog)]
        _refuse(wrong + self._residuals.objections)
        shelves: list[Shelf] = [
            s for part, local in zip(parts, locals_, strict=True) for s in self._shelve(part, local)
        ]
        for block, local in zip(blocks, block_locals, strict=True):
            shelves += block_shelves(block, local, catalog)
        shelves += self._residuals.shelves()
        self._shelves = sorted(shelves, key=lambda shelf: shelf.piece)
        self._pieces = tuple(shelf.piece for shelf in self._shelves)
        self._locals = (*locals_, *block_locals)
        self._buffers = Buffers(pinned=any(local.kind.device == "cuda" for local in self._locals))
        self._held = False

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    @property
    def pieces(self) -> Sequence[Piece]:
        return self._pieces

    def files(self) -> Mapping[str, bytes]:
        return checked_files(self._files()) if callable(self._files) else self._files

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Every local tensor is fetched and checked (``BaseMismatch``), residuals are converted, in their order on
        every rank. Leaving raises ``IntegrityError`` if a tensor was written to meanwhile (see ``Local`` for what
        cannot be seen)."""
        if self._held:
            raise UsageError("the source is held already", next_step="Publish one version at a time.")
        hold_all(self._locals)
        self._held = True
        try:
            _synchronize(self._locals)
            self._residuals.convert()
            yield
        finally:
            self._held = False
            written = release_all(self._locals) + self._residuals.release()
        check_unwritten(written)

    @contextmanager
    def read(self, piece: int, start: int, stop: int) -> Iterator[Elements]:
        """Elements [start, stop) of a piece; see ``ports.Source``."""
        shelf, entry = self._shelves[piece], self._catalog.tensors[self._pieces[piece].tensor]
        if not 0 <= start <= stop <= self._pieces[piece].length:
            found = f"[{start}, {stop}) of {self._pieces[piece].length}"
            raise UsageError(f"no range of piece {piece} ({entry.name})", found=found)
        if (array := shelf.direct(start, stop)) is not None:
            yield array
            return
        with self._buffers.take(stop - start, CARRIERS[entry.width]) as out:
            shelf.fill(start, stop, out)
            yield elements(out)

    def _shelve(self, part: Part, local: Local) -> Iterator[Shelf]:
        for name, whole in part.map.boxes:
            tensor = self._catalog.index[name]
            for span, box in rows_of(whole):
                yield _BoxShelf(Piece(tensor, *span), local, box, part.function)


@dataclass(frozen=True)
class _BoxShelf:
    """A piece that is one box of a local tensor."""

    piece: Piece
    local: Local
    box: Box
    function: Function | None

    def direct(self, start: int, stop: int) -> Elements | None:
        flat = self.local.flat
        if self.function or flat.device.type != "cpu" or not contiguous(self.box):
            return None
        return elements(flat[self.box.local + start : self.box.local + stop])

    def fill(self, start: int, stop: int, out: torch.Tensor) -> None:
        flat = self.local.flat
        if self.function is None and flat.device.type == "cpu":
            gather(flat, self.box, start, stop, out)
            return
        step_bytes = STEP_BYTES if flat.device.type == "cpu" else DEVICE_STEP_BYTES
        step = step_bytes // max(flat.element_size(), out.element_size())
        for first in range(start, stop, step):
            last = min(first + step, stop)
            out[first - start : last - start].copy_(self._converted(flat, first, last))

    def _converted(self, flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if contiguous(self.box):
            picked = flat[self.box.local + start : self.box.local + stop]
        else:
            picked = torch.empty(stop - start, dtype=flat.dtype, device=flat.device)
            gather(flat, self.box, start, stop, picked)
        if self.function is None:
            return picked
        with torch.no_grad():
            return carried(self.function(picked.view(self.local.kind.dtype)))


def _synchronize(every: Sequence[Local]) -> None:
    for device in {local.tensor.device for local in every if local.kind.device == "cuda"}:
        torch.cuda.synchronize(device)


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise UsageError("tensors that cannot be published", found=listed(wrong))


def _objections(part: Part, local: Local, catalog: Catalog) -> Iterator[str]:
    if tuple(part.map.shape) != local.kind.shape:
        yield f"{part.name} has shape {local.kind.shape}, its map is of {tuple(part.map.shape)}"
        return
    entries = {name: catalog.tensors[catalog.index[name]] for name in part.map.names if name in catalog.index}
    yield from (f"{part.name} goes to {n}, which is not in the catalog" for n in part.map.names if n not in entries)
    beyond = [name for name, entry in entries.items() if _beyond(part.map, name, entry)]
    yield from (f"{part.name} reaches beyond the end of {name} {entries[name].shape}" for name in beyond)
    if not local.objections and not beyond:
        yield from _dtype_objections(part, local, entries)


def _beyond(part: AffineMap, name: str, entry: TensorEntry) -> bool:
    return any(
        not 0 <= position < end
        for box in part.of(name)
        for start, strides, end in (
            (box.canonical, box.strides, entry.numel),
            (box.local, box.local_strides, part.numel),
        )
        for position in _ends(start, strides, box.sizes)
    )


def _ends(start: int, strides: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
    """Lowest and highest position of one side of a box."""
    steps = [stride * (size - 1) for stride, size in zip(strides, sizes, strict=True)]
    return start + sum(min(step, 0) for step in steps), start + sum(max(step, 0) for step in steps)


def _dtype_objections(part: Part, local: Local, entries: Mapping[str, TensorEntry]) -> Iterator[str]:
    sample = local.now().reshape(-1)[:SAMPLE]
    try:
        dtype = DTYPES.get(_tried(part.function, sample).dtype) if part.function else DTYPES[sample.dtype]
    except UsageError as error:
        yield f"{part.name}: {error.what}"
        return
    wrong = {name: entry.dtype for name, entry in entries.items() if entry.dtype != dtype}
    yield from (f"{part.name} gives {dtype}, {name} is {wanted} in the catalog" for name, wanted in wrong.items())


def _tried(function: Function, sample: torch.Tensor) -> torch.Tensor:
    """What a function gives on a sample, whole and in halves: an elementwise one gives the same bits."""
    half = sample.numel() // 2
    with torch.no_grad():
        whole, parts = function(sample), [function(sample[:half]), function(sample[half:])]
    if whole.shape != sample.shape:
        raise UsageError(f"its function changes shape {tuple(sample.shape)} to {tuple(whole.shape)}")
    if whole.dtype in DTYPES and not torch.equal(carried(whole), torch.cat([carried(part) for part in parts])):
        raise UsageError("its function is not elementwise, or not deterministic")
    return whole
