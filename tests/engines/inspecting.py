"""What the ranks of a real engine hold, tensor by tensor: a worker extension for vLLM and a loader for SGLang.

Only for tests. Both do what the shipped ones do, and besides tell the SHA-256 of every tensor that the model keeps.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from deltarefit.targets.vllm import RefitWorker

WORKER = "tests.engines.inspecting.InspectingWorker"
SUMS = "DELTAREFIT_TEST_SUMS"
"""Directory into which ``sglang_sums`` writes."""


class InspectingWorker(RefitWorker):
    """``RefitWorker`` that can be looked into: ``collective_rpc("tensor_sums")``."""

    def tensor_sums(self) -> dict[str, str]:
        """SHA-256 by tensor name of this rank's model."""
        return sums_of(self.get_model())


def sums_of(model: torch.nn.Module) -> dict[str, str]:
    """SHA-256 of the bytes of every parameter, buffer and plain tensor of the modules, by name: also of what an engine
    derives from weights after loading. Caches of keys and values are left out."""
    return {name: _sum(tensor) for name, tensor in _tensors(model) if "kv_cache" not in name}


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for leaf, tensor in {**plain, **module._parameters, **module._buffers}.items():
            if tensor is not None and not tensor.is_meta:
                yield f"{prefix}.{leaf}" if prefix else leaf, tensor


def _sum(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def sglang_sums(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A loader for SGLang that loads nothing: it writes ``sums_of`` the model that it is handed into a file."""
    from sglang.srt.runtime_context import get_parallel

    path = Path(os.environ[SUMS]) / f"{get_parallel().tp_rank}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(sums_of(model)))
    part.replace(path)


def vllm_sums(server: Any) -> list[dict[str, str]]:
    """Rank by rank, of a ``VllmServer`` that was started with ``WORKER``."""
    found: list[dict[str, str]] = server.post("/collective_rpc", {"method": "tensor_sums"})["results"]
    return found
