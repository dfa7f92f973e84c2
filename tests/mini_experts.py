"""Miniature engines, continued: loaders of experts, of scales and of state space models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from tests.mini_base import Kinds, Mini


class Experts(Mini):
    """Routed experts, tensor-parallel: w1 and w3 fused, w2 cut by columns; the room is wider than the shares, and is
    cleared before each of them."""

    kinds: ClassVar[Kinds] = {
        f"{e}.{w}": ("BF16", (4, 8) if w == "w2" else (8, 4)) for e in range(3) for w in ("w1", "w2", "w3")
    }

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

    kinds: ClassVar[Kinds] = {
        f"{e}.{w}": ("BF16", (4, 6) if w == "w2" else (6, 4)) for e in range(4) for w in ("w1", "w2", "w3")
    }

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

    kinds: ClassVar[Kinds] = {"down": ("BF16", (3, 8, 4)), "gate_up": ("BF16", (3, 4, 16))}

    def take(self, name: str, w: torch.Tensor) -> None:
        w = w.transpose(-1, -2)
        shards = zip(("w1", "w3"), w.chunk(2, dim=1), strict=True) if name == "gate_up" else [("w2", w)]
        for which, part in shards:
            for expert, one in enumerate(part.unbind(0)):
                self.place(expert, which, one)


class Scales(Mini):
    """Scales: one a tensor, kept in a row by expert; a grid of blocks that is kept finer; and an input scale whose
    loader compares it with another one."""

    kinds: ClassVar[Kinds] = {
        "blocks": ("F32", (3, 2)),
        "input.0": ("F32", (1,)),
        "weight.0": ("F32", ()),
        "weight.1": ("F32", ()),
        "weight.2": ("F32", ()),
    }
    modes: ClassVar = {"input.0": "opaque"}

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

    kinds: ClassVar[Kinds] = {
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


class Gathered(Mini):
    """Stacked experts by an index table (Llama-4 with expert parallelism)."""

    kinds: ClassVar[Kinds] = {"experts": ("BF16", (8, 3, 2)), "reversed": ("F32", (6,))}

    def build(self) -> None:
        self.room("slots", 8 // self.size, 2, 3)
        self.room("back", 6, dtype=torch.float32)

    def take(self, name: str, w: torch.Tensor) -> None:
        if name == "reversed":
            self.back.data.copy_(w.flip(0))
            return
        table = (torch.arange(8) % self.size == self.rank).nonzero().reshape(-1)
        for slot, one in enumerate(w[table].transpose(-1, -2)):
            self.slots.data[slot].copy_(one)


class Mamba(Mini):
    """``mamba_v2_sharded_weight_loader``: parts of one projection, by slice assignment; one group of B and C, which all
    ranks have; A, of which the loader makes -exp in a second write."""

    kinds: ClassVar[Kinds] = {
        "A_log": ("F32", (8,)),
        "D": ("F32", (8,)),
        "conv1d": ("BF16", (16, 1, 3)),
        "in_proj": ("BF16", (32, 5)),
    }
    modes: ClassVar = {"A_log": "opaque"}
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


class Mixed(Mini):
    """A bias of which all ranks but the first clear a part in place: what they hold is no copy any more, so that the
    whole tensor goes through the native loader everywhere."""

    kinds: ClassVar[Kinds] = {"bias": ("BF16", (6,)), "weight": ("BF16", (4, 6))}
    modes: ClassVar = {"bias": "opaque"}
    sizes = (2, 4)

    def build(self) -> None:
        self.room("b", 6)
        self.room("w", 4 // self.size, 6)

    def take(self, name: str, w: torch.Tensor) -> None:
        if name == "weight":
            self.w.data.copy_(self.mine(w, 0))
        else:
            if self.rank:
                w[:4].zero_()
            self.b.data.copy_(w)
