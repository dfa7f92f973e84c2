"""Miniature engines: every kind of weight loader that serving engines have, operation for operation, in a few lines.

Each class is one part of a model on rank ``rank`` of ``size``; ``load_weights`` takes (checkpoint name, tensor) pairs
as those of vLLM and SGLang do, and writes to its parameters in their ways: narrowed, fused, transposed, padded,
permuted, through buffers in between, or not at all.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from tests import mini_experts
from tests.mini_base import BF16, Kinds, Mini, Weights, default, rubbish


class Plain(Mini):
    """Replicated tensors of many dtypes, persistent buffers, BatchNorm statistics; and a cache that is never loaded."""

    kinds: ClassVar[Kinds] = {
        "bn.bias": ("F32", (4,)),
        "bn.num_batches_tracked": ("I64", ()),
        "bn.running_mean": ("F32", (4,)),
        "bn.running_var": ("F32", (4,)),
        "bn.weight": ("F32", (4,)),
        "empty": ("F16", (0, 5)),
        "fp8": ("F8_E4M3", (6, 5)),
        "f16": ("F16", (3, 5)),
        "mask": ("BOOL", (3, 7)),
        "one": ("BF16", ()),
        "steps": ("I32", (7,)),
        "u8": ("U8", (1,)),
        "weight": ("BF16", (6, 4)),
        "wide": ("F64", (2, 3)),
    }
    modes: ClassVar = {"empty": "skipped"}
    scratch = ("cos_cached",)

    def build(self) -> None:
        self.bn = nn.BatchNorm1d(4)
        for name, dtype in (("fp8", torch.float8_e4m3fn), ("f16", torch.float16), ("wide", torch.float64)):
            self.room(name, *self.kinds[name][1], dtype=dtype)
        self.room("empty", 0, 5, dtype=torch.float16)
        self.room("weight", 6, 4)
        self.room("one", 1)
        self.register_buffer("mask", rubbish((3, 7), torch.bool))
        self.register_buffer("steps", rubbish((7,), torch.int32))
        self.register_buffer("u8", rubbish((1,), torch.uint8))
        self.register_buffer("cos_cached", torch.ones(3), persistent=False)


class Linear(Mini):
    """Column-parallel, row-parallel and replicated linear layers, with a 0-d scale that is kept as one element."""

    kinds: ClassVar[Kinds] = {
        "column.bias": ("BF16", (8,)),
        "column.weight": ("BF16", (8, 6)),
        "norm": ("F32", (6,)),
        "row.bias": ("BF16", (6,)),
        "row.scale": ("F32", ()),
        "row.weight": ("BF16", (6, 8)),
    }

    def build(self) -> None:
        n = 8 // self.size
        self.p = {
            "column.bias": self.room("column_bias", n),
            "column.weight": self.room("column_weight", n, 6),
            "norm": self.room("norm", 6, dtype=torch.float32),
            "row.bias": self.room("row_bias", 6),
            "row.scale": self.room("row_scale", 1, dtype=torch.float32),
            "row.weight": self.room("row_weight", 6, n),
        }

    def take(self, name: str, w: torch.Tensor) -> None:
        param = self.p[name].data
        if name.startswith("column"):
            w = self.mine(w, 0)
        elif name == "row.weight":
            w = self.mine(w, 1)
        param.copy_(w.reshape(1) if w.dim() == 0 else w)


class Merged(Mini):
    """Gate and up in one parameter, from two tensors; a second layer whose checkpoint is fused already (Phi-3)."""

    kinds: ClassVar[Kinds] = {"0.gate": ("BF16", (8, 5)), "0.up": ("BF16", (8, 5)), "1.gate_up": ("BF16", (16, 5))}

    def build(self) -> None:
        for layer in range(2):
            self.room(f"p{layer}", 16 // self.size, 5)

    def take(self, name: str, w: torch.Tensor) -> None:
        if name == "1.gate_up":
            for shard in range(2):
                self.place(self.p1, w.narrow(0, 8 * shard, 8), shard)
        else:
            self.place(self.p0, w, ("0.gate", "0.up").index(name))

    def place(self, param: nn.Parameter, w: torch.Tensor, shard: int) -> None:
        n = 8 // self.size
        param.data.narrow(0, shard * n, n).copy_(self.mine(w, 0))


class Heads(Mini):
    """q, k and v in one parameter. Two key heads over four ranks: each is on two of them. The second layer's
    checkpoint is fused."""

    kinds: ClassVar[Kinds] = {
        "0.k.bias": ("F32", (4,)),
        "0.k.weight": ("BF16", (4, 6)),
        "0.q.bias": ("F32", (8,)),
        "0.q.weight": ("BF16", (8, 6)),
        "0.v.bias": ("F32", (4,)),
        "0.v.weight": ("BF16", (4, 6)),
        "1.qkv.weight": ("BF16", (16, 6)),
    }

    def build(self) -> None:
        self.n_q, self.n_kv = 8 // self.size, max(2, 4 // self.size)
        rows = self.n_q + 2 * self.n_kv
        self.p = {
            "0.bias": self.room("b0", rows, dtype=torch.float32),
            "0.weight": self.room("w0", rows, 6),
            "1.weight": self.room("w1", rows, 6),
        }

    def take(self, name: str, w: torch.Tensor) -> None:
        layer, which, leaf = name.split(".")
        if which == "qkv":
            for shard, rows in zip("qkv", w.split([8, 4, 4]), strict=True):
                self.place(self.p[f"{layer}.{leaf}"], rows, shard)
        else:
            self.place(self.p[f"{layer}.{leaf}"], w, which)

    def place(self, param: nn.Parameter, w: torch.Tensor, shard: str) -> None:
        n, rank = (self.n_q, self.rank) if shard == "q" else (self.n_kv, self.rank // max(1, self.size // 2))
        offset = {"q": 0, "k": self.n_q, "v": self.n_q + self.n_kv}[shard]
        param.data.narrow(0, offset, n).copy_(w.narrow(0, rank * n, n))


class Vocab(Mini):
    """Embedding rows of an odd vocabulary, padded with zeros, and attention sinks, padded with -inf: with four ranks
    the last one has nothing but padding."""

    kinds: ClassVar[Kinds] = {"embed": ("BF16", (11, 3)), "sinks": ("BF16", (6,))}

    def build(self) -> None:
        self.room("rows", 16 // self.size, 3)
        self.room("heads", 8 // self.size)

    def take(self, name: str, w: torch.Tensor) -> None:
        param, fill = (self.rows, 0.0) if name == "embed" else (self.heads, -math.inf)
        n = param.shape[0]
        start = min(self.rank * n, w.shape[0])
        mine = w.narrow(0, start, min(n, w.shape[0] - start))
        param[: mine.shape[0]].data.copy_(mine)
        param[mine.shape[0] :].data.fill_(fill)


class Gpt2(Mini):
    """Conv1D weights, stored inputs first: turned round, then q, k, v as ever."""

    kinds: ClassVar[Kinds] = {"attn": ("F32", (4, 24)), "attn_bias": ("F32", (24,)), "proj": ("F32", (8, 4))}

    def build(self) -> None:
        self.room("qkv", 24 // self.size, 4, dtype=torch.float32)
        self.room("qkv_bias", 24 // self.size, dtype=torch.float32)
        self.room("out", 4, 8 // self.size, dtype=torch.float32)

    def take(self, name: str, w: torch.Tensor) -> None:
        if name == "proj":
            self.out.data.copy_(self.mine(w.t(), 1))
            return
        param, n = (self.qkv_bias if name == "attn_bias" else self.qkv), 8 // self.size
        for shard, part in enumerate(w.t().split(8)):
            param.data.narrow(0, shard * n, n).copy_(self.mine(part, 0))


class Casts(Mini):
    """Tensors that are kept in another dtype. BF16 bits are the upper half of FP32."""

    kinds: ClassVar[Kinds] = {
        "bias": ("BF16", (6,)),
        "gate": ("BF16", (4, 3)),
        "f16": ("F16", (5,)),
        "narrow": ("F32", (5,)),
        "steps": ("I64", (3,)),
    }
    modes: ClassVar = {
        "bias": "xor-shifted", "gate": "xor-shifted", "f16": "opaque", "narrow": "opaque", "steps": "opaque",
    }  # fmt: skip

    def build(self) -> None:
        for name, dtype in (("bias", torch.float32), ("f16", torch.float32), ("narrow", BF16), ("steps", torch.int32)):
            self.room(name, *self.kinds[name][1], dtype=dtype)
        self.room("gate", 4, 3, dtype=torch.float32)

    def take(self, name: str, w: torch.Tensor) -> None:
        self.own(name).data.copy_(w.to(torch.float32) if name == "gate" else w)


class Vision(Mini):
    """q, k and v of all layers are collected; concatenated when the checkpoint has ended."""

    kinds: ClassVar[Kinds] = {f"{layer}.{w}": ("BF16", (4, 3)) for layer in range(2) for w in "qkv"}

    def build(self) -> None:
        for layer in range(2):
            self.room(f"qkv{layer}", 12 // self.size, 3)

    def load_weights(self, weights: Weights) -> set[str]:
        found = dict(weights)
        for layer in range(2):
            parts = [found.get(f"{layer}.{w}") for w in "qkv"]
            if all(part is not None for part in parts):
                param = self.get_parameter(f"qkv{layer}")
                param.data.copy_(torch.cat([self.mine(part, 0) for part in parts if part is not None], dim=0))
        return set(found)


class Latent(Mini):
    """q_a and kv_a are kept until both have arrived, in whatever order; two layers, one for each order."""

    kinds: ClassVar[Kinds] = {
        "0.a.kv_a": ("BF16", (3, 4)), "0.b.q_a": ("BF16", (2, 4)), "1.a.q_a": ("BF16", (2, 4)),
        "1.b.kv_a": ("BF16", (3, 4)),
    }  # fmt: skip

    def build(self) -> None:
        self.room("p0", 5, 4)
        self.room("p1", 5, 4)

    def load_weights(self, weights: Weights) -> set[str]:
        kept: dict[str, Any] = {}
        for name, w in weights:
            layer, _, which = name.split(".")
            kept[layer + which] = w
            if layer + "q_a" in kept and layer + "kv_a" in kept:
                fused = torch.cat([kept.pop(layer + "q_a"), kept.pop(layer + "kv_a")], dim=0)
                default(self.own("p" + layer), fused)
        return set()


class Tied(Mini):
    """The head is the embedding and is left out by its name; so are tables of angles and layers for drafts. Of one
    table only the first rows are kept."""

    kinds: ClassVar[Kinds] = {
        "embed": ("BF16", (6, 4)), "mtp.0.weight": ("BF16", (3,)), "rotary.inv_freq": ("F32", (4,)),
        "table": ("BF16", (5, 2)),
    }  # fmt: skip
    modes: ClassVar = {"mtp.0.weight": "skipped", "rotary.inv_freq": "skipped", "table": "opaque"}
    aliases: ClassVar = {"embed": ("lm_head.weight",)}
    sizes = (1, 2)

    def build(self) -> None:
        self.room("rows", 6 // self.size, 4)
        self.head = nn.Module()
        self.head.register_parameter("weight", self.rows)
        self.room("table", 3, 2)

    def load_weights(self, weights: Weights) -> set[str]:
        found = dict(weights)
        if "lm_head.weight" in found and "embed" not in found:
            raise ValueError("lm_head.weight is tied to embed, which was not given")
        for name, w in found.items():
            if name == "embed":
                self.rows.data.copy_(self.mine(w, 0))
            elif name == "table":
                self.table.data.copy_(w[:3])
        return set(found)


CASES: dict[str, type[Mini]] = {
    case.__name__: case
    for case in (
        Plain, Linear, Merged, Heads, Vocab, Gpt2, Casts, Vision, Latent, Tied, mini_experts.Experts,
        mini_experts.ExpertParallel, mini_experts.FusedExperts, mini_experts.Scales, mini_experts.GptOss,
        mini_experts.Gathered, mini_experts.Mamba, mini_experts.Mixed,
    )
}  # fmt: skip
