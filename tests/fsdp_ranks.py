"""What the ranks of the FSDP tests do: shard a tiny model, train it, read it as a source, and export it densely."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from deltarefit.errors import RefitError
from deltarefit.exchange import Alone
from deltarefit.sources import ownership
from deltarefit.sources.fsdp import FsdpSource
from deltarefit.sources.process_group import TorchExchange, default_exchange
from deltarefit.sources.residual import Residual
from tests.distributed import Job
from tests.sources import flat_bits, read_pieces
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
        plan.update(
            {f"model.layers.{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        )
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
    """AdamW on gradients that come from the weights, for layouts that have no forward pass."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer.step()


def dense_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full tensors by name. FSDP2 gathers its own shards (``unshard``), which is what its forward pass computes with;
    what is then still a DTensor is sharded in one dimension."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    found = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        for name, tensor in {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers()),
        }.items()
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


# ------------------------------------------------------------------------------------------ special cases


def publishes_on_two_of_four(job: Job, name: str) -> dict[str, Any] | None:
    """Ranks 0 and 2 train and publish; the others only help to make the mesh."""
    mesh = DeviceMesh("cpu", [0, 2], mesh_dim_names=("shard",))
    if job.rank not in (0, 2):
        return None
    model = build(name)
    _fsdp(model, mesh=mesh)
    train(model, 2)
    exchange = TorchExchange(None, job.rank // 2, 2, name="two of four")
    source = FsdpSource(model, exchange=exchange, ranks=(0, 2))
    answer = write_read(job, source, None)
    state = dense_state(model)
    if job.rank == 0:
        export(name, state, torch.bfloat16, job.directory / "dense")
    source.check_replicas(timeout=20)
    return answer


def strided_shards(job: Job) -> dict[str, int]:
    """Sizes of dimensions that tensor parallelism does not divide, and FSDP2 cuts on top of it."""
    model = build("llama")
    LAYOUTS["tp"](model)
    sizes = {
        name: parameter.shape[placement.dim]
        for name, parameter in model.named_parameters()
        for placement in parameter.placements
        if isinstance(placement, _StridedShard)
    }
    return {name: size for name, size in sizes.items() if size % 2}


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 7))


def text_of(make: Callable[[], Any]) -> str:
    """What an error says; empty if there is none."""
    try:
        make()
    except RefitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def drifts(job: Job) -> dict[str, str]:
    """HSDP over 2 x 2, and a buffer that every rank holds: nothing wrong; a shard wrong on rank 3; the buffer on 2."""
    model = small_model()
    model.register_buffer("steps", torch.zeros(3))
    fully_shard(model, mesh=mesh_of(2, 2))
    source = FsdpSource(model, dtype=None)
    said = {"fine": text_of(lambda: source.check_replicas(20))}
    for who, tensor in ((3, model[0].weight.to_local()), (2, model.steps)):
        last = tensor.detach().view(-1).view(torch.int32)[-1:]
        last ^= int(job.rank == who)
        said[f"wrong on {who}"] = text_of(lambda: source.check_replicas(20))
        last ^= int(job.rank == who)
    said["fine again"] = text_of(lambda: source.check_replicas(20))
    return said


def checks_now_and_then(job: Job) -> list[str]:
    """Holds of a source that checks every third time; rank 1 has drifted."""
    model = small_model()
    source = FsdpSource(model, check_every=3)
    if job.rank == 1:
        model[0].bias.data[0] += 1
    return [text_of(lambda: read_pieces(source)) for _ in range(5)]


def silent_peer(job: Job) -> str:
    """Rank 0 takes no part."""
    source = FsdpSource(small_model())
    return text_of(lambda: source.check_replicas(0.5)) if job.rank else ""


def after_a_forward_pass(job: Job) -> list[str]:
    """FSDP2 leaves the outermost parameters gathered after a forward pass without a backward pass."""
    model = small_model()
    fully_shard(model, mesh=mesh_of(4))
    source = FsdpSource(model)
    with torch.no_grad():
        model(torch.ones(1, 6))
    gathered = str(isinstance(model[0].weight, DTensor))
    before = text_of(lambda: read_pieces(source))
    with torch.no_grad():
        model(torch.ones(1, 6))
    return [gathered, before, text_of(lambda: FsdpSource(model))]


def sharded_anew(job: Job) -> list[str]:
    """A parameter that is replicated where it was sharded; the same one sharded again; none."""
    model = _placed(Shard(0), torch.zeros(2, 2), (8, 2))
    source, before = FsdpSource(model), model.w
    said = []
    for tensor in (before.redistribute(placements=[Replicate()]), before.detach().clone(), None):
        model.w = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
        said.append(text_of(lambda: read_pieces(source)))
    return said


def written_while_held(job: Job) -> list[str]:
    """Steps of optimizers that write in different ways."""
    model = small_model()
    fully_shard(model, mesh=mesh_of(4))
    model(torch.ones(1, 6)).sum().backward()
    source = FsdpSource(model)

    def step(**options: bool) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        with source.hold():
            optimizer.step()

    return [
        text_of(lambda: step(foreach=False)),
        text_of(lambda: step(foreach=True)),
        text_of(lambda: step(fused=True)),
    ]


class One(torch.nn.Module):
    """A model of one parameter, ``w``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(tensor, requires_grad=False)


def _placed(placement: Any, local: torch.Tensor, shape: tuple[int, ...], mesh: DeviceMesh | None = None) -> One:
    mesh = mesh or mesh_of(4)
    stride = torch.empty(shape, device="meta").stride()
    placements = placement if isinstance(placement, list) else [placement]
    return One(DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride))


def refusals(job: Job) -> dict[str, str]:
    """What each case is refused with."""
    crossed = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("outer", "inner"))
    cases: dict[str, Callable[[], Any]] = {
        "partial": lambda: FsdpSource(_placed(Partial(), torch.zeros(4), (4,))),
        "unpaired": lambda: FsdpSource(_placed(_StridedShard(0, split_factor=2), torch.zeros(2), (8,))),
        "shape": lambda: FsdpSource(_placed(Shard(0), torch.zeros(3, 2), (8, 2))),
        "strides": lambda: FsdpSource(_placed(Shard(0), torch.zeros(2, 2).t(), (8, 2))),
        "mesh": lambda: FsdpSource(_placed(Shard(0), torch.zeros(4), (8,), crossed["inner"])),
        "conversions": lambda: FsdpSource(small_model(), conversions="all"),
        "opaque": lambda: FsdpSource(small_model(), conversions=lambda t: {"x": t["0.weight"] + 1}),
        "exchange": lambda: FsdpSource(small_model(), exchange=Alone()),
        "ranks": lambda: FsdpSource(small_model(), ranks=[0, 1]),
        "good": lambda: FsdpSource(_placed(Shard(0), torch.zeros(2, 2), (8, 2))),
    }
    return {name: text_of(make) for name, make in cases.items()}


def outside_of_the_mesh(job: Job) -> str:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("shard",))
    model = _placed(Shard(0), torch.zeros(4), (8,), mesh)
    return text_of(lambda: FsdpSource(model))


def residual(job: Job) -> dict[str, Any]:
    """A merged weight that needs all shards: gathered by a collective in the conversion, owned by rank 2."""
    model = small_model()
    fully_shard(model, mesh=mesh_of(4))

    def convert() -> dict[str, torch.Tensor]:
        return {"merged": (model[0].weight.full_tensor() * 2).bfloat16()}

    source = FsdpSource(
        model,
        conversions=lambda t: {"merged": t["0.weight"] * 2, "bias": t["0.bias"]},
        residuals=[Residual(("merged",), convert, owner=2)],
    )
    answer = write_read(job, source, None)
    if job.rank == 0:
        np.savez(job.directory / "expected.npz", merged=flat_bits((small_model()[0].weight * 2).bfloat16()))
    return answer


def talks(job: Job) -> list[Any]:
    """Messages among ranks over two exchanges, which do not hear each other."""
    one, other = TorchExchange(None, job.rank, job.size), default_exchange()
    one.put(f"from/{job.rank}", bytes([job.rank, 0, 255]))
    dist.barrier()
    heard = [list(one.get(f"from/{rank}") or b"nothing") for rank in range(job.size)]
    deaf = other.get("from/0") is None and one.get("from/9") is None
    dist.barrier()
    one.delete(f"from/{job.rank}")
    one.delete("from/9")
    dist.barrier()
    return [other.rank, other.size, heard, deaf, one.get("from/0") is None]
