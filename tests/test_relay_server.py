"""A relay against clients that mean no good, or are just slow: raw requests over real sockets."""

from __future__ import annotations

import hashlib
import http.client
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from deltarefit.errors import UsageError
from deltarefit.relay import running
from deltarefit.relay.auth import Auth
from deltarefit.relay.budgets import Budget
from deltarefit.relay.serving import Settings
from deltarefit.relay_api import MOST_WAIT_S, SHA256
from deltarefit.stores import open_store
from deltarefit.stores.wrappers import Fault, Faulty, Kind
from tests.relays import relay

TOKENS = {role: secrets.token_hex(16) for role in ("read", "follow", "publish")}


class Reply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


def ask(url: str, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Reply:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.request(method, target, body, headers or {})
        answer = connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


@pytest.fixture(params=["directory", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "root") if request.param == "directory" else f"memory://server-{secrets.token_hex(8)}"


@pytest.fixture
def url(root: str, tmp_path: Path) -> Iterator[str]:
    with relay(open_store(root), tmp_path / "cache") as url:
        yield url


def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    path.chmod(0o600)
    return path


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[role]}"}


def content(size: int = 100_000) -> tuple[str, bytes]:
    data = secrets.token_bytes(size)
    return f"a/0000000001/pl/{hashlib.sha256(data).hexdigest()}", data


def test_objects_over_http(url: str) -> None:
    key, data = content()
    assert ask(url, "PUT", f"/v1/o/{key}", data).status == 204
    whole = ask(url, "GET", f"/v1/o/{key}")
    assert (whole.status, whole.body) == (200, data)
    part = ask(url, "GET", f"/v1/o/{key}", headers={"Range": "bytes=10-19"})
    assert (part.status, part.body, part.headers["content-range"]) == (206, data[10:20], f"bytes 10-19/{len(data)}")
    rest = ask(url, "GET", f"/v1/o/{key}", headers={"Range": f"bytes={len(data) - 3}-"})
    assert (rest.status, rest.body) == (206, data[-3:])
    beyond = ask(url, "GET", f"/v1/o/{key}", headers={"Range": f"bytes={len(data)}-"})
    assert (beyond.status, beyond.body) == (416, b"")
    assert ask(url, "HEAD", f"/v1/o/{key}").headers["content-length"] == str(len(data))
    assert whole.headers["deltarefit-path"]
    assert ask(url, "DELETE", f"/v1/o/{key}").status == 204
    assert ask(url, "HEAD", f"/v1/o/{key}").status == 404


def test_create_is_the_roots(url: str, root: str) -> None:
    once = {"If-None-Match": "*"}
    assert ask(url, "PUT", "/v1/o/run", b"mine", once).status == 201
    taken = ask(url, "PUT", "/v1/o/run", b"other", once)
    assert taken.status == 412
    assert open_store(root).get("run") == b"mine"


@pytest.mark.parametrize(
    "path",
    ["../secret", "a/../../secret", "%2e%2e/secret", "a/%2e%2e/x", "a//b", "/etc/passwd", "~tmp/x", "a%00b", "a%0Ab",
     "a b", "a/" + "x" * 2000, "a\\b", "%C3%A4", ".", "a/./b"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_path_tricks_are_refused(url: str, tmp_path: Path, path: str, method: str) -> None:
    (tmp_path / "secret").write_bytes(b"hidden")
    target = "/v1/o/" + (path if "%" in path else quote(path, safe="/.~"))
    reply = ask(url, method, target, b"x" if method == "PUT" else None)
    assert reply.status in (400, 404)
    assert b"hidden" not in reply.body
    assert (tmp_path / "secret").read_bytes() == b"hidden"


@pytest.mark.parametrize(
    "header", ["bytes=5-2", "bytes=-5", "bytes=a-b", "bytes=0-1,3-4", "items=0-1", "bytes=" + "9" * 30]
)
def test_odd_ranges_are_refused(url: str, header: str) -> None:
    ask(url, "PUT", "/v1/o/k", b"0123456789")
    assert ask(url, "GET", "/v1/o/k", headers={"Range": header}).status == 400


def test_roles(root: str, tmp_path: Path) -> None:
    settings = Settings(auth=Auth.of_file(tokens_file(tmp_path)))
    store = open_store(root)
    store.put("head", b"h")
    with relay(store, tmp_path / "cache", settings=settings) as url:
        for headers in ({}, {"Authorization": "Bearer " + "0" * 32}, {"Authorization": "Basic eDp5"}):
            for method, target in (
                ("GET", "/v1/o/head"),
                ("PUT", "/v1/o/head"),
                ("GET", "/v1/status"),
                ("GET", "/v1/list"),
            ):
                assert ask(url, method, target, b"" if method == "PUT" else None, headers).status == 401
        may = {
            "read": {"GET head"},
            "follow": {"GET head", "PUT member/r1", "PUT a/0000000001/v/r1", "PUT pin/anchor-12ab", "DELETE member/r1"},
        }
        for call in (
            "GET head", "PUT head", "PUT member/r1", "PUT a/0000000001/v/r1", "PUT pin/anchor-12ab", "DELETE member/r1",
            "PUT a/0000000001/outcome", "PUT run", "DELETE run", "PUT member/r1/x", "PUT a/0000000001/pl/" + "0" * 64,
        ):  # fmt: skip
            method, key = call.split()
            for role, allowed in may.items():
                reply = ask(url, method, f"/v1/o/{key}", b"x" if method == "PUT" else None, bearer(role))
                assert (reply.status == 403) == (call not in allowed), (role, call, reply.status)
                assert TOKENS[role].encode() not in reply.body
        assert ask(url, "PUT", "/v1/o/run", b"r", bearer("publish")).status == 204
        assert not [key for key, _ in store.list() if key.startswith("a/0000000001/pl")]


def test_nothing_but_the_interface(url: str) -> None:
    for method, target in (
        ("GET", "/"),
        ("GET", "/v1/o/"),
        ("POST", "/v1/o/k"),
        ("GET", "/favicon.ico"),
        ("PATCH", "/v1/o/k"),
    ):
        assert ask(url, method, target, b"").status in (404, 405)


def test_uploads_that_break_off_or_lie_leave_nothing(url: str, root: str, tmp_path: Path) -> None:
    parts = urlsplit(url)
    key, data = content()
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        head = f"PUT /v1/o/{key} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data[: len(data) // 2])
    assert ask(url, "PUT", f"/v1/o/{key}", data[:-1] + bytes([data[-1] ^ 1])).status == 422
    wrong = {SHA256: hashlib.sha256(b"other").hexdigest()}
    assert ask(url, "PUT", "/v1/o/a/0000000001/intent", b"record", wrong | {"If-None-Match": "*"}).status == 422
    assert ask(url, "PUT", "/v1/o/k", b"x", {SHA256: "Z" * 64}).status == 400
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(f"PUT /v1/o/{key} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
        assert b" 400 " in connection.recv(100)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(
            f"PUT /v1/o/{key} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode()
        )
        assert b" 400 " in connection.recv(100)
    assert list(open_store(root).list()) == []
    deadline = time.monotonic() + 20
    while [path for path in (tmp_path / "cache").iterdir() if path.name != "lock"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_a_reader_that_stands_still_is_let_go(root: str, tmp_path: Path) -> None:
    key, data = content(24 << 20)
    store = open_store(root)
    store.put(key, data)
    settings = Settings(budget=Budget(grace_s=0.5, least_bytes_per_s=1 << 30))
    with relay(store, tmp_path / "cache", settings=settings) as url:
        parts = urlsplit(url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(20)
            connection.connect((parts.hostname, parts.port))
            connection.sendall(f"GET /v1/o/{key} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            time.sleep(2)
            got = 0
            try:
                while piece := connection.recv(1 << 20):
                    got += len(piece)
            except ConnectionResetError:
                pass
            assert got < len(data)
        assert ask(url, "GET", f"/v1/o/{key}").body == data


def test_connections_without_a_request_are_let_go(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SILENT_S", 0.5)
    monkeypatch.setattr(running, "SWEEP_S", 0.2)
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        connection.sendall(b"GET /v1/status HTTP/1.1\r\nHo")
        assert connection.recv(100) == b""


def test_one_client_may_not_take_everything(root: str, tmp_path: Path) -> None:
    settings = Settings(budget=Budget(requests=2))
    with relay(open_store(root), tmp_path / "cache", settings=settings) as url:
        waiting = [threading.Thread(target=ask, args=(url, "HEAD", "/v1/o/k?wait=3")) for _ in range(2)]
        for thread in waiting:
            thread.start()
        deadline, statuses = time.monotonic() + 20, set()
        while 503 not in statuses and time.monotonic() < deadline:
            statuses.add(ask(url, "GET", "/v1/status").status)
        assert 503 in statuses
        for thread in waiting:
            thread.join()
        assert ask(url, "GET", "/v1/status").status == 200


def test_waiting_for_a_key(url: str, root: str) -> None:
    assert ask(url, "HEAD", "/v1/o/k?wait=0.1").status == 404
    assert ask(url, "HEAD", "/v1/o/k?wait=x").status == 400
    threading.Timer(0.3, lambda: ask(url, "PUT", "/v1/o/k", b"now")).start()
    assert ask(url, "HEAD", f"/v1/o/k?wait={MOST_WAIT_S:g}").status == 200


def test_news(url: str) -> None:
    start = json.loads(ask(url, "GET", "/v1/news").body)
    key, data = content(1000)
    threading.Timer(0.3, lambda: ask(url, "PUT", f"/v1/o/{key}", data)).start()
    told = json.loads(ask(url, "GET", f"/v1/news?after={start['cursor']}&wait=20").body)
    assert [key, 1000] in told["keys"]
    assert json.loads(ask(url, "GET", f"/v1/news?after={told['cursor']}").body)["keys"] == []
    assert json.loads(ask(url, "GET", "/v1/news?after=other-3").body)["keys"] == []


def test_a_root_tells_of_what_others_put_into_its_store(url: str, root: str) -> None:
    start = json.loads(ask(url, "GET", "/v1/news").body)
    key, data = content(1000)
    open_store(root).put(key, data)
    found: list[list[object]] = []
    deadline = time.monotonic() + 20
    while [key, 1000] not in found and time.monotonic() < deadline:
        told = json.loads(ask(url, "GET", f"/v1/news?after={start['cursor']}&wait=2").body)
        start, found = told, found + told["keys"]
    assert [key, 1000] in found


def test_lists(url: str) -> None:
    for key in ("a/x", "a/b/c", "b"):
        ask(url, "PUT", f"/v1/o/{key}", key.encode())
    lines = [json.loads(line) for line in ask(url, "GET", "/v1/list?prefix=a").body.splitlines()]
    assert lines == [["a/b/c", 5], ["a/x", 3], None]
    assert ask(url, "GET", "/v1/list?prefix=..").status == 400


def test_ipv6(root: str, tmp_path: Path) -> None:
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with relay(open_store(root), tmp_path / "cache", host="::1") as url:
        assert url.startswith("http://[::1]:")
        assert ask(url, "GET", "/v1/status").status == 200


def test_no_listener_without_authentication_off_loopback(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="authentication"),
        relay(open_store(str(tmp_path)), tmp_path / "c", host="0.0.0.0"),
    ):
        pass


def test_numbers(url: str) -> None:
    ask(url, "PUT", "/v1/o/k", b"0123456789")
    ask(url, "GET", "/v1/o/k")
    status = json.loads(ask(url, "GET", "/v1/status").body)
    assert status["sent_bytes"] == 10
    assert status["peak_resident_bytes"] >= status["resident_bytes"] // 2 > 0
    assert b"deltarefit_relay_sent_bytes 10\n" in ask(url, "GET", "/metrics").body


def test_what_the_parent_says_of_a_write_is_told_on(tmp_path: Path) -> None:
    """Of every size, and for every way to write: never HTTP 500."""
    plan = [Fault(Kind.BEFORE, verb, last=None) for verb in ("put", "create", "delete")]
    store = Faulty(open_store(f"memory://server-{secrets.token_hex(8)}"), plan)
    with relay(store, tmp_path / "above") as above, relay(above, tmp_path / "cache") as url:
        for body in (b"", b"x", bytes(3 << 20)):
            for headers in ({}, {"If-None-Match": "*"}):
                reply = ask(url, "PUT", "/v1/o/member/x", body, headers)
                assert reply.status == 503
                assert "planned fault" in json.loads(reply.body)["what"]
        assert ask(url, "DELETE", "/v1/o/member/x").status == 503
