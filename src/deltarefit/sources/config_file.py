"""``config.json`` of a transformers model, as its library would save it beside the canonical tensors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from deltarefit.sources.arguments import Files


def config_files(model: torch.nn.Module, dtype: object) -> Files:
    """What gives ``config.json`` as it is when asked for; None if the model is not one of transformers. ``dtype``: of
    its canonical tensors; if it is no one dtype, that of the model counts."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    return partial(_config_file, model, dtype if isinstance(dtype, torch.dtype) else model.dtype)


def _config_file(model: Any, dtype: torch.dtype) -> Mapping[str, bytes]:
    """The trainer's own configuration stays as it is."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    return {"config.json": config.to_json_string().encode()}
