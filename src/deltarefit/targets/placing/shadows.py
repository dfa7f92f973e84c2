"""Canonical bits of tensors that the engine does not store as such, kept in host memory beside it.

Opaque tensors go whole through the native loader, which needs all their bits; tensors that the loader takes and stores
nowhere still count in the digest. What the loader makes of opaque tensors is watched: the same bits must give the live
ones, and nothing else may write there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltarefit.elements import Elements
from deltarefit.errors import IntegrityError
from deltarefit.manifest import TORCH_NAMES, Catalog
from deltarefit.targets.placing.plan import Plan
from deltarefit.targets.placing.recorder import Load
from deltarefit.targets.placing.storages import Storage
from deltarefit.tracing import tensors_in, written_arguments

_Region = tuple[int, int, tuple[int, ...], tuple[int, ...], int]
"""A view of a storage: its number, bytes of an element, sizes, strides, offset."""


class Shadows:
    """Shadow bits of one rank, and the native loader for those of them that are opaque.

    What the loader writes when it is given opaque tensors must be all that it wrote because of them while it was
    recorded: one that waits for further tensors would leave older bits live.
    """

    def __init__(self, catalog: Catalog, plan: Plan, load: Load) -> None:
        self._catalog, self._load, self._plan = catalog, load, plan
        self._storages = plan.storages
        self._groups: list[frozenset[int]] = []
        self._bits: dict[int, Elements] = {}
        self._stale: set[int] = set()
        self._regions: dict[_Region, str] = {}

    def keep(self, tensors: Iterable[int], groups: Sequence[frozenset[int]]) -> bool:
        """Make room for these tensors, and let go of all others; whether any of them is new, and full of zeros.
        ``groups``: opaque ones that the loader needs together."""
        wanted = set(tensors)
        new = not wanted <= self._bits.keys()
        self._bits = {k: self._bits[k] if k in self._bits else _zeros(self._catalog, k) for k in sorted(wanted)}
        self._groups = list(groups)
        return new

    def bits(self, tensor: int) -> Elements:
        """All elements of one of them, shape (numel,), writable."""
        return self._bits[tensor]

    def touched(self, tensor: int) -> None:
        """Its bits changed: if it is opaque, the loader has to take it again."""
        self._stale.update(k for group in self._groups if tensor in group for k in group)

    def inherit(self, other: Shadows) -> None:
        """Take over the bits that another one has of the same catalog."""
        self._bits = other._bits

    def renew(self) -> bool:
        """After ``inherit``: whether the loader has to take something again, as it did not make what is live."""
        if not self._regions:
            for tensor in self.prove():
                self.touched(tensor)
        return bool(self._stale)

    def load(self) -> None:
        """Have the native loader take what was touched, and remember what it made. ``IntegrityError`` if it does not
        write all that these tensors lead to."""
        for group in [group for group in self._groups if group & self._stale]:
            with _Watch(self._storages) as watch:
                self._feed(group)
            if not self._is_complete(group, watch):
                raise IntegrityError(
                    "the native loader does not take tensors again",
                    found=", ".join(self._catalog.tensors[k].name for k in sorted(group)[:4]),
                    next_step="Restart the engine, and report the model.",
                )
            self._regions |= {region: self._hash(region) for region in watch.regions}
            self._stale -= group

    def prove(self) -> dict[int, str]:
        """Opaque tensors whose shadow bits do not give what is live, and why. The live weights are as before."""
        wrong: dict[int, str] = {}
        for group in self._groups:
            watch = _Watch(self._storages, undo=True)
            try:
                with watch:
                    self._feed(group)
                made = {region: self._hash(region) for region in watch.regions}
            except Exception as error:  # noqa: BLE001 - whatever a loader raises, these tensors cannot be refitted
                wrong |= dict.fromkeys(group, f"the loader raises {type(error).__name__}: {str(error)[:200]}")
                continue
            finally:
                watch.take_back()
            if not self._is_complete(group, watch):
                wrong |= dict.fromkeys(group, "given alone, the loader does not write all that it leads to")
            elif any(self._hash(region) != found for region, found in made.items()):
                wrong |= dict.fromkeys(group, "the loader makes other bits than are live")
            else:
                self._regions |= made
        return wrong

    def _is_complete(self, group: frozenset[int], watch: _Watch) -> bool:
        """Whether all was written that the recorded loader wrote because of these tensors."""
        wanted = [(storage, box) for why, storage, box in self._plan.made if why & group]
        if not wanted:
            return bool(watch.regions)
        for number in {storage for storage, _ in wanted}:
            marks = torch.zeros(self._storages[number].tensor.untyped_storage().nbytes(), dtype=torch.bool)
            for _, width, sizes, strides, offset in (region for region in watch.regions if region[0] == number):
                _bytes(marks, width, sizes, strides, offset).fill_(True)
            width = self._storages[number].width
            boxes = (box for storage, box in wanted if storage == number)
            if not all(bool(_bytes(marks, width, b.sizes, b.strides, b.canonical).all()) for b in boxes):
                return False
        return True

    def check(self) -> None:
        """Raises ``IntegrityError`` if what the loader made of opaque tensors was written to by someone else."""
        for region, expected in self._regions.items():
            if self._hash(region) != expected:
                name = self._storages[region[0]].names[0]
                step = "A receiver fills it again from an anchor."
                raise IntegrityError(f"{name} changed, and not by a refit", next_step=step)

    def _feed(self, tensors: Iterable[int]) -> None:
        with torch.no_grad():
            self._load(
                (name, self._tensor(k)) for name, k in sorted((n, k) for k in tensors for n in self._plan.names[k])
            )

    def _tensor(self, number: int) -> torch.Tensor:
        """A copy: loaders may write to what they are given."""
        entry = self._catalog.tensors[number]
        tensor = torch.empty(entry.shape, dtype=getattr(torch, TORCH_NAMES[entry.dtype]))
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = self._bits[number].view(np.uint8)
        return tensor

    def _hash(self, region: _Region) -> str:
        view = _view(self._storages, region)
        return hashlib.sha256(view.contiguous().cpu().numpy().tobytes()).hexdigest()


def _view(storages: Sequence[Storage], region: _Region) -> torch.Tensor:
    number, width, sizes, strides, offset = region
    return storages[number].integers(width).as_strided(sizes, strides, offset)


def _bytes(
    marks: torch.Tensor, width: int, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """The bytes of elements in a storage, as a view of ``marks``, one for each byte. Strides are not negative."""
    return marks.as_strided((*sizes, width), (*(stride * width for stride in strides), 1), offset * width)


def _zeros(catalog: Catalog, tensor: int) -> Elements:
    entry = catalog.tensors[tensor]
    return np.zeros(entry.numel, f"<u{entry.width}")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets everything happen, and notes where live storages were written; with ``undo``, what was there before."""

    def __init__(self, storages: Sequence[Storage], *, undo: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = {storage.pointer: number for number, storage in enumerate(storages)}
        self._storages, self._undo = storages, undo
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.regions: dict[_Region, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            for tensor in self._written(func, args, kwargs or {}):
                self._note(tensor)
        return func(*args, **(kwargs or {}))

    def _written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        for tensor in tensors_in(written_arguments(func._schema, args, kwargs)):
            if not tensor.is_meta and tensor.numel() and tensor.untyped_storage().data_ptr() in self._live:
                yield tensor

    def _note(self, tensor: torch.Tensor) -> None:
        number = self._live[tensor.untyped_storage().data_ptr()]
        strides, offset = tuple(tensor.stride()), int(tensor.storage_offset())
        region = (number, tensor.element_size(), tuple(tensor.shape), strides, offset)
        self.regions[region] = None
        if self._undo:
            view = _view(self._storages, region)
            self._before.append((view, view.clone()))

    def take_back(self) -> None:
        """Undo all writes, the last one first."""
        with torch.inference_mode():  # the views may have been made in it
            for view, before in reversed(self._before):
                view.copy_(before)
