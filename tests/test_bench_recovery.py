"""The recovery benchmark at tiny sizes: every fault strikes, every recovery is exact, and wrong bits are caught."""

from __future__ import annotations

import pytest

from deltarefit.bench import recovery
from deltarefit.publishing import polling


def test_quick_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "SILENCE_S", 0.5)
    struck: list[str] = []
    stopped = recovery.Stopped.__init__

    def note(self: recovery.Stopped, where: str) -> None:
        struck.append(where)
        stopped(self, where)

    monkeypatch.setattr(recovery.Stopped, "__init__", note)
    result = recovery.run(True, lambda text: None)
    assert [row["equal"] for row in result["rows"]] == [True] * 7
    assert len(struck) == 7, struck
    assert result["dead_receiver_s"] >= 0.4
    assert set(result["calm"]) == {"publish", "follow", *recovery.CHECKS}


def test_other_bits_are_not_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "SILENCE_S", 0.5)
    bits = recovery._bits
    monkeypatch.setattr(recovery, "_bits", lambda *arguments: bits(*arguments)[:-1] + b"?")
    assert not any(row["equal"] for row in recovery.run(True, lambda text: None)["rows"])


@pytest.mark.parametrize(("times", "reached"), [(2.0, True), (2.01, False)])
def test_goals(times: float, reached: bool) -> None:
    calm = {"publish": 1.0, "follow": 1.0, **dict.fromkeys(recovery.CHECKS, 0.02)}
    rows = [{"times": times, "equal": True}]
    found = recovery.goals({"rows": rows, "calm": calm, "dead_receiver_s": 10.2})
    assert [goal["reached"] for goal in found] == [reached, True, True, True]
