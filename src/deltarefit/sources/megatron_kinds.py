"""The kinds of tensors of a Megatron-Core model: what a rule of a name table says about one tensor of one rank.

A kind is a function from a ``Spot`` (one local tensor, its rule, the rank's place) to where that tensor lies, or to
None for a copy that belongs to another tensor. ``megatron_names`` says which tensor is of which kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from deltarefit.affine import AffineMap
from deltarefit.errors import UsageError
from deltarefit.sources import megatron_layouts as layouts
from deltarefit.sources.megatron_layouts import Cut, DeltaNet, Heads, Mamba, Matrix

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a model's configuration says about its fused tensors; 0 or None where it has no such part.

    ``vocab`` counts real rows, without padding; ``interleave``: rows by which the experts' gate and up take turns;
    ``centred``: norm weights are stored minus one; ``kv_lora`` counts latent and rotary rows.
    """

    vocab: int
    layers: int
    attention: Heads
    gated: bool = True
    tied: bool = False
    centred: bool = False
    experts: int = 0
    interleave: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    delta: DeltaNet | None = None
    mamba: Mamba | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of one rank. ``dp``: which of how many copies of the dense tensors (data × context parallel);
    ``edp``: the same for experts; ``etp`` and ``ep``: tensor and expert parallel rank among the experts."""

    numbers: Numbers
    tp: Cut = Cut()
    pp: Cut = Cut()
    dp: Cut = Cut()
    ep: Cut = Cut()
    etp: Cut = Cut()
    edp: Cut = Cut()


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors of one name. In ``memory``, ``{layer}``, ``{mtp}`` and ``{expert}`` stand for numbers, which go to the
    canonical names; there ``{beyond}`` is a multi-token prediction layer counted on from the last layer.

    Canonical names without ``{expert}`` are stacked, [experts, rows, columns]; ``transposed``: with rows last.
    """

    memory: str
    kind: Kind
    canonical: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor lies: its map, the canonical shapes, which of how many copies this is (``expert``: of a tensor of
    an expert), and what to add to its elements to get canonical ones (norms that are stored minus one)."""

    map: AffineMap
    shapes: Mapping[str, Shape]
    copies: Cut
    expert: bool
    add: int = 0


@dataclass(frozen=True, slots=True)
class Spot:
    """One local tensor of ``shape``: its rule, with canonical names filled in, and the rank's place. ``expert`` is
    its global number where it belongs to one, ``cut`` the part of the tensor that a rank has. ``parallel``: the trainer
    marks it as split. Its ``partition_dim`` is not asked: that of grouped second layers is wrong."""

    layout: Layout
    rule: Rule
    names: tuple[str, ...]
    shape: Shape
    parallel: bool = False
    expert: int | None = None
    shapes: dict[str, Shape] = field(default_factory=dict)

    @property
    def cut(self) -> Cut:
        return self.layout.tp if self.expert is None else self.layout.etp

    @property
    def width(self) -> int:
        """Elements of one row; of a bias 1."""
        return math.prod(self.shape[1:])

    def target(self, rows: int, number: int = 0, width: int | None = None) -> Matrix:
        """Canonical matrix ``number`` of the rule: [rows, width], as wide as the local tensor if not given."""
        name, inner = self.names[number], self.shape[1:] if width is None else (width,)
        width = math.prod(inner)
        if self.expert is None or "{expert}" in self.rule.canonical[number]:
            self.shapes[name] = (rows, *inner)
            return layouts.matrix(name, width)
        turned = self.rule.transposed and bool(inner)
        self.shapes[name] = (self.layout.numbers.experts, *((*inner, rows) if turned else (rows, *inner)))
        return layouts.slab(name, self.expert, rows, width, transposed=turned)

    def split(self, placed: AffineMap, copies: Cut | None = None) -> Placed:
        """Every rank of the cut has another part, or, with ``copies``, so many the same."""
        return Placed(placed, self.shapes, _times(self._replicas, copies or Cut()), self.expert is not None)

    def same(self, placed: AffineMap, add: int = 0) -> Placed:
        """Every rank of the cut has the same."""
        if self.parallel and self.cut.size > 1:
            raise UsageError("its rule says that all ranks have the same", found="marked as split over ranks")
        return Placed(placed, self.shapes, _times(self._replicas, self.cut), self.expert is not None, add)

    @property
    def _replicas(self) -> Cut:
        return self.layout.dp if self.expert is None else self.layout.edp


Kind = Callable[[Spot], "Placed | None"]


def _times(outer: Cut, inner: Cut) -> Cut:
    return Cut(outer.rank * inner.size + inner.rank, outer.size * inner.size)


def replicated(spot: Spot) -> Placed:
    """The same on every rank of the cut, as it is: routers, biases of row-parallel layers."""
    rows = spot.shape[0]
    return spot.same(layouts.whole(spot.target(rows), rows))


def norm(spot: Spot) -> Placed:
    """A norm whose canonical weight multiplies as it stands."""
    rows = spot.shape[0]
    return spot.same(layouts.whole(spot.target(rows), rows), int(spot.layout.numbers.centred))


def centred_norm(spot: Spot) -> Placed:
    """A norm whose canonical weight multiplies plus one."""
    rows = spot.shape[0]
    return spot.same(layouts.whole(spot.target(rows), rows), int(spot.layout.numbers.centred) - 1)


def column(spot: Spot) -> Placed:
    """Weight or bias of a column-parallel layer: ranks have consecutive rows."""
    rows = spot.shape[0] * spot.cut.size
    return spot.split(layouts.column_parallel(spot.target(rows), rows, spot.cut))


def row(spot: Spot) -> Placed:
    """Weight of a row-parallel layer; its bias is ``replicated``."""
    rows, width = spot.shape[0], spot.width * spot.cut.size
    return spot.split(layouts.row_parallel(spot.target(rows, width=width), rows, spot.cut))


def down(spot: Spot) -> Placed:
    """Projection to a latent: a layer of its own on every rank, or column-parallel, by the class it is made of."""
    numbers = spot.layout.numbers
    full = numbers.kv_lora if "kv_" in spot.rule.memory else numbers.q_lora
    return replicated(spot) if spot.shape[0] == full else column(spot)


def embedding(spot: Spot) -> Placed | None:
    """Rows by token. Only the first stage's counts: the last may hold a copy, for a tied head or for prediction."""
    if spot.layout.pp.rank:
        return None
    vocab, padded = spot.layout.numbers.vocab, spot.shape[0] * spot.cut.size
    return spot.split(layouts.vocabulary(spot.target(vocab), vocab, padded, spot.cut))


def head(spot: Spot) -> Placed | None:
    """The output layer, unless it is the last stage's copy of a tied embedding."""
    numbers, cut = spot.layout.numbers, spot.cut
    if numbers.tied:
        return None
    return spot.split(layouts.vocabulary(spot.target(numbers.vocab), numbers.vocab, spot.shape[0] * cut.size, cut))


def qkv(spot: Spot) -> Placed:
    """Query, key and value rows of one layer, fused per query group, to three tensors."""
    heads = spot.layout.numbers.attention
    q = spot.target(heads.heads * heads.dim * (2 if heads.gate else 1), 0)
    k, v = (spot.target(heads.groups * heads.dim, number) for number in (1, 2))
    return spot.split(layouts.qkv(q, k, v, heads, spot.cut))


def fc1(spot: Spot) -> Placed:
    """First layer of an MLP to (gate, up), or to one tensor where there is no gate."""
    if not spot.layout.numbers.gated:
        return column(spot)
    rows = _gated_rows(spot)
    return _gated(spot, spot.target(rows, 0), spot.target(rows, 1), rows)


def fc1_joined(spot: Spot) -> Placed:
    """First layer of an MLP to one tensor: all gate rows, then all up rows."""
    rows = _gated_rows(spot)
    to = spot.target(2 * rows)
    return _gated(spot, to.rows(0), to.rows(rows), rows)


def fc1_alternating(spot: Spot) -> Placed:
    """First layer of an MLP to one tensor: gate and up rows by turns (GPT-OSS)."""
    rows = _gated_rows(spot)
    to = spot.target(2 * rows)
    return _gated(spot, to.rows(0, 2), to.rows(1, 2), rows)


def _gated_rows(spot: Spot) -> int:
    return Cut(0, 2).part(spot.shape[0] * spot.cut.size, f"{spot.rule.memory}: rows")


def _gated(spot: Spot, gate: Matrix, up: Matrix, rows: int) -> Placed:
    interleave = spot.layout.numbers.interleave if spot.expert is not None else 0
    return spot.split(layouts.gated(gate, up, rows, spot.cut, interleave))


def experts_in(spot: Spot) -> Placed:
    """First layers of all of a rank's experts in one tensor (the older grouped MLP), to (gate, up) of each."""
    experts, width = _local_experts(spot), spot.shape[0]
    if not spot.layout.numbers.gated or spot.layout.numbers.interleave:
        raise UsageError(f"{spot.rule.memory}: only plain gated experts are known in one tensor")
    mine = Cut(0, 2 * len(experts)).part(spot.shape[1], f"{spot.rule.memory}: columns")
    rows = mine * experts[0].cut.size
    pairs = [(one.target(rows, 0, width), one.target(rows, 1, width)) for one in experts]
    return experts[0].split(layouts.experts_in(pairs, rows, experts[0].cut))


def experts_out(spot: Spot) -> Placed:
    """Second layers of all of a rank's experts in one tensor (the older grouped MLP)."""
    experts, rows = _local_experts(spot), spot.shape[1]
    width = Cut(0, len(experts)).part(spot.shape[0], f"{spot.rule.memory}: rows") * experts[0].cut.size
    return experts[0].split(layouts.experts_out([one.target(rows, 0, width) for one in experts], rows, experts[0].cut))


def _local_experts(spot: Spot) -> list[Spot]:
    """One spot for each of a rank's experts, for a tensor that holds them all."""
    count = spot.layout.ep.part(spot.layout.numbers.experts, "experts")
    first = spot.layout.ep.rank * count
    return [
        replace(spot, names=tuple(name.replace("{expert}", str(number)) for name in spot.names), expert=number)
        for number in range(first, first + count)
    ]


def full_norm(spot: Spot) -> Placed:
    """A norm over all query heads or all key heads at once, split by heads."""
    heads = spot.layout.numbers.attention
    count = heads.groups if ".k_" in spot.rule.memory else heads.heads
    placed, copies = layouts.head_norm(spot.target(count * heads.dim), count, heads.dim, spot.cut)
    return spot.split(placed, copies)


def eh_proj_swapped(spot: Spot) -> Placed:
    """Projection of [embedding, hidden], which the checkpoint has as [hidden, embedding]."""
    rows = spot.shape[0] * spot.cut.size
    return spot.split(layouts.halves_swapped(spot.target(rows), rows, spot.cut))


def rotary_pairs(spot: Spot) -> Placed:
    """Heads rotated as adjacent pairs, which the checkpoint has in two halves."""
    rows, dim = spot.shape[0] * spot.cut.size, spot.layout.numbers.attention.dim
    heads = Cut(0, dim).part(rows, f"{spot.rule.memory}: rows")
    return spot.split(layouts.rotary_pairs(spot.target(rows), heads, dim, spot.cut))


def mamba_in_proj(spot: Spot) -> Placed:
    """First layer of a state-space mixer: z, x, B, C and dt, each split by itself."""
    net = _mamba(spot)
    rows = 2 * (net.inner + net.shared) + net.heads
    return spot.split(layouts.mamba_in_proj(spot.target(rows), net, spot.cut))


def mamba_conv(spot: Spot) -> Placed:
    """Convolution of a state-space mixer, over x, B and C."""
    net = _mamba(spot)
    return spot.split(layouts.mamba_conv(spot.target(net.inner + 2 * net.shared), net, spot.cut))


def delta_net_grouped(spot: Spot) -> Placed:
    """First layer of a gated delta net, to (qkvz, ba), which go by key head (Qwen3-Next)."""
    net = _delta(spot)
    qkvz, ba = spot.target(2 * (net.keys + net.values), 0), spot.target(2 * net.value_heads, 1)
    return spot.split(layouts.delta_net_grouped(qkvz, ba, net, spot.cut))


def delta_net_separate(spot: Spot) -> Placed:
    """First layer of a gated delta net, to (qkv, z, b, a) (Qwen3.5)."""
    net = _delta(spot)
    rows = (2 * net.keys + net.values, net.values, net.value_heads, net.value_heads)
    qkv, z, b, a = (spot.target(count, number) for number, count in enumerate(rows))
    return spot.split(layouts.delta_net_separate(qkv, z, b, a, net, spot.cut))


def delta_net_conv(spot: Spot) -> Placed:
    """Convolution of a gated delta net, over q, k and v."""
    net = _delta(spot)
    return spot.split(layouts.delta_net_conv(spot.target(2 * net.keys + net.values), net, spot.cut))


def _mamba(spot: Spot) -> Mamba:
    if spot.layout.numbers.mamba is None:
        raise UsageError(f"{spot.rule.memory}: the configuration says nothing of state-space mixers")
    return spot.layout.numbers.mamba


def _delta(spot: Spot) -> DeltaNet:
    if spot.layout.numbers.delta is None:
        raise UsageError(f"{spot.rule.memory}: the configuration says nothing of gated delta nets")
    return spot.layout.numbers.delta
