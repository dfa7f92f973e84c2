"""A directory that is killed, filled or tampered with has the seeded bits afterwards, or says what is bad."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from deltarefit.errors import (
    BaseMismatch,
    FormatError,
    IntegrityError,
    NotFoundError,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.manifest import Catalog, Header, State, TensorEntry
from deltarefit.records import Digest
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.targets.checkpoint import CheckpointTarget

SHAPES = {
    "b": ("BF16", (40, 60)),
    "flags": ("BOOL", (3,)),
    "ids": ("I64", (9,)),
    "none": ("F32", (0, 4)),
    "s": ("F32", ()),
    "f4": ("F4", (2, 4)),
    "f8": ("F8_E4M3", (7, 5)),
    "z": ("U16", (33,)),
}
CATALOG = Catalog(tuple(TensorEntry(n, d, s) for n, (d, s) in sorted(SHAPES.items())))
BITS = [np.random.default_rng(i).bytes(e.nbytes) for i, e in enumerate(CATALOG.tensors)]


def header(state: State = State.UNKNOWN, version: int = 0) -> Header:
    return Header("0" * 32, CATALOG.identity, state, version, 0, Digest(), 0, "ab")


def weight_header(names: list[str], pad: int) -> bytes:
    """Verbatim header of a weight file; ``pad`` spaces shift its data off any alignment."""
    body: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        entry = CATALOG.tensors[CATALOG.index[name]]
        shape = [2, 8] if entry.dtype == "F4" else list(entry.shape)
        body[name] = {"dtype": entry.dtype, "shape": shape, "data_offsets": [end, end + entry.nbytes]}
        end += entry.nbytes
    text = json.dumps(body).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text


def files(pad: int = 0) -> dict[str, bytes]:
    one, two = ["b", "flags", "ids", "none"], ["s", "f4", "f8", "z"]
    names = dict.fromkeys(one, "m-1.safetensors") | dict.fromkeys(two, "m-2.safetensors")
    return {
        "m-1.safetensors.header": weight_header(one, pad),
        "m-2.safetensors.header": weight_header(two, pad + 1),
        "model.safetensors.index.json": json.dumps({"weight_map": names}).encode(),
        "config.json": b'{"a": 1}',
        "tokenizer.json": b"{}" * 3000,
    }


def write_all(target: CheckpointTarget, bits: list[bytes] = BITS, pieces: int = 3) -> None:
    assert target.catalog is not None
    for number, entry in enumerate(target.catalog.tensors):
        cuts = np.linspace(0, entry.numel, pieces + 1).astype(int).tolist()
        for start, stop in itertools.pairwise(cuts):
            with target.window(number, start, stop) as (elements, first):
                assert first == 0
                assert elements.flags.aligned
                width = entry.width
                elements[:] = np.frombuffer(bits[number][start * width : stop * width], f"u{width}")


def read_all(target: CheckpointTarget) -> list[bytes]:
    found = []
    assert target.catalog is not None
    for number, entry in enumerate(target.catalog.tensors):
        with target.window(number, 0, entry.numel) as (elements, _):
            found.append(elements.tobytes())
    return found


@contextlib.contextmanager
def opened(directory: Path, **options: Any) -> Iterator[CheckpointTarget]:
    target = CheckpointTarget(directory, **options)
    try:
        yield target
    finally:
        target.close()


def seed_all(target: CheckpointTarget, side: Mapping[str, bytes]) -> None:
    """What the receiver does with an empty directory."""
    target.write_header(header())
    target.seed(CATALOG, side)
    write_all(target)
    target.flush()
    target.finish_seed()
    target.write_header(header(State.CLEAN, 7))


def visible(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def expected_files(side: Mapping[str, bytes]) -> dict[str, bytes]:
    """The directory that the side files and ``BITS`` describe, built without any code under test."""
    found = {name: data for name, data in side.items() if not name.endswith(".header")}
    for name, data in side.items():
        if name.endswith(".header"):
            body = json.loads(data[8:])
            body.pop("__metadata__")
            ordered = sorted(body, key=lambda n: body[n]["data_offsets"])
            found[name.removesuffix(".header")] = data + b"".join(BITS[CATALOG.index[n]] for n in ordered)
    return found


@pytest.mark.parametrize("pad", range(8))
def test_a_seeded_directory_is_byte_identical(tmp_path: Path, pad: int) -> None:
    with opened(tmp_path / "d") as target:
        assert target.catalog is None
        assert target.read_header() is None
        target.write_header(header())
        target.seed(CATALOG, files(pad))
        write_all(target)
        assert visible(tmp_path / "d") == {}  # nothing is shown before it is complete
        target.finish_seed()
        target.finish_seed()
        target.write_header(header(State.CLEAN, 7))
    assert visible(tmp_path / "d") == expected_files(files(pad))
    with opened(tmp_path / "d") as target:
        assert target.catalog == CATALOG
        assert target.read_header() == header(State.CLEAN, 7)
        assert read_all(target) == BITS


def test_without_headers_there_is_one_file_that_opens(tmp_path: Path) -> None:
    with opened(tmp_path) as target:
        seed_all(target, {})
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(SHAPES)
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("ids").tobytes() == BITS[CATALOG.index["ids"]]
    assert CheckpointSource(tmp_path).catalog == CATALOG


def test_tied_names_are_stored_once(tmp_path: Path) -> None:
    catalog = Catalog((TensorEntry("head", "U8", (4,), ("embed",)),))
    text = b'{"embed":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    for number, side in enumerate(({}, {"m.safetensors.header": len(text).to_bytes(8, "little") + text})):
        directory = tmp_path / str(number)
        with opened(directory) as target:
            target.seed(catalog, side)
            with target.window(0, 1, 3) as (elements, _):
                elements[:] = 5, 6
            target.finish_seed()
        with opened(directory) as target:
            assert target.catalog == catalog
        source = CheckpointSource(directory)
        assert [e.name for e in source.catalog.tensors] == [["head"], ["embed"]][number]
        with source.read(0, 0, 4) as elements:
            assert elements.tolist() == [0, 5, 6, 0]


def test_windows_write_exactly_their_range_from_many_threads(tmp_path: Path) -> None:
    catalog = Catalog((TensorEntry("w", "I64", (40_000,)),))
    text = b'{"w":{"dtype":"I64","shape":[40000],"data_offsets":[0,320000]}}  '  # 65 bytes: nothing is aligned
    for side in ({}, {"m.safetensors.header": len(text).to_bytes(8, "little") + text}):
        with opened(tmp_path / str(len(side))) as target:
            target.seed(catalog, side)

            def work(start: int, target: CheckpointTarget = target) -> None:
                with target.window(0, start, start + 100) as (elements, _):
                    elements += np.arange(start, start + 100, dtype=np.uint64)

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(work, range(0, 40_000, 100)))
            with target.window(0, 0, 40_000) as (elements, _):
                assert np.array_equal(elements, np.arange(40_000, dtype=np.uint64))


def test_what_a_failing_block_wrote_stays(tmp_path: Path) -> None:
    def fail(elements: Any) -> None:
        elements[0] = 9
        raise ZeroDivisionError

    for pad in (0, 1):
        with opened(tmp_path / str(pad)) as target:
            target.seed(CATALOG, files(pad))
            number = CATALOG.index["ids"]
            with pytest.raises(ZeroDivisionError), target.window(number, 2, 4) as (elements, _):
                fail(elements)
            with target.window(number, 0, 9) as (elements, _):
                assert elements.tolist() == [0, 0, 9, 0, 0, 0, 0, 0, 0]


def test_a_window_that_only_reads_dirties_nothing(tmp_path: Path) -> None:
    for pad in range(2):
        directory = tmp_path / str(pad)
        with opened(directory) as target:
            seed_all(target, files(pad))
            for path in directory.glob("*.safetensors"):
                os.utime(path, ns=(1, 1))
            assert read_all(target) == BITS
            target.flush()
            assert {path.stat().st_mtime_ns for path in directory.glob("*.safetensors")} == {1}


def test_ranges_outside_a_tensor_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as target:
        with pytest.raises(NotFoundError, match="is empty"), target.window(0, 0, 0):
            pass
        with pytest.raises(UsageError, match="not seeded"):
            target.finish_seed()
        target.seed(CATALOG, {})
        for start, stop in ((-1, 3), (0, 10), (5, 4)):
            with (
                pytest.raises(UsageError, match="no range of ids"),
                target.window(CATALOG.index["ids"], start, stop),
            ):
                pass


def test_spool(tmp_path: Path) -> None:
    with opened(tmp_path) as target:
        spool = target.spool
        assert spool.get("ab.1") is None
        spool.put("ab.1", b"x" * 100_000)
        spool.put("ab.1", memoryview(b"yz"))
        spool.put("cd", b"")
        for name in ("", ".", "..", "a/b", "../a", "xyz", "a..b", "AB"):
            with pytest.raises(UsageError, match="bad spool name"):
                spool.put(name, b"")
    with opened(tmp_path) as target:
        assert (target.spool.get("ab.1"), target.spool.get("cd")) == (b"yz", b"")
        target.spool.clear()
        assert target.spool.get("ab.1") is None
        target.spool.clear()


def test_pause_and_resume_call_back(tmp_path: Path) -> None:
    calls: list[str] = []
    with opened(tmp_path, on_pause=lambda: calls.append("pause"), on_resume=lambda: calls.append("resume")) as target:
        target.pause()
        target.pause()
        target.resume()
    with opened(tmp_path) as target:
        target.pause()
        target.resume()
    assert calls == ["pause", "pause", "resume"]


# Files of others


@pytest.mark.parametrize("name", ["model.safetensors", "x.safetensors", "pytorch_model.bin", "w.pt", "w.pth", "m.gguf"])
def test_a_directory_with_the_users_weights_is_refused_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(UsageError, match=f"holds files.*{name}"):
        CheckpointTarget(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"precious"


def test_weights_that_appear_before_or_during_the_seed_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as target:
        (tmp_path / "a" / "other.safetensors").write_bytes(b"precious")
        with pytest.raises(UsageError, match="holds files"):
            target.seed(CATALOG, files())
    with pytest.raises(UsageError, match="holds files"):
        CheckpointTarget(tmp_path / "a")
    with opened(tmp_path / "b") as target:
        target.seed(CATALOG, files())
        (tmp_path / "b" / "m-1.safetensors").write_bytes(b"precious")
        with pytest.raises(IntegrityError, match="replaced"):
            write_all(target)
        with pytest.raises(UsageError, match="appeared"):
            target.finish_seed()
    assert (tmp_path / "b" / "m-1.safetensors").read_bytes() == b"precious"


def test_the_users_side_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"mine")
    (tmp_path / "README.md").write_bytes(b"mine")
    with opened(tmp_path) as target:
        with pytest.raises(UsageError, match=r"config\.json"):
            target.seed(CATALOG, files())
        assert target.catalog is None
        (tmp_path / "config.json").unlink()
        seed_all(target, files())
        (tmp_path / "vocab.json").write_bytes(b"mine")
        with pytest.raises(UsageError, match=r"vocab\.json"):
            target.seed(CATALOG, files() | {"vocab.json": b"theirs"})
    assert (tmp_path / "vocab.json").read_bytes() == b"mine"
    assert (tmp_path / "README.md").read_bytes() == b"mine"


def test_a_later_seed_keeps_bits_and_layout_and_refreshes_side_files(tmp_path: Path) -> None:
    with opened(tmp_path) as target:
        seed_all(target, files())
        later = {
            "config.json": b"new",
            "vocab.json": b"v",
            "model.safetensors.index.json": b'{"weight_map":{}}',
        }
        with pytest.raises(FormatError):
            target.seed(CATALOG, later)  # an index that no weight file matches
        index = json.dumps({"weight_map": dict.fromkeys(SHAPES, "model.safetensors")}).encode()
        target.seed(CATALOG, later | {"model.safetensors.index.json": index})
        assert read_all(target) == BITS
        assert (tmp_path / "config.json").read_bytes() == b'{"a": 1}'
        target.finish_seed()
    assert visible(tmp_path) == expected_files(files()) | {"config.json": b"new", "vocab.json": b"v"}
    with opened(tmp_path) as target:
        target.seed(CATALOG, {"config.json": b"newer"})
        target.finish_seed()
        assert (tmp_path / "config.json").read_bytes() == b"newer"


def test_another_catalog_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as target:
        target.seed(CATALOG, {})
        with pytest.raises(BaseMismatch, match="another catalog"):
            target.seed(Catalog(CATALOG.tensors[:-1]), {})


@pytest.mark.parametrize(
    "name", ["evil.py", "pytorch_model.bin", "../config.json", "/etc/x.json", ".deltarefit", "a.safetensors"]
)
def test_a_hostile_anchor_places_nothing(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / "d") as target:
        with pytest.raises(FormatError):
            target.seed(CATALOG, files() | {name: b"x"})
        assert target.catalog is None
    assert visible(tmp_path / "d") == {}
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


# Damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    data = path.read_bytes()
    path.rename(path.with_name("moved"))
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda p: os.truncate(p, p.stat().st_size - 1),
    "emptied": lambda p: os.truncate(p, 0),
    "extended": lambda p: os.truncate(p, p.stat().st_size + 1),
    "gone": lambda p: p.unlink(),
    "swapped": swap,
    "header": flip,
    "garbage": lambda p: p.write_bytes(b"\xff" * p.stat().st_size),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("hidden", [False, True])
def test_damaged_weight_files_are_found(tmp_path: Path, damage: str, hidden: bool) -> None:
    with opened(tmp_path) as target:
        target.seed(CATALOG, files())
        if not hidden:
            target.finish_seed()
        path = (tmp_path / ".deltarefit" / "seed" if hidden else tmp_path) / "m-1.safetensors"
        DAMAGE[damage](path)
        if damage not in ("header", "garbage"):  # found at the next opening; the receiver's digests find bits
            with pytest.raises(IntegrityError, match=r"m-1\.safetensors"), target.window(0, 0, 1):
                pytest.fail("gave a window on a damaged file")
    if damage == "swapped":
        with opened(tmp_path):
            return  # the same bytes under a new inode: a copy that was restored
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"m-1\.safetensors.*seeded anew"):
            CheckpointTarget(tmp_path)


@pytest.mark.parametrize("name", ["header", "layout"])
def test_damaged_state_is_found(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as target:
        seed_all(target, files())
    flip(tmp_path / ".deltarefit" / name)
    with pytest.raises(IntegrityError, match=name), opened(tmp_path) as target:
        target.read_header()


def test_removing_the_state_of_a_seeded_directory_makes_it_the_users(tmp_path: Path) -> None:
    with opened(tmp_path) as target:
        seed_all(target, files())
    shutil.rmtree(tmp_path / ".deltarefit")
    with pytest.raises(UsageError, match="holds files"):
        CheckpointTarget(tmp_path)


# One owner


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child; 0 if it returned, -N if signal N killed it."""
    if not (pid := os.fork()):
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_second_process_is_refused_with_the_pid(tmp_path: Path) -> None:
    code = "import sys; from deltarefit.targets import checkpoint; checkpoint.CheckpointTarget(sys.argv[1])"
    with opened(tmp_path):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert f"UnavailableError: {tmp_path} is in use; found process {os.getpid()}" in done.stderr
        with pytest.raises(UnavailableError, match="in use"):
            CheckpointTarget(tmp_path)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_closing_and_collecting_give_the_directory_back(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        target = CheckpointTarget(tmp_path)
        target.seed(CATALOG, {})
        del target
    with opened(tmp_path) as target:
        pass
    target.close()
    for call in (
        target.flush,
        target.finish_seed,
        lambda: target.write_header(header()),
        lambda: target.seed(CATALOG, {}),
    ):
        with pytest.raises(UsageError, match="is closed"):
            call()
    with pytest.raises(UsageError, match="is closed"), target.window(0, 0, 1):
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# Full, forbidden and failing disks


def test_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    huge = Catalog((TensorEntry("w", "I64", (1 << 46,)),))
    with opened(tmp_path) as target:
        target.write_header(header())
        with pytest.raises(StorageFullError, match="no room for the weights"):
            target.seed(huge, {})
        assert target.catalog is None
        assert not (tmp_path / ".deltarefit" / "seed").exists()
        seed_all(target, files())
    assert visible(tmp_path) == expected_files(files())


def test_no_room_found_by_the_kernel_leaves_nothing_behind(tmp_path: Path) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # posix_fallocate beyond it really fails
        catalog = Catalog((TensorEntry("a", "U8", (1 << 10,)), TensorEntry("b", "U8", (1 << 21,))))
        with opened(tmp_path) as target, pytest.raises(StorageFullError, match="no room for the weights"):
            target.seed(catalog, {})
        assert not (tmp_path / ".deltarefit" / "seed").exists()

    assert in_child(work) == 0
    with opened(tmp_path) as target:
        seed_all(target, files())


def test_a_forbidden_directory_is_a_usage_error(tmp_path: Path) -> None:
    def work() -> None:
        os.chdir(tmp_path)
        tmp_path.chmod(0o555)
        if os.geteuid() == 0:
            os.setuid(65534)
        with pytest.raises(UsageError, match="EACCES"):
            CheckpointTarget(".")

    assert in_child(work) == 0
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RefitError, match="cannot use"):
        CheckpointTarget(tmp_path / "file")


def test_a_failed_flush_stays_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as target:
        target.seed(CATALOG, files())
        write_all(target)

        def fail(_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fail)
            with pytest.raises(IntegrityError, match="did not keep"):
                target.flush()
        with pytest.raises(IntegrityError, match="did not keep"):
            target.flush()  # the kernel reports a lost page once; we do not forget it
        with pytest.raises(IntegrityError, match="did not keep"):
            target.finish_seed()


def test_names_become_durable_after_what_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SIGKILL cannot show: the order that a power loss needs. Real calls, recorded."""
    trace: list[tuple[str, Path]] = []

    def recorded(owner: Any, name: str, where: Callable[..., str | Path]) -> None:
        real = getattr(owner, name)

        def step(*args: Any) -> Any:
            trace.append((name, Path(where(*args))))
            return real(*args)

        monkeypatch.setattr(owner, name, step)

    with opened(tmp_path) as target:
        recorded(os, "fsync", lambda handle: Path(f"/proc/self/fd/{handle}").readlink())
        recorded(os, "fdatasync", lambda handle: Path(f"/proc/self/fd/{handle}").readlink())
        recorded(Path, "replace", lambda source, _: source)
        state = tmp_path / ".deltarefit"
        target.write_header(header())
        (first, temporary), *rest = trace
        assert first == "fsync"
        assert temporary.parent == state
        assert rest == [("replace", temporary), ("fsync", state)]
        trace.clear()
        target.seed(CATALOG, files())
        placed = next(i for i, (_, path) in enumerate(trace) if path.name.startswith("layout."))
        synced = {path for name, path in trace[:placed] if name == "fsync"}
        assert {state / "seed", state, *((state / "seed" / f"m-{n}.safetensors") for n in (1, 2))} <= synced
        trace.clear()
        target.finish_seed()
        shown = [i for i, (name, path) in enumerate(trace) if name == "replace" and path.parent == state / "seed"]
        assert len(shown) == len(visible(tmp_path)) == 5
        assert {path.name for _, path in trace[: shown[0]]} == {"m-1.safetensors", "m-2.safetensors"}
        assert ("fsync", tmp_path) in trace[shown[-1] :]


def test_flush_covers_every_window_and_what_a_killed_process_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda handle: (synced.append(os.fstat(handle).st_size), real(handle))[1])
    with opened(tmp_path) as target:
        seed_all(target, files())
        sizes = {name: (tmp_path / name).stat().st_size for name in ("m-1.safetensors", "m-2.safetensors")}
        synced.clear()
        target.flush()
        assert synced == []
        with target.window(CATALOG.index["z"], 0, 1):
            target.flush()
            assert synced == [sizes["m-2.safetensors"]]
        target.flush()
        assert synced == [sizes["m-2.safetensors"]] * 2
    synced.clear()
    with opened(tmp_path) as target:
        target.flush()
        assert sorted(synced) == sorted(sizes.values())


# Kills


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: SIGKILL loses no page there, and fsync takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as directory:
        yield Path(directory)


def kill_at(call: int) -> None:
    """In a child: die by SIGKILL just before the ``call``-th system call that touches files."""
    left = [call]

    def armed(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return step

    for name in (
        "open",
        "fsync",
        "fdatasync",
        "pwrite",
        "posix_fallocate",
        "ftruncate",
        "unlink",
        "rmdir",
        "statvfs",
    ):
        setattr(os, name, armed(getattr(os, name)))
    for name in ("open", "replace", "mkdir", "iterdir"):
        setattr(Path, name, armed(getattr(Path, name)))
    mmap.mmap = armed(mmap.mmap)


def each_instant(work: Callable[[], None]) -> Iterator[int]:
    """Kill ``work`` at its first file system call, its second, ..., until it gets through."""
    for call in range(10_000):

        def child(call: int = call) -> None:
            kill_at(call)
            work()

        code = in_child(child)
        assert code in (0, -signal.SIGKILL)
        yield call
        if code == 0:
            assert call > 5
            return


def check_shown(directory: Path, side: Mapping[str, bytes]) -> None:
    """What users see at any instant: complete files only, and no config before all weights are there."""
    shown = visible(directory)
    assert shown.items() <= expected_files(side).items()
    if "config.json" in shown:
        assert {"m-1.safetensors", "m-2.safetensors"} <= set(shown)


@pytest.mark.slow
def test_killed_at_every_step_of_a_first_seed(memory_path: Path) -> None:
    side, directory = files(1), memory_path

    def work() -> None:
        with opened(directory) as target:
            seed_all(target, side)

    for call in each_instant(work):
        if directory.exists():
            check_shown(directory, side)
        with opened(directory) as target:
            if (found := target.read_header()) is not None and found.state is State.CLEAN:
                assert visible(directory) == expected_files(side)
            if target.catalog is None:  # space that nobody owns is given back at once
                assert not (directory / ".deltarefit" / "seed").exists()
            seed_all(target, side)
            assert not (directory / ".deltarefit" / "seed").exists()
            assert {p.name for p in (directory / ".deltarefit").iterdir()} == {
                "header",
                "layout",
                "lock",
                "spool",
            }
        assert visible(directory) == expected_files(side)
        directory = memory_path / str(call + 1)


@pytest.mark.slow
def test_killed_at_every_step_of_finish_seed_loses_no_bit(memory_path: Path) -> None:
    side, directory = files(), memory_path

    def prepare() -> None:
        with opened(directory) as target:
            target.write_header(header())
            target.seed(CATALOG, side)
            write_all(target)

    def work() -> None:
        with opened(directory) as target:
            target.finish_seed()
            target.write_header(header(State.CLEAN, 7))

    prepare()
    for call in each_instant(work):
        check_shown(directory, side)
        with opened(directory) as target:
            found = target.read_header()
            assert found in (header(), header(State.CLEAN, 7))
            assert read_all(target) == BITS  # mapped wherever each file is
            target.finish_seed()
        assert visible(directory) == expected_files(side)
        directory = memory_path / str(call + 1)
        prepare()


@pytest.mark.slow
def test_killed_at_every_step_of_a_later_seed(memory_path: Path) -> None:
    side = files()
    later = side | {"config.json": b"new", "vocab.json": b"v"}
    with opened(memory_path) as target:
        seed_all(target, side)

    def work() -> None:
        with opened(memory_path) as target:
            target.seed(CATALOG, later)
            target.finish_seed()

    for _ in each_instant(work):
        with opened(memory_path) as target:
            assert read_all(target) == BITS
            target.seed(CATALOG, later)
            target.finish_seed()
        assert visible(memory_path) == expected_files(later)
        with opened(memory_path) as target:
            target.seed(CATALOG, side)
            target.finish_seed()


@pytest.mark.slow
def test_killed_at_every_step_of_header_and_spool_writes(memory_path: Path) -> None:
    with opened(memory_path) as target:
        target.write_header(header(State.CLEAN, 1))

    def work() -> None:
        with opened(memory_path) as target:
            target.spool.put("aa", b"new" * 5000)
            target.write_header(header(State.CLEAN, 2))
            target.spool.clear()

    seen = set()
    for _ in each_instant(work):
        with opened(memory_path) as target:
            found = target.read_header()
            assert found is not None
            spooled = target.spool.get("aa")
            assert spooled in ((None, b"new" * 5000) if found.version == 2 else (None, b"old", b"new" * 5000))
            seen.add((found.version, spooled and spooled[:3]))
            assert len(list((memory_path / ".deltarefit" / "spool").iterdir())) <= 1
            target.spool.put("aa", b"old")
            target.write_header(header(State.CLEAN, 1))
    assert {(1, b"old"), (1, b"new"), (2, b"new"), (2, None)} <= seen


@pytest.mark.slow
def test_killed_at_random_instants_the_acknowledged_header_is_there(memory_path: Path) -> None:
    rng, version, rounds = random.Random(5), 0, 0
    until = time.monotonic() + 60
    while rounds < 25 or (version < 10 and time.monotonic() < until):
        rounds += 1
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            with contextlib.suppress(BaseException), opened(memory_path) as target:
                for number in range(version + 1, 10_000):
                    target.spool.put("ab", str(number).encode() * 1000)
                    target.write_header(header(State.CLEAN, number))
                    os.write(writer, number.to_bytes(4, "little"))
            os._exit(1)
        os.close(writer)
        time.sleep(rng.uniform(0.001, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        acknowledged = os.read(reader, 1 << 16)[-4:]
        os.close(reader)
        floor = int.from_bytes(acknowledged, "little") if acknowledged else version
        with opened(memory_path) as target:
            found = target.read_header()
            now = found.version if found else 0
            assert floor <= now <= floor + 1
            if spooled := target.spool.get("ab"):
                assert spooled in (str(now).encode() * 1000, str(now + 1).encode() * 1000)
        version = now
    assert version >= 10


# The real readers


def llama(tied: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def carry(source: CheckpointSource, target: CheckpointTarget) -> None:
    target.seed(source.catalog, source.files())
    for number, entry in enumerate(source.catalog.tensors):
        with (
            source.read(number, 0, entry.numel) as bits,
            target.window(number, 0, entry.numel) as (elements, _),
        ):
            elements[:] = bits
    target.flush()
    target.finish_seed()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["50KB", "1GB"])
def test_transformers_opens_a_carried_directory_as_it_is(tmp_path: Path, tied: bool, shard: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = llama(tied)
    model.save_pretrained(tmp_path / "from", max_shard_size=shard)
    with opened(tmp_path / "to") as target:
        carry(CheckpointSource(tmp_path / "from"), target)
    assert visible(tmp_path / "to") == visible(tmp_path / "from")
    assert ("model.safetensors.index.json" in visible(tmp_path / "to")) == (shard == "50KB")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype="auto")
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name].view(torch.int16), theirs[name].view(torch.int16)) for name in mine)


@pytest.mark.slow
def test_transformers_opens_the_default_layout(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = llama(True)
    model.save_pretrained(tmp_path / "from")
    source = CheckpointSource(tmp_path / "from")
    with opened(tmp_path / "to") as target:
        target.seed(source.catalog, {"config.json": source.files()["config.json"]})
        for number, entry in enumerate(source.catalog.tensors):
            with (
                source.read(number, 0, entry.numel) as bits,
                target.window(number, 0, entry.numel) as (elements, _),
            ):
                elements[:] = bits
        target.finish_seed()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype="auto")
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(mine[name].view(torch.int16), theirs[name].view(torch.int16)) for name in mine)


RSS = """
import sys
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.targets.checkpoint import CheckpointTarget
def peak():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) // 1024
count, step = int(sys.argv[2]), 16 << 20
text = b'{"w":{"dtype":"BF16","shape":[%d],"data_offsets":[0,%d]}}' % (count, 2 * count)
text += b' ' * int(sys.argv[3])
target = CheckpointTarget(sys.argv[1])
before, total = peak(), 0
headers = {'m.safetensors.header': len(text).to_bytes(8, 'little') + text}
target.seed(Catalog((TensorEntry('w', 'BF16', (count,)),)), headers)
for start in range(0, count, step):
    with target.window(0, start, min(count, start + step)) as (elements, first):
        total += int(elements.sum())
        elements[::1 << 16] ^= 0x8001
target.flush()
target.finish_seed()
print(total, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pad", [0, 1])
def test_memory_stays_bounded_over_a_large_file(tmp_path: Path, pad: int) -> None:
    count = 768 << 20
    command = [sys.executable, "-c", RSS, str(tmp_path), str(count), str(pad)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    total, grown = map(int, done.stdout.split())
    print(f"{count >> 19} MiB windowed, peak RSS grew by {grown} MiB")
    assert total == 0
    assert grown < 200
    with CheckpointSource(tmp_path).read(0, 0, 1 << 17) as elements:
        assert np.flatnonzero(elements).tolist() == [0, 1 << 16]
