"""What the loader of SGLang's workers decides by itself: which engines it objects to, and where experts' elements went.
``tests/engines`` runs it in real workers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deltarefit.errors import UsageError
from deltarefit.targets import sglang
from deltarefit.targets.loaded import LoadedModuleTarget
from tests import helpers as h

SHAPES: h.Shapes = {"experts.w13": ("BF16", (3, 8, 20)), "norm": ("BF16", (20,))}
PLAIN: dict[str, Any] = {"load_format": "auto", "quantization": None, "weight_cache_mode": "off", "lora_paths": None}


class UnquantizedLinearMethod:
    """By this name the loader knows SGLang's own."""


class Fp8LinearMethod:
    """Unknown."""


class UnquantizedFusedMoEMethod:
    """Experts whose post-load step packs rows in fours, as CPU kernels want them; or as ``step`` says."""

    step = "pack"

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.step == "pack":
            experts, rows, columns = layer.w13_weight.shape
            packed = layer.w13_weight.data.view(experts, rows // 4, 4, columns).permute(0, 1, 3, 2).contiguous()
            layer.w13_weight = torch.nn.Parameter(packed.view(experts, rows, columns), requires_grad=False)
        elif self.step == "pad":
            layer.w13_weight = torch.nn.Parameter(torch.zeros(3, 8, 32, dtype=torch.bfloat16), requires_grad=False)
        elif self.step == "drop":
            layer.w13_weight = None
        elif self.step == "fail":
            raise NotImplementedError("needs another device")


class Experts(torch.nn.Module):
    def __init__(self, step: str) -> None:
        super().__init__()
        self.w13_weight: Any = torch.nn.Parameter(torch.zeros(3, 8, 20, dtype=torch.bfloat16), requires_grad=False)
        self.quant_method = UnquantizedFusedMoEMethod()
        self.quant_method.step = step


class Model(torch.nn.Module):
    """As an engine holds it: loaded, then packed; ``derived`` is made of a weight and kept beside it."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.experts = Experts(step)
        self.norm = torch.nn.Parameter(torch.zeros(20, dtype=torch.bfloat16), requires_grad=False)
        self.linear = torch.nn.Module()
        self.linear.quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]
        self.w_kc: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {"experts.w13": self.experts.w13_weight, "norm": self.norm}
        for name, tensor in weights:
            places[name].data.copy_(tensor)

    def post_load_weights(self) -> None:
        made = self.norm.data * 2
        self.w_kc = made if self.w_kc is None else self.w_kc.copy_(made)


def loaded(step: str, bits: h.Model) -> Model:
    model = Model(step)
    model.load_weights((n, torch.from_numpy(bits[n].view(np.int16)).view(torch.bfloat16)) for n in SHAPES)
    if step == "pack":
        model.experts.quant_method.process_weights_after_loading(model.experts)
    model.post_load_weights()
    return model


def target_of(model: Model) -> LoadedModuleTarget:
    return LoadedModuleTarget(
        model,
        partial(sglang._load, model),
        after=partial(sglang._derive, model),
        layouts=partial(sglang.layouts_of, model),
        unfilled=lambda name: bool(sglang._UNFILLED.search(name)),
    )


@pytest.mark.parametrize("step", ["pack", "nothing"])
def test_experts_are_refitted_where_their_elements_went(step: str) -> None:
    rng = np.random.default_rng(4)
    chain = h.publish_chain(rng, ("some", "many"), SHAPES)
    model = loaded(step, chain.models[1])
    target = target_of(model)
    assert h.followed(chain.store, target) == 3
    fresh = loaded(step, chain.models[3])
    for live, right in ((model.experts.w13_weight, fresh.experts.w13_weight), (model.norm, fresh.norm)):
        assert torch.equal(live.view(torch.int16), right.view(torch.int16))
    assert model.w_kc is not None
    assert fresh.w_kc is not None
    assert torch.equal(model.w_kc.view(torch.int16), fresh.w_kc.view(torch.int16)), "what is derived is derived anew"
    target.close()


@pytest.mark.parametrize(("step", "says"), [("pad", "pads"), ("drop", "drops a parameter"), ("fail", "another device")])
def test_what_a_post_load_step_does_must_be_known(step: str, says: str) -> None:
    chain = h.publish_chain(np.random.default_rng(4), (), SHAPES)
    target = target_of(loaded(step, chain.models[1]))
    with pytest.raises(UsageError, match=rf"experts\.w13: .*{says}"):
        h.followed(chain.store, target)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("quantization", "fp8", "quantized"),
        ("enable_lora", True, "without --enable-lora"),
        ("lora_paths", ["a"], "LoRA"),
        ("enable_eplb", True, "without --enable-eplb"),
        ("load_format", "dummy", "dummy weights"),
        ("cpu_offload_gb", 2, "offloaded"),
        ("enable_memory_saver", True, "released"),
        ("weight_cache_mode", "server", "weight-cache-mode off"),
    ],
)
def test_objections(option: str, value: object, says: str) -> None:
    model = Model("nothing")
    assert sglang.objections(SimpleNamespace(**PLAIN), model) == []
    [text] = sglang.objections(SimpleNamespace(**{**PLAIN, option: value}), model)
    assert says in text


def test_layers_that_no_refit_reaches_are_named() -> None:
    model = Model("nothing")
    model.linear.quant_method = Fp8LinearMethod()  # type: ignore[assignment]
    [text] = sglang.objections(SimpleNamespace(**PLAIN), model)
    assert "linear (Fp8LinearMethod)" in text
    model.linear.quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]
    model.linear.use_intel_amx_backend = True  # type: ignore[assignment]
    [text] = sglang.objections(SimpleNamespace(**PLAIN), model)
    assert "linear (packed for AMX)" in text


def test_ranks_are_counted_stage_by_stage() -> None:
    arguments = SimpleNamespace(tp_size=2, pp_size=3)
    places = [sglang.place_of(arguments, SimpleNamespace(pp_rank=pp, tp_rank=tp)) for pp in range(3) for tp in range(2)]
    assert places == [(rank, 6) for rank in range(6)]
    assert sglang.file_of(Path("/r"), 30000, 5) == Path("/r/sglang-30000-5.json")
