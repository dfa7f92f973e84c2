"""Remote stores when things go wrong: secrets, servers that refuse, die or keep silent, parts of objects."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deltarefit.errors import (
    NotFoundError,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.ports import Store
from deltarefit.stores import Limits, open_store
from deltarefit.stores.object import ObjectStore
from tests.seaweed import Seaweed

CANARY = "canary-" + secrets.token_hex(12)
IMPATIENT = Limits(connect_s=1.0, request_s=2.0, retries=2, retry_s=3.0)
"""One request ends within five seconds."""


# --- secrets


def test_no_message_holds_a_secret(seaweed: Seaweed, caplog: pytest.LogCaptureFixture) -> None:
    login = seaweed.login | {"secret_key": CANARY}
    store = open_store("s3://refits/x", session_token=CANARY + "-token", limits=IMPATIENT, **login)
    seen = [repr(store), str(store), store.url]
    for call in (
        lambda: store.get("k"),
        lambda: store.put("k", b""),
        lambda: store.size("k"),
        lambda: [*store.list()],
    ):
        with pytest.raises(UsageError) as caught:
            call()
        err = caught.value
        seen += [str(err), repr(err), "".join(traceback.format_exception(type(err), err, err.__traceback__))]
    assert len(seen) == 3 + 4 * 3
    assert not [text for text in (*seen, caplog.text) if "canary" in text]


def test_a_secret_in_a_reply_is_cut_out() -> None:
    reply = f"<Error><Code>AccessDenied</Code><Message>{CANARY} is wrong</Message></Error>"
    with parrot(403, reply, secret=CANARY) as store, pytest.raises(UsageError, match=r"\*\*\* is wrong") as caught:
        store.get("k")
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{CANARY}@bucket/x",
        f"s3://bucket/x?secret={CANARY}",
        f"s3://bucket/x#{CANARY}",
        f"ftp://{CANARY}@x/",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert CANARY not in str(caught.value)


def test_a_secret_in_an_endpoint_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        open_store("s3://bucket/x", endpoint=f"http://key:{CANARY}@127.0.0.1:1")
    assert CANARY not in str(caught.value)


def test_wrong_credentials_say_so(seaweed: Seaweed) -> None:
    for wrong, code in (
        ({"secret_key": "wrong"}, "SignatureDoesNotMatch"),
        ({"access_key": "no"}, "InvalidAccessKeyId"),
    ):
        store = open_store("s3://refits/x", limits=IMPATIENT, **(seaweed.login | wrong))
        with pytest.raises(UsageError, match=code) as caught:
            store.get("k")
        assert "secret key" in str(caught.value.next_step)
        with pytest.raises(UsageError):
            store.create("k", b"1")


def test_a_missing_bucket_is_not_an_empty_store(seaweed: Seaweed) -> None:
    with pytest.raises(UsageError, match="no such bucket"):
        open_store("s3://absent-bucket/x", limits=IMPATIENT, **seaweed.login).get("k")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "InvalidBucketName", UsageError),
        (400, "ExpiredToken", UnavailableError),
        (400, "RequestTimeout", UnavailableError),
        (401, "", UsageError),
        (403, "AccessDenied", UsageError),
        (403, "RequestTimeTooSkewed", UnavailableError),
        (404, "NoSuchBucket", UsageError),
        (409, "OperationAborted", UnavailableError),
        (412, "PreconditionFailed", UnavailableError),
        (429, "SlowDown", UnavailableError),
        (301, "PermanentRedirect", UsageError),
        (500, "InternalError", UnavailableError),
        (501, "NotImplemented", UsageError),
        (503, "SlowDown", UnavailableError),
        (507, "", StorageFullError),
        (200, "no S3 server", UnavailableError),
    ],
)
def test_what_a_server_says_is_one_kind_of_error(status: int, code: str, kind: type[RefitError]) -> None:
    """Replies that the server of these tests never gives, from one that gives nothing else, over real HTTP."""
    with parrot(status, f"<Error><Code>{code}</Code></Error>") as store:
        for call in (
            lambda: store.get("k"),
            lambda: store.get("k", 2, 3),
            lambda: store.size("k"),
            lambda: store.put("k", b"1"),
            lambda: store.create("k", b"1"),
        ):
            with pytest.raises(RefitError) as caught:
                call()
            assert type(caught.value) is kind
            assert caught.value.next_step


def test_a_conflict_without_an_object_does_not_read_as_taken() -> None:
    """S3 answers 409 to a create that met another one, even if that one fails in the end."""
    with parrot(409, "<Error><Code>ConditionalRequestConflict</Code></Error>", reading=404) as store:
        with pytest.raises(UnavailableError, match="conflict"):
            store.create("k", b"1")
        with pytest.raises(NotFoundError):
            store.get("k")


@contextlib.contextmanager
def parrot(status: int, body: str, reading: int | None = None, secret: str = "s") -> Iterator[Store]:
    """A store on an HTTP server that gives one answer to everything, or another to reads."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            read = self.command in ("GET", "HEAD")
            self.send_response(reading if read and reading else status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body.encode())

        def log_message(self, *_: object) -> None:
            pass

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield open_store("s3://bucket/x", endpoint=url, access_key="k", secret_key=secret, limits=IMPATIENT)
        finally:
            server.shutdown()


def test_plain_http_is_allowed_only_if_it_is_given_as_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = open_store("s3://bucket/x", access_key="k", secret_key="s", limits=IMPATIENT)
    with pytest.raises(UsageError, match="plain http"):
        store.get("k")


def test_credentials_come_from_the_environment(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    store = open_store("s3://refits/environment", endpoint=seaweed.endpoint)
    store.put("k", b"1")
    assert store.get("k") == b"1"


# --- deadlines


@pytest.mark.slow
def test_a_killed_server_is_unavailable_within_the_deadline_and_keeps_what_it_had(tmp_path: Path) -> None:
    with Seaweed(tmp_path) as server:
        server.make_bucket("refits")
        store = open_store("s3://refits/x", limits=IMPATIENT, **server.login)
        store.create("before", b"kept")
        server.kill()
        for call in (
            lambda: store.get("before"),
            lambda: store.put("k", b"1"),
            lambda: store.create("k", b"1"),
            lambda: store.put("large", bytes(20 << 20)),
            lambda: store.size("before"),
            lambda: [*store.list()],
            lambda: store.delete("k"),
        ):
            start = time.monotonic()
            with pytest.raises(UnavailableError, match="connection refused"):
                call()
            assert time.monotonic() - start < 5
        server.start()
        assert store.get("before") == b"kept"


def put_for_ever(store: Store) -> None:
    while True:
        store.delete("large")
        store.put("large", secrets.token_bytes(64 << 20))


@pytest.mark.slow
def test_a_server_killed_during_a_large_put_leaves_no_object(tmp_path: Path) -> None:
    with Seaweed(tmp_path) as server:
        server.make_bucket("refits")
        store = open_store("s3://refits/x", limits=IMPATIENT, **server.login)
        killer = threading.Timer(0.3, server.kill)
        killer.start()
        with pytest.raises(UnavailableError):
            put_for_ever(store)
        killer.join()
        server.start()
        with contextlib.suppress(NotFoundError):
            assert store.size("large") == 64 << 20


@pytest.mark.parametrize("verb", ["get", "put", "create", "size", "list", "delete", "put large"])
def test_a_silent_server_is_unavailable_within_the_deadline(verb: str) -> None:
    """It takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = open_store(
            "s3://refits/x",
            endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}",
            access_key="k",
            secret_key="s",
            region="us-east-1",
            limits=Limits(connect_s=0.5, request_s=0.5, retries=1, retry_s=1.0),
        )
        call = {
            "get": lambda: store.get("k"),
            "put": lambda: store.put("k", b"1"),
            "create": lambda: store.create("k", b"1"),
            "size": lambda: store.size("k"),
            "list": lambda: [*store.list()],
            "delete": lambda: store.delete("k"),
            "put large": lambda: store.put("k", bytes(20 << 20)),
        }[verb]
        start = time.monotonic()
        with pytest.raises(UnavailableError, match="no answer in time"):
            call()
        assert time.monotonic() - start < 4


# --- parts


def test_large_objects_in_parts_of_every_shape(seaweed: Seaweed) -> None:
    """Sizes and ranges around the part size, against the same slice of the bytes."""
    part = 5 << 20  # the least that S3 takes
    store = open_store("s3://refits/parts", limits=Limits(part_bytes=part), **seaweed.login)
    data = secrets.token_bytes(3 * part + 1)
    for size in (part - 1, part, part + 1, 3 * part, 3 * part + 1):
        store.put("k", memoryview(data)[:size])
        assert store.size("k") == size
        assert store.get("k") == data[:size]
        for start, length in (
            (0, part),
            (0, part + 1),
            (1, part),
            (size - 1, 5),
            (part, None),
            (1, 2 * part),
        ):
            assert store.get("k", start, length) == data[:size][start:][: size if length is None else length]


def test_an_object_replaced_between_two_parts_is_not_mixed(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("s3://refits/mixed", limits=Limits(part_bytes=5 << 20), **seaweed.login)
    assert isinstance(store, ObjectStore)
    store.put("k", b"1" * (12 << 20))
    rest = store._rest

    def replaced_before_the_rest(key: str, cuts: Sequence[int], tag: str | None) -> Sequence[bytes]:
        store.put("k", b"2" * (12 << 20))
        return rest(key, cuts, tag)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_rest", replaced_before_the_rest)
        with pytest.raises(UnavailableError, match="replaced"):
            store.get("k")
    assert store.get("k") == b"2" * (12 << 20)
