"""One rank of real Megatron-Core trainers on the CPU (gloo), for ``test_source_megatron``: builds and trains small
models under several parallel layouts, and writes down what its source reads and what it holds.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deltarefit.errors import IntegrityError
from deltarefit.sources.megatron import MegatronSource
from tests.distributed import Job
from tests.megatron_oracle import Grid, Model
from tests.sources import read_pieces

WORLD = 4
TOKENS = 12


@dataclass(frozen=True)
class Case:
    """A model of a family, and how it is laid over the ranks. ``options`` go to Megatron's configuration, ``hf`` to the
    one of transformers. ``train``: False for a model in evaluation mode, which gets gradients all the same: in training
    mode Megatron wants sequence parallelism for experts beside tensor parallelism, whose norms need a GPU."""

    name: str
    family: str
    model: Model
    grid: Grid
    options: dict[str, Any] = field(default_factory=dict)
    hf: dict[str, Any] = field(default_factory=dict)
    train: bool = True

    @property
    def hf_config(self) -> dict[str, Any]:
        """What a checkpoint's ``config.json`` would say."""
        model = self.model
        return {
            "model_type": self.family, "vocab_size": model.vocab, "tie_word_embeddings": model.tied,
            "hidden_size": model.hidden, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
            "num_key_value_heads": model.groups, "head_dim": model.dim, "intermediate_size": model.ffn,
            "rms_norm_eps": 1e-6, **self.hf,
        }  # fmt: skip


_EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}  # fmt: skip
_HF_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_BIAS = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip
_HF_BIAS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "use_qk_norm": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "partial_rotary_factor": 1.0,
}  # fmt: skip
_SMALL = Model(hidden=32, layers=2, heads=8, groups=4, dim=8, ffn=40, vocab=50, padded=56)
_MOE = replace(_SMALL, experts=4, expert_ffn=24)
_GLM = replace(_MOE, shared_ffn=24, dense_first=1, expert_bias=True)
CASES = [
    Case("dense", "qwen3", _SMALL, Grid(tp=2, dp=2)),
    Case("narrow", "qwen3", replace(_SMALL, layers=1, groups=2), Grid(tp=4)),
    Case("stages", "qwen2", replace(_SMALL, layers=4, heads=4, groups=2, tied=True, bias=True, qk_norm=False),
         Grid(tp=2, pp=2, vpp=2), {"add_qkv_bias": True}),
    Case("experts", "qwen3_moe", _MOE, Grid(dp=4, ep=2), _EXPERTS, {
        **_HF_EXPERTS, "num_experts": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    }),
    Case("mixed", "glm4_moe", _GLM, Grid(tp=2, dp=2, ep=2), {**_EXPERTS, **_BIAS}, {**_HF_EXPERTS, **_HF_BIAS},
         train=False),
]  # fmt: skip


class Wrapped(torch.nn.Module):
    """As wrappers for data parallelism and half precision hold a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def preload() -> None:
    """For processes that fork: import Megatron-Core, and answer for the CPU what 0.16 asks of CUDA on the way."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model  # noqa: F401
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment, method-assign]
    parallel_random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    moe_utils.te_general_gemm = None


def build(case: Case) -> list[Any]:
    """This rank's model chunks, with seeded weights that differ from rank to rank only where shards do."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config, model, grid = _config(case), case.model, case.grid
    torch.manual_seed(0)
    chunks = []
    for stage in range(grid.vpp):
        vp_stage = stage if grid.vpp > 1 else None
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunks.append(GPTModel(
            config, spec, model.padded, 64, pre_process=first, post_process=last, parallel_output=False,
            share_embeddings_and_output_weights=model.tied, position_embedding_type="rope", vp_stage=vp_stage,
        ))  # fmt: skip
    return chunks


def _config(case: Case) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, grid = case.model, case.grid
    fused = ("bias_activation", "bias_dropout", "masked_softmax", "gradient_accumulation")
    return TransformerConfig(
        num_layers=model.layers, hidden_size=model.hidden, num_attention_heads=model.heads, kv_channels=model.dim,
        num_query_groups=model.groups, ffn_hidden_size=model.ffn, qk_layernorm=model.qk_norm, normalization="RMSNorm",
        layernorm_epsilon=1e-6, add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, init_method_std=0.1,
        persist_layer_norm=False, tensor_model_parallel_size=grid.tp, pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None, pipeline_dtype=torch.float32,
        expert_model_parallel_size=grid.ep, expert_tensor_parallel_size=grid.etp,
        **{f"{name}_fusion": False for name in fused}, **case.options,
    )  # fmt: skip


def forward(case: Case, chunks: Sequence[Any], tokens: torch.Tensor) -> list[torch.Tensor]:
    """What each chunk of this rank gives. Hidden states go from chunk to chunk by broadcast in the pipeline."""
    from megatron.core import parallel_state as mpu

    group, stages, last = mpu.get_pipeline_model_parallel_group(), case.grid.pp, case.grid.pp * case.grid.vpp - 1
    length, given = tokens.numel(), []
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    hidden = torch.zeros(length, 1, case.model.hidden)
    for step in range(last + 1):
        if step % stages == mpu.get_pipeline_model_parallel_rank():
            chunks[step // stages].set_input_tensor(hidden if step else None)
            given.append(chunks[step // stages](tokens[None], torch.arange(length)[None], mask))
            hidden = given[-1].detach().clone()
        if stages > 1 and step < last:
            dist.broadcast(hidden, dist.get_global_rank(group, step % stages), group)
            hidden.requires_grad_()
    return given


def train(case: Case, chunks: Sequence[Any], optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """One step. All copies of a parameter get the same gradient, as Megatron's own trainer sees to."""
    optimizer.zero_grad()
    for given in forward(case, chunks, tokens):
        (given.float() ** 2).mean().backward()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            _share_gradient(case, chunk, name, parameter)
    optimizer.step()
    for name, buffer in ((n, b) for chunk in chunks for n, b in chunk.named_buffers() if n.endswith("expert_bias")):
        buffer.add_(noise(name, buffer.shape), alpha=0.01)


def _share_gradient(case: Case, chunk: Any, name: str, parameter: torch.nn.Parameter) -> None:
    from megatron.core import parallel_state as mpu

    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if ".experts." not in name:
        dist.all_reduce(parameter.grad, group=mpu.get_data_parallel_group(True))
        if not getattr(parameter, "tensor_model_parallel", False):
            dist.all_reduce(parameter.grad, group=mpu.get_tensor_model_parallel_group())
    else:
        dist.all_reduce(parameter.grad, group=mpu.get_expert_data_parallel_group())
    shared = parameter is getattr(chunk, "shared_embedding_or_output_weight", lambda: None)()
    if case.model.tied and case.grid.pp > 1 and shared:
        dist.all_reduce(parameter.grad, group=mpu.get_embedding_group())


def noise(name: str, shape: Sequence[int]) -> torch.Tensor:
    """The same wherever the same name is given."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def shake(chunks: Sequence[Any]) -> None:
    """Make every tensor different from every other, copies alike: the first values repeat from stage to stage, and all
    norms are one."""
    from megatron.core import parallel_state as mpu

    for chunk in chunks:
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            if found := re.match(r"decoder\.layers\.(\d+)", name):
                name += f" of layer {chunk.decoder.layers[int(found[1])].layer_number}"
            if chunk.share_embeddings_and_output_weights:
                name = name.replace("output_layer", "embedding.word_embeddings")
            if getattr(tensor, "tensor_model_parallel", False):
                expert = ".experts." in name
                name += f" {mpu.get_expert_tensor_parallel_rank() if expert else mpu.get_tensor_model_parallel_rank()}"
                name += f" {mpu.get_expert_model_parallel_rank()}" if expert else ""
            tensor.data.add_(noise(name, tensor.shape), alpha=0.1)


# ------------------------------------------------------------------------------------ what is written down


def run(job: Job, name: str) -> str:
    """Two steps, then what the source reads in bfloat16 and in float32, the local tensors, and the logits. The
    answer is what became of a copy that drifted on the last rank."""
    from megatron.core import parallel_state as mpu

    case = next(case for case in CASES if case.name == name)
    grid = case.grid
    mpu.initialize_model_parallel(
        grid.tp, grid.pp, grid.vpp if grid.vpp > 1 else None, expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
    )  # fmt: skip
    chunks = build(case)
    shake(chunks)
    for chunk in chunks:
        chunk.train(case.train)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, case.model.vocab, TOKENS))
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=0.01)
    for _ in range(2):
        train(case, chunks, optimizer, tokens)
    arrays: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        state = {
            **dict(chunk.named_parameters()),
            **{n: b for n, b in chunk.named_buffers() if n.endswith("expert_bias")},
        }
        arrays |= {f"local/{number}/{name}": tensor.detach().numpy() for name, tensor in state.items()}
    for dtype in (torch.bfloat16, torch.float32):
        arrays |= _read(case, chunks, dtype)
    with torch.no_grad():
        logits = forward(case, chunks, tokens)[-1]
    if mpu.is_pipeline_last_stage():
        arrays["logits"] = logits[0].numpy()
    np.savez(job.directory / f"{job.rank}.npz", **arrays)
    answer = drift(case, chunks)
    mpu.destroy_model_parallel()
    return answer


def drift(case: Case, chunks: Sequence[Any]) -> str:
    """Change one bit of a norm that all ranks of a stage hold, on the last rank: what each finds out."""
    source = MegatronSource(chunks, hf_config=case.hf_config, check_every=2)
    with source.hold():
        pass
    norm = chunks[-1].decoder.layers[-1].input_layernorm.weight
    if dist.get_rank() == WORLD - 1:
        norm.data.view(torch.int32)[0] ^= 1
    with source.hold():
        pass
    try:
        source.check_replicas(60)
    except IntegrityError as error:
        return str(error)
    return "all alike"


def _read(case: Case, chunks: Sequence[Any], dtype: torch.dtype) -> dict[str, Any]:
    source = MegatronSource([Wrapped(chunk) for chunk in chunks], hf_config=case.hf_config, dtype=dtype)
    prefix, found = str(dtype).removeprefix("torch."), {}
    for number, (piece, array) in enumerate(read_pieces(source)):
        row = (piece.tensor, piece.offset, piece.length, piece.run, piece.step, piece.pitch, int(piece.overwrite))
        found |= {f"{prefix}/{number}/piece": np.array(row), f"{prefix}/{number}/bits": array}
    return {**found, f"{prefix}/catalog": np.frombuffer(source.catalog.to_bytes(), np.uint8)}
