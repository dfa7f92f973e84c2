"""Ranks of a miniature engine in one process, and deltas for them: what tests of placing share.

Nothing of ``targets.placing`` is used to say what the live bits shall be: a fresh module that the same native loader
filled does that, byte for byte, whatever its storages hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from deltarefit import _kernel
from deltarefit.codec import ALL, SET, XOR, Delta, EncodedDelta, PayloadBuilder
from deltarefit.digest import catalog_keys
from deltarefit.manifest import TORCH_NAMES, Catalog, PayloadRef, TensorEntry
from deltarefit.protocol.messages import Op
from deltarefit.records import Digest
from deltarefit.targets.placing.rank import RankWeights
from deltarefit.targets.placing.recorder import Load
from deltarefit.targets.ranks import RankGroup
from tests import helpers as h
from tests.mini_base import Kinds, Mini

RUN = "ab" * 16
Payload = tuple[bytes, PayloadRef]
_SIGN = {2: 0x8000, 4: 1 << 31, 8: 1 << 63}
_ODD_NAN = {"BF16": 0x7FC1, "F16": 0x7E01, "F32": 0x7F800001, "F64": 0x7FF0000000000001}


# ------------------------------------------------------------------------------------------ checkpoints


def catalog_of(kinds: Kinds, aliases: Mapping[str, tuple[str, ...]] | None = None) -> Catalog:
    names = aliases or {}
    return Catalog(tuple(TensorEntry(n, dtype, shape, names.get(n, ())) for n, (dtype, shape) in sorted(kinds.items())))


def tensor_of(kind: tuple[str, tuple[int, ...]], bits: h.Elements) -> torch.Tensor:
    """A tensor of its own with these bits."""
    tensor = torch.empty(kind[1], dtype=getattr(torch, TORCH_NAMES[kind[0]]))
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    return tensor


def tensors_of(
    kinds: Kinds, model: h.Model, aliases: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, torch.Tensor]:
    """The checkpoint as a loader takes it, tied names too."""
    found = {name: tensor_of(kinds[name], bits) for name, bits in model.items()}
    for name, others in (aliases or {}).items():
        found.update({other: tensor_of(kinds[name], model[name]) for other in others})
    return dict(sorted(found.items()))


def saved(directory: Path, kinds: Kinds, model: h.Model) -> str:
    """A checkpoint directory; its path."""
    directory.mkdir(exist_ok=True)
    save_file(tensors_of(kinds, model), directory / "model.safetensors")
    return str(directory)


def changed(rng: np.random.Generator, kinds: Kinds, model: h.Model, density: float = 0.2) -> h.Model:
    """A step: random bit flips, a zero that becomes -0.0, a NaN with an odd payload."""
    new = h.copy_of(model)
    for name, array in new.items():
        flat, dtype = array.reshape(-1), kinds[name][0]
        flips = 1 if dtype == "BOOL" else rng.integers(1, 128, flat.size)
        flat ^= np.where(rng.random(flat.size) < density, flips, 0).astype(flat.dtype)
        if flat.size and dtype in _ODD_NAN and density:
            flat[rng.integers(flat.size)] = _SIGN[flat.itemsize]
            flat[rng.integers(flat.size)] = _ODD_NAN[dtype]
    return new


# ------------------------------------------------------------------------------------------ payloads


def payloads(catalog: Catalog, old: h.Model, new: h.Model, count: int = 2) -> list[Payload]:
    """XOR deltas in up to ``count`` payloads; none if nothing changed."""
    return _built(catalog, old, new, count, {"operation": XOR})


def anchor(catalog: Catalog, new: h.Model) -> list[Payload]:
    """One payload that sets everything."""
    return _built(catalog, new, new, 1, {"operation": SET, "kind": ALL, "packing": 0})


def _built(catalog: Catalog, old: h.Model, new: h.Model, count: int, how: dict[str, int]) -> list[Payload]:
    builders = [PayloadBuilder() for _ in range(count)]
    keys = catalog_keys(RUN, catalog)
    for number, entry in enumerate(catalog.tensors):
        before, after = old[entry.name].reshape(-1), new[entry.name].reshape(-1)
        middle = entry.numel // 3
        for start, stop in ((0, middle), (middle, entry.numel)):
            made = _kernel.encode(before[start:stop], after[start:stop], start, keys[number], **how)
            if made is not None:
                record, streams, pre, post = made
                delta = Delta(number, record, tuple(data for _, data in streams))
                names = tuple(name for name, _ in streams)
                builders[(number + start) % count].add(EncodedDelta(delta, names, Digest(*pre), Digest(*post)))
    return [builder.build() for builder in builders if builder.encoded]


# ------------------------------------------------------------------------------------------ live bytes


def live_bytes(model: nn.Module) -> dict[str, bytes]:
    """All bytes of the storage behind each parameter and persistent buffer, by every name."""
    return {name: _raw(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


def all_bytes(model: nn.Module) -> dict[str, bytes]:
    """The same of all parameters and buffers."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: _raw(tensor) for name, tensor in named}


def _raw(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy().tobytes()


# ------------------------------------------------------------------------------------------ ranks


class Ranks:
    """One ``RankWeights`` per model, assigned by their group: what agents and ``EngineTarget`` do over sockets."""

    def __init__(self, models: Sequence[tuple[nn.Module, Load]], catalog: Catalog, **options: Any) -> None:
        self.models = [model for model, _ in models]
        self.ranks = [RankWeights(model, load, threads=1, **options) for model, load in models]
        self.catalog = catalog
        plans = [json.loads(json.dumps(rank.attach(RUN, catalog))) for rank in self.ranks]
        self.group = RankGroup(catalog, plans)
        for number, rank in enumerate(self.ranks):
            rank.assign(json.loads(json.dumps(self.group.assignment(number))))

    def stage(self, payload: Payload) -> tuple[Digest, Digest]:
        data, ref = payload
        sums = [rank.stage(ref, data) for rank in self.ranks]
        before, after = ([{c: pair[k] for c, pair in one.items()} for one in sums] for k in range(2))
        return self.group.total(before), self.group.total(after)

    def live(self, payload: Payload) -> Digest:
        return self.group.total([rank.live(payload[1]) or {} for rank in self.ranks])

    def write(self, payload: Payload) -> None:
        """Stage and apply, with every sum checked on the way."""
        ref = payload[1]
        assert self.stage(payload) == (ref.pre, ref.post)
        assert self.live(payload) == ref.pre
        for rank in self.ranks:
            rank.write(ref, Op.APPLY)
        assert self.live(payload) == ref.post

    def fill(self, payload: Payload) -> None:
        for rank in self.ranks:
            rank.fill(payload[1], payload[0])

    def digest(self) -> Digest:
        return self.group.total([rank.digest() for rank in self.ranks])

    def drop(self) -> None:
        for rank in self.ranks:
            rank.drop()

    @property
    def modes(self) -> dict[str, str]:
        """Mode by tensor, of those that do not go element for element."""
        return {row.tensor: row.mode for row in self.group.report if row.mode != "xor"}

    def reason(self, tensor: str) -> str:
        return next(row.reason for row in self.group.report if row.tensor == tensor)


def rank_models(case: type[Mini], size: int, model: h.Model) -> list[Mini]:
    """Every rank's part of an engine, filled by its own loader."""
    made = [case(rank, size) for rank in range(size)]
    for one in made:
        filled(one, one.load_weights, tensors_of(case.kinds, model, case.aliases))
    return made


def filled(model: nn.Module, load: Load, checkpoint: Mapping[str, torch.Tensor]) -> nn.Module:
    """The model, loaded natively; loaders may write to what they are given, so each gets its own."""
    with torch.no_grad():
        load((name, tensor.clone()) for name, tensor in checkpoint.items())
    return model


def checkpoint_of(kinds: Kinds, seed: int = 0) -> h.Model:
    """Random bits, with bools that are bools."""
    return h.random_model(np.random.default_rng(seed), kinds)


def loads(models: Iterable[Mini]) -> list[tuple[nn.Module, Load]]:
    return [(model, model.load_weights) for model in models]
