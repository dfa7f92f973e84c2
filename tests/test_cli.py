"""The real command line in processes of its own, on real checkpoints: results, exit codes, signals, last
lines."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltarefit
from deltarefit.cli import app, main, words
from deltarefit.cli.output import Flags, Output
from deltarefit.cli.verbs import Terminated, exit_code
from deltarefit.errors import BaseMismatch, RefitError, UnavailableError
from deltarefit.publisher import Published
from deltarefit.targets.checkpoint import CheckpointTarget
from tests.helpers import MIXED, Model, Shapes, copy_of, random_model, step
from tests.seaweed import Seaweed

PATIENCE_S = 60.0
SHAPES: Shapes = {**MIXED, "layer.weight": ("BF16", (300, 100))}
STEPS = 5
VERBS = ("publish", "follow", "log", "show", "compare", "verify", "anchor", "doctor", "demo", "bench codec")


def save(model: Model, shapes: Shapes, path: Path) -> None:
    """A safetensors file, written by hand: what the tests compare with must not come from what they test."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in sorted(model.items()):
        offsets = [end, end := end + array.nbytes]
        header[name] = {"dtype": shapes[name][0], "shape": list(array.shape), "data_offsets": offsets}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(a.tobytes() for _, a in sorted(model.items())))


@dataclass
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.rstrip("\n").rpartition("\n")[2]

    @property
    def body(self) -> dict[str, Any]:
        """The last line of stdout as JSON."""
        found: dict[str, Any] = json.loads(self.last)
        return found

    @property
    def lines(self) -> list[str]:
        return self.out.split("\n")[:-1]


@dataclass
class Desk:
    """A place to run commands in, with a cache of its own."""

    root: Path
    models: list[Model] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> str:
        return str(self.root / "store")

    def checkpoint(self, number: int) -> str:
        return str(self.root / f"step-{number}")

    def start(self, *arguments: object, **streams: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "deltarefit.cli", *map(str, arguments)]
        path = os.pathsep.join(filter(None, sys.path))
        mine = {
            "PYTHONPATH": path,
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "TMPDIR": str(self.root / "tmp"),
        }
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        return subprocess.Popen(command, env=os.environ | mine | self.environment, text=True, **pipes)

    def run(self, *arguments: object) -> Done:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=PATIENCE_S)
        return Done(process.returncode, out, err)

    def copy(self, root: Path) -> Desk:
        """The same store and checkpoints, to spoil."""
        shutil.copytree(self.root, root)
        return Desk(root, self.models)


def make_desk(root: Path) -> Desk:
    """Checkpoints step-0 to step-4, each a training step after the one before."""
    rng = np.random.default_rng(7)
    desk = Desk(root)
    (root / "tmp").mkdir(parents=True)
    model = random_model(rng, SHAPES)
    for number in range(STEPS):
        if number:
            step(rng, model, "few")
        directory = root / f"step-{number}"
        directory.mkdir()
        save(model, SHAPES, directory / "model.safetensors")
        (directory / "config.json").write_text('{"model_type": "none"}')
        desk.models.append(copy_of(model))
    return desk


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, list[Done]]]:
    """Three versions, published one after another; nobody may write to this desk's store."""
    desk = make_desk(tmp_path_factory.mktemp("cli") / "desk")
    yield (
        desk,
        [desk.run("publish", desk.checkpoint(n), "--to", desk.store, "--step", 10 * n) for n in range(3)],
    )
    assert list((desk.root / "tmp").iterdir()) == []


@pytest.fixture(scope="module")
def desk(published: tuple[Desk, list[Done]]) -> Desk:
    assert [done.code for done in published[1]] == [0, 0, 0]
    return published[0]


@pytest.fixture
def spoiled(desk: Desk, tmp_path: Path) -> Desk:
    return desk.copy(tmp_path / "copy")


Here = Callable[..., Done]


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Here:
    """A command in this process, for the many that need no other: starting Python takes longer than most verbs."""

    def run(*arguments: object) -> Done:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capfd.readouterr())

    return run


# -------------------------------------------------------------------------------- the way of a version


def test_publish_prints_the_version_and_talks_on_stderr(published: tuple[Desk, list[Done]]) -> None:
    desk, done = published
    assert [each.out for each in done] == ["1\n", "2\n", "3\n"]
    assert re.search(r"Compared +10 tensors, .* with version 2\n", done[2].err)
    assert re.search(r"Packed +[\d,]+ elements in 1 payload, density \d\.\d\d %\n", done[2].err)
    assert re.search(r"Uploaded +\S+ \wB .*\n", done[2].err)
    assert re.search(r"Committed +version 3 on base 2, \d+\.\d times smaller +\S+ m?s\n$", done[2].err)
    assert "version 1, an anchor" in done[0].err
    assert "\x1b" not in "".join(each.err for each in done)
    assert [path.name for path in (desk.root / "cache" / "deltarefit" / "baseline").iterdir()] == [run_id(desk)]


def run_id(desk: Desk) -> str:
    text: str = json.loads((Path(desk.store) / "run").read_text().partition("\n")[0])["run"]
    return text


def test_the_way_of_a_version(desk: Desk, tmp_path: Path) -> None:
    into = tmp_path / "into"
    first = desk.run("follow", desk.store, "--into", into, "--once")
    assert (first.code, first.lines) == (0, ["1", "2", "3"])
    assert same_files(into, Path(desk.checkpoint(2)))
    again = desk.run("follow", desk.store, "--into", into, "--once", "--json", "-q")
    assert (again.code, again.err) == (0, "")
    assert again.body == {"version": 3, "seconds": {}, "pause_s": 0.0}
    equal = desk.run("verify", desk.store, into)
    assert (equal.code, equal.out) == (0, "equal\n")
    assert "holds version 3" in equal.err


def same_files(directory: Path, expected: Path) -> bool:
    names = [path.name for path in expected.iterdir()]
    return all((directory / name).read_bytes() == (expected / name).read_bytes() for name in names)


def test_publish_json_has_all_of_published_and_log_agrees(here: Here, spoiled: Desk) -> None:
    done = spoiled.run("publish", spoiled.checkpoint(3), "--to", spoiled.store, "--json", "-q", "--step", 7)
    assert (done.code, done.err, len(done.lines)) == (0, "", 1)
    body = done.body
    assert set(Published.__dataclass_fields__) <= set(body)
    assert (body["version"], body["base"], body["step"], body["anchor"]) == (4, 3, 7, 1)
    assert body["run"] == run_id(spoiled)
    assert body["density"] == body["changed"] / body["numel"]
    rows = here("log", spoiled.store, "--json").body["attempts"]
    shared = ("base", "step", "changed", "numel", "dense_bytes", "wire_bytes", "density", "times_smaller")
    assert {name: rows[-1][name] for name in shared} == {name: body[name] for name in shared}


def test_unchanged_bits_and_a_lost_baseline_make_a_version_all_the_same(spoiled: Desk) -> None:
    shutil.rmtree(spoiled.root / "cache")
    done = spoiled.run("publish", spoiled.checkpoint(2), "--to", spoiled.store, "--json", "--threads", 1)
    assert (done.code, done.body["version"], done.body["changed"]) == (0, 4, 0)


def test_an_anchor_is_where_the_next_receiver_starts(here: Here, spoiled: Desk, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline"
    done = spoiled.run("anchor", spoiled.store, "--baseline", baseline)
    assert (done.code, done.out) == (0, "3\n")
    assert same_files(baseline, Path(spoiled.checkpoint(2)))
    followed = here("follow", spoiled.store, "--into", tmp_path / "into", "--once")
    assert followed.lines == ["3"]
    assert same_files(tmp_path / "into", Path(spoiled.checkpoint(2)))
    again = spoiled.run("anchor", spoiled.store, "--baseline", baseline, "--json")
    assert (again.body["version"], again.body["created"]) == (3, False)
    assert "an anchor already" in again.err
    assert [row["anchor"] for row in here("log", spoiled.store, "--json").body["attempts"]] == [
        True,
        False,
        True,
    ]


# -------------------------------------------------------------------------------- log and show


def test_log(here: Here, desk: Desk) -> None:
    table = here("log", desk.store)
    cells = [re.split(r" {2,}", line.strip()) for line in table.lines]
    assert cells[0][:4] == ["attempt", "outcome", "base", "step"]
    assert [row[:4] for row in cells[1:]] == [[str(n + 1), "COMMIT", str(n), str(10 * n)] for n in range(3)]
    assert [row[-1] == "anchor" for row in cells[1:]] == [True, False, False]
    body = here("log", desk.store, "--json").body
    assert body["run"] == run_id(desk)
    assert [row["attempt"] for row in body["attempts"]] == [1, 2, 3]
    assert all(row["wire_bytes"] < row["dense_bytes"] / 5 for row in body["attempts"][1:])
    newest = here("log", desk.store, "-n", 1, "--json").body["attempts"]
    assert newest == body["attempts"][-1:]


def test_log_does_not_trust_the_hint(here: Here, spoiled: Desk) -> None:
    (Path(spoiled.store) / "head").unlink()
    assert [row["attempt"] for row in here("log", spoiled.store, "-n", 2, "--json").body["attempts"]] == [2, 3]


def test_show(here: Here, desk: Desk) -> None:
    body = here("show", desk.store, "2", "--tensors", "--json").body
    for payload in body["payloads"]:
        path = Path(desk.store) / "a" / f"{2:010d}" / "pl" / payload["sha256"]
        assert path.stat().st_size == payload["size"]
    sizes = sum(payload["size"] for payload in body["payloads"])
    assert body["bytes_per_changed"] == sizes / body["changed"]
    counts = {name: int((desk.models[0][name] != desk.models[1][name]).sum()) for name in SHAPES}
    listed = {tensor["name"]: tensor["changed"] for tensor in body["tensors"]}
    assert {name for name, count in counts.items() if count} == set(listed)
    assert all(counts[name] <= listed[name] for name in listed)
    assert listed["layer.weight"] == counts["layer.weight"] > 100
    text = here("show", desk.store, "--tensors")
    assert text.lines[0] == "version      3 on base 2, step 20"
    assert re.search(r"\nlayer.weight +BF16 +300x100 +\d+ +\d\.\d\d %\n", text.out)


# -------------------------------------------------------------------------------- compare and verify


def test_compare(here: Here, desk: Desk, tmp_path: Path) -> None:
    equal = here("compare", desk.checkpoint(1), desk.checkpoint(1) + "/model.safetensors")
    assert (equal.code, equal.out) == (0, "equal\n")
    body = here("compare", desk.checkpoint(0), desk.checkpoint(1), "--json").body
    counts = {name: int((desk.models[0][name] != desk.models[1][name]).sum()) for name in SHAPES}
    assert {tensor["name"]: tensor["changed"] for tensor in body["tensors"]} == counts
    assert body["result"] == "differ"
    shown = here("show", desk.store, "2", "--json").body
    assert body["wire_bytes"] == sum(payload["size"] for payload in shown["payloads"])
    other = {name: array for name, array in desk.models[1].items() if name != "h.one"}
    save(other, SHAPES, tmp_path / "other.safetensors")
    text = here("compare", desk.checkpoint(1), tmp_path / "other.safetensors")
    assert (text.code, text.lines) == (4, ["only in A: h.one", "differ"])
    assert "cannot follow A in one run" in text.err


def test_verify_names_the_tensors_that_differ(here: Here, desk: Desk, tmp_path: Path) -> None:
    into = tmp_path / "into"
    assert here("follow", desk.store, "--into", into, "--once", "-q").last == "3"
    older = desk.run("verify", desk.store, into, "--version", 1, "--json")
    changed = {n: int((desk.models[0][n] != desk.models[2][n]).sum()) for n in SHAPES}
    expected = {name: count for name, count in changed.items() if count}
    assert (older.code, older.body["result"]) == (4, "differ")
    assert {tensor["name"]: tensor["changed"] for tensor in older.body["tensors"]} == expected
    weights = into / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), -3))
    found = desk.run("verify", desk.store, into)
    assert (found.code, found.last) == (4, "differ")
    assert re.fullmatch(r"layer\.weight +BF16 +300x100 +1 +0\.00\d+ %", found.lines[1])
    assert "does not hold version 3" in found.err


def test_verify_takes_any_checkpoint(here: Here, desk: Desk) -> None:
    head = here("verify", desk.store, desk.checkpoint(2))
    assert (head.code, head.last) == (0, "equal")
    older = desk.run("verify", desk.store, desk.checkpoint(1) + "/model.safetensors", "--version", 2, "--json")
    assert (older.code, older.body["result"], older.body["version"]) == (0, "equal", 2)
    assert not (Path(desk.checkpoint(2)) / ".deltarefit").exists()


def flipped(data: bytes, at: int) -> bytes:
    """One bit of ``data`` is the other one."""
    copy = bytearray(data)
    copy[at] ^= 4
    return bytes(copy)


# -------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["publish"], "Missing argument 'CKPT'. See: deltarefit publish --help"),
        (["log", "x", "--frob"], "No such option"),
        (["log", "ftp://host/x"], "bad store URL"),
        (["log", "x", "-n", "0"], "'-n'"),
        (["bench"], "Missing command"),
    ],
)
def test_2_usage(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capfd.readouterr().err
    assert main([*arguments, "--json"]) == 2
    out, _ = capfd.readouterr()
    assert json.loads(out)["exit_code"] == 2


def test_2_a_directory_of_somebody_else_is_left_alone(here: Here, desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    done = here("follow", desk.store, "--into", tmp_path, "--once")
    assert (done.code, done.out) == (2, "")
    assert "model.safetensors" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_2_show_of_no_number(desk: Desk, here: Here) -> None:
    done = here("show", desk.store, "newest")
    assert (done.code, done.out) == (2, "")
    assert "a number from 1 on, or head" in done.err


def test_3_not_found(desk: Desk, tmp_path: Path, here: Here) -> None:
    nowhere, empty = tmp_path / "nowhere", tmp_path / "empty"
    empty.mkdir()
    for arguments in (
        ["log", str(nowhere)],
        ["follow", f"file://{nowhere}", "--into", str(tmp_path / "into"), "--once"],
        ["anchor", str(empty)],
        ["show", desk.store, "9"],
        ["verify", desk.store, str(nowhere)],
        ["compare", desk.checkpoint(0), str(nowhere)],
        ["publish", str(nowhere), "--to", str(tmp_path / "store")],
    ):
        done = here(*arguments, "--json")
        assert (done.code, done.body["exit_code"]) == (3, 3), arguments
        assert done.err.startswith(f"error: {done.body['error']}")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert list(empty.iterdir()) == []


def test_4_a_corrupt_payload_is_named(spoiled: Desk, tmp_path: Path) -> None:
    [payload] = (Path(spoiled.store) / "a" / f"{2:010d}" / "pl").iterdir()
    good = payload.read_bytes()
    payload.write_bytes(flipped(good, len(good) // 2))
    done = spoiled.run("follow", spoiled.store, "--into", tmp_path / "into", "--once", "--json")
    assert done.code == 4
    assert f"payload {payload.name[:12]} is corrupt" in done.err
    assert [json.loads(line).get("version") for line in done.lines] == [1, None]
    body = done.body
    assert (body["exit_code"], body["expected"]) == (4, payload.name)
    assert body["found"] not in (None, payload.name)
    payload.write_bytes(good)
    assert spoiled.run("follow", spoiled.store, "--into", tmp_path / "into", "--once").lines == ["2", "3"]


def test_4_another_model_and_another_run(here: Here, spoiled: Desk, desk: Desk, tmp_path: Path) -> None:
    shapes = {**SHAPES, "h.one": ("U8", (2,))}
    save({**spoiled.models[0], "h.one": np.zeros(2, "u1")}, shapes, tmp_path / "other.safetensors")
    done = spoiled.run("publish", tmp_path / "other.safetensors", "--to", spoiled.store)
    assert (done.code, done.out) == (4, "")
    assert "tensor h.one is not that of this run; expected U8 [1]; found U8 [2]" in done.err
    assert here("verify", spoiled.store, tmp_path / "other.safetensors").code == 4
    new = tmp_path / "new"
    assert spoiled.run("publish", spoiled.checkpoint(0), "--to", new, "-q").out == "1\n"
    assert here("follow", new, "--into", tmp_path / "into", "--once").last == "1"
    foreign = here("verify", desk.store, tmp_path / "into")
    assert foreign.code == 4
    assert f"follows another run; expected {run_id(desk)}" in foreign.err


def test_5_a_directory_in_use(desk: Desk, tmp_path: Path) -> None:
    with contextlib.closing(CheckpointTarget(tmp_path / "into")):
        done = desk.run("follow", desk.store, "--into", tmp_path / "into", "--json")
    assert (done.code, done.body["exit_code"]) == (5, 5)
    assert done.body["found"].startswith(f"process {os.getpid()}")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RefitError("a"), 1),
        (BaseMismatch("b", expected=1, found=2), 4),
        (UnavailableError("c", next_step="Wait."), 5),
        (KeyboardInterrupt(), 130),
        (Terminated(), 143),
        (ZeroDivisionError("[red]d[/]"), 1),
    ],
)
def test_every_end_has_its_code(error: BaseException, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    for verbose in (False, True):
        assert exit_code(Output(Flags(json=True, quiet=True, verbose=verbose)), fail) == code
        out, err = capfd.readouterr()
        unexpected = isinstance(error, ZeroDivisionError)
        assert ("Traceback" in err) is (verbose and unexpected)
        assert unexpected is (err.splitlines()[0] == "error: unexpected: ZeroDivisionError: [red]d[/]")
        body = json.loads(out)
        assert set(body) == {"error", "exit_code", "expected", "found", "next_step"}
        assert body["exit_code"] == code


def test_a_reader_that_has_gone_is_no_error(desk: Desk) -> None:
    read, write = os.pipe()
    os.close(read)
    process = desk.start("log", desk.store, stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (128 + signal.SIGPIPE, "")


# -------------------------------------------------------------------------------- signals and outages


class Following:
    """A ``follow`` that runs until it is told to stop; ``wait_for`` finds lines of its stdout and stderr."""

    def __init__(self, desk: Desk, *arguments: object) -> None:
        self.process = desk.start("follow", *arguments)
        self.out: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=(stream, kept), daemon=True)
            for stream, kept in ((self.process.stdout, self.out), (self.process.stderr, []))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, kept: list[str]) -> None:
        for line in stream:
            kept.append(line.rstrip("\n"))
            self._lines.put(line.rstrip("\n"))

    def wait_for(self, pattern: str) -> str:
        end = time.monotonic() + PATIENCE_S
        while True:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            if re.search(pattern, line):
                return line

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return code

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_follow_runs_until_it_is_told_to_stop(spoiled: Desk, tmp_path: Path, number: signal.Signals) -> None:
    into = tmp_path / "into"
    with Following(spoiled, spoiled.store, "--into", into, "--poll", "0.05", "--json") as following:
        following.wait_for('"version":3')
        assert spoiled.run("publish", spoiled.checkpoint(3), "--to", spoiled.store, "-q").last == "4"
        following.wait_for('"version":4')
        assert spoiled.run("verify", spoiled.store, into).code == 5  # in use
        assert following.end(number) == 0
    bodies = [json.loads(line) for line in following.out]
    assert [body["version"] for body in bodies] == [1, 2, 3, 4]
    assert {"stage", "write", "verify"} <= set(bodies[-1]["seconds"])
    assert bodies[-1]["pause_s"] > 0
    assert spoiled.run("verify", spoiled.store, into).last == "equal"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_other_verbs_end_at_once(desk: Desk, tmp_path: Path, number: signal.Signals) -> None:
    """``doctor`` is the one that takes long."""
    process = desk.start("doctor", tmp_path / "store")
    assert process.stderr is not None
    assert "Checking" in process.stderr.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    assert err == f"error: {'interrupted' if number == signal.SIGINT else 'terminated'}\n"


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A server of our own: it is stopped on the way."""
    with Seaweed(tmp_path_factory.mktemp("weed")) as server:
        server.make_bucket("runs")
        yield server


@pytest.mark.slow
def test_s3_and_an_outage(desk: Desk, server: Seaweed, tmp_path: Path) -> None:
    """Credentials and endpoint come from the environment; a store that goes away is waited for."""
    desk = Desk(desk.root, desk.models, environment_of(server))
    store, into = "s3://runs/a/b", tmp_path / "into"
    assert desk.run("publish", desk.checkpoint(0), "--to", store, "-q", "--baseline", tmp_path / "base").out == "1\n"
    with Following(desk, store, "--into", into, "--poll", "0.05") as following:
        following.wait_for("^1$")
        server.stop()
        following.wait_for(r"^warning: .*Trying again in")
        done = desk.run("log", store, "--json")
        assert (done.code, done.body["exit_code"]) == (5, 5)
        server.start()
        assert (
            desk.run("publish", desk.checkpoint(1), "--to", store, "-q", "--baseline", tmp_path / "base").out == "2\n"
        )
        following.wait_for("^2$")
        assert following.end(signal.SIGTERM) == 0
    assert same_files(into, Path(desk.checkpoint(1)))
    without = Desk(desk.root, desk.models, {**environment_of(server), "AWS_SECRET_ACCESS_KEY": "wrong"})
    refused = without.run("log", store)
    assert refused.code == 2
    assert server.secret_key not in refused.err


def environment_of(server: Seaweed) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_REGION": "us-east-1",
        "DELTAREFIT_ENDPOINT": server.endpoint,
    }


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
    assert ("--endpoint" in text) is (verb not in ("compare", "demo", "bench codec"))


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
