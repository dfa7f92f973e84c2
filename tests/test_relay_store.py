"""The client of a relay against servers that lie, stall, trickle and never end: raw answers over real sockets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from deltarefit.cli.settings import Remote
from deltarefit.errors import (
    AlreadyExistsError,
    IntegrityError,
    NotFoundError,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.relay_api import MOST_ERROR_BYTES, MOST_NEWS, MOST_PATH
from deltarefit.stores import Limits, open_store, relay
from deltarefit.stores.relay import RelayStore
from tests.hostile import FLOOD_BYTES, Answer, Request, Server, always, endless, says, server, trickle

TOKEN = secrets.token_hex(16)
DATA = secrets.token_bytes(1000)
KEY = f"a/0000000001/pl/{hashlib.sha256(DATA).hexdigest()}"
QUICK = Limits(connect_s=2, request_s=2)


@contextlib.contextmanager
def client(answer: Answer, limits: Limits = QUICK, **rest: object) -> Iterator[tuple[RelayStore, Server]]:
    with server(answer, **rest) as made, contextlib.closing(RelayStore(made.url, token=TOKEN, limits=limits)) as store:
        yield store, made


VERBS: dict[str, Callable[[RelayStore], object]] = {
    "get": lambda store: store.get(KEY),
    "range": lambda store: store.get(KEY, 5, 10),
    "size": lambda store: store.size(KEY),
    "put": lambda store: store.put(KEY, DATA),
    "create": lambda store: store.create("run", DATA),
    "delete": lambda store: store.delete(KEY),
    "list": lambda store: [*store.list("a")],
    "news": lambda store: store.news("", 0),
    "status": lambda store: store.status(),
}
every_verb = pytest.mark.parametrize("verb", VERBS)


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        ("get", says(200, DATA[:-1], len(DATA))),
        ("range", says(206, DATA[5:14], 10, Content_Range="bytes 5-14/1000")),
        ("range", says(206, DATA[5:14], Content_Range="bytes 5-14/1000")),
        ("range", says(206, DATA[6:16], Content_Range="bytes 6-14/1000")),
        ("range", says(206, DATA[5:15])),
        ("range", says(206, DATA[5:16])),
        ("range", says(206, DATA[6:16], Content_Range="bytes 6-15/1000")),
        ("range", says(206, DATA[5:10], Content_Range="bytes 5-9/1000")),
        ("get", says(206, DATA[:10], Content_Range="bytes 0-9/1000")),
        ("get", says(416)),
        ("get", says(200, DATA, "")),
        ("get", says(200, DATA, -5)),
        ("get", says(200, DATA, "0x10")),
        ("size", says(200, b"", "")),
        ("size", says(200, b"", -5)),
        ("size", says(200, b"", "1_0")),
        ("get", b"HTTP/1.1 200 X\r\nContent-Le"),
        ("get", b"SSH-2.0-OpenSSH_9.6\r\n"),
        ("get", b""),
    ],
    ids=lambda value: value if isinstance(value, str) else value[:60].decode("latin-1").split("\r\n")[0] or "nothing",
)
def test_answers_that_cannot_be_right(ask: str, answer: bytes) -> None:
    def once(_: Request) -> Iterator[bytes]:
        yield answer
        raise EOFError

    with client(once) as (store, _), pytest.raises(UnavailableError):
        VERBS[ask](store)


def test_a_part_of_unknown_size() -> None:
    """Of what is only passed on: at most what was asked for, and nothing that is put together from chunks."""
    with client(always(says(206, DATA[5:15], Content_Range="bytes 5-14/*"))) as (store, _):
        assert store.get("head", 5, 10) == store.get("head", 5, 20) == store.get("head", 5) == DATA[5:15]
        for key, start, length in (("head", 5, 9), ("head", 6, 10), (KEY, 5, 10), (KEY, 5, 20), (KEY, 5, None)):
            with pytest.raises(UnavailableError):
                store.get(key, start, length)


def test_what_is_sent_beyond_the_end_is_nobodys_answer() -> None:
    """Bytes after a body that look like an answer to the next request."""
    with client(always(says(200, DATA) + says(200, b"forged"))) as (store, _):
        for _ in range(5):
            assert store.get("head") == DATA


def test_no_more_is_read_than_was_asked_for() -> None:
    """A server that ignores the range of a request, and has no end."""
    with client(endless(says(200, DATA, 1 << 40))) as (store, made):
        assert store.get(KEY, 5, 10) == DATA[5:15]
    assert made.sent < FLOOD_BYTES // 2


@every_verb
@pytest.mark.parametrize("status", [500, 301])
def test_an_error_without_end(verb: str, status: int) -> None:
    answer = endless(says(status, b"", 1 << 40, Location="/"))
    with client(answer) as (store, made), pytest.raises((UnavailableError, UsageError)):
        VERBS[verb](store)
    assert made.sent < FLOOD_BYTES // 2


@pytest.mark.parametrize("verb", ["put", "create", "delete"])
def test_a_yes_without_end(verb: str) -> None:
    with client(endless(says(200, b"", 1 << 40))) as (store, made):
        VERBS[verb](store)
    assert made.sent < FLOOD_BYTES // 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("verb", ["get", "list", "news", "status"])
def test_a_trickle_is_given_up(verb: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps every read from running out of time, but not the whole."""
    monkeypatch.setattr(relay, "LEAST_RATE", 1 << 40)
    answer = trickle(says(status, b"", 1 << 20))
    with client(answer, Limits(request_s=0.5)) as (store, _), pytest.raises(UnavailableError):
        VERBS[verb](store)


@every_verb
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(verb: str, status: int) -> None:
    with server(always(says(200, DATA))) as other:
        answer = always(says(status, Location=f"{other.url}/v1/o/{KEY}"))
        with client(answer) as (store, _), pytest.raises(UsageError, match="redirect"):
            VERBS[verb](store)
        assert other.requests == []


ERRORS = {
    400: UsageError, 401: UsageError, 403: UsageError, 404: NotFoundError, 412: AlreadyExistsError,
    422: IntegrityError, 429: UnavailableError, 500: UnavailableError, 502: UnavailableError,
    503: UnavailableError, 507: StorageFullError,
}  # fmt: skip
BODIES = {
    "fields": json.dumps({"what": "told", "found": "this", "next_step": "Do that.", "other": [1]}).encode(),
    "garbage": b"<html>\xff\x00{",
    "deep": b"[" * MOST_ERROR_BYTES,
    "other types": b'{"what": 5, "found": null}',
    "a list": b"[1, 2]",
    "nothing": b"",
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("status", ERRORS)
def test_errors_keep_their_kind(status: int, body: str) -> None:
    with client(always(says(status, BODIES[body]))) as (store, _):
        for verb in ("get", "size", "create"):
            with pytest.raises(ERRORS[status]) as caught:
                VERBS[verb](store)
            assert type(caught.value) is ERRORS[status]
            assert ("told" in str(caught.value)) == (body == "fields" and verb != "size")


def echo(status: int) -> Answer:
    """An error that repeats what was sent, as servers for debugging do."""
    return lambda request: [says(status, json.dumps({"what": str(request.headers), "found": TOKEN}).encode())]


@every_verb
@pytest.mark.parametrize(
    "answer",
    [echo(400), echo(401), echo(503), always(says(301)), always(b"HTTP/1.1 " + TOKEN.encode() + b"\r\n\r\n"),
     always(TOKEN.encode() + b"\r\n\r\n"), always(says(206, b"x", Content_Range=TOKEN))],
    ids=["400", "401", "503", "redirect", "status", "garbage", "range"],
)  # fmt: skip
def test_the_token_stands_in_no_message(verb: str, answer: Answer) -> None:
    with client(answer) as (store, made):
        with pytest.raises(RefitError) as caught:
            VERBS[verb](store)
        said = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + str(vars(caught.value))
        assert TOKEN not in said + repr(store) + store.url + made.requests[0].target
        assert made.requests[0].headers["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("token", ["", "two words", "line\r\nX: y", "ä" * 16, "x" * 600])
def test_bad_tokens_are_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(UsageError) as caught:
        RelayStore("http://127.0.0.1:1", token=token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize(
    "lines",
    [b"", b'["a/x", 1]\n', b"[\nnull\n", b"7\nnull\n", b'["a/x", -1]\nnull\n', b'["../x", 1]\nnull\n',
     b'["a/x", true]\nnull\n', b"[" * 100_000 + b"\nnull\n", b'["a/x", "1"]\nnull\n', b"\xff\nnull\n"],
)  # fmt: skip
def test_lists_that_are_none(lines: bytes) -> None:
    with client(always(says(200, lines))) as (store, _), pytest.raises(UnavailableError):
        [*store.list("a")]


def test_a_list_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MOST_LIST_BYTES", 1000)
    with client(endless(says(200, b"", 1 << 40))) as (store, made), pytest.raises(UnavailableError):
        [*store.list("a")]
    assert made.sent < FLOOD_BYTES // 2


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"cursor": 1, "keys": []}', b'{"cursor": "c", "keys": [["../x", 1]]}', b"[" * 100_000,
     json.dumps({"cursor": "c", "keys": [["k", 1]] * (MOST_NEWS + 1)}).encode()],
)  # fmt: skip
def test_news_that_are_none(body: bytes) -> None:
    with client(always(says(200, body))) as (store, _), pytest.raises(UnavailableError):
        store.news("", 0)


def test_a_loop_of_parents_is_named() -> None:
    with server(always(says(200, DATA, Deltarefit_Path="above, me,root"))) as made:
        with pytest.raises(UnavailableError, match=r"me -> above -> me\."):
            RelayStore(made.url, own_id="me").get(KEY)
        other = RelayStore(made.url, own_id="another")
        assert other.get(KEY) == DATA
        assert other.path == ("above", "me", "root")


def test_a_path_has_bounds() -> None:
    header = ",".join(["<b>", "", "x" * 65, "ok", *map(str, range(100))])
    with client(always(says(200, DATA, Deltarefit_Path=header))) as (store, _):
        store.get(KEY)
        assert store.path[:1] == ("ok",)
        assert len(store.path) <= MOST_PATH


def test_only_bytes_that_came_are_doubted() -> None:
    """The same bytes once more: the first answer was damaged. Not after an answer that failed, nor for other bytes."""
    fails = [True]

    def answer(_: Request) -> Iterable[bytes]:
        return [says(503)] if fails[0] else [says(200, DATA)]

    with client(answer) as (store, made):
        with pytest.raises(UnavailableError):
            store.get(KEY)
        fails[0] = False
        for _ in range(2):
            store.get(KEY)
            store.get("head")
    asked = [(request.target.rpartition("/")[2][:4], request.headers.get("cache-control")) for request in made.requests]
    digest = KEY.rpartition("/")[2][:4]
    assert asked == [(digest, None), (digest, None), ("head", None), (digest, "no-cache"), ("head", None)]


def test_connections_are_used_again() -> None:
    """Also after errors, and after answers without a body: whoever polls makes no new connection each time."""

    def answer(request: Request) -> Iterable[bytes]:
        body = b'{"what": "no such key"}'
        if request.method in ("PUT", "DELETE"):
            return [says(204)]
        if request.target.endswith("/there"):
            return [says(200, b"", 7)]
        return [says(404, b"" if request.method == "HEAD" else body, len(body))]

    with client(answer) as (store, made):
        for _ in range(5):
            with pytest.raises(NotFoundError):
                store.get("head")
            assert not store.wait("head", 0)
            assert store.size("there") == 7
            store.put("head", b"x")
            store.delete("head")
        assert made.connections == 1


@pytest.mark.timeout(60)
def test_a_slow_link_takes_a_large_upload() -> None:
    """The whole takes longer than a connection may; no part of it does."""
    got = []

    def slowly(sock: socket.socket, count: int) -> bytes:
        hasher, left = hashlib.sha256(), count
        while left:
            if not (piece := sock.recv(min(left, 1 << 20))):
                raise EOFError
            hasher.update(piece)
            left -= len(piece)
            time.sleep(len(piece) / (16 << 20))
        got.append(hasher.hexdigest())
        return b""

    body = secrets.token_bytes(32 << 20)
    with client(always(says(204)), Limits(connect_s=0.7, request_s=20), read=slowly) as (store, _):
        store.put(KEY, body)
    assert hashlib.sha256(body).hexdigest() in got


def silent_first(status_too: bool) -> Answer:
    """Says nothing to the first GET of an object, and if ``status_too`` to nobody; then all is well."""
    gets = []

    def answer(request: Request) -> Iterator[bytes]:
        first = not gets
        if request.target.startswith("/v1/o/"):
            gets.append(request)
        if status_too or (first and gets):
            time.sleep(30)
        yield says(200, b"{}" if request.target == "/v1/status" else DATA)

    return answer


@pytest.mark.timeout(60)
def test_a_relay_that_is_silent_and_lives_is_waited_for() -> None:
    with client(silent_first(False), Limits(request_s=0.5)) as (store, made):
        assert store.get(KEY) == DATA
        assert [request.target for request in made.requests].count("/v1/status") == 1


@pytest.mark.timeout(60)
def test_a_relay_that_does_not_answer_at_all_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "ANSWER_S", 0.5)
    with server(silent_first(True)) as dead, server(always(says(200, DATA))) as other:
        store = open_store(f"{dead.url},{other.url}", limits=Limits(request_s=0.5, retries=1))
        assert store.get(KEY) == DATA
        store.close()  # type: ignore[attr-defined]


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for verb in VERBS.values():
        with pytest.raises(UnavailableError, match="refused"):
            verb(RelayStore(url))


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with client(always(says(200, DATA))) as (store, made):
        assert store.get(KEY) == DATA
        assert made.requests[0].target == f"/v1/o/{KEY}"


def test_a_token_from_a_file(tmp_path: Path) -> None:
    """What ``--token-file`` names: before the environment, of its owner only, one word."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    access = Remote(token_file=file)
    with server(always(says(200, DATA))) as made, contextlib.closing(access.open(made.url)) as store:  # type: ignore[type-var]
        assert store.get(KEY) == DATA
        assert made.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    for text, mode in ((TOKEN, 0o644), (f"{TOKEN} {TOKEN}", 0o600), ("", 0o600)):
        file.write_text(text)
        file.chmod(mode)
        with pytest.raises(UsageError) as caught:
            access.open("http://127.0.0.1:1")
        assert TOKEN not in str(caught.value)
