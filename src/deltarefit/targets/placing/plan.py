"""Where each canonical tensor lies in a rank's live storages: the recording of its loader, sorted out.

A plan consists of parts: one canonical box in one storage, element for element. What is no such copy is opaque (the
whole tensor goes through the native loader) or refused; nothing is guessed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from deltarefit.affine import AffineMap, Box, NotAffineError, compose, disjoint, rows_of
from deltarefit.affine.boxes import ascends, box_of, flipped, ordered
from deltarefit.errors import UnavailableError
from deltarefit.manifest import TORCH_NAMES, Catalog
from deltarefit.pieces import Piece
from deltarefit.targets.placing.recorder import Landing, Load, Recording, record
from deltarefit.targets.placing.storages import Seen, Storage, places_of

MAX_DIGITS = 6
"""Most digits of a part's box."""
MAX_COPIES = 256
"""Most places in one storage that one element may go to by one write."""
Table = npt.NDArray[np.int64]
Layout = tuple[Box, ...] | str
"""What became of a storage after loading: boxes from where the loader writes to where the elements lie now (local to
canonical), or why that is not known."""
Layouts = Callable[[Sequence[Storage]], Mapping[int, Layout]]


class Mode(str, enum.Enum):
    """How changes of a canonical tensor reach a rank."""

    XOR = "xor"
    """Element for element, at its own width."""
    SHIFTED = "xor-shifted"
    """BF16 kept as FP32: the same bits, 16 higher."""
    OPAQUE = "opaque"
    """The whole tensor through the native loader."""
    SKIPPED = "skipped"
    """The loader takes it and stores nothing on this rank."""
    REFUSED = "refused"


@dataclass(frozen=True)
class Part:
    """A box of canonical tensor ``tensor`` in a storage: ``box.local`` counts the storage's elements, ``box.canonical``
    the tensor's. ``shift``: bits by which the stored element is the canonical one shifted left."""

    tensor: int
    storage: int
    shift: int
    box: Box


@dataclass(frozen=True)
class Plan:
    """One rank's placement of one catalog. ``modes``: mode and reason of each tensor. ``together``: opaque tensors that
    the loader needs in one call. ``leftover``: names of each of the engine's tensors
    that has no element which the loader writes to."""

    storages: tuple[Storage, ...]
    parts: tuple[Part, ...]
    modes: tuple[tuple[Mode, str], ...]
    together: tuple[frozenset[int], ...]
    leftover: tuple[tuple[str, ...], ...]
    names: tuple[tuple[str, ...], ...]
    """Checkpoint names of each tensor that the loader takes."""
    made: tuple[tuple[frozenset[int], int, Box], ...]
    """(tensors, storage, box): what the loader writes because of these tensors. The box's canonical side counts the
    storage's elements."""
    places: Mapping[str, tuple[object, ...]]

    def holds(self, model: torch.nn.Module) -> bool:
        """Whether every tensor of the model is where it was, unmoved, not rebound and not reshaped."""
        return places_of(model) == self.places

    def check(self, model: torch.nn.Module) -> None:
        """Raises ``UnavailableError`` unless it ``holds``."""
        now = places_of(model)
        if now != self.places:
            moved = sorted(n for n in {*now, *self.places} if now.get(n) != self.places.get(n))
            raise UnavailableError(
                "the engine moved its weights since their placement was recorded",
                found=", ".join(moved[:8]),
                next_step="Attach again: their placement is recorded anew then, and every bit is checked.",
            )


def make_plan(
    model: torch.nn.Module,
    load: Load,
    catalog: Catalog,
    layouts: Layouts = lambda storages: {},
    unfilled: Callable[[str], bool] = lambda name: False,
) -> Plan:
    """Record ``load`` on ``model`` and place every tensor of ``catalog``. Writes nothing."""
    numbers = {name: k for k, entry in enumerate(catalog.tensors) for name in (entry.name, *entry.aliases)}
    kinds = {
        name: (catalog.tensors[numbers[name]].shape, getattr(torch, TORCH_NAMES[catalog.tensors[numbers[name]].dtype]))
        for name in sorted(numbers)
    }
    recording, storages = record(model, load, kinds, unfilled)
    return _Sorting(catalog, numbers, recording, storages, layouts(storages)).plan(places_of(model))


class _Sorting:
    """Turns a recording into a plan."""

    def __init__(
        self,
        catalog: Catalog,
        numbers: Mapping[str, int],
        recording: Recording,
        storages: Sequence[Storage],
        layouts: Mapping[int, Layout],
    ) -> None:
        self._catalog, self._numbers, self._recording = catalog, numbers, recording
        self._storages, self._layouts = storages, layouts
        self._opaque = {numbers[name]: reason for name, reason in recording.opaque.items()}
        self._refused = {numbers[name]: reason for name, reason in recording.refused.items()}
        self._together = [frozenset(numbers[name] for name in names) for names in recording.together]

    def plan(self, places: Mapping[str, tuple[object, ...]]) -> Plan:
        landings = self._settled()
        parts = [part for landing in landings for part in self._parts(landing)]
        out = {*self._opaque, *self._refused}
        parts = [part for part in parts if part.tensor not in out]
        leftover = tuple(self._leftover())
        shifts: dict[int, int] = {}
        for part in parts:
            shifts[part.tensor] = max(part.shift, shifts.get(part.tensor, 0))
        modes = tuple(self._mode(k, shifts.get(k)) for k in range(len(self._catalog.tensors)))
        names: list[list[str]] = [[] for _ in self._catalog.tensors]
        for name in sorted(self._recording.taken):
            names[self._numbers[name]].append(name)
        taken = tuple(map(tuple, names))
        together = tuple(self._together)
        return Plan(tuple(self._storages), tuple(parts), modes, together, leftover, taken, self._made(), places)

    def _made(self) -> tuple[tuple[frozenset[int], int, Box], ...]:
        """Of tensors that go through the loader."""
        caused = ((self._causes(one), one) for one in self._recording.landings if one.name or one.made)
        opaque = self._opaque.keys()
        return tuple((why, one.storage, box) for why, one in caused if why & opaque for box in one.boxes)

    def _leftover(self) -> Iterator[tuple[str, ...]]:
        """A tensor that only shares a storage with filled ones is not filled; one that shares elements is."""
        filled: dict[int, list[Box]] = {}
        for landing in self._recording.landings:
            filled.setdefault(landing.storage, []).extend(landing.boxes)
        for number, storage in enumerate(self._storages):
            if number not in self._layouts or number not in filled:  # else elements have moved since
                yield from (seen.names for seen in _untouched(storage.seen, filled.get(number, [])))

    def _mode(self, tensor: int, shift: int | None) -> tuple[Mode, str]:
        if tensor in self._refused:
            return Mode.REFUSED, self._refused[tensor]
        if tensor in self._opaque:
            return Mode.OPAQUE, self._opaque[tensor]
        if shift is None:
            return Mode.SKIPPED, ""
        return (Mode.SHIFTED if shift else Mode.XOR), ""

    def _settled(self) -> list[Landing]:
        """Named landings, each once, of which nothing was written over later."""
        kept = list(dict.fromkeys(landing for landing in self._recording.landings if landing.name))
        kept = list({(self._numbers[one.name], one.storage, one.boxes, one.casts): one for one in kept}.values())
        order = {id(landing): number for number, landing in enumerate(self._recording.landings)}
        nameless = list(dict.fromkeys(landing for landing in self._recording.landings if not landing.name))
        for one, other in _meeting([*kept, *nameless]):
            self._overlap(*sorted((one, other), key=lambda landing: order[id(landing)]))
        return kept

    def _overlap(self, first: Landing, last: Landing) -> None:
        """The same element is written twice: harmless if the first write was of the second's tensor, and of nothing
        that comes from one. Else one of them, loaded alone, would undo what is live of the other."""
        one, other = self._causes(first), self._causes(last)
        if first.name and last.name and one != other:
            names = [self._catalog.tensors[tensor].name for tensor in sorted(one | other)]
            for tensor in one | other:
                self._refused[tensor] = f"the engine keeps {names[0]} and {names[1]} in one place, as if they were tied"
        if first.name or (one and one != other):
            for tensor in one | other:
                self._opaque.setdefault(tensor, "the loader writes to the same place again")
            self._together.append(one | other)

    def _causes(self, landing: Landing) -> frozenset[int]:
        """The tensors that have the loader write there."""
        return frozenset(self._numbers[name] for name in ([landing.name] if landing.name else landing.by))

    def _parts(self, landing: Landing) -> Iterator[Part]:
        tensor = self._numbers[landing.name]
        shift = self._shift(tensor, landing)
        layout = self._layouts.get(landing.storage, ())
        if isinstance(layout, str):
            self._refused[tensor] = layout
        elif shift is None:
            kept = ", ".join(str(cast) for cast in landing.casts)
            self._opaque.setdefault(tensor, f"kept as {kept or self._storages[landing.storage].tensor.dtype}")
        else:
            try:
                yield from self._placed(tensor, landing, shift, layout)
            except NotAffineError as error:
                self._opaque.setdefault(tensor, str(error.what))

    def _shift(self, tensor: int, landing: Landing) -> int | None:
        """Bits from the canonical to the stored element; None if it is another than the canonical one."""
        entry, width = self._catalog.tensors[tensor], self._storages[landing.storage].width
        if not landing.casts and width == entry.width:
            return 0
        return 16 if landing.casts == (torch.float32,) and entry.dtype == "BF16" and width == 4 else None

    def _placed(self, tensor: int, landing: Landing, shift: int, layout: tuple[Box, ...]) -> Iterator[Part]:
        boxes = landing.boxes
        if layout:
            whole = (self._storages[landing.storage].numel,)
            inner = AffineMap((), tuple(("", box) for box in boxes))
            boxes = compose(inner, {"": AffineMap(whole, tuple(("", box) for box in layout))}).of("")
            if sum(box.numel for box in boxes) != sum(box.numel for box in landing.boxes):
                raise NotAffineError("elements are lost in the layout that the engine keeps")
        for box in boxes:
            for one in _unfolded(flipped(box)):
                yield Part(tensor, landing.storage, shift, one)


def _unfolded(box: Box) -> Iterator[Box]:
    """A box whose canonical positions ascend; one for each copy where an element goes to several places."""
    copies = [dim for dim in box.dims if dim[0] > 1 and dim[2] == 0]
    rest = [dim for dim in box.dims if dim[0] > 1 and dim[2] != 0]
    if math.prod(n for n, _, _ in copies) > MAX_COPIES:
        raise NotAffineError("an element goes to too many places", expected=f"<= {MAX_COPIES}")
    for index in product(*(range(n) for n, _, _ in copies)):
        local = box.local + sum(i * step for i, (_, step, _) in zip(index, copies, strict=True))
        one = ordered(box_of(rest, local, box.canonical))
        if len(one.sizes) > MAX_DIGITS or not ascends(one.sizes, one.strides):
            raise NotAffineError("a box has too many digits, or meets itself", found=one)
        yield one


def _meeting(landings: Sequence[Landing]) -> Iterator[tuple[Landing, Landing]]:
    """Pairs that write to the same element of a storage, of which at least one comes from tensors."""
    spans = [(landing.storage, *_span(box), box, landing) for landing in landings for box in landing.boxes]
    spans.sort(key=lambda span: span[:3])
    near: list[tuple[int, int, int, Box, Landing]] = []
    for span in spans:
        near = [other for other in near if other[0] == span[0] and other[2] > span[1]]
        for other in near:
            one, last = other[4], span[4]
            telling = one.name or last.name or ((one.made or last.made) and one.by != last.by)
            if telling and other[4] is not span[4] and _share(other[3], span[3]):
                yield other[4], span[4]
        near.append(span)


def _untouched(regions: Sequence[Seen], filled: Sequence[Box]) -> Iterator[Seen]:
    """Regions of a storage that have no element in common with boxes that were written to, of the same storage."""
    writes = sorted(((_span(box), box) for box in dict.fromkeys(filled)), key=lambda write: write[0], reverse=True)
    near: list[tuple[tuple[int, int], Box]] = []
    for low, high, seen in sorted(((*_span(seen.box), seen) for seen in regions), key=lambda region: region[:2]):
        while writes and writes[-1][0][0] < high:
            near.append(writes.pop())
        near = [write for write in near if write[0][1] > low]
        dense = seen.box.numel == high - low
        meets = (one for span, one in near if span[0] < high and ((dense and span[0] >= low) or _share(one, seen.box)))
        if next(meets, None) is None:
            yield seen


def _span(box: Box) -> tuple[int, int]:
    reach = [(n - 1) * stride for n, stride in zip(box.sizes, box.strides, strict=True)]
    return box.canonical + sum(r for r in reach if r < 0), box.canonical + sum(r for r in reach if r > 0) + 1


def _share(one: Box, other: Box) -> bool:
    """Whether two boxes have a storage position in common; True where that cannot be told."""
    try:
        pieces = [[Piece(0, *span) for span, _ in rows_of(_storage_side(box))] for box in (one, other)]
    except NotAffineError:
        return True
    return not all(disjoint(a, b) for a in pieces[0] for b in pieces[1])


def _storage_side(box: Box) -> Box:
    return replace(box, local=0, local_strides=(0,) * len(box.sizes))


def table_of(parts: Sequence[Part]) -> Table:
    """The boxes of parts as the kernel takes them, sorted by canonical offset: shape (n, 2 + 3 * digits), int64."""
    digits = max((len(part.box.sizes) for part in parts), default=0)
    rows = []
    for part in sorted(parts, key=lambda part: part.box.canonical):
        row = [part.box.canonical, part.box.local]
        for n, step, stride in part.box.dims:
            row += [n, stride, step]
        rows.append(row + [1, 0, 0] * (digits - len(part.box.sizes)))
    return np.array(rows, np.int64).reshape(len(rows), 2 + 3 * digits)
