"""How commands end: exit codes, signals, outages."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltarefit.cli import main
from deltarefit.cli.following import Stop
from deltarefit.cli.output import Flags, Output
from deltarefit.cli.verbs import Terminated, exit_code
from deltarefit.errors import BaseMismatch, RefitError, UnavailableError
from deltarefit.targets.checkpoint import CheckpointTarget
from tests.desk import PATIENCE_S, SHAPES, Desk, Following, Here, flipped, run_id, same_files, save
from tests.seaweed import Seaweed

pytest_plugins = ["tests.desk_fixtures"]


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
    for _ in range(5):  # on a busy machine it may have ended by itself before the signal comes
        process = desk.start("doctor", tmp_path / "store")
        assert process.stderr is not None
        assert "Checking" in process.stderr.readline()
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
        if process.returncode:
            break
    assert process.returncode == 128 + number
    assert err.endswith(f"error: {'interrupted' if number == signal.SIGINT else 'terminated'}\n")


def test_a_second_signal_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        with Stop() as stop:
            assert not stop.asked()
            os.kill(os.getpid(), number)
            assert stop.asked()
            with pytest.raises(error):
                os.kill(os.getpid(), number)
            assert stop.number == number
    assert signal.getsignal(signal.SIGTERM) == before


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


def test_2_a_directory_that_is_no_store_and_a_store_that_is_no_directory(
    desk: Desk, here: Here, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    done = here("publish", desk.checkpoint(0), "--to", tmp_path / "notes")
    assert done.code == 2
    assert "is not a store" in done.err
    assert [p.name for p in (tmp_path / "notes").iterdir()] == ["a.txt"]
    assert here("publish", desk.checkpoint(0), "--to", "s3:/bucket/run").code == 2
    assert "is a store" in here("follow", desk.store, "--into", desk.store, "--once").err


def test_4_weights_of_another_run_are_kept_unless_asked(desk: Desk, here: Here, tmp_path: Path) -> None:
    into, other = tmp_path / "into", tmp_path / "other"
    assert here("follow", desk.store, "--into", into, "--once").code == 0
    assert here("publish", desk.checkpoint(0), "--to", other, "--baseline", tmp_path / "base", "-q").out == "1\n"
    refused = here("follow", other, "--into", into, "--once")
    assert refused.code == 4
    assert "weights of another run" in refused.err
    assert here("verify", desk.store, into).last == "equal"
    assert here("follow", other, "--into", into, "--once", "--switch-run").last == "1"


def test_follow_waits_for_the_first_publish(desk: Desk, here: Here, tmp_path: Path) -> None:
    store = tmp_path / "late"
    assert here("follow", store, "--into", tmp_path / "into", "--once").code == 3
    process = desk.start("follow", store, "--into", tmp_path / "into", "--poll", "0.1", stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert here("publish", desk.checkpoint(0), "--to", store, "--baseline", tmp_path / "base").code == 0
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready
        assert process.stdout.readline() == "1\n"
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0
