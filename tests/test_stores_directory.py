"""Directory stores when things go wrong: power, full and read-only disks, dead writers, odd trees."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltarefit.errors import (
    AlreadyExistsError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.ports import Store
from deltarefit.stores import open_store
from deltarefit.stores.directory import DirectoryStore

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


def test_bytes_are_durable_before_the_name_and_the_name_before_the_return(tmp_path: Path, steps: list[str]) -> None:
    store = open_store(str(tmp_path / "root"))
    steps.clear()
    store.create("a/b/c", b"1")
    assert steps == ["fsync ~tmp/*", "link", "fsync b", "fsync a", "fsync root"]
    steps.clear()
    store.put("a/b/d", b"1")
    assert steps == ["fsync ~tmp/*", "rename", "fsync b", "fsync a", "fsync root"]


def test_a_name_that_may_not_be_durable_yet_is_made_so_by_whoever_sees_it(tmp_path: Path, steps: list[str]) -> None:
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


def test_the_file_of_an_object(tmp_path: Path, steps: list[str]) -> None:
    """Whole and durable once its path is given out; nothing but objects have one, and a lost root is not silence."""
    root = tmp_path / "root"
    store = DirectoryStore(root)
    store.create("a/k", b"1")
    (root / "~tmp" / "writer").hardlink_to(root / "a" / "k")
    steps.clear()
    assert store.file("a/k") == root / "a" / "k"
    assert steps == ["fsync a", "fsync root"]
    (root / "~tmp" / "writer").unlink()
    steps.clear()
    assert store.file("a/k") == root / "a" / "k"
    assert steps == []
    assert [store.file(key) for key in ("a", "a/none", "a/k/below")] == [None] * 3
    for key in ("../root/a/k", "~tmp/writer", "/etc/passwd"):
        with pytest.raises(UsageError):
            store.file(key)
    root.rename(tmp_path / "away")
    with pytest.raises(UnavailableError):
        store.file("a/k")


def test_a_failing_fsync_is_never_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))

    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    for call in (lambda: store.put("k", b"1"), lambda: store.create("k", b"1")):
        with pytest.raises(UnavailableError, match="EIO"):
            call()
    assert list(store.list()) == []


@pytest.mark.slow
def test_a_writer_killed_at_any_time_leaves_whole_objects_only(tmp_path: Path) -> None:
    code = (
        "import sys, itertools; from deltarefit.stores import open_store\n"
        "store = open_store(sys.argv[1]); print('ready', flush=True)\n"
        "for n in itertools.count():\n"
        "    store.put('k', bytes([n % 251]) * 300_000); store.create(f'c/{n}', b'x' * 300_000)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for turn in range(6):
        command = [sys.executable, "-c", code, str(tmp_path / str(turn))]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.04 * turn)
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
