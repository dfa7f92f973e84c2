"""A trainer as reinforcement learning has them: fp32 masters, AdamW, a bf16 copy to compute with and publish.

The loss is advantage times negative log-likelihood of the completion. With right answers of advantage 1 (the
default) that is supervised learning; with graded completions of the policy itself it is REINFORCE. This does
not claim to train a good model: it makes the weight changes of real optimizer steps at real learning rates.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deltarefit.demo.model import transformers
from deltarefit.demo.task import Sample, problems, solved

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "model.safetensors"
_IGNORED = -100  # PyTorch's label for "no loss here"


class Trainer:
    """AdamW (betas 0.9, 0.95, no weight decay, gradients clipped to norm 1) on a Hugging Face bf16 directory.

    Gradients are accumulated in bf16 and widened; moments are fp32. ``threads`` are PyTorch's, process-wide.

    The masters start as the bf16 weights widened, as when reinforcement learning starts from a published
    model, so all lie exactly on bf16 values and the first densities are uneven. Of a model dequantized from
    Q4_1 one weight in 400 is exactly 0, too, and stays so small for long that each step changes it by many
    bf16 steps. ``tune`` mends both.
    """

    def __init__(
        self,
        model: Path,
        learning_rate: float = 1e-6,
        *,
        batch: int = 8,
        seed: int = 0,
        threads: int = 2,
    ) -> None:
        library = transformers()
        import torch

        torch.set_num_threads(threads)
        self._directory, self._batch, self._seed, self.steps = model, batch, seed, 0
        self._tokenizer: Any = library.AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._model: Any = library.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, local_files_only=True
        )
        # named_parameters gives a tied tensor once, under the name that save_pretrained stores too.
        self._weights: dict[str, torch.Tensor] = dict(sorted(self._model.named_parameters()))
        self._masters = {name: weight.detach().float() for name, weight in self._weights.items()}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    @property
    def learning_rate(self) -> float:
        """Of the next steps; may be set between steps."""
        return float(self._optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def tune(self, steps: int = 20, learning_rate: float = 1e-4) -> None:
        """Supervised steps at a fine-tuning rate: the changes after them are those of a run under way."""
        rate, self.learning_rate = self.learning_rate, learning_rate
        for _ in range(steps):
            self.step()
        self.learning_rate = rate

    @property
    def numel(self) -> int:
        """Elements of the model, tied ones once."""
        return sum(weight.numel() for weight in self._weights.values())

    def step(self, samples: Sequence[Sample] | None = None) -> dict[str, float]:
        """One optimizer step on ``samples``, or on the right answers of the task's next batch.

        Returns ``step`` (steps taken), ``loss``, ``grad_norm`` before clipping, ``seconds``, and of the bf16
        elements whose bits are others now the count ``changed`` and the share ``density``.
        """
        begin = time.perf_counter()
        if samples is None:
            samples = solved(problems(self._seed, self.steps, self._batch))
        loss, norm = self._gradients(samples)
        self._optimizer.step()
        changed = self._publish_masters()
        self.steps += 1
        report: dict[str, float] = {"step": self.steps, "loss": loss, "grad_norm": norm}
        report |= {"changed": changed, "density": changed / self.numel}
        return report | {"seconds": time.perf_counter() - begin}

    def _gradients(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Fill the masters' gradients; loss and gradient norm."""
        import torch

        loss = self._loss(samples)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        for name, weight in self._weights.items():
            self._masters[name].grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), 1.0)
        return loss.item(), norm.item()

    def _loss(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Mean over the completions' tokens of advantage times negative log-likelihood."""
        import torch

        tokens, labels = self._batch_of(samples)
        # Padding stands on the right of a causal model: no mask is needed, padded places have no label.
        logits = self._model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        targets = labels[:, 1:].flatten()
        each = torch.nn.functional.cross_entropy(logits, targets, ignore_index=_IGNORED, reduction="none")
        advantages = torch.tensor([sample.advantage for sample in samples]).repeat_interleave(labels.shape[1] - 1)
        return (each * advantages).sum() / (targets != _IGNORED).sum()

    def _batch_of(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels, both (samples, longest); only completion and end token have a label."""
        import torch

        end = self._tokenizer.eos_token_id
        rows = [(self._tokens(sample.prompt), [*self._tokens(sample.completion), end]) for sample in samples]
        longest = max(len(prompt) + len(completion) for prompt, completion in rows)
        tokens = torch.full((len(rows), longest), end)
        labels = torch.full_like(tokens, _IGNORED)
        for row, (prompt, completion) in enumerate(rows):
            stop = len(prompt) + len(completion)
            tokens[row, :stop] = torch.tensor(prompt + completion)
            labels[row, len(prompt) : stop] = torch.tensor(completion)
        return tokens, labels

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return found

    def _publish_masters(self) -> int:
        """Round the masters into the bf16 copy; how many elements got other bits."""
        import torch

        changed = 0
        with torch.no_grad():
            for name, weight in self._weights.items():
                rounded = self._masters[name].to(torch.bfloat16)
                changed += int(torch.count_nonzero(rounded.view(torch.int16) != weight.view(torch.int16)))
                weight.copy_(rounded)
        return changed

    def bits(self) -> dict[str, npt.NDArray[np.uint16]]:
        """Live views of the bf16 weights as integers by canonical name, sorted; ``step`` changes them."""
        import torch

        return {name: weight.detach().view(torch.uint16).numpy() for name, weight in self._weights.items()}

    def save(self, directory: Path) -> None:
        """Write the bf16 checkpoint with config and tokenizer: a directory that ``from_pretrained`` opens.

        The byte layout depends only on names and shapes: two checkpoints differ exactly where weights differ.
        The weights file is replaced in one rename.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for file in self._directory.iterdir():
            if file.suffix != ".safetensors":
                shutil.copyfile(file, directory / file.name)
        write_bf16(directory / WEIGHTS_FILE, self.bits())


def write_bf16(path: Path, bits: Mapping[str, npt.NDArray[np.uint16]]) -> None:
    """Write a safetensors file of BF16 tensors sorted by name, straight from the arrays, in one rename."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(bits):
        end = offset + bits[name].nbytes
        entries[name] = {"dtype": "BF16", "shape": list(bits[name].shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    with work.open("wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in sorted(bits):
            _write_all(file, np.ascontiguousarray(bits[name]).reshape(-1).view(np.uint8).data)
    work.replace(path)


def _write_all(file: Any, data: memoryview) -> None:
    # One write() call stores at most 2 GiB - 4 KiB on Linux.
    while len(data):
        data = data[file.write(data) :]
