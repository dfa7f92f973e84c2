"""A Megatron-Core trainer as a source: every rank publishes its own shards, and nothing is gathered.

The rank's place comes from Megatron's parallel state, the numbers of fused tensors from its ``TransformerConfig``, the
names from a table of rules (``megatron_names``); ``megatron_plan`` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from deltarefit.errors import UsageError
from deltarefit.manifest import TensorEntry
from deltarefit.ports import Exchange
from deltarefit.sources.arguments import Files, check_dtypes
from deltarefit.sources.dtypes import DTYPES
from deltarefit.sources.megatron_catalog import agree
from deltarefit.sources.megatron_kinds import Layout, Numbers, Placed
from deltarefit.sources.megatron_layouts import Cut, DeltaNet, Heads, Mamba
from deltarefit.sources.megatron_names import Table, table
from deltarefit.sources.megatron_plan import Chunk, Planned, canonical_shapes, plan
from deltarefit.sources.process_group import default_exchange
from deltarefit.sources.replicas import Replicated
from deltarefit.sources.replicated import ReplicatedSource
from deltarefit.sources.tensors import Part

KEPT = {"*.e_score_correction_bias": torch.float32}
"""Canonical dtypes of tensors that are not stored like the others, by pattern of their names."""


class MegatronSource(ReplicatedSource):
    """``ports.Source`` of one rank: the chunks of ``GPTModel`` or ``MambaModel`` that it trains, wrapped or not.

    On every rank, after the model is made and its weights are loaded::

        chunks = get_model(model_provider, ModelType.encoder_or_decoder)      # as Megatron's training loop has them
        config = AutoConfig.from_pretrained("Qwen/Qwen3-30B-A3B")
        files = {"config.json": config.to_json_string().encode()}
        publisher = Publisher(open_store("s3://bucket/run7"), MegatronSource(chunks, hf_config=config, files=files))
        optimizer.step()
        publisher.publish(step=step)

    ``hf_config`` is the Hugging Face configuration of the checkpoint, as an object or a mapping: its ``model_type``
    picks the name table, its ``vocab_size`` says where padding begins. ``files`` are side files that receivers put
    beside the tensors, bytes by name, or a function that gives them: a followed directory has a ``config.json`` only if
    it is among them. ``names``: "auto", another family, or rules of one's own; the first that fits counts.
    ``megatron_names.FAMILIES`` has the rules of 14 families by name; they were tested with Megatron-Core 0.16. A model
    with a layer more than its family::

        from deltarefit.sources.megatron_kinds import Rule, column
        from deltarefit.sources.megatron_names import FAMILIES

        mine = Rule("decoder.layers.{layer}.my.weight", column, ("model.layers.{layer}.my.weight",))
        MegatronSource(chunks, hf_config=config, names=(mine, *FAMILIES["llama"]))

    The kinds of tensors (``column``, ``row``, ``qkv``, ...) are the functions of ``megatron_kinds``. ``dtype`` is
    that of all canonical floating-point tensors, but for those that ``dtypes`` names by pattern; parameters of
    another one are cast before they are compared. Expert biases stay float32 unless ``dtypes`` says otherwise.
    ``config`` None: the model's own.

    With ``check_every`` n, every n-th hold begins with ``check_replicas``: tensors that all tensor-parallel ranks
    update for themselves can drift apart. The ranks of ``exchange`` are the global ranks.

    Parameters and persistent buffers are published; each element by one of the ranks that hold it, found without
    communication. With several pipeline stages or expert-parallel ranks the catalog is agreed on over ``exchange``.
    Raises ``UsageError`` that names every tensor whose place in the checkpoint is not known.
    """

    def __init__(
        self,
        model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        hf_config: Any,
        names: str | Table = "auto",
        dtype: torch.dtype = torch.bfloat16,
        dtypes: Mapping[str, torch.dtype] | None = None,
        files: Files = None,
        exchange: Exchange | None = None,
        config: Any = None,
        check_every: int = 0,
    ) -> None:
        check_dtypes({"": dtype, **(dtypes or {})})
        given = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else model_chunks
        chunks = [_unwrapped(one) for one in given]
        self._lazy = [wrapper for one in given for wrapper in _wrappers(one) if _gathers_late(wrapper)]
        config, hf_config = config or chunks[0].config, _text_config(hf_config)
        layout, exchange = layout_of(numbers_of(config, hf_config, chunks)), exchange or default_exchange()
        _check_world(layout, exchange)
        rules = table(names, _get(hf_config, "model_type", None))
        pairs = [pair for chunk in chunks for pair in _planned(chunk, layout, rules, dtype.itemsize)]
        stored = _Stored(dtype, (*(dtypes or {}).items(), *KEPT.items()))
        catalog = agree(_entries(pairs, stored), layout, exchange)
        held_alike = replicated(pairs, layout)
        parts = _parts(pairs, stored)
        super().__init__(parts, catalog, exchange, replicated=held_alike, check_every=check_every, files=files)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """As ``ReplicatedSource.hold``. Where Megatron puts off gathering new parameters to the next forward pass
        (``overlap_param_gather``), they are gathered first, by its own means: until then most of them are old."""
        for wrapper in self._lazy:
            wrapper.start_param_sync(force_sync=True)
        with super().hold():
            yield


@dataclass(frozen=True)
class _Tensor:
    """A parameter or persistent buffer: where the model keeps it, so that it is found again if it was rebound."""

    name: str
    owner: torch.nn.Module
    leaf: str
    buffer: bool

    def now(self) -> torch.Tensor:
        tensor = getattr(self.owner, self.leaf)
        assert isinstance(tensor, torch.Tensor)
        return tensor


@dataclass(frozen=True)
class _Stored:
    """What dtype a canonical tensor has; the first pattern that fits counts."""

    dtype: torch.dtype
    special: Sequence[tuple[str, torch.dtype]]

    def of(self, name: str, local: torch.dtype) -> torch.dtype:
        if not local.is_floating_point:
            return local
        return next((dtype for pattern, dtype in self.special if fnmatchcase(name, pattern)), self.dtype)


@dataclass(frozen=True)
class Converted:
    """Adds to every element, in the trainer's own precision, and casts."""

    add: int
    dtype: torch.dtype

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor + self.add if self.add else tensor).to(self.dtype)


def layout_of(numbers: Numbers) -> Layout:
    """This rank's place, from Megatron's parallel state, which must be initialised."""
    from megatron.core import parallel_state as mpu

    return Layout(
        numbers,
        tp=Cut(mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()),
        pp=Cut(mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()),
        dp=Cut(mpu.get_data_parallel_rank(True), mpu.get_data_parallel_world_size(True)),
        ep=Cut(mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()),
        etp=Cut(mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()),
        edp=Cut(mpu.get_expert_data_parallel_rank(), mpu.get_expert_data_parallel_world_size()),
    )


def numbers_of(config: Any, hf_config: Any, chunks: Sequence[Any]) -> Numbers:
    """The numbers of a model, from its ``TransformerConfig``; the real vocabulary from the checkpoint's."""
    if getattr(config, "heterogeneous_block_specs", False):
        raise UsageError("layers of different sizes are not known", found="heterogeneous_block_specs")
    tied = any(getattr(chunk, "share_embeddings_and_output_weights", False) for chunk in chunks)
    if _get(hf_config, "tie_word_embeddings", tied) != tied:
        raise UsageError(
            "model and checkpoint disagree whether the output layer is tied to the embedding",
            expected=f"tie_word_embeddings={tied} as in the model",
            found=not tied,
        )
    heads = Heads(
        config.num_attention_heads,
        config.num_query_groups or config.num_attention_heads,
        config.kv_channels,
        bool(getattr(config, "attention_output_gate", False)),
    )
    return Numbers(
        vocab=int(_get(hf_config, "vocab_size")),
        layers=config.num_layers,
        attention=heads,
        gated=config.gated_linear_unit,
        tied=tied,
        centred=config.layernorm_zero_centered_gamma,
        experts=config.num_moe_experts or 0,
        interleave=getattr(config, "moe_mlp_glu_interleave_size", None) or 0,
        q_lora=getattr(config, "q_lora_rank", None) or 0,
        kv_lora=(getattr(config, "kv_lora_rank", None) or 0) + (getattr(config, "qk_pos_emb_head_dim", None) or 0),
        delta=_delta_net(config),
        mamba=_mamba(config),
    )


def _delta_net(config: Any) -> DeltaNet | None:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    key_heads, value_heads, key_dim, value_dim = (getattr(config, name, None) or 0 for name in names)
    return DeltaNet(key_heads, value_heads, key_dim, value_dim) if key_heads else None


def _mamba(config: Any) -> Mamba | None:
    """Without a number of heads, the mixer is twice as wide as the model."""
    names = ("mamba_head_dim", "mamba_num_groups", "mamba_state_dim")
    dim, groups, state = (getattr(config, name, None) for name in names)
    if not (dim and groups and state):
        return None
    return Mamba(getattr(config, "mamba_num_heads", None) or 2 * config.hidden_size // dim, dim, groups, state)


def _wrappers(model: Any) -> Iterator[Any]:
    """Whatever is around a model for data parallelism and half precision, from outside in, and at last itself."""
    yield model
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
        yield model


def _unwrapped(model: Any) -> Any:
    *_, inner = _wrappers(model)
    if not hasattr(inner, "decoder"):
        raise UsageError(
            "not a Megatron-Core language model",
            expected="GPTModel or MambaModel, with a decoder",
            found=type(inner).__name__,
        )
    return inner


def _gathers_late(wrapper: Any) -> bool:
    return bool(getattr(getattr(wrapper, "ddp_config", None), "overlap_param_gather", False))


def _check_world(layout: Layout, exchange: Exchange) -> None:
    ranks = layout.tp.size * layout.pp.size * layout.dp.size
    if exchange.size != ranks:
        raise UsageError(
            "the ranks that publish are not those that train",
            expected=f"{ranks} ranks in Megatron's parallel state",
            found=f"{exchange.size} in the exchange",
        )


def _text_config(hf_config: Any) -> Any:
    return _get(hf_config, "text_config", None) or hf_config


def _get(hf_config: Any, name: str, *default: Any) -> Any:
    found = hf_config.get(name) if isinstance(hf_config, Mapping) else getattr(hf_config, name, None)
    if found is None and not default:
        raise UsageError(
            f"the Hugging Face configuration has no {name}", next_step="Pass the checkpoint's config.json."
        )
    return default[0] if found is None else found


def _tensors(model: torch.nn.Module) -> Iterator[_Tensor]:
    """Every parameter, shared ones once, and every persistent buffer: those are not among the parameters."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        persistent = (leaf for leaf in module._buffers if leaf not in module._non_persistent_buffers_set)
        for leaf, buffer in (*((leaf, False) for leaf in module._parameters), *((leaf, True) for leaf in persistent)):
            tensor = getattr(module, leaf)
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield _Tensor(f"{prefix}.{leaf}" if prefix else leaf, module, leaf, buffer)


Pair = tuple[Planned, _Tensor]


def replicated(pairs: Sequence[Pair], layout: Layout) -> list[Replicated]:
    """All tensors that other ranks hold as well, with those ranks."""
    return [
        Replicated(one.name, tensor.now, group)
        for one, tensor in pairs
        if one.placed.copies.size > 1 and len(group := _group(one.placed, layout)) > 1
    ]


def _group(placed: Placed, layout: Layout) -> tuple[int, ...]:
    """Global ranks that hold the same; of norms that only some tensor-parallel ranks share, those of this one."""
    from megatron.core import parallel_state as mpu

    if placed.expert:
        group = mpu.get_expert_data_parallel_group()
    elif placed.copies.size == layout.dp.size * layout.tp.size:
        group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    else:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))


def _planned(model: Any, layout: Layout, rules: Table, width: int) -> list[Pair]:
    """What this rank has of one chunk, each with where it is kept."""
    held = {tensor.name: tensor for tensor in _tensors(model)}
    shapes = {name: tuple(tensor.now().shape) for name, tensor in held.items()}
    parallel = frozenset(name for name in held if getattr(held[name].now(), "tensor_model_parallel", False))
    chunk = Chunk(shapes, [layer.layer_number - 1 for layer in model.decoder.layers], parallel)
    return [(one, held[one.local]) for one in plan(layout, chunk, rules, width)]


def _entries(pairs: Sequence[Pair], stored: _Stored) -> list[TensorEntry]:
    """All canonical tensors that this rank has any part of, owned or not."""
    shapes = canonical_shapes(one for one, _ in pairs)
    local = {name: tensor.now().dtype for one, tensor in pairs for name in one.placed.shapes}
    return [TensorEntry(name, DTYPES[stored.of(name, local[name])], shape) for name, shape in sorted(shapes.items())]


def _parts(pairs: Sequence[Pair], stored: _Stored) -> list[Part]:
    return [_part(one, tensor, stored) for one, tensor in pairs if one.map.boxes]


def _part(one: Planned, tensor: _Tensor, stored: _Stored) -> Part:
    """Buffers are small, and Megatron changes the precision of some when it first runs: they are cast as they are
    fetched."""
    local = tensor.now().dtype
    dtype, add = stored.of(min(one.placed.shapes), local), one.placed.add
    if tensor.buffer:
        return Part(one.name, lambda: tensor.now().to(dtype), one.map, Converted(add, dtype) if add else None)
    return Part(one.name, tensor.now, one.map, Converted(add, dtype) if add or local != dtype else None)
