"""The agent of one rank: real sockets, several clients, death in the middle, and whatever else may knock."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import errors
from deltarefit.errors import (
    BaseMismatch,
    FormatError,
    IntegrityError,
    RefitError,
    UnavailableError,
    UsageError,
)
from deltarefit.manifest import Catalog, Header, PayloadRef, State
from deltarefit.protocol.messages import Op
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, payload_prefix
from deltarefit.targets import agent as agents
from deltarefit.targets import engine as engines
from deltarefit.targets.agent import Agent, private_directory, remove_dead, run_directory
from deltarefit.targets.agent_client import AgentClient
from deltarefit.targets.agent_wire import MAX_MESSAGE_BYTES, error_message, error_of, receive, send
from deltarefit.targets.engine import EngineTarget, note, read_note
from deltarefit.targets.ranks import RankGroup
from tests import helpers as h
from tests import live_ranks as live

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RefitError)]


@pytest.fixture(scope="module")
def chain() -> h.Chain:
    return h.publish_chain(np.random.default_rng(21), ("some", "many"), live.SHAPES)


@pytest.fixture
def weights(chain: h.Chain) -> live.ArrayRank:
    rank = live.ArrayRank(live.layout(0, 2), chain.models[1])
    rank.load(chain.models[1])
    return rank


Start = Callable[..., Agent]
Connect = Callable[[Agent], AgentClient]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def started(weights: Any, rank: int = 0, size: int = 2, **options: Any) -> Agent:
            one = Agent(weights, rank, size, directory=tmp_path / "s", **options)
            one.start()
            stack.callback(one.close)
            return one

        yield started


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connected(one: Agent) -> AgentClient:
            client = AgentClient(one.path)
            stack.callback(client.close)
            return client

        yield connected


class Gate:
    """``on_main`` that holds operations up until the test lets them through."""

    def __init__(self) -> None:
        self.reached, self.let, self.done = threading.Event(), threading.Event(), threading.Event()
        self.inside, self.most = 0, 0

    def __call__(self, work: Callable[[], Any]) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.reached.set()
        assert self.let.wait(20)
        try:
            return work()
        finally:
            self.inside -= 1
            self.done.set()


def attached(client: AgentClient, store: Any) -> RunLog:
    log = RunLog.open(store)
    plan, _ = client.attach(log.run, log.catalog)
    client.assign(RankGroup(log.catalog, [plan, live.layout(1, 2)]).assignment(0))
    return log


def first_payload(log: RunLog, tmp_path: Path) -> tuple[PayloadRef, Path, bytes]:
    ref = log.version(2).payloads[0]
    data = log.store.get(payload_prefix(2) + ref.sha256)
    file = tmp_path / "payload"
    file.write_bytes(data)
    return ref, file, data


# ------------------------------------------------------------------------------------------ requests


def test_says_who_it_is(start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain) -> None:
    agent = start(weights, 1, 4)
    one, other = connect(agent), connect(agent)
    first = one.hello()
    expected = {"incarnation": agent.incarnation, "pid": os.getpid(), "rank": 1, "size": 4, "header": None, "busy": ""}
    assert first == {**expected, "plan": "", "attached": False}
    _, identity = other.attach(RunLog.open(chain.store).run, chain.source.catalog)
    other.set_header("a header")
    assert one.hello() == {**expected, "header": "a header", "plan": identity, "attached": False}
    assert other.hello()["attached"]
    assert other.header() == "a header"
    other.set_header(None)
    assert other.header() is None
    assert start(weights, 1, 4).incarnation != agent.incarnation


def test_every_operation(
    start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain, tmp_path: Path
) -> None:
    """What comes over the socket is what the weights say themselves."""
    client = connect(start(weights))
    log = attached(client, chain.store)
    ref, file, _ = first_payload(log, tmp_path)
    assert client.live(ref) is None
    assert not client.staged(ref)
    sums = client.stage(ref, file)
    assert sums
    assert client.staged(ref)
    assert client.live(ref) == {class_id: now for class_id, (now, _) in sums.items()} == weights.live(ref)
    client.write(ref, Op.APPLY)
    assert client.live(ref) == {class_id: then for class_id, (_, then) in sums.items()}
    assert client.digest() == weights.digest()
    assert client.proof() == h.digest_of(log.run, log.catalog, chain.models[1])
    client.drop()
    assert client.live(ref) is None
    anchor = log.anchor(1)
    assert anchor is not None
    before = client.digest()
    for part in anchor.payloads:
        file.write_bytes(log.store.get(f"anchor/{1:010d}/pl/{part.sha256}"))
        client.fill(part, file)
    assert client.digest() != before


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_come_back_as_what_they_are(
    start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain, kind: type[RefitError]
) -> None:
    def refuse(assignment: object) -> None:
        raise kind("no", expected=Digest(1, 2), found=[3], next_step="Do this.")

    weights.assign = refuse  # type: ignore[method-assign]
    client = connect(start(weights))
    with pytest.raises(kind) as caught:
        attached(client, chain.store)
    assert type(caught.value) is kind
    assert str(caught.value) == f"no; expected {Digest(1, 2)}; found [3]. Do this."
    assert client.hello()["rank"] == 0


def test_whatever_else_goes_wrong_is_said_too(
    start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("by nought")

    weights.drop = fail  # type: ignore[method-assign]
    client = connect(start(weights))
    attached(client, chain.store)
    with pytest.raises(RefitError, match="rank 0 failed in drop: ZeroDivisionError: by nought") as caught:
        client.drop()
    assert not caught.value.retryable
    for arguments in ({}, {"ref": "x"}, {"ref": 7}):
        with pytest.raises(RefitError):
            client.call("live", 5, **arguments)
    assert client.digest()


def test_an_error_of_an_unknown_class_is_one_of_ours_all_the_same() -> None:
    body = json.loads(json.dumps(error_message(FormatError("bad", found=1))))["error"]
    assert type(error_of(body)) is FormatError
    for name in ("SystemExit", "RefitErrors", "", 7):
        assert type(error_of({**body, "type": name})) is RefitError


# ------------------------------------------------------------------------------------------ several clients


def test_one_request_at_a_time_and_hello_in_between(
    start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain
) -> None:
    gate = Gate()
    agent = start(weights, on_main=gate)
    log = RunLog.open(chain.store)
    clients = [connect(agent) for _ in range(3)]
    threads = [threading.Thread(target=client.attach, args=(log.run, log.catalog)) for client in clients]
    for thread in threads:
        thread.start()
    assert gate.reached.wait(10)
    assert connect(agent).hello()["busy"] == "attach"
    gate.let.set()
    for thread in threads:
        thread.join(10)
    assert gate.most == 1
    assert [client.hello()["attached"] for client in clients].count(True) == 1
    assert connect(agent).hello()["busy"] == ""


def test_a_request_is_finished_though_its_client_is_dead(
    start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain, tmp_path: Path
) -> None:
    gate = Gate()
    gate.let.set()
    agent = start(weights, on_main=gate)
    first = AgentClient(agent.path)
    log = attached(first, chain.store)
    ref, file, _ = first_payload(log, tmp_path)
    sums = first.stage(ref, file)
    gate.let.clear()
    gate.reached.clear()
    assert first._socket is not None
    send(first._socket, {"op": "write", "ref": ref.to_bytes().decode(), "write": "apply"})
    assert gate.reached.wait(10)
    first.close()
    gate.let.set()
    second = connect(agent)
    attached(second, chain.store)  # waits for it
    assert second.live(ref) == {class_id: then for class_id, (_, then) in sums.items()}


def test_what_a_dead_follower_left_behind_is_refused(
    start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain, tmp_path: Path
) -> None:
    """Its request is still on the way when its successor attaches."""
    agent = start(weights)
    first, second = connect(agent), connect(agent)
    log = attached(first, chain.store)
    ref, file, _ = first_payload(log, tmp_path)
    attached(second, chain.store)
    second.stage(ref, file)
    for use in (first.drop, first.digest, first.header, lambda: first.set_header("x"), lambda: first.live(ref)):
        with pytest.raises(UnavailableError, match="another follower has attached to rank 0 since"):
            use()
    assert second.live(ref)
    assert second.header() is None


def test_more_connections_than_it_takes(start: Start, connect: Connect, weights: live.ArrayRank) -> None:
    agent = start(weights)
    clients = [connect(agent) for _ in range(agents.MAX_CONNECTIONS)]
    assert {client.hello()["rank"] for client in clients} == {0}
    with pytest.raises(UnavailableError):
        connect(agent).hello()
    clients[0].close()
    deadline = time.monotonic() + 10
    while True:
        try:
            assert connect(agent).hello()["rank"] == 0
            break
        except UnavailableError:
            assert time.monotonic() < deadline


# ------------------------------------------------------------------------------------------ strangers and garbage


def raw(agent: Agent) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(agent.path)
    return connection


def test_garbage_is_refused_and_the_agent_lives(
    start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain
) -> None:
    agent, rng = start(weights), np.random.default_rng(8)
    steady = connect(agent)
    log = attached(steady, chain.store)
    bodies = [b"", b"{", b"[]", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{}x", rng.bytes(1000)]
    for body in bodies:
        with raw(agent) as connection:
            connection.sendall(struct.pack("<I", len(body)) + body)
            reply = receive(connection, 10)
            assert reply is not None
            assert reply["error"]["type"] == "FormatError"
            assert receive(connection, 10) is None, "goes on after what is no message"
    for request in ({}, {"op": 3}, {"op": "shutdown"}, {"op": "__init__"}, {"op": ["drop"]}):
        with raw(agent) as connection:
            send(connection, request)
            reply = receive(connection, 10)
            assert reply is not None
            assert reply["error"]["type"] == "UsageError"
            send(connection, {"op": "hello"})
            assert receive(connection, 10)
    for _ in range(20):
        with raw(agent) as connection, contextlib.suppress(OSError):
            connection.sendall(rng.bytes(int(rng.integers(1, 4000))))
    assert weights.digest() == steady.digest()
    assert log.catalog == chain.source.catalog


def test_oversized_messages_are_refused_before_they_are_read(start: Start, weights: live.ArrayRank) -> None:
    agent = start(weights)
    for size in (MAX_MESSAGE_BYTES + 1, (1 << 32) - 1):
        with raw(agent) as connection:
            connection.sendall(struct.pack("<I", size))
            reply = receive(connection, 10)
            assert reply is not None
            assert "too large" in reply["error"]["what"]
            assert receive(connection, 10) is None
    left, right = socket.socketpair()
    with left, right, pytest.raises(FormatError, match="too large"):
        send(left, {"op": "x" * (MAX_MESSAGE_BYTES + 1)})


def test_a_message_that_never_ends_holds_nobody_up(
    start: Start, connect: Connect, weights: live.ArrayRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "MESSAGE_S", 0.2)
    agent = start(weights)
    with raw(agent) as connection:
        connection.sendall(struct.pack("<I", 100) + b"{")
        assert connect(agent).hello()["rank"] == 0
        assert connection.recv(1) == b"", "still waits for the rest"


STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.settimeout(10)
connection.connect(sys.argv[1])
try:
    connection.sendall((14).to_bytes(4, "little") + b'{"op": "hello"}'[:14])
    got = connection.recv(100)
except OSError:
    got = b""
print(len(got))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away(start: Start, connect: Connect, weights: live.ArrayRank) -> None:
    """Even where the file's modes would let it in."""
    agent = start(weights)
    opened = [Path(agent.path), *Path(agent.path).parents]
    modes = {path: path.stat().st_mode & 0o777 for path in opened}
    try:
        for path, mode in modes.items():
            path.chmod(mode | (0o666 if path == opened[0] else 0o011))
        done = subprocess.run([sys.executable, "-c", STRANGER, agent.path], capture_output=True, text=True, timeout=30)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
    assert connect(agent).hello()["rank"] == 0


def test_the_user_of_a_peer_is_asked_of_the_kernel(
    start: Start, connect: Connect, weights: live.ArrayRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start(weights)
    monkeypatch.setattr(agents, "peer_uid", lambda connection: os.geteuid() + 1)
    with pytest.raises(UnavailableError):
        connect(agent).hello()
    monkeypatch.undo()
    assert connect(agent).hello()["rank"] == 0


def test_damaged_payload_files_are_refused(
    start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain, tmp_path: Path
) -> None:
    client = connect(start(weights))
    log = attached(client, chain.store)
    ref, file, data = first_payload(log, tmp_path)
    before = client.digest()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for damaged in (bytes(flipped), data[:-1], data + b"x", b""):
        file.write_bytes(damaged)
        for hand_over in (client.stage, client.fill):
            with pytest.raises(IntegrityError, match="payload file"):
                hand_over(ref, file)
    with pytest.raises(UsageError, match="does not see payload file"):
        client.stage(ref, tmp_path / "nothing")
    assert client.live(ref) is None
    assert client.digest() == before


def test_what_is_no_regular_file_holds_nobody_up(
    start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain, tmp_path: Path
) -> None:
    """The rank's lock is held while a payload is read: a pipe without a writer must not be waited for."""
    client = connect(start(weights))
    log = attached(client, chain.store)
    ref, _, _ = first_payload(log, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        for hand_over in ("stage", "fill"):
            with pytest.raises(UsageError, match="payload file"):
                client.call(hand_over, 5, ref=ref.to_bytes().decode(), path=str(path))
    assert client.digest()


def test_connections_that_say_nothing_shut_nobody_out(
    start: Start, connect: Connect, weights: live.ArrayRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "FIRST_S", 0.3)
    agent = start(weights)
    steady = connect(agent)
    assert steady.hello()["rank"] == 0
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(raw(agent)) for _ in range(agents.MAX_CONNECTIONS)]
        assert idle[0].recv(1) == b"", "waits for ever"
        deadline = time.monotonic() + 10
        while True:
            try:
                assert connect(agent).hello()["rank"] == 0
                break
            except UnavailableError:
                assert time.monotonic() < deadline
    time.sleep(0.5)
    assert steady.hello()["rank"] == 0, "who has said something may rest"


# ------------------------------------------------------------------------------------------ deadlines and ends


def test_an_agent_that_does_not_answer(start: Start, connect: Connect, weights: live.ArrayRank, chain: h.Chain) -> None:
    gate = Gate()
    agent = start(weights, on_main=gate)
    client, log = connect(agent), RunLog.open(chain.store)
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=r"no answer to attach within 0\.3 s"):
        client.call("attach", 0.3, run=log.run, catalog=log.catalog.to_bytes().decode())
    assert 0.25 < time.monotonic() - started < 5
    gate.let.set()
    assert gate.done.wait(10)
    with pytest.raises(UnavailableError, match="given up"):  # the late answer is to another question
        client.hello()
    assert connect(agent).hello()["rank"] == 0


def test_no_agent(tmp_path: Path, start: Start, weights: live.ArrayRank) -> None:
    with pytest.raises(UnavailableError, match="no agent"):
        AgentClient(str(tmp_path / "nothing.sock"))
    with pytest.raises(UsageError, match="too long"):
        AgentClient("/" + "x" * 200)
    agent = start(weights)
    client = AgentClient(agent.path)
    assert client.hello()
    agent.close()
    agent.close()
    assert not Path(agent.path).exists()
    with pytest.raises(UnavailableError):
        client.hello()
    with pytest.raises(UnavailableError):
        AgentClient(agent.path)


def test_close_waits_for_the_request_at_hand(start: Start, weights: live.ArrayRank, chain: h.Chain) -> None:
    gate = Gate()
    agent, log = start(weights, on_main=gate), RunLog.open(chain.store)
    client = AgentClient(agent.path)

    def ask() -> None:
        with contextlib.suppress(UnavailableError):  # the answer may not get out any more
            client.attach(log.run, log.catalog)

    asking = threading.Thread(target=ask)
    asking.start()
    assert gate.reached.wait(10)
    closing = threading.Thread(target=agent.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    gate.let.set()
    closing.join(10)
    asking.join(10)
    assert not closing.is_alive()
    assert gate.done.is_set()
    client.close()


def busy(use: Callable[[], object], gate: Gate) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that waits for an answer, and what it ends with."""
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            use()
        except RefitError as error:
            caught.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert gate.reached.wait(10)
    return asking, caught


def test_a_client_that_is_closed_wakes_who_waits(start: Start, weights: live.ArrayRank, chain: h.Chain) -> None:
    gate = Gate()
    agent, log = start(weights, on_main=gate), RunLog.open(chain.store)
    client = AgentClient(agent.path)
    asking, caught = busy(lambda: client.attach(log.run, log.catalog), gate)
    client.close()
    client.close()
    asking.join(5)
    woken = not asking.is_alive()
    gate.let.set()
    assert woken, "still waits for the answer"
    assert [type(error) for error in caught] == [UnavailableError]


def test_a_target_is_closed_though_a_rank_is_busy(
    start: Start, weights: live.ArrayRank, chain: h.Chain, tmp_path: Path
) -> None:
    gate, log = Gate(), RunLog.open(chain.store)
    gate.let.set()
    agent, other = start(weights, 0, 2, on_main=gate), live.ArrayRank(live.layout(1, 2), chain.models[1])
    other.load(chain.models[1])
    target = EngineTarget(Paths([agent.path, start(other, 1, 2).path]), tmp_path / "spool")
    target.attach(log.run, log.catalog)
    gate.let.clear()
    gate.reached.clear()
    asking, caught = busy(target.digest, gate)
    closing = threading.Thread(target=target.close, daemon=True)
    closing.start()
    closing.join(5)
    asking.join(5)
    ended = not closing.is_alive(), not asking.is_alive()
    gate.let.set()
    assert ended == (True, True), "waited for the rank"
    assert [type(error) for error in caught] == [UnavailableError]
    assert gate.done.wait(10), "the rank did not finish what it was asked for"


def test_a_target_is_closed_at_once_whatever_its_threads_do(engine: EngineTarget) -> None:
    begun, let = threading.Event(), threading.Event()

    def work(client: AgentClient) -> None:
        begun.set()
        assert let.wait(20)

    asking = threading.Thread(target=engine._all, args=(work,), daemon=True)
    asking.start()
    assert begun.wait(10)
    started = time.monotonic()
    timer = threading.Timer(5, let.set)
    timer.start()
    engine.close()
    seconds = time.monotonic() - started
    timer.cancel()
    let.set()
    assert seconds < 4
    asking.join(10)


# ------------------------------------------------------------------------------------------ places


def test_only_a_private_directory_will_do(tmp_path: Path, weights: live.ArrayRank) -> None:
    made = private_directory(tmp_path / "new" / "one")
    assert made.stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    (tmp_path / "link").symlink_to(made)
    for path in (tmp_path / "open", tmp_path / "link"):
        with pytest.raises(UsageError, match="is not private"):
            private_directory(path)
    (tmp_path / "file").touch()
    with pytest.raises(RefitError):
        private_directory(tmp_path / "file")
    with pytest.raises(UsageError, match="DELTAREFIT_RUN_DIR"):
        Agent(weights, 0, 1, directory=tmp_path / ("x" * 100)).start()


def test_where_sockets_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTAREFIT_RUN_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert run_directory() == tmp_path / "own"
    monkeypatch.delenv("DELTAREFIT_RUN_DIR")
    assert run_directory() == tmp_path / "xdg" / "deltarefit"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert run_directory().name == f"deltarefit-{os.geteuid()}"


def test_sockets_of_dead_processes_are_removed(start: Start, weights: live.ArrayRank, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(30)
    directory = private_directory(tmp_path / "s")
    stale, kept = directory / f"agent-{dead.pid}-0-abcdef01.sock", directory / "agent-x.sock"
    stale.touch()
    kept.touch()
    agent = start(weights)
    assert not stale.exists()
    assert kept.exists()
    remove_dead(directory)
    assert Path(agent.path).exists()
    assert Path(agent.path).stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------------------------ the engine's target


class Paths(live.FileControl):
    def __init__(self, paths: list[str]) -> None:
        super().__init__(Path())
        self.paths = paths

    def agents(self) -> list[str]:
        return self.paths


def test_agents_that_are_not_one_engine(start: Start, chain: h.Chain, tmp_path: Path, weights: live.ArrayRank) -> None:
    zero, one, log = start(weights, 0, 2), start(weights, 1, 2), RunLog.open(chain.store)
    for paths in ([], [one.path, zero.path], [zero.path], [zero.path, zero.path]):
        target = EngineTarget(Paths(paths), tmp_path / "spool")
        with pytest.raises(UnavailableError, match="not the ranks of one engine"):
            target.attach(log.run, log.catalog)
        with pytest.raises(UnavailableError):
            target.read_header()
        with pytest.raises(UsageError, match="before they were attached to"):
            target.seed(log.catalog, {})


def test_what_no_retry_cures_is_said_first(start: Start, chain: h.Chain, tmp_path: Path) -> None:
    ranks = [live.ArrayRank(live.layout(rank, 2), None) for rank in range(2)]
    started = [start(rank, number) for number, rank in enumerate(ranks)]
    for rank in ranks:
        rank.load(chain.models[1])
    target, log = EngineTarget(Paths([agent.path for agent in started]), tmp_path / "spool"), RunLog.open(chain.store)
    target.attach(log.run, log.catalog)
    assert target.proof() is None
    done = threading.Event()

    def fails(error: RefitError, wait: bool) -> Callable[[], dict[int, Digest]]:
        def digest() -> dict[int, Digest]:
            if wait:
                time.sleep(0.2)
                done.set()
            raise error

        return digest

    ranks[0].digest = fails(UnavailableError("later"), False)  # type: ignore[method-assign]
    ranks[1].digest = fails(BaseMismatch("never"), True)  # type: ignore[method-assign]
    with pytest.raises(BaseMismatch, match="never"):
        target.digest()
    assert done.is_set(), "gave up on a rank that was still at work"
    target.close()


def test_files_of_dead_followers_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(30)
    spool = private_directory(tmp_path / "spool")
    names = [f"payload-{dead.pid}-ab", f"payload-{os.getpid()}-ab", "payload-mine", "other"]
    for name in names:
        (spool / name).touch()
    EngineTarget(Paths([]), spool)
    assert sorted(path.name for path in spool.iterdir()) == sorted(names[1:])


@pytest.fixture
def engine(start: Start, chain: h.Chain, tmp_path: Path) -> Iterator[EngineTarget]:
    """Attached, of two ranks."""
    ranks = [live.ArrayRank(live.layout(rank, 2), chain.models[1]) for rank in range(2)]
    for rank in ranks:
        rank.load(chain.models[1])
    paths = [start(rank, number).path for number, rank in enumerate(ranks)]
    target, log = EngineTarget(Paths(paths), tmp_path / "spool"), RunLog.open(chain.store)
    target.attach(log.run, log.catalog)
    yield target
    target.close()


def test_a_spool_that_was_cleaned_away_is_made_anew(engine: EngineTarget, chain: h.Chain, tmp_path: Path) -> None:
    ref, _, data = first_payload(RunLog.open(chain.store), tmp_path)
    for _ in range(2):
        (tmp_path / "spool").rmdir()
        assert engine.stage(ref, data) == (ref.pre, ref.post)
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "spool").iterdir())


def test_a_spool_that_goes_away_does_not_look_like_a_lost_payload(
    engine: EngineTarget, chain: h.Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``NotFoundError`` would have healthy weights loaded again from an anchor."""
    ref, _, data = first_payload(RunLog.open(chain.store), tmp_path)
    monkeypatch.setattr(engines, "private_directory", lambda path: path)  # it goes at the very next moment
    (tmp_path / "spool").rmdir()
    with pytest.raises(UnavailableError, match="went away"):
        engine.stage(ref, data)
    monkeypatch.undo()
    assert engine.stage(ref, data) == (ref.pre, ref.post)


def test_notes_of_headers() -> None:
    header = Header("0" * 32, "1" * 64, State.CLEAN, 3, 0, Digest(1, 2), 0, "x")
    text = note(["a", "b"], header)
    assert read_note(text) == (["a", "b"], header)
    for damaged in ("", "{}", "[]", text[:-2], text.replace("CLEAN", "DIRTY"), text.replace('"a"', '"a', 1)):
        with pytest.raises(IntegrityError, match="damaged"):
            read_note(damaged)


def test_seeding_another_catalog(start: Start, chain: h.Chain, tmp_path: Path, weights: live.ArrayRank) -> None:
    agent, log = start(weights, 0, 1), RunLog.open(chain.store)
    weights.plan = live.layout(0, 2)
    target = EngineTarget(Paths([agent.path]), tmp_path / "spool")
    target.attach(log.run, log.catalog)
    target.seed(log.catalog, {})
    with pytest.raises(UsageError, match="another catalog"):
        target.seed(Catalog(()), {})
    target.close()
