"""The checkpoint that an engine was started from, tensor by tensor, as integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch

from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch
from deltarefit.manifest import TORCH_NAMES, TensorEntry
from deltarefit.targets.placing.storages import INTEGERS


class CheckpointFiles:
    """Safetensors files of a directory, or of a model's name on the Hugging Face hub whose files are on this machine.
    ``available`` is false where there is none: then nothing is known of what the engine loaded."""

    def __init__(self, checkpoint: str | Path | None) -> None:
        self._files: dict[str, Path] = {}
        directory = None if checkpoint is None else _directory(str(checkpoint))
        for path in sorted(directory.glob("*.safetensors")) if directory else []:
            with _opened(path) as file:
                self._files.update(dict.fromkeys(file.keys(), path))

    @property
    def available(self) -> bool:
        """Whether there are any."""
        return bool(self._files)

    def read(self, entry: TensorEntry) -> Elements:
        """All elements of a tensor, under the first of its names that is there, shape (numel,). ``BaseMismatch`` if it
        is missing or another."""
        name = next((name for name in (entry.name, *entry.aliases) if name in self._files), None)
        if name is None:
            raise _foreign(f"tensor {entry.name} is not in the checkpoint that the engine was started from")
        with _opened(self._files[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        expected = (getattr(torch, TORCH_NAMES[entry.dtype]), entry.shape)
        if (tensor.dtype, tuple(tensor.shape)) != expected:
            raise _foreign(
                f"tensor {name} of the engine's checkpoint is another", expected, (tensor.dtype, tensor.shape)
            )
        flat = tensor.contiguous().reshape(-1).view(INTEGERS[entry.width])
        elements: Elements = flat.numpy().view(f"u{entry.width}")
        return elements


def _directory(checkpoint: str) -> Path | None:
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(checkpoint, local_files_only=True))
    except (ImportError, ValueError, OSError):  # no name of the hub, or nothing of it is here
        return None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with safetensors.safe_open(path, framework="pt") as file:
        yield file


def _foreign(what: str, expected: object = None, found: object = None) -> BaseMismatch:
    step = "Start the engine from a checkpoint of the model that this run publishes."
    return BaseMismatch(what, expected=expected, found=found, next_step=step)
