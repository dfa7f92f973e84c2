"""What the ranks of the FSDP tests do: shard a tiny model, train it, read it as a source, and export it densely."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deltarefit.sources import ownership
from deltarefit.sources.fsdp import FsdpSource
from tests.distributed import Job
from tests.sources import read_pieces
from tests.tiny_models import build, tokens

logging.getLogger("transformers").setLevel(logging.ERROR)
SPLIT_BYTES = 1024
"""So that tiny models have tensors that are split among replicas, and tensors that are not."""

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(*shape: int) -> DeviceMesh:
    """Made once per process: each one makes process groups."""
    if shape not in _meshes:
        names = {1: ("shard",), 2: ("outer", "inner")}[len(shape)]
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape]


# ------------------------------------------------------------------------------------------ layouts


def _blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers, as users shard them one by one."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == 2:
            yield from module


def _fsdp(model: torch.nn.Module, **options: Any) -> None:
    for block in list(_blocks(model)):
        fully_shard(block, **options)
    fully_shard(model, **options)


def _second_dim(parameter: torch.nn.Parameter) -> Shard | None:
    even = parameter.ndim > 1 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if even else None


def _tensor_parallel(model: torch.nn.Module) -> None:
    """Tensor parallelism as users set it up for a Llama, vocabulary included, then FSDP2 over the other dimension."""
    mesh = mesh_of(2, 2)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(2):
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan.update({f"model.layers.{layer}.{name}": ColwiseParallel() for name in columns})
        plan.update({f"model.layers.{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")})
    parallelize_module(model, mesh["inner"], plan)
    _fsdp(model, mesh=mesh["outer"])


def _experts_parallel(model: torch.nn.Module) -> None:
    """Experts sharded over one dimension, uneven (6 over 4), nothing over the other but by FSDP2; not trained."""
    mesh = mesh_of(2, 2)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 3 and "proj" in name:
                sharded = distribute_tensor(parameter.data, mesh["inner"], [Shard(0)])
                module.register_parameter(name, torch.nn.Parameter(sharded))
    _fsdp(model, mesh=mesh["outer"])


LAYOUTS: dict[str, Callable[[torch.nn.Module], None]] = {
    "fsdp": lambda model: _fsdp(model, mesh=mesh_of(dist.get_world_size())),
    "hsdp": lambda model: _fsdp(model, mesh=mesh_of(2, 2)),
    "tp": _tensor_parallel,
    "experts": _experts_parallel,
    "dim 1": lambda model: _fsdp(model, mesh=mesh_of(dist.get_world_size()), shard_placement_fn=_second_dim),
    "mixed": lambda model: _fsdp(
        model, mesh=mesh_of(dist.get_world_size()), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "wrapped": lambda model: _wrapped(model),
    "plain": lambda model: None,
}


def _wrapped(model: torch.nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    layers = {id(block) for block in _blocks(model)}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in layers)
    for block in list(_blocks(model)):
        block.compile()
    _fsdp(model, mesh=mesh_of(dist.get_world_size()))


# ------------------------------------------------------------------------------------------ training and export


def train(model: torch.nn.Module, steps: int) -> None:
    """AdamW on one sequence that all ranks share."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        ids = tokens(seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def nudge(model: torch.nn.Module) -> None:
    """AdamW on gradients that come from nowhere, for layouts that have no forward pass."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        gradient = torch.randn(local.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = DTensor.from_local(
                gradient, parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        parameter.grad = gradient
    optimizer.step()


def dense_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full tensors by name. FSDP2 gathers its own shards (``unshard``), which is what its forward pass computes with;
    what is then still a DTensor is sharded in one dimension."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    found = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        for name, tensor in {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}.items()
    }
    for module in sharded:
        module.reshard()
    return {name.replace("_checkpoint_wrapped_module.", ""): tensor.detach() for name, tensor in found.items()}


def export(name: str, state: dict[str, torch.Tensor], dtype: torch.dtype | None, directory: Any) -> None:
    """``save_pretrained`` of a dense model with these bits, parameters cast."""
    model = build(name, seed=99)
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for key, tensor in own.items():
        tensor.data = state[key].clone()
        if dtype is not None and isinstance(tensor, torch.nn.Parameter):
            tensor.data = tensor.data.to(dtype)
    model.save_pretrained(directory)


def write_read(job: Job, source: FsdpSource, step: int | None) -> dict[str, Any]:
    """What this rank reads, in a file; and what it says it owns."""
    read = read_pieces(source, step)
    np.savez(job.directory / f"{job.rank}.npz", **{str(number): array for number, (_, array) in enumerate(read)})
    pieces = [(p.tensor, p.offset, p.length, p.run, p.step, p.pitch, p.overwrite) for p, _ in read]
    return {"catalog": source.catalog.to_bytes().decode(), "pieces": pieces}


def publishes(job: Job, name: str, layout: str, dtype: str | None, step: int | None) -> dict[str, Any]:
    """Shard, train two steps, read; rank 0 exports densely into ``dense``."""
    ownership.SPLIT_BYTES = SPLIT_BYTES
    cast = getattr(torch, dtype) if dtype else None
    model = build(name)
    LAYOUTS[layout](model)
    if layout == "experts":
        nudge(model)
    else:
        train(model, 2)
    source = FsdpSource(model, dtype=cast)
    answer = write_read(job, source, step)
    state = dense_state(model) if layout != "mixed" else full_state(model)
    if job.rank == 0:
        with contextlib.redirect_stdout(None):
            export(name, state, cast, job.directory / "dense")
    source.check_replicas(timeout=20)
    return answer


def full_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """``full_tensor`` of every parameter: the float32 shards, where FSDP2 itself gathers bfloat16."""
    model.state_dict()
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {key: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for key, t in named.items()}


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
