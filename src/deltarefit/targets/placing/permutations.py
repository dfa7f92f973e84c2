"""What post-load steps did to weights, found out by running them once more on index planes.

Some expert back ends keep the checkpoint's shape but permute elements in place (CPU prepacking, FlashInfer's TRT-LLM
and CUTLASS kernels): a write through the loader's own coordinates would land on the wrong elements, silently. Here each
step is run on stand-in tensors whose bits count elements; what comes out says where each one went.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from deltarefit.affine import NotAffineError, fit
from deltarefit.targets.placing.plan import Layout
from deltarefit.targets.placing.storages import INTEGERS, Storage

Step = Callable[[torch.nn.Module, torch.nn.Module], None]
"""A layer's post-load steps on a stand-in for it: (layer, stand-in)."""


def layouts_of(
    layers: Iterable[torch.nn.Module], storages: Sequence[Storage], step: Step, kind: Callable[..., Hashable]
) -> Mapping[int, Layout]:
    """What became of the storages of these layers' parameters, by number; those that are as the loader left them are
    not in it (``plan.Layouts``). Layers of one ``kind`` are taken to be treated alike."""
    numbers = {storage.pointer: number for number, storage in enumerate(storages)}
    known: dict[Hashable, Layout | None] = {}
    layouts: dict[int, Layout] = {}
    for layer in layers:
        for leaf, parameter in layer._parameters.items():
            if parameter is None:
                continue
            key = (leaf, tuple(parameter.shape), parameter.dtype, kind(layer))
            if key not in known:
                known[key] = _layout(layer, leaf, step)
            number = numbers.get(parameter.untyped_storage().data_ptr())
            if (layout := known[key]) is not None and number is not None:
                layouts[number] = layout
    return layouts


def _layout(layer: torch.nn.Module, leaf: str, step: Step) -> Layout | None:
    """Where the elements of one parameter went; None if they stayed."""
    try:
        positions = permutation(layer._parameters[leaf], lambda plane: _run(layer, leaf, plane, step))
        return None if np.array_equal(positions, np.arange(positions.size)) else fit(positions)
    except NotAffineError as error:
        return f"its layout after loading is no union of a few boxes: {error.what}"
    except Exception as error:  # noqa: BLE001 - whatever a post-load step raises, its layout is not known
        return f"its layout after loading cannot be found out: {type(error).__name__}: {error}"


def _run(layer: torch.nn.Module, leaf: str, plane: torch.Tensor, step: Step) -> torch.Tensor:
    """The post-load steps of a layer on a stand-in that shares nothing but read-only settings with it."""
    stand_in = copy.copy(layer)
    stand_in._parameters = {
        name: None if p is None else torch.nn.Parameter(torch.zeros_like(p), requires_grad=False)
        for name, p in layer._parameters.items()
    }
    stand_in._parameters[leaf] = torch.nn.Parameter(plane, requires_grad=False)
    with torch.no_grad():
        step(layer, stand_in)
    made = stand_in._parameters[leaf]
    if made is None:
        raise ValueError("the post-load step drops a parameter")
    return made


def permutation(like: torch.Tensor | None, run: Callable[[torch.Tensor], torch.Tensor]) -> npt.NDArray[np.int64]:
    """Which element of a tensor like ``like`` stands at each place of what ``run`` makes of it, shape (numel,).

    Positions are pushed through as bits, as many at a time as an element has. ``ValueError`` if what comes out are not
    all elements, each once.
    """
    if like is None:
        raise ValueError("no such parameter")
    bits, numel = 8 * like.element_size(), like.numel()
    found = np.zeros(numel, np.int64)
    for low in range(0, max(1, (numel - 1).bit_length()), bits):
        plane = torch.arange(numel, device=like.device) >> low & ((1 << bits) - 1)
        half = 1 << (bits - 1)
        signed = torch.where(plane >= half, plane - 2 * half, plane) if bits > 8 else plane
        typed = signed.to(INTEGERS[bits // 8]).view(like.dtype).reshape(like.shape)
        made = run(typed)
        if made.numel() != numel or made.dtype != like.dtype or not made.is_contiguous():
            raise ValueError("the post-load step pads, casts or restrides the tensor")
        codes = made.detach().reshape(-1).view(INTEGERS[bits // 8]).cpu().numpy().view(f"u{bits // 8}")
        found |= codes.astype(np.int64) << low
    if not np.array_equal(np.sort(found), np.arange(numel)):
        raise ValueError("the post-load step changes values, or repeats or drops elements")
    return found
