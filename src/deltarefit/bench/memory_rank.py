"""One rank of the memory benchmark: a model of one large tensor and some small ones, published again and again.

Memory is counted beyond what the bare program holds with the same shard of the model, and beyond the baseline, which is
another copy of the shard in canonical bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from deltarefit.bench import meter
from deltarefit.bench.ranks import Rank
from deltarefit.publisher import Publisher
from deltarefit.sources.fsdp import FsdpSource
from deltarefit.sources.modules import slots
from deltarefit.stores import open_store

DENSITIES = (0.01, 0.05, 1.0)
SMALL = {"norm": (4096,), "gate": (64, 4096), "bias": (1000,)}
_CHUNK = 4 << 20
_COLUMNS = 4096


class Weights(torch.nn.Module):
    """Parameters and nothing to compute with them. ``large`` has ``numel`` elements; all bits are random."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in {"large": (numel // _COLUMNS, _COLUMNS), **SMALL}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))


def publishing(rank: Rank, large: int, masters: bool) -> dict[str, Any]:
    """Peaks of the first publish and of one for each of ``DENSITIES``, in bytes; ``large`` is the largest tensor's size
    in canonical bytes, ``masters`` keeps float32 and publishes bfloat16."""
    model = _sharded(rank, large, masters)
    return _peaks(rank, model, first="anchor")


def rebuilding(rank: Rank, large: int, masters: bool) -> dict[str, Any]:
    """Peak of the first publish after a restart, whose baseline comes from the store: the anchor and all deltas."""
    model = _sharded(rank, large, masters)
    for number, density in enumerate(DENSITIES):
        _change(rank, model, density, number)
    return _peaks(rank, model, first="rebuild")


def _peaks(rank: Rank, model: Weights, first: str) -> dict[str, Any]:
    bare = meter.settled()
    store = open_store(str(rank.directory.parent / "store"))
    source = FsdpSource(model)
    peaks: dict[str, int] = {}
    with contextlib.closing(Publisher(store, source)) as publisher:
        publisher.publish(0)
        peaks[first] = meter.peak() - bare
        for number, density in enumerate(DENSITIES if first == "anchor" else ()):
            _change(rank, model, density, number)
            meter.settled()
            publisher.publish(number + 1)
            peaks[f"delta {density:.0%}"] = meter.peak() - bare
    widths = [source.catalog.tensors[piece.tensor].width for piece in source.pieces]
    baseline = sum(piece.length * width for piece, width in zip(source.pieces, widths, strict=True))
    return {"peaks": peaks, "baseline": baseline}


def _sharded(rank: Rank, large: int, masters: bool) -> Weights:
    """The model without a moment at which a rank holds all of it."""
    with torch.device("meta"):
        model = Weights(large // 2, torch.float32 if masters else torch.bfloat16)
    if rank.size > 1:
        fully_shard(model)
    model.to_empty(device="cpu")
    noise = _noise(rank)
    for number, chunk in enumerate(_chunks(model)):
        chunk.copy_(noise[: chunk.numel()]).bitwise_xor_(number)
    return model


def _change(rank: Rank, model: Weights, density: float, number: int) -> None:
    """Other bits in about that share of all elements, the same ones whenever this is repeated: one low bit each, or any
    if all change, which nothing compresses."""
    generator, noise = torch.Generator().manual_seed(number), _noise(rank) | 1
    for chunk in _chunks(model):
        if density == 1.0:
            chunk.bitwise_xor_(noise[-chunk.numel() :])
        else:
            places = torch.randint(chunk.numel(), (round(density * chunk.numel()),), generator=generator)
            chunk[places] = chunk[places] ^ 1


def _noise(rank: Rank) -> torch.Tensor:
    """Random bits for a chunk. They may repeat: no compressor of payloads looks so far back."""
    generator = torch.Generator().manual_seed(rank.number)
    return torch.randint(-(1 << 15), 1 << 15, (_CHUNK,), dtype=torch.int16, generator=generator)


def _chunks(model: Weights) -> Iterator[torch.Tensor]:
    """Views of the high 16 bits of each of this rank's elements."""
    for slot in slots(model):
        tensor = slot.tensor().detach()
        flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).reshape(-1)
        high = flat.view(torch.int16)[flat.element_size() // 2 - 1 :: flat.element_size() // 2]
        for start in range(0, high.numel(), _CHUNK):
            yield high[start : start + _CHUNK]
