"""What a rank keeps of a catalog that it is attached to, and of payloads on their way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deltarefit.codec import Delta
from deltarefit.manifest import Catalog
from deltarefit.records import Digest
from deltarefit.targets.placing.host import Backend
from deltarefit.targets.placing.plan import Part, Plan, Table
from deltarefit.targets.placing.shadows import Shadows

Sums = dict[int, Digest]
"""Digest sums by class."""


@dataclass(frozen=True)
class Place:
    """Parts of one tensor and one class in one storage: canonical positions [low, high) at most."""

    class_: int
    low: int
    high: int
    boxes: Table
    backend: Backend
    storage: Any
    shift: int


@dataclass
class Staged:
    """A payload on its way. ``done``: written; None while that is not known."""

    deltas: list[Delta]
    pre: Sums
    post: Sums
    done: bool | None = False


@dataclass
class Attached:
    """One catalog, placed here. ``known``: the shadows have the bits that are live. ``run`` is who attached last.
    ``classes``: those of the parts, then of the shadows, as they were assigned last."""

    catalog: Catalog
    plan: Plan
    shadows: Shadows
    known: bool = False
    run: str = ""
    keys: tuple[int, ...] = ()
    classes: tuple[object, ...] = ()
    places: list[list[Place]] = field(default_factory=list)
    shadow_classes: dict[int, int] = field(default_factory=dict)


def last_of(part: Part) -> int:
    """The last canonical position of a part."""
    return part.box.canonical + sum((n - 1) * stride for n, _, stride in part.box.dims)


def said(part: Part) -> list[Any]:
    """A part as ``ranks.RankGroup`` is told of it."""
    return [part.tensor, [[n, stride] for n, _, stride in part.box.dims], part.box.canonical]


def loaded_together(plan: Plan, opaque: frozenset[int]) -> list[frozenset[int]]:
    """Opaque tensors that the loader needs in one call: what is linked stays together."""
    groups: list[set[int]] = []
    for links in [*({k} for k in sorted(opaque)), *(set(names & opaque) for names in plan.together)]:
        joined = set(links)
        apart = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return [frozenset(group) for group in groups if group]
