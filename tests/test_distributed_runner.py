"""The runner of the distributed tests: results by rank, errors by rank, no test hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import Job, RankFailedError, World, world


def total(job: Job, factor: int) -> list[Any]:
    tensor = torch.tensor([job.rank * factor])
    dist.all_reduce(tensor)
    (job.directory / f"{job.rank}.txt").write_text("here")
    return [job.rank, job.size, int(tensor)]


def nothing() -> None:
    """To import before forking."""


def fail(job: Job) -> None:
    raise ValueError("only here")


def hang(job: Job) -> None:
    time.sleep(60)


def test_results_come_by_rank() -> None:
    started = world(4).start(total, 10)
    assert started.results(30) == [[0, 4, 60], [1, 4, 60], [2, 4, 60], [3, 4, 60]]
    assert sorted(path.name for path in started.directory.glob("*.txt")) == [f"{rank}.txt" for rank in range(4)]


def test_a_rank_that_fails_or_hangs_fails_the_test_and_the_next_one_works() -> None:
    lone = World(1, preload="tests.test_distributed_runner:nothing")
    try:
        with pytest.raises(RankFailedError, match="ValueError: only here"):
            lone.run(fail)
        assert lone.run(total, 1) == [[0, 1, 0]]
        with pytest.raises(RankFailedError, match="rank 0: did not answer"):
            lone.run(hang, timeout=0.2)
    finally:
        lone.kill()
