"""The release run in small, and that a part which fails is said."""

from __future__ import annotations

import json

import pytest

from tests import soak

SMALL = ["model", "kills", "points", "bits"]


@pytest.mark.slow
def test_the_release_run_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    code = soak.main(["--hours", "0.01", "--only", *SMALL])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0, lines
    parts = {line["part"]: line for line in lines[:-1]}
    assert sorted(parts) == sorted(SMALL)
    assert parts["model"]["states"] >= 2000
    assert parts["kills"]["kills"] >= 60
    assert parts["kills"]["unguarded_wrong"] > 0
    assert parts["points"]["points"] >= 25
    assert parts["bits"]["cases"] >= 65_000
    assert lines[-1]["verdict"] == "every part held"


def test_a_part_that_fails_is_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(soak.PARTS, "bits", lambda scale, seed: {"cases": 1, "problems": ["one bit was read"]})
    monkeypatch.setattr(soak, "in_process", soak.run_part)
    assert soak.main(["--hours", "0.001", "--only", "bits"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (lines[0]["problems"], lines[1]["verdict"]) == (["one bit was read"], "failed: bits")


def test_an_exception_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(soak.PARTS, "bits", lambda scale, seed: 1 // 0)
    assert "ZeroDivisionError" in soak.run_part("bits", 1.0, 1)["problems"][0]
