"""Where one rank's local tensor of a Megatron-Core model lies in canonical tensors: one closed form per layout.

Every function gives the ``AffineMap`` of one local tensor. Rows are output features, as in ``torch.nn.Linear``; a
bias is a matrix of width 1. ``Cut(r, n)`` is tensor-parallel rank ``r`` of ``n``. Layout rules are those that the
forward passes of Megatron-Core 0.16 show (``core/transformer``, ``core/ssm``): fused tensors are put together per
query group or per rank, so a rank's part of one is several strided boxes and never a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deltarefit.affine import AffineMap, restrict
from deltarefit.affine.boxes import Box, box_of, ordered
from deltarefit.errors import UsageError

Digit = tuple[int, int, int]
"""(how many, local rows from one to the next, canonical rows from one to the next)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Part ``rank`` of ``size`` equal parts."""

    rank: int = 0
    size: int = 1

    def part(self, count: int, what: str) -> int:
        """How many of ``count`` each part has. ``UsageError`` if they cannot be shared evenly."""
        if count % self.size:
            raise UsageError(f"{what} cannot be cut evenly", expected=f"a multiple of {self.size}", found=count)
        return count // self.size


@dataclass(frozen=True, slots=True)
class Matrix:
    """A logical matrix inside canonical tensor ``name``: element (r, c), c < ``width``, has canonical position
    ``offset + r * row + c * column``."""

    name: str
    width: int
    offset: int
    row: int
    column: int = 1

    def rows(self, start: int, step: int = 1) -> Matrix:
        """Its rows from ``start`` on, every ``step``-th."""
        return replace(self, offset=self.offset + start * self.row, row=step * self.row)

    def columns(self, start: int, width: int) -> Matrix:
        """Its columns [start, start + width)."""
        return replace(self, offset=self.offset + start * self.column, width=width)


def matrix(name: str, width: int = 1) -> Matrix:
    """The whole of a canonical tensor [rows, width], or [rows] where ``width`` is 1."""
    return Matrix(name, width, 0, width)


def slab(name: str, index: int, rows: int, width: int, *, transposed: bool = False) -> Matrix:
    """Matrix ``index`` [rows, width] of a stacked tensor [E, rows, width], or [E, width, rows] if ``transposed``.

    Whether a checkpoint stores experts transposed is a property of the model: shapes cannot tell for square ones.
    """
    row, column = (1, rows) if transposed else (width, 1)
    return Matrix(name, width, index * rows * width, row, column)


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive rows of a fused tensor: ``groups`` groups of ``size`` rows, of which group g is canonical rows
    ``start + g * pitch ...`` of ``to`` (``pitch``: ``size`` if not given)."""

    to: Matrix
    groups: int
    size: int
    start: int = 0
    pitch: int | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of a query-group attention; ``gate``: every query head has a gate head as well."""

    heads: int
    groups: int
    dim: int
    gate: bool = False

    @property
    def block(self) -> int:
        """Rows of one query group: [query heads, gate heads, key, value]."""
        return (self.heads // self.groups * (2 if self.gate else 1) + 2) * self.dim


def whole(to: Matrix, rows: int) -> AffineMap:
    """The same on every rank: norms, routers, biases of row-parallel layers."""
    return _map(to, rows, [_box(to, [(rows, 1, 1)])])


def column_parallel(to: Matrix, rows: int, cut: Cut) -> AffineMap:
    """Output features split evenly."""
    return sections([Section(to, rows, 1)], cut)


def row_parallel(to: Matrix, rows: int, cut: Cut) -> AffineMap:
    """Input features split evenly."""
    width = cut.part(to.width, f"{to.name}: columns")
    return whole(to.columns(cut.rank * width, width), rows)


def vocabulary(to: Matrix, vocab: int, padded: int, cut: Cut) -> AffineMap:
    """Rows of an embedding that was padded to ``padded`` rows before it was split: padding goes nowhere, and a rank
    with nothing else has no box."""
    rows = cut.part(padded, f"{to.name}: padded rows")
    real = min(max(vocab - cut.rank * rows, 0), rows)
    return _map(to, rows, [_box(to, [(real, 1, 1)], canonical=cut.rank * rows)] if real else [])


def sections(parts: Sequence[Section], cut: Cut) -> AffineMap:
    """Parts laid one behind the other, each split by whole groups over the ranks."""
    boxes, local = [], 0
    for part in parts:
        groups = cut.part(part.groups, f"{part.to.name}: groups of {part.size} rows")
        pitch = part.size if part.pitch is None else part.pitch
        first = part.start + cut.rank * groups * pitch
        boxes.append(_box(part.to, [(groups, part.size, pitch), (part.size, 1, 1)], local, first))
        local += groups * part.size
    return _map(parts[0].to, local, boxes)


def gated(gate: Matrix, up: Matrix, rows: int, cut: Cut, interleave: int = 0) -> AffineMap:
    """First layer of a gated MLP: every rank has [its gate rows, its up rows], or, with ``interleave``, the two in
    turns of so many rows. ``rows`` counts one of them, over all ranks."""
    if not interleave:
        return sections([Section(gate, rows, 1), Section(up, rows, 1)], cut)
    mine = cut.part(rows, f"{gate.name}: rows")
    turns = Cut(0, interleave).part(mine, f"{gate.name}: rows of a rank, in turns")
    digits = [(turns, 2 * interleave, interleave), (interleave, 1, 1)]
    boxes = [_box(to, digits, side * interleave, cut.rank * mine) for side, to in enumerate((gate, up))]
    return _map(gate, 2 * mine, boxes)


def qkv(q: Matrix, k: Matrix, v: Matrix, spec: Heads, cut: Cut) -> AffineMap:
    """Fused projection of query groups, [q heads, gate heads, k, v] each, split evenly over the ranks.

    With more ranks than groups a rank has some rows of one group, not aligned to heads (the activations are gathered
    instead). Canonical query rows are [head, gate] by turns where there is a gate.
    """
    if spec.groups % cut.size == 0:
        return _groups(q, k, v, spec, spec.groups // cut.size, cut.rank * spec.groups // cut.size)
    share = Cut(0, spec.groups).part(cut.size, f"{q.name}: ranks over query groups")
    rows = Cut(0, share).part(spec.block, f"{q.name}: rows of a query group")
    group = _groups(q, k, v, spec, 1, cut.rank // share)
    return _row_range(group, cut.rank % share * rows, rows, q.width)


def _groups(q: Matrix, k: Matrix, v: Matrix, spec: Heads, count: int, first: int) -> AffineMap:
    """Query groups [first, first + count), whole."""
    per, dim, sides = spec.heads // spec.groups, spec.dim, 2 if spec.gate else 1
    query = [(count, spec.block, per * sides * dim), (per, dim, sides * dim), (dim, 1, 1)]
    start = first * per * sides * dim
    boxes = [_box(q, query, side * per * dim, start + side * dim) for side in range(sides)]
    for number, to in enumerate((k, v)):
        digits = [(count, spec.block, dim), (dim, 1, 1)]
        boxes.append(_box(to, digits, (sides * per + number) * dim, first * dim))
    return _map(q, count * spec.block, boxes)


def rotary_pairs(to: Matrix, heads: int, dim: int, cut: Cut) -> AffineMap:
    """Heads whose rows are rotated as adjacent pairs, where the canonical ones are rotated as two halves."""
    mine = cut.part(heads, f"{to.name}: heads")
    digits = [(mine, dim, dim), (dim // 2, 2, 1), (2, 1, dim // 2)]
    return _map(to, mine * dim, [_box(to, digits, canonical=cut.rank * mine * dim)])


def halves_swapped(to: Matrix, rows: int, cut: Cut) -> AffineMap:
    """Output features split evenly; the two halves of the input features are in the other order."""
    mine, half = cut.part(rows, f"{to.name}: rows"), to.width // 2
    boxes = [
        _box(to.columns((1 - side) * half, half), [(mine, 1, 1)], 0, cut.rank * mine, (side * half, to.width))
        for side in range(2)
    ]
    return _map(to, mine, boxes)


def head_norm(to: Matrix, heads: int, dim: int, cut: Cut) -> tuple[AffineMap, Cut]:
    """A norm over all heads at once: split by heads, and where ranks outnumber heads several have the same one.

    Also gives which of how many such copies this is.
    """
    copies = Cut(0, heads).part(cut.size, f"{to.name}: ranks over heads") if heads < cut.size else 1
    held = Cut(cut.rank // copies, cut.size // copies)
    return column_parallel(to, heads * dim, held), Cut(cut.rank % copies, copies)


def experts_in(pairs: Sequence[tuple[Matrix, Matrix]], rows: int, cut: Cut) -> AffineMap:
    """First layers of a rank's experts in one tensor, stored as [input, -1] and seen as [experts, input, gate rows then
    up rows]: the (gate, up) matrices of each, ``rows`` being those of one over all ranks."""
    mine, width = cut.part(rows, f"{pairs[0][0].name}: rows"), pairs[0][0].width
    boxes = [
        _box(_turned(to, mine, cut.rank * mine), [(width, 1, 1)], number * width, 0, (side * mine, 2 * mine))
        for number, pair in enumerate(pairs)
        for side, to in enumerate(pair)
    ]
    return AffineMap((width, len(pairs) * 2 * mine), tuple(boxes))


def experts_out(matrices: Sequence[Matrix], rows: int, cut: Cut) -> AffineMap:
    """Second layers of a rank's experts in one tensor, stored as [-1, output] and seen as [experts, input, output]:
    matrices of ``rows`` rows."""
    mine = cut.part(matrices[0].width, f"{matrices[0].name}: columns")
    turned = [_turned(to.columns(cut.rank * mine, mine), rows) for to in matrices]
    boxes = [_box(to, [(mine, 1, 1)], number * mine) for number, to in enumerate(turned)]
    return AffineMap((len(matrices) * mine, rows), tuple(boxes))


def _turned(to: Matrix, rows: int, start: int = 0) -> Matrix:
    """Rows [start, start + rows) of a matrix, transposed."""
    return Matrix(to.name, rows, to.offset + start * to.row, to.column, to.row)


@dataclass(frozen=True, slots=True)
class Mamba:
    """The numbers of a state-space mixer: ``heads`` heads of ``dim`` rows, ``groups`` groups of ``state`` rows."""

    heads: int
    dim: int
    groups: int
    state: int

    @property
    def inner(self) -> int:
        return self.heads * self.dim

    @property
    def shared(self) -> int:
        return self.groups * self.state


def mamba_in_proj(to: Matrix, net: Mamba, cut: Cut) -> AffineMap:
    """[z, x, B, C, dt], each split over the ranks: heads, heads, groups, groups and one row per head."""
    z, rest = Section(to, net.heads, net.dim), _xbc_sections(to, net, net.inner)
    return sections([z, *rest, Section(to, net.heads, 1, 2 * (net.inner + net.shared))], cut)


def mamba_conv(to: Matrix, net: Mamba, cut: Cut) -> AffineMap:
    """[x, B, C] of a causal convolution, each split over the ranks; ``to.width`` is the kernel length."""
    return sections(_xbc_sections(to, net, 0), cut)


def _xbc_sections(to: Matrix, net: Mamba, start: int) -> list[Section]:
    states = [Section(to, net.groups, net.state, start + net.inner + k * net.shared) for k in range(2)]
    return [Section(to, net.heads, net.dim, start), *states]


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The numbers of a gated delta net: key heads and value heads of so many rows."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


def delta_net_grouped(qkvz: Matrix, ba: Matrix, net: DeltaNet, cut: Cut) -> AffineMap:
    """[q, k, v, z, b, a], each split over the ranks, to two tensors that go by key head: [q, k, its v, its z] and
    [its b, its a] (Qwen3-Next)."""
    per = net.value_heads // net.key_heads
    sizes = [net.key_dim, net.key_dim, per * net.value_dim, per * net.value_dim]
    starts = [sum(sizes[:number]) for number in range(4)]
    wide = [Section(qkvz, net.key_heads, size, start, sum(sizes)) for size, start in zip(sizes, starts, strict=True)]
    narrow = [Section(ba, net.key_heads, per, start, 2 * per) for start in (0, per)]
    return sections(wide + narrow, cut)


def delta_net_separate(qkv: Matrix, z: Matrix, b: Matrix, a: Matrix, net: DeltaNet, cut: Cut) -> AffineMap:
    """[q, k, v, z, b, a], each split over the ranks, to four tensors (Qwen3.5)."""
    rest = [Section(z, net.value_heads, net.value_dim), Section(b, net.value_heads, 1), Section(a, net.value_heads, 1)]
    return sections([*_qkv_sections(qkv, net), *rest], cut)


def delta_net_conv(to: Matrix, net: DeltaNet, cut: Cut) -> AffineMap:
    """[q, k, v] of a causal convolution, each split over the ranks; ``to.width`` is the kernel length."""
    return sections(_qkv_sections(to, net), cut)


def _qkv_sections(to: Matrix, net: DeltaNet) -> list[Section]:
    return [
        Section(to, net.key_heads, net.key_dim),
        Section(to, net.key_heads, net.key_dim, net.keys),
        Section(to, net.value_heads, net.value_dim, 2 * net.keys),
    ]


def _map(to: Matrix, rows: int, boxes: Sequence[tuple[str, Box]]) -> AffineMap:
    """The map of a local tensor with ``rows`` rows as wide as ``to``; one of width 1 has one dimension."""
    return AffineMap((rows, to.width) if to.width > 1 else (rows,), tuple(boxes))


def _box(
    to: Matrix, digits: Sequence[Digit], local: int = 0, canonical: int = 0, columns: tuple[int, int] | None = None
) -> tuple[str, Box]:
    """Rows counted by ``digits`` from local row ``local`` and canonical row ``canonical`` on; ``columns``: first
    local column and width of the local tensor, where it has more columns than ``to``."""
    column, width = columns or (0, to.width)
    dims = [(size, here * width, there * to.row) for size, here, there in digits] + [(to.width, 1, to.column)]
    return to.name, ordered(box_of(dims, local * width + column, to.offset + canonical * to.row))


def _row_range(whole: AffineMap, start: int, rows: int, width: int) -> AffineMap:
    """The map of rows [start, start + rows) as a tensor of their own."""
    first = start * width
    kept = restrict(whole, first, first + rows * width)
    boxes = tuple((name, replace(box, local=box.local - first)) for name, box in kept.boxes)
    return AffineMap((rows, *whole.shape[1:]), boxes)
