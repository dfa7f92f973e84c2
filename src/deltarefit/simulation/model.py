"""Small models, how training changes them, and sources that hold parts of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from random import Random

import numpy as np

from deltarefit.elements import Elements
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import Piece, whole
from deltarefit.ports import Exchange

Model = tuple[Elements, ...]
"""Flat tensors in catalog order, as unsigned integers. Never changed once made."""
Owned = tuple[Piece, ...]
"""What one rank owns, sorted."""
FILES: Mapping[str, bytes] = {"config.json": b"{}"}
CATALOG = Catalog(
    (
        TensorEntry("a.weight", "BF16", (7, 6)),
        TensorEntry("b.bias", "F32", (13,)),
        TensorEntry("c.mask", "U8", (24,)),
        TensorEntry("d.steps", "I64", (5,)),
    )
)
CHANGES = ("nothing", "few", "some", "most", "back", "nudge", "block")
"""What happens between two versions. "back" returns elements to what they were before, "nudge" adds one."""


def new_model(random: Random) -> Model:
    """Random bits."""
    return tuple(np.frombuffer(random.randbytes(e.nbytes), f"<u{e.width}").copy() for e in CATALOG.tensors)


def trained(random: Random, model: Model, before: Model) -> Model:
    """The next model: one kind of change to each tensor of ``model``. ``before`` is an older one."""
    kind = random.choice(CHANGES)
    return tuple(_changed(random, kind, array, old) for array, old in zip(model, before, strict=True))


def _changed(random: Random, kind: str, array: Elements, old: Elements) -> Elements:
    density = {"few": 0.05, "some": 0.3, "most": 0.9, "back": 0.5, "nudge": 0.4, "block": 1.0}.get(kind, 0.0)
    chosen = [at for at in range(array.size) if random.random() < density]
    if kind == "block":
        chosen = chosen[random.randrange(array.size) :]
    new: Elements = array.copy()
    if kind == "back":
        new[chosen] = old[chosen]
    elif kind == "nudge":
        new[chosen] += new.dtype.type(1)
    elif chosen:
        new[chosen] ^= np.array([random.randrange(1, 256) for _ in chosen], new.dtype)
    return new


def shared_out(random: Random, ranks: int) -> tuple[Owned, ...]:
    """Who owns what: whole tensors, halves, or columns."""
    owned: list[list[Piece]] = [[] for _ in range(ranks)]
    for number, entry in enumerate(CATALOG.tensors):
        way = random.randrange(3) if ranks == 2 else 0
        if way == 0:
            owned[random.randrange(ranks)].append(whole(number, entry.numel))
            continue
        width = entry.shape[-1] if way == 1 else entry.numel
        cut, rows = random.randrange(1, width), entry.numel // width
        owned[0].append(Piece(number, 0, cut * rows, cut, 1, width))
        owned[1].append(Piece(number, cut, (width - cut) * rows, width - cut, 1, width))
    return tuple(tuple(sorted(pieces)) for pieces in owned)


def part_of(model: Model, piece: Piece) -> Elements:
    """The elements of one piece, in its order."""
    part: Elements = model[piece.tensor][[piece.position(p) for p in range(piece.length)]]
    return part


class SimSource:
    """``ports.Source`` of one rank. ``model`` is what is published next."""

    def __init__(self, model: Model, pieces: Owned, exchange: Exchange) -> None:
        self.model = model
        self._pieces, self._exchange = pieces, exchange

    @property
    def catalog(self) -> Catalog:
        return CATALOG

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    @property
    def pieces(self) -> Sequence[Piece]:
        return self._pieces

    def files(self) -> Mapping[str, bytes]:
        return FILES

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def read(self, piece: int, start: int, stop: int) -> Iterator[Elements]:
        yield part_of(self.model, self._pieces[piece])[start:stop]
