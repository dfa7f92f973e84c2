"""Miniature engines: every kind of weight loader that serving engines have, operation for operation, in a few lines.

Each class is one part of a model on rank ``rank`` of ``size``; ``load_weights`` takes (checkpoint name, tensor) pairs as
those of vLLM and SGLang do, and writes to its parameters in their ways: narrowed, fused, transposed, padded, permuted,
through buffers in between, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from deltarefit.manifest import TORCH_NAMES

Weights = Iterable[tuple[str, torch.Tensor]]
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""Safetensors dtype and shape by checkpoint name."""
BF16 = torch.bfloat16


class Mini(nn.Module):
    """A part of an engine. ``kinds`` is its checkpoint; ``modes`` says how tensors reach it that do not go element for
    element; ``aliases`` are other names of tied tensors; ``scratch`` are tensors that no checkpoint fills."""

    kinds: ClassVar[Kinds]
    modes: ClassVar[Mapping[str, str]] = {}
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    scratch: ClassVar[tuple[str, ...]] = ()
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.build()

    def build(self) -> None:
        """Make the parameters of this rank."""
        raise NotImplementedError

    def room(self, name: str, *shape: int, dtype: torch.dtype = BF16) -> nn.Parameter:
        """A parameter that is full of rubbish, as fresh memory is."""
        parameter = nn.Parameter(rubbish(shape, dtype), requires_grad=False)
        self.register_parameter(name, parameter)
        return parameter

    def load_weights(self, weights: Weights) -> set[str]:
        taken = set()
        for name, tensor in weights:
            self.take(name, tensor)
            taken.add(name)
        return taken

    def take(self, name: str, w: torch.Tensor) -> None:
        """Load one tensor: as it is."""
        default(self.own(name), w)

    def own(self, name: str) -> torch.Tensor:
        """A parameter or buffer by its name."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}[name]

    def mine(self, w: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share of a dimension."""
        return w.narrow(dim, self.rank * (w.shape[dim] // self.size), w.shape[dim] // self.size)


def rubbish(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory before anything was loaded."""
    nbytes = math.prod(shape) * dtype.itemsize
    fill = 1 if dtype is torch.bool else 0xA5
    return torch.full((nbytes,), fill, dtype=torch.uint8).view(dtype).reshape(shape)


def default(param: torch.Tensor, w: torch.Tensor) -> None:
    """``default_weight_loader``."""
    if param.numel() == 1 and w.numel() == 1:
        param.data.copy_(w.view(param.shape))
    else:
        assert param.size() == w.size(), f"expected {param.size()}, found {w.size()}"
        param.data.copy_(w)


class Plain(Mini):
    """Replicated tensors of many dtypes, persistent buffers, BatchNorm statistics; and a cache that is never loaded."""

    kinds = {
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
    modes = {"empty": "skipped"}
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

    kinds = {
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

    kinds = {"0.gate": ("BF16", (8, 5)), "0.up": ("BF16", (8, 5)), "1.gate_up": ("BF16", (16, 5))}

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

    kinds = {
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

    kinds = {"embed": ("BF16", (11, 3)), "sinks": ("BF16", (6,))}

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


class Experts(Mini):
    """Routed experts, tensor-parallel: w1 and w3 fused, w2 cut by columns; the room is wider than the shares, and is
    cleared before each of them."""

    kinds = {f"{e}.{w}": ("BF16", (4, 8) if w == "w2" else (8, 4)) for e in range(3) for w in ("w1", "w2", "w3")}

    def build(self) -> None:
        self.n = 8 // self.size
        self.room("w13", 3, 2 * (self.n + 1), 4)
        self.room("w2", 3, 4, self.n + 1)

    def take(self, name: str, w: torch.Tensor) -> None:
        e, which = name.split(".")
        self.place(int(e), which, w)

    def place(self, expert: int, which: str, w: torch.Tensor) -> None:
        dim = 1 if which == "w2" else 0
        room = self.w2.data[expert]
        if which != "w2":
            room = self.w13.data[expert].narrow(0, 0 if which == "w1" else self.n + 1, self.n + 1)
        room.fill_(0)
        room.narrow(dim, 0, self.n).copy_(self.mine(w, dim))


class ExpertParallel(Mini):
    """Experts by number over ranks; a map says where each lies here, -1 elsewhere."""

    kinds = {f"{e}.{w}": ("BF16", (4, 6) if w == "w2" else (6, 4)) for e in range(4) for w in ("w1", "w2", "w3")}

    def build(self) -> None:
        n = 4 // self.size
        self.room("w13", n, 12, 4)
        self.room("w2", n, 4, 6)
        self.map = {e: e - self.rank * n if e // n == self.rank else -1 for e in range(4)}

    def take(self, name: str, w: torch.Tensor) -> None:
        e, which = name.split(".")
        slot = self.map[int(e)]
        if slot == -1:
            return
        if which == "w2":
            self.w2.data[slot].copy_(w)
        else:
            self.w13.data[slot].narrow(0, 0 if which == "w1" else 6, 6).copy_(w)


class FusedExperts(Experts):
    """All experts in one 3-D checkpoint tensor, inputs first: transposed, cut in two, taken apart."""

    kinds = {"down": ("BF16", (3, 8, 4)), "gate_up": ("BF16", (3, 4, 16))}

    def take(self, name: str, w: torch.Tensor) -> None:
        w = w.transpose(-1, -2)
        shards = zip(("w1", "w3"), w.chunk(2, dim=1), strict=True) if name == "gate_up" else [("w2", w)]
        for which, part in shards:
            for expert, one in enumerate(part.unbind(0)):
                self.place(expert, which, one)


class Scales(Mini):
    """Scales: one a tensor, kept in a row by expert; a grid of blocks that is kept finer; and an input scale whose
    loader compares it with another one."""

    kinds = {
        "blocks": ("F32", (3, 2)),
        "input.0": ("F32", (1,)),
        "weight.0": ("F32", ()),
        "weight.1": ("F32", ()),
        "weight.2": ("F32", ()),
    }
    modes = {"input.0": "opaque"}

    def build(self) -> None:
        self.room("fine", 6, 2, dtype=torch.float32)
        self.room("each", 3, dtype=torch.float32)
        self.room("input", 1, dtype=torch.float32)

    def take(self, name: str, w: torch.Tensor) -> None:
        kind, _, expert = name.partition(".")
        if kind == "blocks":
            self.fine.data[:] = w.repeat_interleave(2, dim=0)
        elif kind == "weight":
            self.each.data[int(expert)] = w.reshape(())
        else:
            self.input.data[0] = w[0].abs() if w[0].item() < 0 else w[0]


class GptOss(Mini):
    """Experts stored inputs first, permuted into fresh memory; a bias that only rank 0 has, as others clear it in
    place; and blocks that go into padded rows."""

    kinds = {
        "blocks": ("U8", (2, 3, 2, 4)),
        "down": ("BF16", (2, 8, 4)),
        "down_bias": ("BF16", (2, 4)),
        "gate_up": ("BF16", (2, 4, 16)),
        "gate_up_bias": ("BF16", (2, 16)),
    }

    def build(self) -> None:
        n = 8 // self.size
        self.room("w13", 2, 2 * n, 4)
        self.room("w13_bias", 2, 2 * n)
        self.room("w2", 2, 4, n)
        self.room("w2_bias", 2, 4)
        self.room("quant", 2, 4, 10, dtype=torch.uint8)

    def take(self, name: str, w: torch.Tensor) -> None:
        if name == "blocks":
            w = w.reshape(2, 3, -1).contiguous()
            self.quant.data[:, : w.shape[1], : w.shape[2]].copy_(w)
        elif name == "gate_up":
            n = 16 // self.size
            self.w13.copy_(w[:, :, self.rank * n : (self.rank + 1) * n].permute(0, 2, 1).contiguous())
        elif name == "gate_up_bias":
            self.w13_bias.copy_(self.mine(w, 1))
        elif name == "down":
            self.w2.copy_(self.mine(w, 1).permute(0, 2, 1).contiguous())
        else:
            if self.rank:
                w.zero_()
            self.w2_bias.data.copy_(w)


class Gpt2(Mini):
    """Conv1D weights, stored inputs first: turned round, then q, k, v as ever."""

    kinds = {"attn": ("F32", (4, 24)), "attn_bias": ("F32", (24,)), "proj": ("F32", (8, 4))}

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


class Mamba(Mini):
    """``mamba_v2_sharded_weight_loader``: parts of one projection, by slice assignment; one group of B and C, which all
    ranks have; A, of which the loader makes -exp in a second write."""

    kinds = {"A_log": ("F32", (8,)), "D": ("F32", (8,)), "conv1d": ("BF16", (16, 1, 3)), "in_proj": ("BF16", (32, 5))}
    modes = {"A_log": "opaque"}
    parts = ((8, False), (8, False), (4, True), (4, True), (8, False))
    """Rows of z, x, B, C, dt; whether all ranks have them."""

    def build(self) -> None:
        self.room("A", 8 // self.size, dtype=torch.float32)
        self.room("D", 8 // self.size, dtype=torch.float32)
        self.room("conv", 8 // self.size + 8, 1, 3)
        self.room("proj", 24 // self.size + 8, 5)

    def take(self, name: str, w: torch.Tensor) -> None:
        if name == "A_log":
            self.A.data.copy_(self.mine(w, 0))
            self.A.data.copy_(-torch.exp(self.A))
        elif name == "D":
            self.D.data.copy_(self.mine(w, 0))
        elif name == "conv1d":
            self.cut(self.conv, w, self.parts[1:4])
        else:
            self.cut(self.proj, w, self.parts)

    def cut(self, param: nn.Parameter, w: torch.Tensor, parts: Iterable[tuple[int, bool]]) -> None:
        at = row = 0
        for rows, shared in parts:
            n = rows if shared else rows // self.size
            first = row if shared else row + self.rank * n
            param.data[at : at + n, ...] = w[first : first + n, ...].view_as(param.data[at : at + n])
            at, row = at + n, row + rows


class Casts(Mini):
    """Tensors that are kept in another dtype. BF16 bits are the upper half of FP32."""

    kinds = {
        "bias": ("BF16", (6,)),
        "gate": ("BF16", (4, 3)),
        "f16": ("F16", (5,)),
        "narrow": ("F32", (5,)),
        "steps": ("I64", (3,)),
    }
    modes = {
        "bias": "xor-shifted", "gate": "xor-shifted", "f16": "opaque", "narrow": "opaque", "steps": "opaque",
    }  # fmt: skip

    def build(self) -> None:
        for name, dtype in (("bias", torch.float32), ("f16", torch.float32), ("narrow", BF16), ("steps", torch.int32)):
            self.room(name, *self.kinds[name][1], dtype=dtype)
        self.room("gate", 4, 3, dtype=torch.float32)

    def take(self, name: str, w: torch.Tensor) -> None:
        self.own(name).data.copy_(w.to(torch.float32) if name == "gate" else w)


class Gathered(Mini):
    """Stacked experts by an index table (Llama-4 with expert parallelism)."""

    kinds = {"experts": ("BF16", (8, 3, 2)), "reversed": ("F32", (6,))}

    def build(self) -> None:
        self.room("slots", 8 // self.size, 2, 3)
        self.room("back", 6, dtype=torch.float32)

    def take(self, name: str, w: torch.Tensor) -> None:
        if name == "reversed":
            self.back.data.copy_(w.flip(0))
            return
        table = torch.arange(self.rank, 8, self.size)
        for slot, one in enumerate(w[table].transpose(-1, -2)):
            self.slots.data[slot].copy_(one)


class Vision(Mini):
    """q, k and v of all layers are collected; concatenated when the checkpoint has ended."""

    kinds = {f"{layer}.{w}": ("BF16", (4, 3)) for layer in range(2) for w in "qkv"}

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

    kinds = {
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

    kinds = {
        "embed": ("BF16", (6, 4)), "mtp.0.weight": ("BF16", (3,)), "rotary.inv_freq": ("F32", (4,)),
        "table": ("BF16", (5, 2)),
    }  # fmt: skip
    modes = {"mtp.0.weight": "skipped", "rotary.inv_freq": "skipped", "table": "opaque"}
    aliases = {"embed": ("lm_head.weight",)}
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
        Plain, Linear, Merged, Heads, Vocab, Experts, ExpertParallel, FusedExperts, Scales, GptOss, Gpt2, Mamba, Casts,
        Gathered, Vision, Latent, Tied,
    )
}  # fmt: skip
