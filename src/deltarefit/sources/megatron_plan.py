"""What one rank of a Megatron-Core trainer publishes, from names and shapes alone: no model, no communication.

``plan`` finds the rule of each local tensor, asks where it lies, and keeps the part that this rank owns. All ranks
that hold the same elements come to the same answer about who owns them (``ownership``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deltarefit.affine import AffineMap
from deltarefit.errors import UsageError
from deltarefit.sources.arguments import listed
from deltarefit.sources.megatron_kinds import Layout, Placed, Rule, Shape, Spot
from deltarefit.sources.ownership import owned

_LOCAL_LAYER = re.compile(r"decoder\.layers\.([0-9]+)\.")
_LOCAL_EXPERT = re.compile(
    r"(?<=\.local_experts\.)[0-9]+|(?<=\.experts\.linear_fc[12]\.weight)[0-9]+|(?<=\.experts\.linear_fc[12]\.bias)[0-9]+"
)
_PLACE = re.compile(r"\{(\w+)\}")
_DIGITS = re.compile(r"[0-9]+")

Index = dict[str, list[tuple[re.Pattern[str], Rule]]]


@dataclass(frozen=True)
class Chunk:
    """One model chunk of a rank: its local tensors by name, with shapes; ``layers[i]`` is the global number, from 0,
    of ``decoder.layers.i``. ``parallel``: names of the tensors that the trainer marks as split over its ranks."""

    tensors: Mapping[str, Shape]
    layers: Sequence[int]
    parallel: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Planned:
    """A local tensor, and what this rank publishes of it: the elements in ``map``. ``name`` has global numbers;
    ``placed`` is where the whole of it lies."""

    local: str
    name: str
    map: AffineMap
    placed: Placed


def plan(layout: Layout, chunk: Chunk, rules: Sequence[Rule], width: int = 2) -> list[Planned]:
    """What this rank publishes of one chunk; the first rule that fits a name counts. ``UsageError`` names every tensor
    that has no rule, or not the shape that its rule and the model's numbers give it. ``width``: bytes of an element."""
    planned, wrong, index = [], [], _index(rules)
    for local, shape in chunk.tensors.items():
        name = global_name(layout, chunk, local)
        try:
            if (placed := _placed(layout, index, name, shape, local in chunk.parallel)) is not None:
                planned.append(Planned(local, name, _owned(placed, width), placed))
        except UsageError as error:
            wrong.append(f"{name} {shape}: {error}")
    _refuse(wrong)
    return planned


def canonical_shapes(planned: Iterable[Planned]) -> dict[str, Shape]:
    """The shapes of all canonical tensors that local tensors are part of. ``UsageError`` if two disagree."""
    shapes: dict[str, tuple[Shape, str]] = {}
    for one in planned:
        for name, shape in one.placed.shapes.items():
            before = shapes.setdefault(name, (shape, one.name))
            if before[0] != shape:
                raise UsageError(
                    f"{name} has two shapes", expected=f"{before[0]} by {before[1]}", found=f"{shape} by {one.name}"
                )
    return {name: shape for name, (shape, _) in shapes.items()}


def global_name(layout: Layout, chunk: Chunk, name: str) -> str:
    """A local name with global layer and expert numbers."""
    if layer := _LOCAL_LAYER.match(name):
        name = f"decoder.layers.{chunk.layers[int(layer[1])]}.{name[layer.end() :]}"
    if layout.ep.size > 1:
        first = layout.ep.rank * layout.ep.part(layout.numbers.experts, "experts")
        name = _LOCAL_EXPERT.sub(lambda found: str(first + int(found[0])), name)
    return name


def _placed(layout: Layout, index: Index, name: str, shape: Shape, parallel: bool) -> Placed | None:
    """Where one local tensor lies, or None if it is a copy of another."""
    rule, numbers = _find(index, name)
    numbers["beyond"] = layout.numbers.layers + numbers.get("mtp", 0)
    names = tuple(_PLACE.sub(lambda found: str(numbers.get(found[1], found[0])), each) for each in rule.canonical)
    placed = rule.kind(Spot(layout, rule, names, shape, parallel, numbers.get("expert")))
    if placed is None:
        return None
    if [size for size in placed.map.shape if size != 1] != [size for size in shape if size != 1]:
        raise UsageError("its rule gives another shape", expected=placed.map.shape, found=shape)
    return replace(placed, map=replace(placed.map, shape=shape))


def _find(index: Index, name: str) -> tuple[Rule, dict[str, int]]:
    """The first rule for a global name, and the numbers in it."""
    for pattern, rule in index.get(_DIGITS.sub("#", name), ()):
        if found := pattern.fullmatch(name):
            return rule, {key: int(number) for key, number in found.groupdict().items()}
    raise UsageError("no rule says what it is")


def _index(rules: Sequence[Rule]) -> Index:
    """Rules by what their names look like without numbers."""
    index: Index = {}
    for rule in rules:
        key = _DIGITS.sub("#", _PLACE.sub("#", rule.memory))
        pattern = "".join(
            f"(?P<{part}>[0-9]+)" if number % 2 else re.escape(part)
            for number, part in enumerate(_PLACE.split(rule.memory))
        )
        index.setdefault(key, []).append((re.compile(pattern), rule))
    return index


def _owned(placed: Placed, width: int) -> AffineMap:
    """The part of a tensor that this one of its copies publishes."""
    return owned(placed.map, min(placed.shapes), width, placed.copies.rank, placed.copies.size)


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise UsageError(
            f"{len(wrong)} tensors of the model cannot be mapped to a checkpoint",
            found=listed(wrong),
            next_step="Pass names=[Rule(...), *FAMILIES[family]] with a rule for each (sources.megatron_names).",
        )
