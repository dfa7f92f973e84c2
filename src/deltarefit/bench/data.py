"""Pairs of consecutive checkpoints to encode: real AdamW steps of a real model, and generated ones.

A pair is a mapping from canonical name to (old, new), two unsigned-integer arrays of the tensor's shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltarefit.demo.model import build_once, real_model, tiny_model
from deltarefit.demo.train import Trainer, write_bf16
from deltarefit.errors import UsageError
from deltarefit.manifest import WIDTHS

Bits = npt.NDArray[np.unsignedinteger[Any]]
Pair = Mapping[str, tuple[Bits, Bits]]

LEARNING_RATES = (1e-6, 3e-6, 1e-5)
WARM_STEPS = 2
"""AdamW steps at a pair's learning rate before its old checkpoint."""


def real_pairs(cache: Path, quick: bool = False) -> dict[float, Pair]:
    """By learning rate, the checkpoints before and after one AdamW step; read-only memory maps, uint16.

    The model is the real one (dequantized from Q4_1), or with ``quick`` the tiny random one. All pairs come
    from one supervised run on the task of ``demo.task`` with fp32 masters: 20 steps at a fine-tuning rate of
    1e-4 (``Trainer`` says why), then for each learning rate, falling, ``WARM_STEPS`` steps and the pair's
    step. Made once per cache: real 1.6 GB and about a minute, tiny a few seconds.
    """
    model = tiny_model(cache) if quick else real_model(cache)
    directory = build_once(cache / f"pairs-{model.name}", partial(_make_pairs, model))
    return {rate: _pair(directory, rate) for rate in LEARNING_RATES}


def _pair(directory: Path, rate: float) -> Pair:
    old, new = (map_safetensors(directory / _file(rate, which)) for which in ("old", "new"))
    return {name: (old[name], new[name]) for name in old}


def _file(rate: float, which: str) -> str:
    return f"lr-{rate:.0e}-{which}.safetensors"


def _make_pairs(model: Path, directory: Path) -> None:
    trainer = Trainer(model)
    trainer.tune()
    for rate in sorted(LEARNING_RATES, reverse=True):
        trainer.learning_rate = rate
        for _ in range(WARM_STEPS):
            trainer.step()
        write_bf16(directory / _file(rate, "old"), trainer.bits())
        trainer.step()
        write_bf16(directory / _file(rate, "new"), trainer.bits())


def map_safetensors(path: Path) -> dict[str, Bits]:
    """All tensors of a trusted local safetensors file as read-only views of one memory map, as integers."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=start)
    return {name: _view(data, entry) for name, entry in sorted(header.items())}


def _view(data: npt.NDArray[np.uint8], entry: Mapping[str, Any]) -> Bits:
    first, last = entry["data_offsets"]
    bits: Bits = data[first:last].view(f"<u{WIDTHS[entry['dtype']]}").reshape(entry["shape"])
    return bits


def generated_pair(density: float, numel: int, dtype: str = "BF16", seed: int = 0) -> Pair:
    """About ``numel`` random elements in the tensors of a small transformer; ``density`` of them change.

    ``dtype`` is BF16 (normal weights; nine changes in ten are one step of the format, the rest have a
    geometric tail), F32 (normal weights; 10 to 10,000 steps, log-uniform) or F8_E4M3 (finite bytes; one
    or two steps). Half go up in magnitude, half down, all independent of place: no structure to exploit.
    """
    if not 0 <= density <= 1 or dtype not in _MAKERS or numel < 0:
        raise UsageError(
            f"generated pair of density {density}, {numel} elements, {dtype}",
            expected=f"density in 0..1, numel >= 0, dtype of {', '.join(_MAKERS)}",
        )
    generator = np.random.default_rng(seed)
    return {name: _generated(generator, shape, density, dtype) for name, shape in _shapes(numel).items()}


def _shapes(numel: int) -> dict[str, tuple[int, ...]]:
    """Two layers and an embedding that takes up the slack: 22 h^2 + 5 h elements outside it."""
    hidden = max(8, 8 * int(math.sqrt(numel / 32) / 8))
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    for layer in ("model.layers.0", "model.layers.1"):
        for part in ("q", "o"):
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (hidden, hidden)
        for part in ("k", "v"):
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (hidden // 4, hidden)
        for part, shape in {"gate": (3, 1), "up": (3, 1), "down": (1, 3)}.items():
            shapes[f"{layer}.mlp.{part}_proj.weight"] = (shape[0] * hidden, shape[1] * hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
    rest = numel - sum(math.prod(shape) for shape in shapes.values())
    return {"model.embed_tokens.weight": (max(1, round(rest / hidden)), hidden), **shapes}


def _generated(generator: np.random.Generator, shape: tuple[int, ...], density: float, dtype: str) -> tuple[Bits, Bits]:
    old = _MAKERS[dtype](generator, math.prod(shape))
    new = old.copy()
    places = np.flatnonzero(generator.random(old.size, dtype=np.float32) < density)
    new[places] = _moved(old[places], _STEPS[dtype](generator, places.size), generator)
    return old.reshape(shape), new.reshape(shape)


def _moved(values: Bits, steps: npt.NDArray[np.int64], generator: np.random.Generator) -> Bits:
    """Values moved up or down in magnitude by ``steps`` of their format; never through zero."""
    magnitude = (values & values.dtype.type(np.iinfo(values.dtype).max >> 1)).astype(np.int64)
    down = (generator.random(values.size, dtype=np.float32) < 0.5) & (magnitude >= steps)
    # Unsigned arithmetic wraps: adding 2^n - s is subtracting s.
    moved: Bits = values + np.where(down, -steps, steps).astype(values.dtype)
    return moved


def _normal_bf16(generator: np.random.Generator, numel: int) -> Bits:
    bits: Bits = (_normal_f32(generator, numel) >> np.uint32(16)).astype(np.uint16)
    return bits


def _normal_f32(generator: np.random.Generator, numel: int) -> Bits:
    bits: Bits = (generator.standard_normal(numel, dtype=np.float32) * np.float32(0.05)).view(np.uint32)
    return bits


def _bytes_e4m3(generator: np.random.Generator, numel: int) -> Bits:
    # Magnitudes 0x08..0x77: 0x7f is NaN, and two steps up must stay below it.
    magnitudes = generator.integers(0x08, 0x78, numel, dtype=np.uint8)
    bits: Bits = magnitudes | (generator.integers(0, 2, numel, dtype=np.uint8) << np.uint8(7))
    return bits


def _steps_bf16(generator: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    tail = generator.random(count, dtype=np.float32) < 0.1
    return np.where(tail, 1 + generator.geometric(0.5, count), 1)


def _steps_f32(generator: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    return (10 ** generator.uniform(1, 4, count)).astype(np.int64)


def _steps_e4m3(generator: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    return 1 + (generator.random(count, dtype=np.float32) < 0.1).astype(np.int64)


_MAKERS = {"BF16": _normal_bf16, "F32": _normal_f32, "F8_E4M3": _bytes_e4m3}
_STEPS = {"BF16": _steps_bf16, "F32": _steps_f32, "F8_E4M3": _steps_e4m3}
