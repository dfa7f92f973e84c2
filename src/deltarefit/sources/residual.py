"""Residual tensors: what only code that sees more than one rank's elements can bring to canonical form.

Merged adapters, per-tensor scales, synthesized tensors. They are converted once per publish, whole, on one owner, and
travel as new values, not as differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch, UsageError
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece, whole
from deltarefit.sources.arguments import listed
from deltarefit.sources.dtypes import DTYPES, carried, elements


@dataclass(frozen=True)
class Residual:
    """Canonical tensors ``names`` that ``convert`` makes, whole, in the catalog's shapes and dtypes.

    ``convert`` runs on every rank in every hold, residual after residual in the order given, so that it may use
    collectives; what it returns counts on rank ``owner`` only. Other ranks may return anything.
    """

    names: tuple[str, ...]
    convert: Callable[[], Mapping[str, torch.Tensor]]
    owner: int = 0


class Residuals:
    """All residuals of a source, and what they gave for the publish that is under way."""

    def __init__(self, every: Sequence[Residual], catalog: Catalog, rank: int) -> None:
        self._every, self._catalog, self._rank = tuple(every), catalog, rank
        self._converted: dict[str, tuple[torch.Tensor, int]] = {}
        self.objections = list(self._objections())

    def _objections(self) -> Iterator[str]:
        seen: set[str] = set()
        for name in (name for residual in self._every for name in residual.names):
            if name not in self._catalog.index:
                yield f"residual {name} is not in the catalog"
            if name in seen:
                yield f"residual {name} is given twice"
            seen.add(name)

    def shelves(self) -> list[ResidualShelf]:
        """What this rank owns."""
        names = [name for residual in self._every if residual.owner == self._rank for name in residual.names]
        ids = [self._catalog.index[name] for name in names]
        return [
            ResidualShelf(_overwrite(number, self._catalog.tensors[number].numel), self, name)
            for number, name in zip(ids, names, strict=True)
            if self._catalog.tensors[number].numel
        ]

    def convert(self) -> None:
        """Run all; ``BaseMismatch`` names what is not as the catalog has it."""
        wrong: list[str] = []
        for residual in self._every:
            with torch.no_grad():
                found = residual.convert()
            if residual.owner == self._rank:
                wrong += self._wrong(residual, found)
                if not wrong:
                    self._keep(residual, found)
        if wrong:
            raise BaseMismatch(
                "a residual conversion did not give the catalog's tensors",
                found=listed(wrong),
                next_step="Make it return every one of its tensors, whole, in its canonical shape and dtype.",
            )

    def _wrong(self, residual: Residual, found: Mapping[str, torch.Tensor]) -> Iterator[str]:
        for name in sorted({*residual.names, *found}):
            if name not in residual.names:
                yield f"{name} was not announced"
            elif name not in found:
                yield f"{name} is missing"
            else:
                entry, tensor = self._catalog.tensors[self._catalog.index[name]], found[name]
                if (DTYPES.get(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
                    yield f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {entry.dtype} {entry.shape}"

    def _keep(self, residual: Residual, found: Mapping[str, torch.Tensor]) -> None:
        for name in residual.names:
            tensor = found[name].detach().cpu().contiguous()
            self._converted[name] = tensor, tensor._version

    def of(self, name: str) -> torch.Tensor:
        """What was converted in this hold. ``UsageError`` outside of one."""
        if name not in self._converted:
            raise UsageError(f"{name} was read outside of hold()", next_step="Read inside `with source.hold():`.")
        return self._converted[name][0]

    def release(self) -> list[str]:
        """Forget all; names of those that were written to since."""
        written = [name for name, (tensor, version) in self._converted.items() if tensor._version != version]
        self._converted.clear()
        return written


def _overwrite(tensor: int, numel: int) -> Piece:
    piece = whole(tensor, numel)
    return Piece(piece.tensor, piece.offset, piece.length, piece.run, overwrite=True)


@dataclass(frozen=True)
class ResidualShelf:
    """A residual tensor, read where it was converted to."""

    piece: Piece
    residuals: Residuals
    name: str

    def direct(self, start: int, stop: int) -> Elements:
        return elements(carried(self.residuals.of(self.name).reshape(-1))[start:stop])

    def fill(self, start: int, stop: int, out: torch.Tensor) -> None:
        out.copy_(carried(self.residuals.of(self.name).reshape(-1))[start:stop])
