"""The source benchmark at tiny sizes: both ways publish the same bits, counts are right, wrong bits are caught."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from deltarefit.baseline import MemoryBaseline
from deltarefit.bench import memory, memory_rank, meter, source, source_rank, source_report, stream
from deltarefit.bench.ranks import Rank, run_ranks
from deltarefit.bench.ways import CountingExchange, Gathering, GatherSource, TimedSource, TimedStore, bits, sent_bytes
from deltarefit.cli import main
from deltarefit.errors import RefitError, UsageError
from deltarefit.exchange import Alone
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.receiver import Receiver
from tests import helpers as h
from tests.distributed import Job, world

# ------------------------------------------------------------------------------------------ the whole of it


@pytest.mark.slow
def test_quick_run_on_three_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "source", "--quick", "--ranks", "3", "-q"]) == 0
    shown, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    assert "receiver equals dense export" in shown
    result = json.loads(last)
    assert (result["ranks"], result["steps"]) == (3, 2)
    assert [goal["reached"] for goal in result["goals"]] == [True, True]
    (case,) = result["cases"]
    assert case["equal"]
    assert case["same_bits"]
    check_ways(**case["ways"])


def check_ways(ours: dict[str, Any], gather: dict[str, Any]) -> None:
    assert len(ours["memory"]) == len(gather["first_memory"]) == 3
    assert ours["dense_bytes"] == gather["dense_bytes"] == 2 * 164_160
    assert 0 < ours["density"] == gather["density"] < 0.2
    assert 0 < ours["wire_bytes"] < 0.1 * ours["dense_bytes"]
    # Two thirds of every row that a rank lacks come to each of three ranks, more where three do not divide the rows.
    assert 2 * gather["dense_bytes"] < gather["bytes_between_ranks"] < 2.05 * gather["dense_bytes"]
    assert 0 < ours["bytes_between_ranks"] < 20_000
    assert ours["seconds"]["gather"] == 0 < gather["seconds"]["gather"] < gather["seconds"]["total"]
    for way in (ours, gather):
        assert min(way["seconds"][stage] for stage in ("train", "read/encode", "upload", "total")) > 0


@pytest.mark.slow
def test_a_replicated_model_has_nothing_to_gather(tmp_path: Path) -> None:
    case = source._case(tmp_path, "replicated", 2, "tiny", 1, lambda _: None)
    assert case["equal"]
    assert case["same_bits"]
    assert case["ways"]["gather"]["bytes_between_ranks"] == 0
    Console(width=200).print(source_report.table({"cases": [case], "stream": [], "goals": []}))


def test_figures_are_medians_of_the_slowest_rank() -> None:
    def row(total: float, traffic: int, peak: int, **facts: Any) -> dict[str, Any]:
        return {"seconds": {"train": 1.0, "total": total}, "traffic": traffic, "peak": peak, **facts}

    facts = {"density": 0.5, "wire_bytes": 7, "dense_bytes": 9}
    ranks = [
        {"before": 100, "first": row(5, 1, 300), "steps": [row(1, 10, 150, **facts), row(9, 10, 170, **facts)]},
        {"before": 50, "first": row(6, 1, 100), "steps": [row(3, 20, 60), row(2, 40, 55)]},
    ]
    found = source.summary([{**rank, "equal": number == 0, "content": "x"} for number, rank in enumerate(ranks)], 2)
    assert found["seconds"]["total"] == 6
    assert found["first_seconds"]["total"] == 6
    assert found["seconds"]["gather"] == 0
    assert found["bytes_between_ranks"] == 40
    assert (found["memory"], found["first_memory"]) == ([70, 10], [200, 50])
    assert (found["density"], found["wire_bytes"], found["dense_bytes"]) == (0.5, 7, 9)
    assert not found["equal"]


def test_goals_admit_misses() -> None:
    row = {"wall/allowed": 0.5, "bytes_per_s": stream.LINK}
    other = {"wall/allowed": 3.0, "bytes_per_s": 1.0}
    good, bad = {"equal": True}, {"equal": False}
    assert [g["reached"] for g in source.goals({"cases": [good], "stream": [row, other]})] == [True, True]
    late = {**row, "wall/allowed": 1.01}
    assert [g["reached"] for g in source.goals({"cases": [good, bad], "stream": [row, late]})] == [False, False]


# ------------------------------------------------------------------------------------------ ranks


def shout(rank: Rank, word: str) -> list[Any]:
    tensor = torch.tensor([rank.number])
    torch.distributed.all_reduce(tensor)
    return [rank.number, rank.size, word, int(tensor)]


def fail_on_one(rank: Rank) -> None:
    if rank.number == 1:
        raise ValueError("only here")
    torch.distributed.barrier()


def test_ranks_return_what_json_holds_and_say_why_they_failed(tmp_path: Path) -> None:
    found = run_ranks("tests.test_bench_source:shout", 2, tmp_path / "a", {"word": "x"})
    assert found == [[0, 2, "x", 1], [1, 2, "x", 1]]
    with pytest.raises(RefitError, match="only here"):
        run_ranks("tests.test_bench_source:fail_on_one", 2, tmp_path / "b", {})


# ------------------------------------------------------------------------------------------ the ways


def sharded(job: Job, shape: list[int], dim: int | None) -> list[Any]:
    """What one rank says it sends to gather a tensor, and whether it has all of it then."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    placement = Replicate() if dim is None else Shard(dim)
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (job.size,)), [placement])
    same = np.array_equal(bits(tensor), whole.to(torch.bfloat16).reshape(-1).view(torch.uint16).numpy())
    return [sent_bytes(tensor, job.size), same]


@pytest.mark.parametrize(
    ("shape", "sent"),
    [((8, 3), 4 * 3 * 2), ((7, 3), 4 * 3 * 2), ((1, 5), 5 * 2), ((9,), 5 * 2), ((0, 4), 0)],
)
def test_a_rank_sends_its_chunk_to_every_other(shape: tuple[int, ...], sent: int) -> None:
    assert world(2).run(sharded, list(shape), 0) == [[sent, True]] * 2


def test_a_plain_tensor_is_there_already() -> None:
    tensor = torch.tensor([1.0, 2.5, -0.0])
    assert sent_bytes(tensor, 4) == 0
    assert bits(tensor).tolist() == [0x3F80, 0x4020, 0x8000]


def test_a_gather_goes_in_order_once_and_lets_go() -> None:
    """Four threads read all segments from the last to the first."""
    gathered: list[int] = []
    catalog = Catalog(tuple(TensorEntry(name, "BF16", (100,)) for name in "abcd"))

    def gather(number: int) -> Any:
        gathered.append(number)
        return np.full(100, number, np.uint16)

    reading = GatherSource(catalog, gather, meter.Stopwatch())

    def read(tensor: int) -> None:
        for start in (50, 0):
            with reading.read(tensor, start, start + 50) as array:
                assert array.tolist() == [tensor] * 50

    for _ in range(2):
        with reading.hold():
            threads = [threading.Thread(target=read, args=(tensor,)) for tensor in (3, 2, 1, 0)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
    assert gathered == [0, 1, 2, 3] * 2
    assert reading._there == {}


def test_messages_are_counted_both_ways() -> None:
    exchange = CountingExchange(Alone())
    exchange.put("key", b"12345")
    assert exchange.get("key") == b"12345"
    assert exchange.get("other") is None
    exchange.delete("key")
    assert (exchange.messages, exchange.nbytes) == (4, 8 + 8 + 5 + 3)


def test_stages_are_timed_where_they_happen() -> None:
    watch = meter.Stopwatch()
    store, model = TimedStore(h.new_store(), watch), h.random_model(np.random.default_rng(0))
    store.put("a", b"1")
    assert set(watch.seconds) == {"upload"}
    watch.seconds.clear()
    store.create("b", b"2")
    assert set(watch.seconds) == {"upload"}
    assert store.get("a") + store.get("b") == b"12"
    timed = TimedSource(h.ArraySource(model), watch)
    assert timed.files() == h.FILES
    with timed.hold(), timed.read(0, 0, 10) as array:
        time.sleep(0.05)
        assert array.size == 10
    assert watch.seconds["read/encode"] >= 0.05 > watch.seconds["upload"]


def test_a_wrong_bit_in_a_received_model_is_seen(tmp_path: Path) -> None:
    """One rank alone, so that nothing but the receiver's bits can differ."""
    model = torch.nn.Linear(40, 3)
    store = h.new_store()
    gathering = Gathering(Rank(0, 1, tmp_path), model, store, 1)
    assert gathering.publish(0) is not None
    target = MemoryBaseline()
    Receiver(store, target).follow(once=True)
    equal, content = source_rank._compared(target, model)
    assert equal
    assert source_rank._compared(MemoryBaseline(), model) == (True, content)
    with target.window(0, 0, 1) as (array, _):
        array[0] ^= 1
    assert source_rank._compared(target, model) == (False, content)
    with torch.no_grad():
        model.bias[0] += 1
    assert source_rank._compared(MemoryBaseline(), model)[1] != content


def test_an_unknown_size_is_refused() -> None:
    from deltarefit.bench.training import Trainer

    with pytest.raises(UsageError, match="size"):
        Trainer(Rank(0, 1, Path()), "huge", "fsdp2")


# ------------------------------------------------------------------------------------------ streaming


def test_streaming_compares_one_publish_with_its_halves() -> None:
    rows = stream.measure(1 << 16, 1)
    assert [(row["what"], row["density"]) for row in rows] == [
        ("anchor", 1.0), ("change", 0.01), ("change", 0.05), ("change", 0.2), ("change", 0.2), ("anchor", 1.0),
    ]  # fmt: skip
    assert [row["bytes_per_s"] for row in rows[:4]] == [stream.LINK] * 4
    for row in rows:
        assert row["uploads"] == 1
        assert row["upload"] >= row["payload_bytes"] / row["bytes_per_s"]
        assert row["wall"] >= row["payload_bytes"] / row["bytes_per_s"]
        allowed = stream.FACTOR * max(row["build"], row["upload"]) + stream.SLACK_S
        assert row["wall/allowed"] == pytest.approx(row["wall"] / allowed)
    sizes = [row["payload_bytes"] for row in rows]
    assert sizes[1] < sizes[2] < sizes[3] < sizes[0] <= 1.1 * sizes[5]
    assert rows[4]["bytes_per_s"] == pytest.approx(sizes[3] / rows[3]["build"])


def test_the_streaming_model_changes_by_the_density_that_it_says() -> None:
    source_ = stream.ArraySource({"a": np.zeros((300, 300), np.uint16), "b": np.zeros(10_000, np.uint16)})
    source_.change(0.05)
    changed = 0
    for number, entry in enumerate(source_.catalog.tensors):
        with source_.read(number, 0, entry.numel) as array:
            changed += int(np.count_nonzero(array))
    assert 0.045 < changed / source_.catalog.numel < 0.055


# ------------------------------------------------------------------------------------------ memory


def test_the_peak_is_counted_from_the_last_look_on() -> None:
    np.ones(300 << 20, np.uint8)
    before = meter.settled()
    assert meter.peak() < before + (50 << 20)
    np.ones(200 << 20, np.uint8)
    assert 190 << 20 < meter.peak() - before < 250 << 20
    assert meter.settled() < before + (50 << 20)


def test_seconds_add_up_over_threads() -> None:
    watch = meter.Stopwatch()

    def spend() -> None:
        with watch.time("a"):
            time.sleep(0.05)

    threads = [threading.Thread(target=spend) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.seconds["a"] >= 0.15


@pytest.mark.slow
def test_memory_of_a_rank(tmp_path: Path) -> None:
    """The rebuilt rank holds the bits that the first one published last, else its publish would change some."""
    rows = memory.of_ranks(tmp_path, 8 << 20, (2,), lambda _: None)
    assert [row["phase"] for row in rows] == ["anchor", "delta 1%", "delta 5%", "delta 100%", "rebuild"]
    assert all(row["ranks"] == 2 and row["weights"] == "float32 as bfloat16" for row in rows)
    assert all(4 << 20 < row["baseline"] < 5 << 20 for row in rows)
    assert all(0 < row["beyond_baseline"] < 512 << 20 for row in rows)
    result = {"rows": rows, "goals": [memory.goal(rows)]}
    assert result["goals"][0]["reached"]
    Console(width=200).print(source_report.memory_table(result))
    assert not memory.goal([{"beyond_baseline": (512 << 20) + 1}])["reached"]


@pytest.mark.parametrize("masters", [False, True])
def test_a_restarted_rank_finds_the_bits_again(tmp_path: Path, masters: bool) -> None:
    rank = Rank(0, 1, tmp_path)
    first, second = (memory_rank._sharded(rank, 1 << 20, masters) for _ in range(2))
    for number, density in enumerate(memory_rank.DENSITIES):
        before = chunks_of(first)
        for model in (first, second):
            memory_rank._change(rank, model, density, number)
        assert torch.equal(chunks_of(first), chunks_of(second))
        share = (chunks_of(first) != before).double().mean().item()
        assert 0.95 * density < share <= 1.05 * density


def chunks_of(model: memory_rank.Weights) -> torch.Tensor:
    return torch.cat(list(memory_rank._chunks(model)))
