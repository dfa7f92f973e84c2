"""FSDP2 and DTensor models as sources: all ranks together hold every bit of a dense export, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from deltarefit import affine
from deltarefit.elements import Elements
from deltarefit.manifest import Catalog
from deltarefit.pieces import Piece
from tests import fsdp_ranks as ranks
from tests.distributed import world
from tests.sources import Read, assert_same, bits_of, put_together
from tests.tiny_models import MODELS


def check_against_dense(size: int, *arguments: Any) -> list[list[Read]]:
    """Run ``publishes`` on ``size`` ranks: coverage, names, shapes and bits."""
    started = world(size).start(ranks.publishes, *arguments)
    answers = started.results(60)
    assert len({answer["catalog"] for answer in answers}) == 1
    catalog = Catalog.from_bytes(answers[0]["catalog"].encode())
    read: list[list[Read]] = []
    for rank, answer in enumerate(answers):
        with np.load(started.directory / f"{rank}.npz") as arrays:
            pieces = [Piece(*piece) for piece in answer["pieces"]]
            read.append([(piece, arrays[str(number)]) for number, piece in enumerate(pieces)])
    affine.check_coverage(catalog, [[piece for piece, _ in one] for one in read])
    dense = load_file(started.directory / "dense" / "model.safetensors")
    assert {e.name: e.shape for e in catalog.tensors} == {name: tuple(t.shape) for name, t in dense.items()}
    found: dict[str, Elements] = put_together(catalog, [pair for one in read for pair in one])
    assert_same(found, bits_of(dense))
    return read


@pytest.mark.parametrize("name", MODELS)
def test_every_family_over_two_ranks(name: str) -> None:
    check_against_dense(2, name, "fsdp", "bfloat16", None)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_over_four_ranks_as_it_is(name: str) -> None:
    check_against_dense(4, name, "fsdp", None, 100)
