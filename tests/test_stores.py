"""Every store and wrapper passes the contract; and what each of them does when things go wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deltarefit.errors import (
    AlreadyExistsError,
    NotFoundError,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.ports import Store
from deltarefit.stores import Limits, open_store
from deltarefit.stores.directory import DirectoryStore
from deltarefit.stores.object import ObjectStore
from deltarefit.stores.wrappers import Fault, Faulty, Kind, Prefixed, Retrying
from deltarefit.testing import StoreContract
from tests.seaweed import Seaweed

CANARY = "canary-" + secrets.token_hex(12)
IMPATIENT = Limits(connect_s=1.0, request_s=2.0, retries=2, retry_s=3.0)
"""One request ends within five seconds."""


class TestDirectory(StoreContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "new" / "store"

    def open(self) -> Store:
        return open_store(str(self.root))


class TestFileUrl(TestDirectory):
    racers, rounds, large_bytes = 4, 5, 1 << 20

    def open(self) -> Store:
        return open_store(f"file://{self.root}")


class TestMemory(StoreContract):
    @pytest.fixture(autouse=True)
    def _name(self) -> None:
        self.name = secrets.token_hex(8)

    def open(self) -> Store:
        return open_store(f"memory://{self.name}")


class TestSeaweed(StoreContract):
    races_at_once = 25

    @pytest.fixture(autouse=True)
    def _server(self, seaweed: Seaweed) -> None:
        self.server = seaweed

    def open(self) -> Store:
        return open_store("s3://refits/some/run", **self.server.login)


class TestRetrying(TestMemory):
    def open(self) -> Store:
        return Retrying(open_store(f"memory://{self.name}"))


class TestRetryingOverFaults(TestMemory):
    """Every second call of each repeatable verb fails, half of those after the fact: nobody notices."""

    def open(self) -> Store:
        plan = [
            Fault(kind, verb, first=first, last=None, every=4)
            for verb in ("put", "get", "size", "list", "delete")
            for first, kind in ((1, Kind.BEFORE), (3, Kind.AFTER))
        ]
        faulty = Faulty(open_store(f"memory://{self.name}"), plan)
        return Retrying(faulty, attempts=60, sleep=lambda _: None)  # racing callers share the count of calls


class TestFaultyWithoutFaults(TestMemory):
    def open(self) -> Store:
        return Faulty(open_store(f"memory://{self.name}"), [])


class TestPrefixed(TestMemory):
    def open(self) -> Store:
        return Prefixed(open_store(f"memory://{self.name}"), "some/run")


# --- open_store


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host/x",
        "memory://",
        "s3://",
        "s3:///x",
        "gs://",
        "s3://bucket/a//b",
        "http://host/x",
        "file://",
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert caught.value.next_step


def test_settings_of_s3_are_refused_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="region"):
        open_store(str(tmp_path), region="us-east-1")


def test_two_opens_of_one_name_see_one_memory() -> None:
    name = secrets.token_hex(8)
    open_store(f"memory://{name}").put("k", b"1")
    assert open_store(f"memory://{name}").get("k") == b"1"
    with pytest.raises(NotFoundError):
        open_store(f"memory://{name}x").get("k")


def test_google_and_azure_urls_open_without_a_network() -> None:
    assert open_store("gs://bucket/a/b").url == "gs://bucket/a/b"
    with pytest.raises(RefitError) as caught:
        open_store("az://container/a")  # no account in the environment
    assert isinstance(caught.value, UsageError | UnavailableError)


def test_opening_a_directory_does_not_import_obstore(tmp_path: Path) -> None:
    code = (
        "import sys; from deltarefit.stores import open_store; "
        f"open_store({str(tmp_path)!r}).put('k', b'1'); sys.exit('obstore' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0
    )


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
def test_what_servers_say_becomes_one_kind_of_error(status: int, code: str, kind: type[RefitError]) -> None:
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
def parrot(status: int, body: str, reading: int | None = None) -> Iterator[Store]:
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
            yield open_store("s3://bucket/x", endpoint=url, access_key="k", secret_key="s", limits=IMPATIENT)
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


# --- directories that do not want to


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="ENOTDIR") as caught:
            open_store(str(path))
        assert "path" in str(caught.value.next_step)


def test_a_key_below_another_key_is_refused_in_a_directory(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a", b"1")
    store.put("b/c", b"2")
    for call in (
        lambda: store.put("a/b", b""),
        lambda: store.create("a/b", b""),
        lambda: store.put("b", b""),
        lambda: store.create("b", b""),
    ):
        with pytest.raises(UsageError):
            call()
    assert list(store.list()) == [("a", 1), ("b/c", 1)]


def test_a_directory_that_vanished_is_not_an_empty_store(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.put("k", b"1")
    shutil.rmtree(tmp_path / "store")
    for call in (lambda: store.get("k"), lambda: store.put("k", b"1"), lambda: store.create("k", b"1")):
        with pytest.raises(UnavailableError, match="gone"):
            call()


def test_a_delete_leaves_no_empty_directories_and_races_with_creates(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            store.put("a/b/c/churn", b"1")
            store.delete("a/b/c/churn")

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(200):
            store.create(f"a/b/c/{number}", b"1")
            assert store.get(f"a/b/c/{number}") == b"1"
            store.delete(f"a/b/c/{number}")
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    assert [path.name for path in tmp_path.iterdir()] == ["~tmp"]
    assert list((tmp_path / "~tmp").iterdir()) == []


def test_opening_removes_only_old_leftovers(tmp_path: Path) -> None:
    open_store(str(tmp_path))
    old, new = tmp_path / "~tmp" / "old", tmp_path / "~tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    assert list(open_store(str(tmp_path)).list()) == []
    assert not old.exists()
    assert new.exists()


# --- durability, seen from the system calls


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files and directories in the order in which they are fsynced, linked, renamed."""
    steps: list[str] = []
    fsync, link, rename = os.fsync, os.link, os.replace

    def seen_fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        steps.append(f"fsync {'~tmp/*' if path.parent.name == '~tmp' else path.name}")
        fsync(handle)

    def seen_link(*args: object, **kwargs: object) -> None:
        steps.append("link")
        link(*args, **kwargs)  # type: ignore[arg-type]

    def seen_rename(*args: object, **kwargs: object) -> None:
        steps.append("rename")
        rename(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "link", seen_link)
    monkeypatch.setattr(os, "replace", seen_rename)
    return steps


def test_bytes_are_durable_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, steps: list[str]
) -> None:
    store = open_store(str(tmp_path / "root"))
    steps.clear()
    store.create("a/b/c", b"1")
    assert steps == ["fsync ~tmp/*", "link", "fsync b", "fsync a", "fsync root"]
    steps.clear()
    store.put("a/b/d", b"1")
    assert steps == ["fsync ~tmp/*", "rename", "fsync b", "fsync a", "fsync root"]


def test_a_name_that_may_not_be_durable_yet_is_made_so_by_whoever_sees_it(
    tmp_path: Path, steps: list[str]
) -> None:
    """Its writer is between link and return, or died there: the file still has its second name."""
    store = open_store(str(tmp_path / "root"))
    store.create("a/k", b"1")
    steps.clear()
    assert store.get("a/k") == b"1"
    assert steps == []
    (tmp_path / "root" / "~tmp" / "writer").hardlink_to(tmp_path / "root" / "a" / "k")
    assert store.get("a/k") == b"1"
    assert steps == ["link", "fsync a", "fsync root"]
    steps.clear()
    with pytest.raises(AlreadyExistsError):
        store.create("a/k", b"2")
    assert steps == ["fsync ~tmp/*", "link", "fsync a", "fsync root"]


def test_a_failing_fsync_is_never_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))

    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    for call in (lambda: store.put("k", b"1"), lambda: store.create("k", b"1")):
        with pytest.raises(UnavailableError, match="EIO"):
            call()
    assert list(store.list()) == []


def test_a_writer_killed_at_any_time_leaves_whole_objects_only(tmp_path: Path) -> None:
    code = (
        "import sys, itertools; from deltarefit.stores import open_store\n"
        "store = open_store(sys.argv[1]); print('ready', flush=True)\n"
        "for n in itertools.count():\n"
        "    store.put('k', bytes([n % 251]) * 300_000); store.create(f'c/{n}', b'x' * 300_000)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for turn in range(10):
        command = [sys.executable, "-c", code, str(tmp_path / str(turn))]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.02 * (turn + 1))
            writer.kill()
        store = open_store(str(tmp_path / str(turn)))
        objects = dict(store.list())
        assert set(objects.values()) <= {300_000}
        for key in objects:
            assert len(set(store.get(key))) == 1


# --- full and read-only disks, for real


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A file system of its own. Fails where that is not allowed unless the caller checked ``may_mount``."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True, timeout=30)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True, timeout=30)


def may_mount(tmp_path: Path) -> bool:
    try:
        with mounted(tmp_path / "probe", "size=64k"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size``: the full disk of those who may not mount."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_full(store: Store, root: Path) -> None:
    """A put and a create that do not fit fail, change nothing, and leave nothing behind."""
    store.put("k", b"old")
    too_large = bytes(3 << 20)
    for call in (
        lambda: store.put("k", too_large),
        lambda: store.put("new", too_large),
        lambda: store.create("new", too_large),
    ):
        with pytest.raises(StorageFullError) as caught:
            call()
        assert "room" in str(caught.value.next_step)
    assert list(store.list()) == [("k", 3)]
    assert store.get("k") == b"old"
    assert list((root / "~tmp").iterdir()) == []
    store.create("small", b"fits")


def test_a_full_disk(tmp_path: Path) -> None:
    if may_mount(tmp_path):
        with mounted(tmp_path / "small", "size=2m") as root:
            assert_full(open_store(str(root)), root)
    else:
        with file_size_limit(2 << 20):
            assert_full(open_store(str(tmp_path / "small")), tmp_path / "small")


def test_a_file_size_limit_counts_as_full(tmp_path: Path) -> None:
    with file_size_limit(2 << 20):
        assert_full(open_store(str(tmp_path)), tmp_path)


def assert_read_only(store: Store) -> None:
    assert store.get("k") == b"1"
    for call in (lambda: store.put("k", b"2"), lambda: store.create("new", b"2"), lambda: store.delete("k")):
        with pytest.raises(UsageError, match=r"EROFS|EACCES") as caught:
            call()
        assert "writable" in str(caught.value.next_step)
    assert store.get("k") == b"1"


def test_a_read_only_disk(tmp_path: Path) -> None:
    if may_mount(tmp_path):
        with mounted(tmp_path / "disk", "size=2m") as root:
            store = open_store(str(root))
            store.put("k", b"1")
            subprocess.run(["mount", "-o", "remount,ro", root], check=True, timeout=30)
            assert_read_only(store)
            assert DirectoryStore(root).get("k") == b"1", "a read-only store opens for reading"
    else:
        with tempfile.TemporaryDirectory() as name, nobody_may_write(Path(name)) as store:
            assert_read_only(store)


@contextlib.contextmanager
def nobody_may_write(root: Path) -> Iterator[Store]:
    """For those who may not mount: a directory without the right to write, seen as another user by root."""
    store = open_store(str(root))
    store.put("k", b"1")
    for path in (root / "~tmp", root):
        path.chmod(0o555)
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield store
    finally:
        os.seteuid(mine)
        for path in (root, root / "~tmp"):
            path.chmod(0o755)


def test_a_directory_of_another_user() -> None:
    with tempfile.TemporaryDirectory() as name, nobody_may_write(Path(name)) as store:
        assert_read_only(store)


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


def test_an_object_replaced_between_two_parts_is_not_mixed(
    seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# --- wrappers


def memory() -> Store:
    return open_store(f"memory://{secrets.token_hex(8)}")


def test_faults_strike_as_planned() -> None:
    inner = memory()
    inner.put("a/k", b"\x00" * 10)
    plan = [
        Fault(Kind.BEFORE, "put", "a/*"),
        Fault(Kind.AFTER, "create", first=2, last=2),
        Fault(Kind.CORRUPT, "get", "a/k"),
        Fault(Kind.TRUNCATE, "get", "a/k", first=2, last=2),
        Fault(Kind.MISSING, "get", "a/k", first=3, last=3),
        Fault(Kind.BEFORE, "delete", last=None),
    ]
    store = Faulty(inner, plan)
    with pytest.raises(UnavailableError):
        store.put("a/new", b"1")
    with pytest.raises(NotFoundError):
        inner.get("a/new")
    store.put("a/new", b"1")
    store.create("b/1", b"1")
    with pytest.raises(UnavailableError):
        store.create("b/2", b"2")
    assert inner.get("b/2") == b"2"
    assert store.get("a/k") == b"\x00" * 5 + b"\x01" + b"\x00" * 4
    assert store.get("a/k") == b"\x00" * 5
    with pytest.raises(NotFoundError):
        store.get("a/k")
    assert store.get("a/k") == b"\x00" * 10
    for _ in range(3):
        with pytest.raises(UnavailableError):
            store.delete("a/k")
    assert store.fired == [
        ("put", "a/new", Kind.BEFORE),
        ("create", "b/2", Kind.AFTER),
        ("get", "a/k", Kind.CORRUPT),
        ("get", "a/k", Kind.TRUNCATE),
        ("get", "a/k", Kind.MISSING),
        *[("delete", "a/k", Kind.BEFORE)] * 3,
    ]


def test_a_planned_delay_sleeps() -> None:
    slept: list[float] = []
    store = Faulty(memory(), [Fault(Kind.DELAY, "put", seconds=1.5, last=2)], sleep=slept.append)
    for _ in range(3):
        store.put("k", b"1")
    assert slept == [1.5, 1.5]


def test_retrying_gives_up_after_its_attempts_with_growing_bounded_waits() -> None:
    slept: list[float] = []
    faulty = Faulty(memory(), [Fault(Kind.BEFORE, last=None)])
    store = Retrying(faulty, attempts=6, backoff=1.0, longest=5.0, sleep=slept.append)
    with pytest.raises(UnavailableError):
        store.get("k")
    assert len(faulty.fired) == 6
    assert len(slept) == 5
    assert all(0 <= wait <= most for wait, most in zip(slept, (1, 2, 4, 5, 5), strict=True))


def test_retrying_repeats_every_verb_but_create() -> None:
    inner = memory()
    inner.put("k", b"1")
    for verb in ("put", "get", "size", "list", "delete", "create"):
        faulty = Faulty(inner, [Fault(Kind.AFTER, verb)])
        store = Retrying(faulty, sleep=lambda _: None)
        call = {
            "put": lambda store=store: store.put("k", b"1"),
            "get": lambda store=store: store.get("k"),
            "size": lambda store=store: store.size("k"),
            "list": lambda store=store: [*store.list()],
            "delete": lambda store=store: store.delete("k"),
            "create": lambda store=store: store.create("fresh", b"1"),
        }[verb]
        with pytest.raises(UnavailableError) if verb == "create" else contextlib.nullcontext():
            call()
        assert [struck for struck, _, _ in faulty.fired] == [verb]
        inner.put("k", b"1")


@pytest.mark.parametrize(
    "error", [NotFoundError("x"), UsageError("x"), AlreadyExistsError("x"), StorageFullError("x")]
)
def test_retrying_repeats_nothing_else(error: RefitError) -> None:
    calls: list[str] = []

    class Refusing(Faulty):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            calls.append(key)
            raise error

    with pytest.raises(type(error)):
        Retrying(Refusing(memory(), []), sleep=lambda _: None).get("k")
    assert calls == ["k"]
