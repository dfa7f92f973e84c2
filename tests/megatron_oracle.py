"""Megatron-Core layouts by straightforward import code: canonical tensors in, every rank's local tensors out.

Written after the forward passes of Megatron-Core 0.16 (what a rank does with its tensor), with NumPy only and nothing
of ``deltarefit``, so that it can judge the closed forms. Tensors may hold anything; tests put in positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
PADDING = -1


def chunks(tensor: Ids, ranks: int, axis: int = 0) -> list[Ids]:
    """Equal parts in rank order."""
    return np.split(tensor, ranks, axis)


def pad_rows(tensor: Ids, rows: int) -> Ids:
    """An embedding with padding rows behind it."""
    return np.concatenate([tensor, np.full((rows - len(tensor), *tensor.shape[1:]), PADDING, tensor.dtype)])


def fuse_qkv(q: Ids, k: Ids, v: Ids, heads: int, groups: int, dim: int, gate: bool = False) -> Ids:
    """Group after group: its query heads, then its gate heads, its key, its value. A checkpoint with gates has each
    query head followed by its gate head."""
    per, rest = heads // groups, q.shape[1:]
    blocks: list[Ids] = []
    for group in range(groups):
        if gate:
            pairs = q.reshape(heads, 2, dim, *rest)[group * per : (group + 1) * per]
            blocks += [pairs[head, 0] for head in range(per)] + [pairs[head, 1] for head in range(per)]
        else:
            blocks.append(q[group * per * dim : (group + 1) * per * dim])
        blocks += [k[group * dim : (group + 1) * dim], v[group * dim : (group + 1) * dim]]
    return np.concatenate(blocks)


def gated_ranks(gate: Ids, up: Ids, ranks: int, interleave: int = 0) -> list[Ids]:
    """Each rank has its rows of the gate and then those of up, or both by turns."""
    found = []
    for mine_gate, mine_up in zip(chunks(gate, ranks), chunks(up, ranks), strict=True):
        if interleave:
            turns = len(mine_gate) // interleave
            both = zip(np.split(mine_gate, turns), np.split(mine_up, turns), strict=True)
            found.append(np.concatenate([part for pair in both for part in pair]))
        else:
            found.append(np.concatenate([mine_gate, mine_up]))
    return found


def parts_ranks(parts: Sequence[Ids], ranks: int) -> list[Ids]:
    """A fused tensor every part of which is split: each rank has its share of each, one behind the other."""
    split = [chunks(part, ranks) for part in parts]
    return [np.concatenate([part[rank] for part in split]) for rank in range(ranks)]


def grouped_delta_net(qkvz: Ids, ba: Ids, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> list[Ids]:
    """[q, k, v, z, b, a], all heads of each together, from rows by key head: the inverse of how the checkpoint's own
    model takes its two projections apart."""
    per = value_heads // key_heads
    found: list[list[Ids]] = [[] for _ in range(6)]
    for head in np.split(qkvz, key_heads):
        cuts = np.cumsum([key_dim, key_dim, per * value_dim])
        for kind, part in enumerate(np.split(head, cuts)):
            found[kind].append(part)
    for head in np.split(ba, key_heads):
        for kind, part in enumerate(np.split(head, 2), 4):
            found[kind].append(part)
    return [np.concatenate(part) for part in found]


def pairs_from_halves(tensor: Ids, heads: int, dim: int) -> Ids:
    """Rotary rows as adjacent pairs, from a checkpoint that has the first of all pairs before the second of all."""
    rows = []
    for head in np.split(tensor, heads):
        first, second = head[: dim // 2], head[dim // 2 :]
        rows += [row for pair in zip(first, second, strict=True) for row in pair]
    return np.stack(rows)


def old_grouped(gates: Sequence[Ids], ups: Sequence[Ids], downs: Sequence[Ids], ranks: int) -> list[tuple[Ids, Ids]]:
    """(weight1, weight2) of each expert-tensor-parallel rank in the older grouped MLP, for one rank's experts: seen as
    [experts, hidden, gate and up] and [experts, ffn, hidden]; stored as [hidden, -1] and [-1, hidden]."""
    found = []
    for rank in range(ranks):
        first, second = [], []
        for gate, up, down in zip(gates, ups, downs, strict=True):
            first.append(np.concatenate([chunks(gate, ranks)[rank], chunks(up, ranks)[rank]]).T)
            second.append(chunks(down, ranks, 1)[rank].T)
        hidden = gates[0].shape[1]
        found.append((np.stack(first).reshape(hidden, -1), np.stack(second).reshape(-1, hidden)))
    return found


# ------------------------------------------------------------------------------------ ranks and layers


@dataclass(frozen=True)
class Grid:
    """Degrees of parallelism. Tensor-parallel ranks are neighbours, then context and data, then pipeline stages;
    experts are laid over the same ranks of a stage by expert-tensor, expert and expert-data rank."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1

    @property
    def edp(self) -> int:
        return self.tp * self.dp // (self.ep * self.etp)

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp

    def place(self, rank: int) -> dict[str, int]:
        inside, pp = rank % (self.tp * self.dp), rank // (self.tp * self.dp)
        return {
            "tp": inside % self.tp,
            "dp": inside // self.tp,
            "etp": inside % self.etp,
            "ep": inside // self.etp % self.ep,
            "edp": inside // (self.etp * self.ep),
            "pp": pp,
        }

    def stage_layers(self, pp: int, vpp: int, layers: int) -> list[int]:
        """Global numbers of the layers of one model chunk: the model is dealt in turns of one chunk per stage."""
        each = layers // (self.pp * self.vpp)
        start = (vpp * self.pp + pp) * each
        return list(range(start, start + each))


@dataclass(frozen=True)
class Model:
    """A small decoder. ``experts`` 0: dense; otherwise all layers but the first ``dense_first`` have experts, with
    ``shared_ffn`` a shared one beside them. ``vocab`` is padded to ``padded`` rows."""

    hidden: int = 16
    layers: int = 4
    heads: int = 8
    groups: int = 2
    dim: int = 4
    ffn: int = 16
    vocab: int = 21
    padded: int = 32
    experts: int = 0
    expert_ffn: int = 16
    shared_ffn: int = 0
    dense_first: int = 0
    expert_bias: bool = False
    tied: bool = False
    qk_norm: bool = True
    bias: bool = False
    sequential: bool = True

    def canonical(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a checkpoint of the Qwen3 / Qwen3-MoE kind."""
        width, kv = self.heads * self.dim, self.groups * self.dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer(layer, width, kv).items()}
        return shapes

    def has_experts(self, layer: int) -> bool:
        return bool(self.experts) and layer >= self.dense_first

    def _layer(self, layer: int, width: int, kv: int) -> dict[str, tuple[int, ...]]:
        rows = {"q": width, "k": kv, "v": kv}
        shapes: dict[str, tuple[int, ...]] = {f"self_attn.{s}_proj.weight": (n, self.hidden) for s, n in rows.items()}
        if self.bias:
            shapes |= {f"self_attn.{s}_proj.bias": (n,) for s, n in rows.items()}
        if self.qk_norm:
            shapes |= {f"self_attn.{side}_norm.weight": (self.dim,) for side in "qk"}
        shapes |= {"self_attn.o_proj.weight": (self.hidden, width)}
        shapes |= {f"{norm}_layernorm.weight": (self.hidden,) for norm in ("input", "post_attention")}
        if not self.has_experts(layer):
            return shapes | _mlp_shapes("mlp.", self.ffn, self.hidden)
        shapes |= {"mlp.gate.weight": (self.experts, self.hidden)}
        shapes |= {"mlp.gate.e_score_correction_bias": (self.experts,)} if self.expert_bias else {}
        shapes |= _mlp_shapes("mlp.shared_experts.", self.shared_ffn, self.hidden) if self.shared_ffn else {}
        for expert in range(self.experts):
            shapes |= _mlp_shapes(f"mlp.experts.{expert}.", self.expert_ffn, self.hidden)
        return shapes


def _mlp_shapes(prefix: str, ffn: int, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = {f"{prefix}{side}_proj.weight": (ffn, hidden) for side in ("gate", "up")}
    return {**shapes, f"{prefix}down_proj.weight": (hidden, ffn)}


def numbered(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Ids], dict[str, int]]:
    """Tensors of these shapes whose elements all have numbers of their own, and the first number of each."""
    tensors, first, start = {}, {}, 0
    for name, shape in sorted(shapes.items()):
        count = int(np.prod(shape))
        tensors[name], first[name] = np.arange(start, start + count).reshape(shape), start
        start += count
    return tensors, first


Chunks = list[tuple[list[int], dict[str, Ids]]]


def local_tensors(model: Model, grid: Grid, rank: int, hf: dict[str, Ids]) -> Chunks:
    """(layers, local tensors by local name) of each model chunk of one rank, as ``GPTModel`` with local layers names
    them."""
    at = grid.place(rank)
    found: Chunks = []
    for vpp in range(grid.vpp):
        layers = grid.stage_layers(at["pp"], vpp, model.layers)
        tensors: dict[str, Ids] = {}
        first = at["pp"] == 0 and vpp == 0
        last = at["pp"] == grid.pp - 1 and vpp == grid.vpp - 1
        if first:
            tensors["embedding.word_embeddings.weight"] = _vocabulary(model, grid, at, hf["model.embed_tokens.weight"])
        for number, layer in enumerate(layers):
            local = _layer_tensors(model, grid, at, hf, layer)
            tensors |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in local.items()}
        if last:
            tensors["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if not (model.tied and first):
                head = hf["model.embed_tokens.weight" if model.tied else "lm_head.weight"]
                tensors["output_layer.weight"] = _vocabulary(model, grid, at, head)
        found.append((layers, tensors))
    return found


def _vocabulary(model: Model, grid: Grid, at: dict[str, int], tensor: Ids) -> Ids:
    return chunks(pad_rows(tensor, model.padded), grid.tp)[at["tp"]]


def _layer_tensors(model: Model, grid: Grid, at: dict[str, int], hf: dict[str, Ids], layer: int) -> dict[str, Ids]:
    prefix = f"model.layers.{layer}."
    numbers: tuple[Any, ...] = (model.heads, model.groups, model.dim)
    found = {
        "input_layernorm.weight": hf[prefix + "input_layernorm.weight"],
        "pre_mlp_layernorm.weight": hf[prefix + "post_attention_layernorm.weight"],
        "self_attention.linear_proj.weight": chunks(hf[prefix + "self_attn.o_proj.weight"], grid.tp, 1)[at["tp"]],
    }
    for part in ("weight", "bias") if model.bias else ("weight",):
        q, k, v = (hf[f"{prefix}self_attn.{side}_proj.{part}"] for side in "qkv")
        found[f"self_attention.linear_qkv.{part}"] = chunks(fuse_qkv(q, k, v, *numbers), grid.tp)[at["tp"]]
    if model.qk_norm:
        found |= {f"self_attention.{s}_layernorm.weight": hf[f"{prefix}self_attn.{s}_norm.weight"] for s in "qk"}
    if not model.has_experts(layer):
        fc1, fc2 = _mlp_tensors(hf, prefix + "mlp.", grid.tp, at["tp"])
        return found | {"mlp.linear_fc1.weight": fc1, "mlp.linear_fc2.weight": fc2}
    return found | _expert_tensors(model, grid, at, hf, prefix)


def _expert_tensors(model: Model, grid: Grid, at: dict[str, int], hf: dict[str, Ids], prefix: str) -> dict[str, Ids]:
    found = {"mlp.router.weight": hf[prefix + "mlp.gate.weight"]}
    if model.expert_bias:
        found["mlp.router.expert_bias"] = hf[prefix + "mlp.gate.e_score_correction_bias"]
    if model.shared_ffn:
        fc1, fc2 = _mlp_tensors(hf, prefix + "mlp.shared_experts.", grid.tp, at["tp"])
        found |= {"mlp.shared_experts.linear_fc1.weight": fc1, "mlp.shared_experts.linear_fc2.weight": fc2}
    each = model.experts // grid.ep
    for number in range(each):
        fc1, fc2 = _mlp_tensors(hf, f"{prefix}mlp.experts.{at['ep'] * each + number}.", grid.etp, at["etp"])
        if model.sequential:
            found[f"mlp.experts.local_experts.{number}.linear_fc1.weight"] = fc1
            found[f"mlp.experts.local_experts.{number}.linear_fc2.weight"] = fc2
        else:
            found[f"mlp.experts.linear_fc1.weight{number}"] = fc1
            found[f"mlp.experts.linear_fc2.weight{number}"] = fc2
    return found


def _mlp_tensors(hf: dict[str, Ids], prefix: str, ranks: int, rank: int) -> tuple[Ids, Ids]:
    fc1 = gated_ranks(hf[prefix + "gate_proj.weight"], hf[prefix + "up_proj.weight"], ranks)[rank]
    return fc1, chunks(hf[prefix + "down_proj.weight"], ranks, 1)[rank]
