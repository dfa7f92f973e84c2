"""The zoo itself: what the other tests of this directory stand on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engines import zoo


def bits(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor.view(torch.int16)
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_seed_decides_every_bit_of_a_model(name: str, tmp_path: Path) -> None:
    once, again, other = (bits(zoo.save(name, tmp_path / str(i), seed)) for i, seed in enumerate([1, 1, 2]))

    assert once.keys() == again.keys() == other.keys()
    assert all(torch.equal(once[tensor], again[tensor]) for tensor in once)
    assert not [tensor for tensor in once if torch.equal(once[tensor], other[tensor])]
    assert not [tensor for tensor in once if once[tensor].unique().numel() == 1], "equal elements hide misplaced ones"
