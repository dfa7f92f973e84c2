"""Real files in, exactly their bits out; whatever is ambiguous, broken or changing is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize

from deltarefit.errors import FormatError, IntegrityError, NotFoundError, RefitError, UsageError
from deltarefit.sources.checkpoint import CheckpointSource


def header_of(tensors: dict[str, tuple[str, list[int], int]], pad: int = 0) -> bytes:
    """Header for {name: (dtype, shape, bytes)} in order; ``pad`` spaces shift the data off alignment."""
    body, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        body[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(body).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text


TENSORS = {
    "w": ("BF16", [40, 60], 4800),
    "flags": ("BOOL", [3], 3),
    "scale": ("F32", [], 4),
    "ids": ("I64", [9], 72),
    "none": ("F32", [0, 4], 0),
    "f8": ("F8_E4M3", [7, 5], 35),
    "c": ("C64", [2], 16),
    "f4": ("F4", [2, 8], 8),
}


def write(path: Path, tensors: dict[str, tuple[str, list[int], int]] = TENSORS, pad: int = 0, seed: int = 0) -> bytes:
    data = np.random.default_rng(seed).bytes(sum(size for _, _, size in tensors.values()))
    whole = header_of(tensors, pad) + data
    path.write_bytes(whole)
    return whole


def read_all(source: CheckpointSource) -> dict[str, bytes]:
    found = {}
    for number, entry in enumerate(source.catalog.tensors):
        with source.read(number, 0, entry.numel) as elements:
            assert elements.dtype == np.dtype(f"u{entry.width}")
            assert elements.shape == (entry.numel,)
            assert not elements.flags.writeable
            assert elements.flags.aligned
            found[entry.name] = elements.tobytes()
    return found


@pytest.mark.parametrize("pad", range(8))
def test_bits_of_a_single_file_at_any_alignment(tmp_path: Path, pad: int) -> None:
    whole = write(tmp_path / "foo.safetensors", pad=pad)
    source = CheckpointSource(tmp_path / "foo.safetensors")
    assert [e.name for e in source.catalog.tensors] == sorted(TENSORS)
    assert read_all(source) == {name: bytes(info["data"]) for name, info in deserialize(whole)}
    assert source.files() == {"foo.safetensors.header": whole[: int.from_bytes(whole[:8], "little") + 8]}


def test_any_range_of_a_tensor(tmp_path: Path) -> None:
    big = {"odd": ("U8", [5], 5), "w": ("BF16", [9000], 18000), "x": ("I64", [5000], 40000)}
    for pad in (0, 1, 3):
        whole = write(tmp_path / "m.safetensors", big, pad)
        expected = {name: bytes(info["data"]) for name, info in deserialize(whole)}
        source = CheckpointSource(tmp_path / "m.safetensors")
        rng = np.random.default_rng(pad)
        for _ in range(200):
            number = int(rng.integers(3))
            entry = source.catalog.tensors[number]
            start, stop = sorted(rng.integers(0, entry.numel + 1, 2).tolist())
            with source.read(number, start, stop) as elements:
                assert elements.tobytes() == expected[entry.name][start * entry.width : stop * entry.width]


def test_ranges_outside_a_tensor_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors")
    source = CheckpointSource(tmp_path / "m.safetensors")
    number = source.catalog.index["w"]
    for start, stop in ((-1, 3), (0, 2401), (5, 4)):
        with pytest.raises(UsageError, match="no range of w"), source.read(number, start, stop):
            pass


def sharded(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    write(directory / "model-00001-of-00002.safetensors", {"b": ("U8", [4], 4), "z": ("U16", [2], 4)}, seed=1)
    write(directory / "model-00002-of-00002.safetensors", {"a": ("U8", [4], 4)}, pad=5, seed=2)
    names = {"b": 1, "z": 1, "a": 2}
    index = {"weight_map": {name: f"model-0000{n}-of-00002.safetensors" for name, n in names.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_sharded_directory(tmp_path: Path) -> None:
    sharded(tmp_path)
    write(tmp_path / "consolidated.safetensors", {"a": ("U8", [1], 1)})  # not in the index: not ours
    source = CheckpointSource(tmp_path)
    assert [e.name for e in source.catalog.tensors] == ["a", "b", "z"]
    expected = {}
    for path in tmp_path.glob("model-*.safetensors"):
        expected.update({name: bytes(info["data"]) for name, info in deserialize(path.read_bytes())})
    assert read_all(source) == expected
    assert sorted(source.files()) == [
        "model-00001-of-00002.safetensors.header",
        "model-00002-of-00002.safetensors.header",
        "model.safetensors.index.json",
    ]


def test_several_files_without_an_index(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"b": ("U8", [4], 4)})
    write(tmp_path / "two.safetensors", {"a": ("U8", [4], 4)})
    assert [e.name for e in CheckpointSource(tmp_path).catalog.tensors] == ["a", "b"]
    write(tmp_path / "three.safetensors", {"a": ("U8", [4], 4)})
    with pytest.raises(FormatError, match=r"'a' stands in three\.safetensors and in two\.safetensors"):
        CheckpointSource(tmp_path)


def test_side_files_are_chosen_by_name_and_kind(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    carried = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.txt",
        "vocab.json",
        "merges.txt",
        "special_tokens_map.json",
        "chat_template.jinja",
        "qwen.tiktoken",
        "preprocessor_config.json",
    ]
    left = [
        "modeling.py",
        "tokenization.py",
        "tokenizer.py",
        "pytorch_model.bin",
        "optimizer.pt",
        "a.pth",
        ".env.json",
        "._config.json",
        "README.md",
        "secrets.json",
        "training_args.bin",
        "notes.txt",
        "x.safetensors",
        "pytorch_model.bin.index.json",
        "vocab space.txt.gz",
    ]
    for name in carried + left:
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "tokenizer_dir.json").mkdir()
    found = CheckpointSource(tmp_path).files()
    assert sorted(found) == sorted([*carried, "model.safetensors.header"])
    assert all(found[name] == name.encode() for name in carried)


def test_side_files_through_links_as_a_hub_cache_has_them(tmp_path: Path) -> None:
    blobs, view = tmp_path / "blobs", tmp_path / "view"
    blobs.mkdir()
    view.mkdir()
    whole = write(blobs / "1234")
    (blobs / "5678").write_bytes(b"{}")
    (view / "model.safetensors").symlink_to("../blobs/1234")
    (view / "config.json").symlink_to("../blobs/5678")
    source = CheckpointSource(view)
    assert read_all(source) == {name: bytes(info["data"]) for name, info in deserialize(whole)}
    assert source.files()["config.json"] == b"{}"


def test_a_side_file_too_large_or_misnamed_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(UsageError, match=r"tokenizer\.json is too large"):
        CheckpointSource(tmp_path).files()
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer 2.json")
    with pytest.raises(FormatError, match="unsafe file name"):
        CheckpointSource(tmp_path).files()


@pytest.mark.parametrize("case", ["nothing", "empty", "text", "unsafe", "stale", "missing", "outside"])
def test_paths_that_are_no_checkpoint(tmp_path: Path, case: str) -> None:
    path = tmp_path / "d"
    path.mkdir()
    index = path / "model.safetensors.index.json"
    if case == "nothing":
        path = tmp_path / "nowhere"
    elif case == "text":
        path = tmp_path / "model.txt"
        path.write_text("x")
    elif case == "unsafe":
        write(path / "my model.safetensors")
    elif case == "stale":
        sharded(path)
        write(path / "model.safetensors")
    elif case == "missing":
        sharded(path)
        (path / "model-00002-of-00002.safetensors").unlink()
    elif case == "outside":
        write(tmp_path / "x.safetensors", {"a": ("U8", [4], 4)})
        index.write_text('{"weight_map":{"a":"../x.safetensors"}}')
    expected = {"nothing": NotFoundError, "missing": NotFoundError, "empty": UsageError, "stale": UsageError}
    with pytest.raises(expected.get(case, FormatError)) as caught:
        CheckpointSource(path)
    assert isinstance(caught.value, RefitError)
    assert caught.value.next_step or caught.value.expected


def test_an_index_that_disagrees_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["weight_map"]["z"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(body))
    with pytest.raises(FormatError, match=r"does not match.*z"):
        CheckpointSource(tmp_path)


@pytest.mark.parametrize("delta", [-1, 1])
def test_a_file_of_another_size_is_refused(tmp_path: Path, delta: int) -> None:
    path = tmp_path / "model.safetensors"
    whole = write(path)
    path.write_bytes(whole[:delta] if delta < 0 else whole + b"\0")
    with pytest.raises(FormatError, match="wrong size for its header"):
        CheckpointSource(path)


def test_a_file_that_changes_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def opened() -> CheckpointSource:
        write(path)
        os.utime(path, ns=(1, 1))
        return CheckpointSource(path)

    def touch() -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")

    def replace() -> None:
        path.rename(tmp_path / "old")  # kept, so that its inode cannot be used again
        write(path)
        os.utime(path, ns=(1, 1))

    for change in (touch, replace, lambda: os.truncate(path, 100), path.unlink):
        source = opened()
        change()
        with pytest.raises(IntegrityError, match="changed after it was opened"), source.read(0, 0, 1):
            pytest.fail("read from a changed file")
    source = opened()
    with pytest.raises(IntegrityError, match="changed after it was opened"), source.read(0, 0, 1):
        touch()
    source = opened()
    with pytest.raises(ZeroDivisionError), source.read(0, 0, 1):
        raise ZeroDivisionError  # the caller's own errors come through


def test_many_threads_read_the_same_bits(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.safetensors", {"w": ("BF16", [500, 1000], 1_000_000), "x": ("I64", [500], 4000)}, pad=1)
    expected = {name: bytes(info["data"]) for name, info in deserialize(whole)}
    source = CheckpointSource(tmp_path / "m.safetensors")
    start = threading.Barrier(8)

    def work(_: int) -> dict[str, bytes]:
        start.wait(10)
        return read_all(source)

    with ThreadPoolExecutor(8) as pool:
        assert all(found == expected for found in pool.map(work, range(8)))


def test_holds_no_descriptor_and_survives_a_kept_view(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors")
    source = CheckpointSource(tmp_path / "m.safetensors")
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = []
    for _ in range(100):
        with source.read(source.catalog.index["w"], 0, 100) as elements:
            kept.append(elements)
    assert all(np.array_equal(view, kept[0]) for view in kept)  # not valid by contract, but never a crash
    kept.clear()
    del elements
    assert len(list(Path("/proc/self/fd").iterdir())) == before


RSS = """
import sys, numpy as np
from deltarefit.sources.checkpoint import CheckpointSource
def peak():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) // 1024
source = CheckpointSource(sys.argv[1])
before, total, step = peak(), 0, 16 << 20
for number, entry in enumerate(source.catalog.tensors):
    for start in range(0, entry.numel, step):
        with source.read(number, start, min(entry.numel, start + step)) as elements:
            total += int(elements.sum(dtype=np.uint64))
print(total, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pad", [0, 1])
def test_memory_stays_bounded_over_a_large_file(tmp_path: Path, pad: int) -> None:
    size = 1536 << 20
    header = header_of({"w": ("BF16", [size // 2], size)}, pad=pad)
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
        for at in range(0, size, size // 64):
            file.seek(len(header) + at)
            file.write(b"\1\1")
    done = subprocess.run(
        [sys.executable, "-c", RSS, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    total, grown = map(int, done.stdout.split())
    print(f"{size >> 20} MiB read, peak RSS grew by {grown} MiB")
    assert total == 64 * 257
    assert grown < 200
