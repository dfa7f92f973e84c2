"""From the names and layouts that a model has in memory to those of the checkpoint that it is saved as.

transformers (5 and newer) keeps, for instance, the experts of a layer in one stacked tensor and writes one tensor per
expert. What ``save_pretrained`` does about that is a list of conversions that belongs to the model; here the library's
own reversal of it is run once, on tensors without storage (``tracing``), and becomes boxes. It needs no memory that
grows with the model; a mixture with 16 thousand expert matrices takes some seconds. A model of no such library is
saved as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deltarefit.errors import UsageError
from deltarefit.sources.building import Holding, unconverted
from deltarefit.sources.modules import Slot
from deltarefit.sources.tracing import Conversion, Output, trace


@dataclass(frozen=True)
class Saved:
    """What a checkpoint of the model has: its tensors, and other names for some of them."""

    outputs: Mapping[str, Output]
    aliases: Mapping[str, tuple[str, ...]]


def saved_name(model: torch.nn.Module, slot: Slot) -> str:
    """Under which of its names a tied tensor is saved: transformers knows which are copies; else the first."""
    copies = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in slot.names if name not in copies), slot.names[0])


def is_saved(model: torch.nn.Module, name: str) -> bool:
    """Whether the model's library writes this tensor at all."""
    return name not in (getattr(model, "_keys_to_ignore_on_save", None) or ())


def saved(conversion: Conversion | None, holdings: Sequence[Holding], ties: Mapping[str, Sequence[str]]) -> Saved:
    """``ties`` gives other names of holdings; they become aliases where their tensor is saved whole, as it is."""
    if conversion is None:
        return Saved(unconverted(holdings), {name: tuple(others) for name, others in ties.items()})
    outputs = trace(conversion, {holding.name: holding.kind for holding in holdings})
    kinds = {holding.name: holding.kind for holding in holdings}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, others in ties.items():
        main = [output for output, found in outputs.items() if _is_whole(found, name)]
        for other in others:
            found = list(trace(conversion, {other: kinds[name]}))
            if len(main) == len(found) == 1 and found[0] not in outputs:
                aliases[main[0]] = (*aliases.get(main[0], ()), found[0])
    return Saved(outputs, aliases)


def _is_whole(output: Output, source: str) -> bool:
    return {origin.source for origin in output.origins} == {source}


def reversal(model: torch.nn.Module) -> Conversion | None:
    """What the model's library does to tensors when it saves them; None if the model is of no library known here."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise UsageError(
            "this transformers does not say how it saves models",
            expected="transformers >= 5",
            found=transformers.__version__,
            next_step="Update it, or pass conversions=None if names and layouts in memory are those of the checkpoint.",
        ) from error

    def convert(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        found: Mapping[str, torch.Tensor] = revert_weight_conversion(model, tensors)
        return found

    return convert
