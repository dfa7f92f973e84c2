"""Fixtures of the tests against real engines: checkpoints of the zoo, saved once for a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines import zoo


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(name, seed=0)`` gives the directory of a zoo model; nobody may write into it."""

    @functools.cache
    def saved(name: str, seed: int = 0) -> Path:
        return zoo.save(name, tmp_path_factory.mktemp(f"{name}-{seed}-"), seed)

    return saved
