"""The apply benchmark at tiny sizes: every way writes the same bits, and wrong bits are caught."""

from __future__ import annotations

import pytest
import torch

from deltarefit.bench import apply, apply_report
from deltarefit.protocol.messages import Op
from deltarefit.targets.placing.rank import RankWeights


def test_quick_run_is_equal_at_every_density() -> None:
    said: list[str] = []
    result = apply.run(True, said.append)
    assert [row["density"] for row in result["rows"]] == list(apply.DENSITIES)
    assert len(said) == len(apply.DENSITIES)
    assert all(row["equal"] for row in result["rows"])
    assert result["rank_bytes"] * 2 == result["canonical_bytes"]
    assert result["rows"][-1]["payload_bytes"] > result["rows"][1]["payload_bytes"] > 0
    assert [goal["reached"] for goal in result["goals"]][1:] == [True, True]
    assert set(result["rows"][0]["rivals"]) == {"dense load", "torch scatter", "no placement", "copy"}
    assert apply_report.table(result) is not None


def test_a_write_that_is_wrong_is_not_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    write = RankWeights.write

    def wrong(self: RankWeights, ref: object, op: Op) -> None:
        write(self, ref, op)  # type: ignore[arg-type]
        next(self._model.parameters()).data.view(torch.int16)[0, 0] ^= 1

    monkeypatch.setattr(RankWeights, "write", wrong)
    assert not any(row["equal"] for row in apply.run(True, lambda text: None)["rows"])


def test_the_rank_holds_its_share_of_the_dense_load() -> None:
    """Ranks together hold every element of the canonical model, each once."""
    size = apply.QUICK
    catalog = apply.catalog_of(size)
    held = sum(p.numel() for rank in range(size.ranks) for p in apply.FusedShard(size, rank).parameters())
    assert held == sum(entry.numel for entry in catalog.tensors)


@pytest.mark.parametrize(("figure", "reached"), [(2.0, True), (1.99, False)])
def test_the_goal_counts_the_rank_s_own_bytes(figure: float, reached: bool) -> None:
    rows = [{"density": 0.03, "rank_gb_s": figure, "extra_bytes": 0, "equal": True}]
    assert apply.goals(rows)[0]["reached"] is reached
