"""A trainer of several ranks: a Llama-style transformer built from a configuration, sharded, with real AdamW steps.

Weights start at random and batches are random tokens, so nothing is learnt; what matters are the changes that real
steps at the learning rates of reinforcement learning make to real layers. Masters and moments are float32.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from deltarefit.bench.ranks import Rank
from deltarefit.demo.model import transformers
from deltarefit.errors import UsageError

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "small": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 6, "num_attention_heads": 12,
              "num_key_value_heads": 4, "vocab_size": 8192},
    "medium": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16,
               "num_key_value_heads": 4, "vocab_size": 16384},
}  # fmt: skip
"""0.2, 54 and 226 million parameters."""
LEARNING_RATE = 1e-6
BATCH = (1, 32)
"""Sequences and tokens in each of a rank's batches."""


class Trainer:
    """One rank of it. ``sharding`` "fsdp2": parameters are cut among the ranks by ``fully_shard``, layer by layer;
    "replicated": every rank holds all and sees the same batches, as data-parallel ranks hold all after their reduce.
    """

    def __init__(self, rank: Rank, size: str, sharding: str) -> None:
        if size not in SIZES:
            raise UsageError("unknown size of model", expected=", ".join(SIZES), found=size)
        self.model = _built(size)
        if sharding == "fsdp2":
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        seed = rank.number if sharding == "fsdp2" else 0
        self._generator = torch.Generator().manual_seed(1 + seed)
        self._tokens = SIZES[size]["vocab_size"]
        parameters = self.model.parameters()
        self._optimizer = torch.optim.AdamW(
            parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self) -> float:
        """One optimizer step on the next batch; its seconds."""
        started = time.perf_counter()
        tokens = torch.randint(self._tokens, BATCH, generator=self._generator)
        self.model(tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started


def _built(size: str) -> Any:
    """The same weights on every rank, before they are sharded."""
    library = transformers()
    torch.manual_seed(0)
    return library.LlamaForCausalLM(library.LlamaConfig(**SIZES[size], tie_word_embeddings=False))
