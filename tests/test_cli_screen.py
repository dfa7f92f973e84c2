"""What the command line looks like: help, flags, progress bars, numbers; and ``doctor``."""

from __future__ import annotations

import json
import os
import pty
from pathlib import Path

import pytest

import deltarefit
from deltarefit.cli import app, main, words
from tests.desk import PATIENCE_S, Desk

pytest_plugins = ["tests.desk_fixtures"]

VERBS = (
    "publish",
    "follow",
    "log",
    "show",
    "compare",
    "verify",
    "anchor",
    "prune",
    "keygen",
    "relay",
    "tree",
    "doctor",
    "simulate",
    "demo",
    "bench codec",
)


# -------------------------------------------------------------------------------- words and screens


@pytest.mark.parametrize("flag", [None, "--no-progress", "-q", "--json"])
def test_bars_only_on_a_terminal_that_wants_them(desk: Desk, flag: str | None) -> None:
    """stderr is a real pseudo-terminal; a live bar hides the cursor."""
    master, slave = pty.openpty()
    arguments = ["compare", desk.checkpoint(0), desk.checkpoint(0), *([flag] if flag else [])]
    process = desk.start(*arguments, stderr=slave)
    os.close(slave)
    seen = b"".join(iter(lambda: read_terminal(master), b""))
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (json.loads(out)["result"] if flag == "--json" else out.rstrip()) == "equal"
    assert (b"\x1b[?25l" in seen) is (flag is None)


def read_terminal(master: int) -> bytes:
    try:
        return os.read(master, 4096)
    except OSError:  # the other side is closed
        return b""


def test_help_and_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capfd.readouterr().out
    assert all(verb.split()[0] in text for verb in VERBS)
    assert "Exit codes" in text
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"deltarefit {deltarefit.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_the_same_flags_and_help(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    text = capfd.readouterr().out
    for flag in ("--json", "--quiet", "-q", "--verbose", "-v", "--no-progress"):
        assert flag in text
    assert ("--endpoint" in text) is (verb not in ("compare", "keygen", "tree", "simulate", "demo", "bench codec"))


def test_no_verb_is_forgotten_here() -> None:
    names = [command.name for command in app.registered_commands]
    assert [*names, "bench codec"] == list(VERBS)


def test_doctor_without_a_store(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    body = json.loads(capfd.readouterr().out)
    assert (body["result"], body["checks"], body["deltarefit"]) == ("ok", [], deltarefit.__version__)
    assert "portable" in body["kernel"]


def test_doctor_fails_where_nothing_can_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A bucket that is not there: the first check fails, in words, and no other is tried."""
    arguments = [
        "doctor",
        "s3://nobody/x",
        "--endpoint",
        "http://127.0.0.1:1",
        "--region",
        "us-east-1",
        "--json",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        assert main(arguments) == 4
    body = json.loads(capfd.readouterr().out)
    assert [(check["name"], check["ok"]) for check in body["checks"]] == [("reach", False)]
    assert "connection refused" in body["checks"][0]["detail"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (61_100_000_000, "61.1 GB"),
        (999_600, "1 MB"),
        (123_456, "123 kB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert words.size(nbytes) == text


def test_numbers_in_words() -> None:
    assert [words.percent(value) for value in (0, 1e-9, 0.0127, 1)] == [
        "0 %",
        "1e-07 %",
        "1.27 %",
        "100.00 %",
    ]
    assert [words.seconds(value) for value in (0.0123, 0.96, 75)] == ["12 ms", "1.0 s", "75.0 s"]
    assert [words.times(100, wire) for wire in (0, 1, 40)] == ["-", "100", "2.5"]
    assert [words.count(n, "payload") for n in (0, 1, 1234)] == ["0 payloads", "1 payload", "1,234 payloads"]
    assert (words.shape(()), words.shape((2, 3))) == ("scalar", "2x3")
