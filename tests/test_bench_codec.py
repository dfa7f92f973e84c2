"""The codec benchmark at tiny sizes: every case runs, the figures add up, bad results are caught."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deltarefit.bench import codec, memory
from deltarefit.bench.codec import Case
from deltarefit.bench.data import generated_pair
from deltarefit.bench.report import table
from deltarefit.errors import RefitError


def test_quick_run_covers_all_cases_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    result = codec.run(tmp_path, quick=True, say=said.append)
    names = [row["case"] for row in result["cases"]]
    assert len(names) == len(set(names)) == 3 + len(codec.DENSITIES) + 2
    assert json.loads(json.dumps(result))["goals"] == result["goals"]
    assert len(said) == len(names) + 1
    for row in result["cases"]:
        assert set(row["others"]) == {rival.name for rival in codec.RIVALS}
        assert row["others"][codec.FULL_COPY]["wire"] == row["model_bytes"]
        assert 0 < row["ours"]["wire"] < row["model_bytes"]
    for peak in result["memory"]["sizes"].values():
        assert min(peak.values()) > 0
    from rich.console import Console

    Console(width=160).print(table(result))
    assert "deltarefit, everything" in capsys.readouterr().out


def test_density_is_counted_and_wire_stays_near_entropy() -> None:
    row = codec.measure(Case("bf16 3.00%", False, generated_pair(0.03, 1 << 20)), 1)
    assert 0.029 < row["density"] < 0.031
    assert row["ours"]["wire"] <= 1.08 * row["bound_difference"]
    assert row["ours"]["wire"] < min(o["wire"] for o in row["others"].values())


def test_wrong_result_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "apply_model", lambda catalog, payloads, targets: targets[0].__setitem__(0, 1))
    with pytest.raises(RefitError, match="ours does not give the new bits"):
        codec.measure(Case("x", False, generated_pair(0.01, 1 << 16)), 1)


def test_goals_take_the_worst_case_and_admit_misses() -> None:
    row = codec.measure(Case("bf16 3.00%", False, generated_pair(0.03, 1 << 18)), 1)
    row["ours"] |= {"encode": 1.0, "apply": 1.0}
    row["compare_scan"] = 8.0
    result = {"cases": [row], "memory": {"base": 0, "sizes": {1: {"publish": 1 << 30, "follow": 1}}}}
    reached = {goal["goal"]: goal["reached"] for goal in codec.goals(result)}
    assert not reached["encode / compare scan"]
    assert not reached["extra memory of publish and follow, MiB"]
    assert not reached["wire / entropy, real deltas of 1-5 %"]  # no such case: not reached, not skipped


def test_records_are_part_of_the_wire() -> None:
    assert codec.wire_bytes([]) > 500
    pair = generated_pair(0.01, 1 << 16)
    news = [np.array(new).reshape(-1) for _, (_, new) in sorted(pair.items())]
    olds = [np.array(old).reshape(-1) for _, (old, _) in sorted(pair.items())]
    catalog = codec.Catalog(
        tuple(codec.TensorEntry(n, "U16", (a.size,)) for n, a in zip(sorted(pair), news, strict=True))
    )
    payloads = codec.encode_model(catalog, olds, news)
    assert codec.wire_bytes(payloads) > sum(ref.size for _, ref in payloads)


def test_peak_memory_is_that_of_the_program_not_of_its_caller() -> None:
    ballast = np.ones(400 << 20, np.uint8)
    peak = memory._peak("--version")
    assert 10 << 20 < peak < ballast.nbytes
