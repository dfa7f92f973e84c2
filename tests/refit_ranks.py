"""What the ranks of a real sharded trainer do in the end-to-end tests: train, publish, export densely, step by step."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from deltarefit import Publisher, open_store
from deltarefit.sources import ownership
from deltarefit.sources.fsdp import FsdpSource
from tests import fsdp_ranks
from tests.distributed import Job
from tests.tiny_models import build

STEPS = 3


def refits(job: Job, name: str, layout: str, dtype: str | None) -> list[int]:
    """FSDP2 and DTensor: the versions that this rank was told."""
    ownership.SPLIT_BYTES = fsdp_ranks.SPLIT_BYTES
    cast = getattr(torch, dtype) if dtype else None
    model = build(name)
    fsdp_ranks.LAYOUTS[layout](model)
    source = FsdpSource(model, dtype=cast, files={"config.json": b"{}"})
    publisher, versions = _publisher(job, source), []
    for step in range(STEPS):
        fsdp_ranks.nudge(model) if layout == "experts" else fsdp_ranks.train(model, 1)
        versions.append(publisher.publish(step).version)
        state = fsdp_ranks.dense_state(model) if layout != "mixed" else fsdp_ranks.full_state(model)
        if job.rank == 0:
            with contextlib.redirect_stdout(None):
                fsdp_ranks.export(name, state, cast, job.directory / f"dense-{step}")
    publisher.close()
    return versions


def refits_megatron(job: Job, name: str) -> list[int]:
    """Megatron-Core: the local tensors after each step go into files."""
    from megatron.core import parallel_state as mpu

    from deltarefit.sources.megatron import MegatronSource
    from tests import megatron_ranks as ranks

    case = next(case for case in ranks.CASES if case.name == name)
    grid = case.grid
    mpu.initialize_model_parallel(
        grid.tp, grid.pp, grid.vpp if grid.vpp > 1 else None, expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
    )  # fmt: skip
    chunks = ranks.build(case)
    ranks.shake(chunks)
    for chunk in chunks:
        chunk.train(case.train)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, case.model.vocab, ranks.TOKENS))
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-3)
    publisher, versions = _publisher(job, MegatronSource(chunks, hf_config=case.hf_config)), []
    for step in range(STEPS):
        ranks.train(case, chunks, optimizer, tokens)
        versions.append(publisher.publish(step).version)
        np.savez(job.directory / f"{job.rank}-{step}.npz", **_local(chunks))
    publisher.close()
    mpu.destroy_model_parallel()
    return versions


def _publisher(job: Job, source: Any) -> Publisher:
    return Publisher(open_store(str(job.directory / "store")), source, threads=1, deadline_s=60, payload_bytes=4000)


def _local(chunks: Any) -> dict[str, Any]:
    arrays = {}
    for number, chunk in enumerate(chunks):
        state = {
            **dict(chunk.named_parameters()),
            **{n: b for n, b in chunk.named_buffers() if n.endswith("expert_bias")},
        }
        arrays |= {f"local/{number}/{name}": tensor.detach().numpy() for name, tensor in state.items()}
    return arrays
