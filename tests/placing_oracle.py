"""What a native loader puts where, found out by running it on codes: independent of all recording.

Every element of the checkpoint is given its own number, then the number's complement, and the model is loaded with
each. A stored element whose bits turned round as a whole holds a copy, and says of what; one that stayed the same
holds a constant; anything else was computed. Narrow elements take several passes, a digit each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.targets.placing.plan import Mode, Plan, make_plan
from deltarefit.targets.placing.storages import Storage, storages_of
from tests.mini_ranks import tensor_of

MOST = 1 << 16
"""Most elements of a catalog: two bytes say which one it is."""
Cell = tuple[int, int]
"""(storage, element)."""
Copy = tuple[int, int, int]
"""(tensor, position, shift)."""
COMPUTED: Copy = (-1, -1, -1)
Bits = npt.NDArray[np.uint64]


def probed(model: Any, catalog: Catalog) -> dict[Cell, Copy]:
    """What every stored element that depends on the checkpoint holds: a copy, or ``COMPUTED``."""
    assert catalog.numel < MOST - 1, "two bytes do not tell so many elements apart"
    widths = [_bits(entry) for entry in catalog.tensors if entry.numel]
    passes = max(-(-16 // bits) for bits in widths)
    runs = [[_loaded(model, catalog, digit, flip) for digit in range(passes)] for flip in (False, True)]
    found: dict[Cell, Copy] = {}
    for number, storage in enumerate(storages_of(model)):
        plain, turned = ([one[number] for one in passes_] for passes_ in runs)
        for at in range(storage.numel):
            digits = [(int(a[at]), int(b[at])) for a, b in zip(plain, turned, strict=True)]
            if any(a != b for a, b in digits):
                found[number, at] = _read(storage, digits, catalog)
    return found


def _bits(entry: TensorEntry) -> int:
    return 1 if entry.dtype == "BOOL" else 8 * entry.width


def _loaded(model: Any, catalog: Catalog, digit: int, flip: bool) -> list[Bits]:
    """Storages of the model, loaded with one digit of every element's number; it is as it was afterwards."""
    storages = storages_of(model)
    before = [storage.integers(1).clone() for storage in storages]
    with torch.no_grad():
        model.load_weights(_codes(catalog, digit, flip).items())
    found = [_unsigned(storage) for storage in storages]
    for storage, whole in zip(storages, before, strict=True):
        storage.integers(1).copy_(whole)
    return found


def _codes(catalog: Catalog, digit: int, flip: bool) -> Mapping[str, torch.Tensor]:
    found, first = {}, 1
    for entry in catalog.tensors:
        bits = _bits(entry)
        numbers = np.arange(first, first + entry.numel, dtype=np.uint64)
        values = (numbers >> np.uint64(min(63, bits * digit))) & np.uint64((1 << bits) - 1)
        if flip:
            values ^= np.uint64((1 << bits) - 1)
        first += entry.numel
        for name in (entry.name, *entry.aliases):
            found[name] = tensor_of((entry.dtype, entry.shape), values.astype(f"<u{entry.width}"))
    return dict(sorted(found.items()))


def _unsigned(storage: Storage) -> Bits:
    return storage.integers().numpy().view(f"u{storage.width}").astype(np.uint64)


def _read(storage: Storage, digits: list[tuple[int, int]], catalog: Catalog) -> Copy:
    """What an element is a copy of, at its own width or widened."""
    bits = 1 if torch.bool in storage.dtypes else 8 * storage.width
    if (found := _number(digits, bits, catalog)) is not None:
        return (*found, 0)
    if bits == 32 and all((a | b) & 0xFFFF == 0 for a, b in digits):
        halves = [(a >> 16, b >> 16) for a, b in digits]
        if (found := _number(halves, 16, catalog)) is not None:
            return (*found, 16)
    return COMPUTED


def _number(digits: list[tuple[int, int]], bits: int, catalog: Catalog) -> tuple[int, int] | None:
    if any(a ^ b != (1 << bits) - 1 for a, b in digits):
        return None
    position = sum(a << bits * k for k, (a, _) in enumerate(digits)) - 1
    for tensor, entry in enumerate(catalog.tensors):
        if 0 <= position < entry.numel:
            return tensor, position
        position -= entry.numel
    return None


def planned(plan: Plan) -> dict[Cell, Copy]:
    """The same of a plan's parts, one element after the other."""
    found: dict[Cell, Copy] = {}
    for part in plan.parts:
        cells = [(part.box.local, part.box.canonical)]
        for n, step, stride in part.box.dims:
            cells = [(a + i * step, b + i * stride) for a, b in cells for i in range(n)]
        for at, position in cells:
            assert (part.storage, at) not in found, "an element of a storage is in two parts"
            found[part.storage, at] = (part.tensor, position, part.shift)
    return found


def check_plan(model: Any, catalog: Catalog) -> Plan:
    """The recorded plan of a model is what probes find, and nothing was left out but what is opaque."""
    plan, found = make_plan(model, model.load_weights, catalog), probed(model, catalog)
    parts = planned(plan)
    for cell, expected in parts.items():
        assert found.get(cell) == expected, f"{plan.storages[cell[0]].names[0]}[{cell[1]}]"
    opaque = {k for k, (mode, _) in enumerate(plan.modes) if mode is Mode.OPAQUE}
    for cell in found.keys() - parts.keys():
        tensor = found[cell][0]
        assert tensor in opaque or (found[cell] == COMPUTED and opaque), f"a write was not recorded: {found[cell]}"
    return plan
