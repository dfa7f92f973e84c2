"""An FSDP2 trainer over gloo that publishes a real model of 163 million parameters, and saves dense exports.

``World`` (``tests.distributed``) runs its ranks; they keep model, optimizer and publisher from one call to the next:

    with Trainer(base, store) as trainer:
        trainer.advance("train")
        version = trainer.publish()["version"]
        trainer.export(directory)

The model is SmolLM2-135M with an output layer of its own. Masters are float32 and are published as bfloat16; the
embedding is bfloat16 itself, so that the bits planted in it reach receivers as they are.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deltarefit import Publisher, open_store
from deltarefit.demo.model import real_model
from deltarefit.demo.task import problems
from tests.distributed import Job, World

RANKS = 2
LEARNING_RATE = 5e-5
BATCH = 2
COUNTER = "model.layers.0.self_attn.rotary_emb.cos_cached"
"""An integer buffer by a name that engines pass over when they load."""
UNUSED = 7
"""A token (a special one) that neither prompts nor this model's replies have."""
NAN, MINUS_ZERO = 0x7FA5, -0x8000
"""A NaN with a payload, and -0.0, as bfloat16 bits."""
TIMEOUT_S = 240.0
STEPS = ("train", "plant", "count", "nothing")


class Trainer:
    """The ranks of one run. A context manager; entering it publishes version 1, the checkpoint ``base``."""

    def __init__(self, base: Path, store: Path) -> None:
        self._world = World(RANKS, "tests.engines.trainer:preload")
        self._start = str(base), str(store)

    def __enter__(self) -> Trainer:
        self._world.run(start, *self._start, timeout=TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._world.kill()

    def advance(self, kind: str) -> None:
        """One of ``STEPS``; nothing is published yet."""
        self._world.run(advance, kind, timeout=TIMEOUT_S)

    def publish(self) -> dict[str, Any]:
        """Version, digest, and what else rank 0 says of it."""
        found: dict[str, Any] = self._world.run(publish, timeout=TIMEOUT_S)[0]
        return found

    def export(self, into: Path) -> Path:
        """The gathered model as a checkpoint."""
        self._world.run(export, str(into), timeout=TIMEOUT_S)
        return into


def make_base(cache: Path, into: Path) -> Path:
    """The checkpoint that the run and the engines start from. Each element of the output layer differs from the
    embedding's, or an engine would tie them again."""
    from transformers import AutoModelForCausalLM

    directory = real_model(cache)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    head = tensors["model.embed_tokens.weight"].clone()
    head.view(torch.int16).bitwise_xor_(1)
    tensors |= {"lm_head.weight": head, COUNTER: torch.arange(16)}
    model.config.tie_word_embeddings = False
    model.config.save_pretrained(into)
    _save(tensors, into)
    for file in directory.glob("tokenizer*"):
        shutil.copyfile(file, into / file.name)
    return into


def _save(tensors: dict[str, torch.Tensor], into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, into / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip


# ------------------------------------------------------------------------------------------ on the ranks

_state: dict[str, Any] = {}


def preload() -> None:
    """What is slow to import, before ranks are forked."""
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch.distributed.fsdp import fully_shard  # noqa: F401

    logging.getLogger("transformers").setLevel(logging.ERROR)


def start(job: Job, base: str, store: str) -> None:
    """Shard the model, and publish it as it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoTokenizer

    from deltarefit.sources.fsdp import FsdpSource

    model = _sharded(_loaded(Path(base)), init_device_mesh("cpu", (job.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    objects = open_store(store)
    publisher = Publisher(objects, FsdpSource(model), threads=1, deadline_s=120)
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    _state.update(model=model, optimizer=optimizer, publisher=publisher, tokenizer=tokenizer, base=base, steps=0)
    publisher.publish(0)


def _loaded(base: Path) -> Any:
    """Float32, but for the embedding; with the integer buffer of the checkpoint."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base, local_files_only=True)).float()
    tensors = load_file(base / "model.safetensors")
    holder = torch.nn.Module()
    holder.register_buffer("cos_cached", tensors[COUNTER])
    model.model.layers[0].self_attn.rotary_emb = holder
    model.load_state_dict(tensors)
    model.model.embed_tokens.bfloat16()
    return model


def _sharded(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (model.model.embed_tokens, *model.model.layers, model.lm_head):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def advance(job: Job, kind: str) -> None:
    """One of ``STEPS``."""
    {"train": _train, "plant": _plant, "count": _count, "nothing": lambda job: None}[kind](job)
    _state["steps"] += 1


def publish(job: Job) -> dict[str, Any]:
    """Of all ranks together."""
    published = _state["publisher"].publish(_state["steps"])
    names = ("version", "digest", "changed", "density", "wire_bytes", "seconds")
    return {name: getattr(published, name) for name in names}


def _train(job: Job) -> None:
    """AdamW on right answers; each rank has problems of its own."""
    model, optimizer, tokenizer = _state["model"], _state["optimizer"], _state["tokenizer"]
    given = problems(0, _state["steps"] * job.size + job.rank, BATCH)
    ids = tokenizer([one.prompt + one.answer for one in given], return_tensors="pt", padding=True).input_ids
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _plant(job: Job) -> None:
    """A step, and then a NaN with a payload and a -0.0 in the embedding of a token that nobody says."""
    _train(job)
    local = _state["model"].model.embed_tokens.weight.to_local().detach()
    if job.rank == 0:
        local.view(torch.int16)[UNUSED, :2] = torch.tensor([NAN, MINUS_ZERO], dtype=torch.int16)


def _count(job: Job) -> None:
    _state["model"].get_buffer(COUNTER).add_(1 << 40)


def export(job: Job, into: str) -> None:
    """Gathered by DTensor's own collectives, tensor by tensor, cast as a trainer's ``save_pretrained`` would be."""
    from torch.distributed.tensor import DTensor

    model, tensors = _state["model"], {}
    for name, tensor in (*model.named_parameters(), (COUNTER, model.get_buffer(COUNTER))):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if job.rank == 0:
            full = full.detach()
            tensors[name] = full.bfloat16() if full.is_floating_point() else full.clone()
    if job.rank == 0:
        _save(tensors, Path(into))
        for file in Path(_state["base"]).glob("*.json"):
            shutil.copyfile(file, Path(into) / file.name)
