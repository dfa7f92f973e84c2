"""Whether two catalogs are of one model, and if not, where they differ first."""

from __future__ import annotations

from deltarefit.errors import BaseMismatch
from deltarefit.manifest import Catalog, TensorEntry


def check_catalog(found: Catalog, expected: Catalog) -> None:
    """``BaseMismatch`` that names the first tensor in which two catalogs differ."""
    if difference := first_difference(found, expected):
        name, theirs, ours = difference
        step = "Publish a checkpoint of the same model, or start a new run in another store."
        raise BaseMismatch(f"tensor {name} is not that of this run", expected=ours, found=theirs, next_step=step)


def first_difference(one: Catalog, other: Catalog) -> tuple[str, str, str] | None:
    """Name of the first tensor that differs, and what it is in either catalog."""
    if one.identity == other.identity:
        return None
    first, second = ({entry.name: entry for entry in catalog.tensors} for catalog in (one, other))
    names = sorted(first.keys() | second.keys())
    name = next(name for name in names if first.get(name) != second.get(name))
    return name, _describe(first.get(name)), _describe(second.get(name))


def _describe(entry: TensorEntry | None) -> str:
    if entry is None:
        return "no such tensor"
    tied = f", tied to {list(entry.aliases)}" if entry.aliases else ""
    return f"{entry.dtype} {list(entry.shape)}{tied}"
