"""Who holds what among the ranks of one engine: every canonical element counts once, every copy is checked.

Pure: ``RankGroup`` is made from what ``RankWeights.attach`` said on each rank, and decides what ``assign`` tells them.

A *part* is one canonical box in one storage of a rank; a second part with the same box on the same rank is its copy 1,
and so on. Parts that the same (rank, copy) pairs hold are summed together, as one *class*; the first holder counts, the
others must report the same sums. A class has one id per copy, so that a rank never adds two copies up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from deltarefit.affine.boxes import Box, NotAffineError, Span, ordered, rows_of
from deltarefit.affine.coverage import check_coverage
from deltarefit.errors import BaseMismatch, DigestMismatch, IntegrityError, UsageError
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece, whole
from deltarefit.records import Digest

XOR, SHIFTED, OPAQUE, SKIPPED, REFUSED = "xor", "xor-shifted", "opaque", "skipped", "refused"
MODES = (XOR, SHIFTED, OPAQUE, SKIPPED, REFUSED)
NO_CLASS = -1
"""Of a part whose tensor goes through the native loader as a whole."""
_NOT_TAKEN = "the loader does not take it"
SHOWN = 8
"""Most tensors that a message names."""

Holders = tuple[tuple[int, int], ...]
"""(rank, copy) pairs, ascending."""
Plan = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """How one canonical tensor reaches the ranks. ``ranks`` hold it, or keep its bits in host memory."""

    tensor: str
    mode: str
    reason: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Class:
    """What the same holders have; ``ids`` by copy."""

    holders: Holders
    shadow: bool
    tensors: dict[int, None] = field(default_factory=dict)  # in order, each once
    ids: dict[int, int] = field(default_factory=dict)


class RankGroup:
    """The ranks of one engine, by their plans: ``{"parts": [[tensor, [[size, stride], ...], canonical offset], ...],
    "modes": {tensor: [mode, reason], ...}}`` with tensors by catalog index.

    Raises ``UsageError`` that lists every tensor that a rank refuses, with its reason, and ``BaseMismatch`` for plans
    that do not belong to ``catalog``.
    """

    def __init__(self, catalog: Catalog, plans: Sequence[Plan]) -> None:
        self.catalog = catalog
        self.size = len(plans)
        self._modes = [_modes_of(catalog, plan, rank) for rank, plan in enumerate(plans)]
        self._parts = [_parts_of(catalog, plan, rank) for rank, plan in enumerate(plans)]
        self._boxes = self._found_boxes()
        self._proofs: dict[tuple[int, frozenset[Box]], str] = {}
        self._refuse()
        self._rows = [self._decided(tensor) for tensor in range(len(catalog.tensors))]
        self._classes: dict[tuple[bool, Holders], _Class] = {}
        self._part_ids = self._classified()
        self._shadow_ids = self._shadowed()
        self._by_id = {id_: (one, copy) for one in self._classes.values() for copy, id_ in one.ids.items()}
        self._prove()

    @property
    def report(self) -> list[Row]:
        """One row per canonical tensor, in catalog order."""
        return list(self._rows)

    def assignment(self, rank: int) -> dict[str, Any]:
        """What ``RankWeights.assign`` of one rank gets: ``classes`` (an id per part; ``NO_CLASS``: not summed),
        ``shadows`` (tensors whose bits it keeps in host memory) with ``shadow_classes``, and ``opaque`` (those of them
        that go through the native loader)."""
        shadows = sorted(self._shadow_ids[rank])
        return {
            "classes": list(self._part_ids[rank]),
            "shadows": shadows,
            "shadow_classes": [self._shadow_ids[rank][tensor] for tensor in shadows],
            "opaque": [tensor for tensor in shadows if self._rows[tensor].mode == OPAQUE],
        }

    def total(self, sums: Sequence[Mapping[int, Digest]], *, alike: bool = True) -> Digest:
        """Every element once, from the sums by class id that each rank reports; a class that a rank leaves out is zero
        there. ``DigestMismatch`` names ranks and tensors whose copies do not agree, unless they need not be ``alike``:
        the first counts then."""
        self._check_ids(sums)
        total = Digest()
        for one in self._classes.values():
            found = [sums[rank].get(one.ids[copy], Digest()) for rank, copy in one.holders]
            for holder, other in zip(one.holders, found, strict=True):
                if alike and other != found[0]:
                    raise self._disagree(one, holder, found[0], other)
            total += found[0]
        return total

    # ------------------------------------------------------------------------------------ tensors

    def _found_boxes(self) -> list[dict[Box, list[tuple[int, int]]]]:
        """Per tensor its boxes, in one form each, with their holders."""
        boxes: list[dict[Box, list[tuple[int, int]]]] = [{} for _ in self.catalog.tensors]
        for rank, parts in enumerate(self._parts):
            for tensor, box in parts:
                holders = boxes[tensor].setdefault(box, [])
                holders.append((rank, sum(holder == rank for holder, _ in holders)))
        return boxes

    def _refuse(self) -> None:
        refused: dict[str, str] = {}
        for modes in self._modes:
            for tensor, (mode, reason) in modes.items():
                if mode == REFUSED:
                    refused.setdefault(self.catalog.tensors[tensor].name, reason)
        if refused:
            raise _refusal(refused, len(self.catalog.tensors))

    def _decided(self, tensor: int) -> Row:
        entry = self.catalog.tensors[tensor]
        said = [modes.get(tensor, (SKIPPED, "")) for modes in self._modes]
        modes, every = {mode for mode, _ in said}, tuple(range(self.size))
        if OPAQUE in modes:
            reason = next(reason for mode, reason in said if mode == OPAQUE)
            return Row(entry.name, OPAQUE, reason, every)
        if modes == {SKIPPED}:
            return Row(entry.name, SKIPPED, next((reason for _, reason in said if reason), ""), (0,))
        if fault := self._fault(tensor):
            return Row(entry.name, OPAQUE, fault, every)
        ranks = {rank for holders in self._boxes[tensor].values() for rank, _ in holders}
        return Row(entry.name, SHIFTED if SHIFTED in modes else XOR, "", tuple(sorted(ranks)))

    def _fault(self, tensor: int) -> str:
        """Why a tensor's boxes are not each of its elements once; "" if they are."""
        entry, boxes = self.catalog.tensors[tensor], frozenset(self._boxes[tensor])
        key = entry.numel, boxes
        if key not in self._proofs:
            try:
                check_coverage(Catalog((entry,)), [[piece for box in boxes for piece in _pieces(0, box)]])
                self._proofs[key] = ""
            except NotAffineError as error:
                self._proofs[key] = error.what
            except UsageError as error:
                self._proofs[key] = "the ranks' parts overlap without being equal, or leave a hole: " + error.what
        return self._proofs[key]

    # ------------------------------------------------------------------------------------ classes

    def _classified(self) -> list[list[int]]:
        """A class id for each part of each rank."""
        ids = []
        for parts in self._parts:
            seen: dict[tuple[int, Box], int] = {}
            mine = []
            for part in parts:
                copy = seen[part] = seen.get(part, -1) + 1
                mine.append(self._id_of_part(*part, copy))
            ids.append(mine)
        return ids

    def _id_of_part(self, tensor: int, box: Box, copy: int) -> int:
        if self._rows[tensor].mode not in (XOR, SHIFTED):
            return NO_CLASS
        return self._id(False, tuple(self._boxes[tensor][box]), tensor, copy)

    def _shadowed(self) -> list[dict[int, int]]:
        """By rank and tensor the class ids of what ranks keep in host memory."""
        ids: list[dict[int, int]] = [{} for _ in range(self.size)]
        for tensor, row in enumerate(self._rows):
            if row.mode in (OPAQUE, SKIPPED):
                for rank in row.ranks:
                    ids[rank][tensor] = self._id(True, tuple((rank, 0) for rank in row.ranks), tensor, 0)
        return ids

    def _id(self, shadow: bool, holders: Holders, tensor: int, copy: int) -> int:
        one = self._classes.setdefault((shadow, holders), _Class(holders, shadow))
        one.tensors.setdefault(tensor)
        if copy not in one.ids:
            one.ids[copy] = sum(len(other.ids) for other in self._classes.values())
        return one.ids[copy]

    def _prove(self) -> None:
        """First holders and shadows cover every element of the catalog exactly once."""
        owned: list[list[Piece]] = [[] for _ in range(self.size)]
        for tensor, (entry, row) in enumerate(zip(self.catalog.tensors, self._rows, strict=True)):
            if row.mode in (OPAQUE, SKIPPED):
                owned[row.ranks[0]].append(whole(tensor, entry.numel))
            else:
                for box, holders in self._boxes[tensor].items():
                    owned[holders[0][0]] += _pieces(tensor, box)
        check_coverage(self.catalog, owned)

    # ------------------------------------------------------------------------------------ sums

    def _check_ids(self, sums: Sequence[Mapping[int, Digest]]) -> None:
        if len(sums) != self.size:
            raise IntegrityError("sums of the wrong number of ranks", expected=self.size, found=len(sums))
        for rank, mine in enumerate(sums):
            for id_ in mine:
                one, copy = self._by_id.get(id_, (None, 0))
                if one is None or (rank, copy) not in one.holders:
                    raise IntegrityError(f"rank {rank} reports sums of class {id_}, which it does not hold")

    def _disagree(self, one: _Class, holder: tuple[int, int], first: Digest, other: Digest) -> DigestMismatch:
        names = [self.catalog.tensors[tensor].name for tensor in one.tensors]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        of = f"copies of {', '.join(names[:SHOWN])}{more}"
        where = [f"rank {rank}" + (f", copy {copy}" if copy else "") for rank, copy in (one.holders[0], holder)]
        return DigestMismatch(f"{of} do not agree", expected=f"{first} ({where[0]})", found=f"{other} ({where[1]})")


def _refusal(refused: Mapping[str, str], total: int) -> UsageError:
    """Names what is refused. A loader that does not take most of the tensors is that of another model."""
    names = sorted(refused)
    lines = [f"\n  {name}: {refused[name].strip().removesuffix(':') or 'no reason given'}" for name in names[:SHOWN]]
    more = f"\n  and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    what = f"{len(refused)} tensors cannot be kept bit-exact in this engine:{''.join(lines)}{more}\n"
    unknown = sum(reason.startswith(_NOT_TAKEN) for reason in refused.values())
    if 2 * unknown > total:
        what = f"the engine serves another model: its loader does not take {unknown} of {total} tensors.\n{what}"
        return UsageError(what, next_step="Start it from a checkpoint of the model that this run publishes.")
    step = "Start the engine with options that keep these tensors as the checkpoint has them."
    return UsageError(what, next_step=step)


def _modes_of(catalog: Catalog, plan: Plan, rank: int) -> dict[int, tuple[str, str]]:
    modes = {}
    for key, (mode, reason) in plan["modes"].items():
        if mode not in MODES:
            raise BaseMismatch(f"rank {rank}: unknown mode of a tensor", expected=MODES, found=mode)
        modes[_index(catalog, key, rank)] = (str(mode), str(reason or ""))
    return modes


def _parts_of(catalog: Catalog, plan: Plan, rank: int) -> list[tuple[int, Box]]:
    parts = []
    for tensor, dims, offset in plan["parts"]:
        parts.append((_index(catalog, tensor, rank), _box(tuple((n, stride) for n, stride in dims), offset)))
    return parts


@lru_cache(maxsize=1 << 16)  # a model has many tensors, but few shapes
def _box(dims: tuple[tuple[int, int], ...], offset: int) -> Box:
    """Its one form, whatever the order of the digits; the local side says nothing here."""
    sizes, strides = tuple(int(n) for n, _ in dims), tuple(int(stride) for _, stride in dims)
    return ordered(Box(sizes, int(offset), strides, int(offset), strides))


def _index(catalog: Catalog, key: str | int, rank: int) -> int:
    """A tensor by catalog index, which is text where JSON wants it to be, or by name."""
    found = catalog.index.get(key) if isinstance(key, str) else None
    number = int(key) if found is None and str(key).isdecimal() else found
    if number is None or number >= len(catalog.tensors):
        raise BaseMismatch(f"rank {rank} plans a tensor that the catalog does not have", found=key)
    return number


def _pieces(tensor: int, box: Box) -> list[Piece]:
    return [Piece(tensor, *span) for span in _spans(box)]


@lru_cache(maxsize=1 << 16)
def _spans(box: Box) -> tuple[Span, ...]:
    return tuple(span for span, _ in rows_of(box))
