"""Trainer, store and receiver in three network namespaces, whose links are cut and healed: nobody decides anything by
silence, and everyone goes on by itself.

Each of the three is a process of its own (``python -m tests.test_partitions ROLE ...``), which says what happens to it
in lines of JSON. Needs root and ``ip netns``; skipped, with the reason, where these are not.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import Publisher, Receiver, open_store
from deltarefit.errors import NotFoundError, RefitError
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from deltarefit.stores import Limits
from tests import helpers as h
from tests.fault_proxy import FaultProxy
from tests.seaweed import Seaweed

ROOT = Path(__file__).parent.parent
LIMITS = Limits(connect_s=1.0, request_s=2.0, retries=1, retry_s=2.0)
SHAPES: h.Shapes = {"a": ("BF16", (30_000,)), "b": ("F32", (500,))}
SEED, PORT, WAIT_S = 21, 9000, 60.0
"""``WAIT_S``: what is to happen must happen within this."""
NETS = {"trainer": "10.78.1", "receiver": "10.78.2"}
"""A link of its own to the store for each; the store's end is ``.1``."""


def model_at(step: int) -> h.Model:
    model = h.random_model(np.random.default_rng(SEED), SHAPES)
    h.step(np.random.default_rng([SEED, step]), model, ("some", "few", "many")[step % 3])
    return model


# ------------------------------------------------------------------------------------------ namespaces


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def missing() -> str:
    """Why this machine has no namespaces to give; empty if it has."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need root on Linux"
    name = "refit-probe-" + secrets.token_hex(3)
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "probe-a", "type", "veth", "peer", "name", "probe-b")
        finally:
            ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', '') or error}".strip()
    return ""


@dataclass
class Net:
    """Three namespaces: the store's, and one for each of ``NETS`` with a link to it."""

    tag: str = field(default_factory=lambda: secrets.token_hex(3))

    def __enter__(self) -> Net:
        for role in ("store", *NETS):
            ip("netns", "add", self.space(role))
            ip("-n", self.space(role), "link", "set", "lo", "up")
        for role, net in NETS.items():
            here, there = f"s{role[0]}{self.tag}", f"{role[0]}{self.tag}"
            ip(
                "link",
                "add",
                here,
                "netns",
                self.space("store"),
                "type",
                "veth",
                "peer",
                "name",
                there,
                "netns",
                self.space(role),
            )
            ip("-n", self.space("store"), "addr", "add", f"{net}.1/24", "dev", here)
            ip("-n", self.space(role), "addr", "add", f"{net}.2/24", "dev", there)
            ip("-n", self.space(role), "link", "set", there, "up")
            self.heal(role)
        return self

    def __exit__(self, *_: object) -> None:
        for role in ("store", *NETS):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", self.space(role))

    def space(self, role: str) -> str:
        return f"refit-{role}-{self.tag}"

    def cut(self, role: str) -> None:
        """The store's end goes down: what ``role`` sends is lost without an answer."""
        ip("-n", self.space("store"), "link", "set", f"s{role[0]}{self.tag}", "down")

    def heal(self, role: str) -> None:
        ip("-n", self.space("store"), "link", "set", f"s{role[0]}{self.tag}", "up")


class Role:
    """A process in its namespace, and what it says."""

    def __init__(self, net: Net, role: str, *arguments: str, work: str = "") -> None:
        command = ["ip", "netns", "exec", net.space(role), sys.executable, "-m", "tests.test_partitions"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        self.process = subprocess.Popen(
            [*command, work or role, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.said: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def hear(self) -> list[dict[str, Any]]:
        """What was said since the last time."""
        new = []
        with contextlib.suppress(queue.Empty):
            while True:
                new.append(self._lines.get_nowait())
        self.said += new
        return new

    def until(self, good: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The first new line that is ``good``."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for line in self.hear():
                if good(line):
                    return line
            assert self.process.poll() is None or not self._lines.empty(), f"ended before {what}: {self.said[-3:]}"
            time.sleep(0.02)
        raise AssertionError(f"no {what} within {WAIT_S} s; said {self.said[-3:]}")

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()


# ------------------------------------------------------------------------------------------ roles


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def serve(root: str) -> None:
    """SeaweedFS, behind a proxy that is reached from the other namespaces."""
    with Seaweed(Path(root)) as server:
        server.make_bucket("refits")
        with FaultProxy(("127.0.0.1", server.s3), host="0.0.0.0", port=PORT):
            say(login={**server.login, "endpoint": ""})
            while True:
                time.sleep(1)


def store_of(role: str, login: str) -> Store:
    endpoint = f"http://{NETS[role]}.1:{PORT}"
    return open_store("s3://refits/run", **(json.loads(login) | {"endpoint": endpoint}), limits=LIMITS)


def train(login: str) -> None:
    """A version every tenth of a second, when the store can be reached."""
    step = 0
    while True:
        try:
            with contextlib.closing(
                Publisher(store_of("trainer", login), h.ArraySource(model_at(step), SHAPES), threads=1)
            ) as publisher:
                while True:
                    publisher.source = h.ArraySource(model_at(step), SHAPES)
                    say(version=publisher.publish(step).version, step=step)
                    step += 1
                    time.sleep(0.1)
        except RefitError as error:
            say(error=type(error).__name__, text=str(error)[:200], step=step)


def receive(login: str) -> None:
    """Says every version it holds, once its bits are proven to be those of the version's step."""
    target: h.StrictTarget | None = None
    while True:
        try:
            store = store_of("receiver", login)
            target = target or h.strict_target(store)
            with contextlib.closing(Receiver(store, target, threads=1, poll_s=0.05)) as receiver:
                while True:
                    version = receiver.follow(once=True)
                    commit = RunLog.open(store).version(version)
                    equal = h.bits(target) == h.bytes_of(model_at(commit.manifests[0].step))
                    say(version=version, equal=equal, seeds=target.seeds)
                    time.sleep(0.05)
        except RefitError as error:
            say(error=type(error).__name__, text=str(error)[:200])
            time.sleep(0.0 if not isinstance(error, NotFoundError) else 0.1)


def look(login: str) -> None:
    """The log as it is in the end."""
    store = store_of("receiver", login)
    log = RunLog.open(store)
    say(steps={version: log.version(version).manifests[0].step for version in h.check_linear(store)})


ROLES: dict[str, Callable[[str], None]] = {"store": serve, "trainer": train, "receiver": receive, "look": look}


# ------------------------------------------------------------------------------------------ the test


@contextlib.contextmanager
def running(net: Net, root: Path) -> Iterator[tuple[Role, Role, str]]:
    """(trainer, receiver, login)."""
    roles = [Role(net, "store", str(root))]
    try:
        login = json.dumps(roles[0].until(lambda line: "login" in line, "server")["login"])
        roles += [Role(net, "trainer", login), Role(net, "receiver", login)]
        yield roles[1], roles[2], login
    finally:
        for role in reversed(roles):
            role.stop()


def newer(version: int) -> Callable[[dict[str, Any]], bool]:
    return lambda line: line.get("version", 0) > version


def failed(line: dict[str, Any]) -> bool:
    return "error" in line


@pytest.mark.slow
def test_each_link_cut_and_healed(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    with Net() as net, running(net, tmp_path) as (trainer, receiver, login):
        held = receiver.until(newer(2), "third version")["version"]

        net.cut("trainer")  # F11: the trainer says so, the receiver goes on serving what it holds
        assert trainer.until(failed, "error of a cut-off trainer")["error"] == "UnavailableError"
        receiver.hear()
        held = receiver.until(newer(0), "sign of life")["version"]
        net.heal("trainer")
        held = receiver.until(newer(held), "version after healing")["version"]

        net.cut("receiver")  # F20: the trainer commits without it, and it catches up
        assert receiver.until(failed, "error of a cut-off receiver")["error"] == "UnavailableError"
        trainer.hear()
        alone = trainer.until(newer(held), "version without the receiver")["version"]
        net.heal("receiver")
        held = receiver.until(newer(alone), "version after healing")["version"]

        net.cut("trainer")
        net.cut("receiver")
        trainer.until(failed, "error of the trainer")
        receiver.until(failed, "error of the receiver")
        net.heal("receiver")
        net.heal("trainer")
        last = trainer.until(newer(held), "version after healing")["version"]
        receiver.until(newer(last), "the head")
        trainer.stop()
        check(trainer, receiver, Role(net, "receiver", login, work="look").until(lambda line: True, "the log"))


def check(trainer: Role, receiver: Role, log: dict[str, Any]) -> None:
    """No version that was said is lost; the receiver never held other bits, and loaded one anchor, at its start."""
    trainer.hear()
    receiver.hear()
    steps = {int(version): step for version, step in log["steps"].items()}
    for line in trainer.said:
        assert "version" not in line or steps[line["version"]] == line["step"]
    held = [line for line in receiver.said if "version" in line]
    assert all(line["equal"] and line["seeds"] == 1 for line in held), "bits differ, or memory was loaded anew"
    errors = {line["error"] for line in [*trainer.said, *receiver.said] if "error" in line}
    assert errors <= {"UnavailableError", "AttemptLostError", "NotFoundError"}, errors
    assert [line["version"] for line in held] == sorted(line["version"] for line in held)


def main(arguments: Sequence[str]) -> None:
    ROLES[arguments[0]](arguments[1])


if __name__ == "__main__":
    main(sys.argv[1:])
