"""The real command line on real checkpoints: what each verb does and prints."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from deltarefit.errors import IntegrityError
from deltarefit.manifest import Intent, Mode
from deltarefit.publisher import Published, Publisher
from deltarefit.runlog import RunLog, attempt_key
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.stores import open_store
from tests.desk import SHAPES, Desk, Done, Here, flipped, run_id, same_files, save

pytest_plugins = ["tests.desk_fixtures"]


# -------------------------------------------------------------------------------- the way of a version


def test_publish_prints_the_version_and_talks_on_stderr(published: tuple[Desk, list[Done]]) -> None:
    desk, done = published
    assert [each.out for each in done] == ["1\n", "2\n", "3\n"]
    assert re.search(r"Compared +10 tensors, .* with version 2\n", done[2].err)
    assert re.search(r"Packed +[\d,]+ elements in 1 payload, density \d\.\d\d %\n", done[2].err)
    assert re.search(r"Uploaded +\S+ \wB .*\n", done[2].err)
    assert re.search(r"Committed +version 3 on base 2, \d+\.\d times smaller +\S+ m?s\n$", done[2].err)
    assert "version 1, an anchor" in done[0].err
    assert "\x1b" not in "".join(each.err for each in done)
    assert [path.name for path in (desk.root / "cache" / "deltarefit" / "baseline").iterdir()] == [run_id(desk)]


def test_the_way_of_a_version(desk: Desk, tmp_path: Path) -> None:
    into = tmp_path / "into"
    first = desk.run("follow", desk.store, "--into", into, "--once")
    assert (first.code, first.lines) == (0, ["1", "2", "3"])
    assert same_files(into, Path(desk.checkpoint(2)))
    again = desk.run("follow", desk.store, "--into", into, "--once", "--json", "-q")
    assert (again.code, again.err) == (0, "")
    assert again.body == {"version": 3, "seconds": {}, "pause_s": 0.0}
    equal = desk.run("verify", desk.store, into)
    assert (equal.code, equal.out) == (0, "equal\n")
    assert "holds version 3" in equal.err


def test_publish_json_has_all_of_published_and_log_agrees(here: Here, spoiled: Desk) -> None:
    done = spoiled.run("publish", spoiled.checkpoint(3), "--to", spoiled.store, "--json", "-q", "--step", 7)
    assert (done.code, done.err, len(done.lines)) == (0, "", 1)
    body = done.body
    assert set(Published.__dataclass_fields__) <= set(body)
    assert (body["version"], body["base"], body["step"], body["anchor"]) == (4, 3, 7, 1)
    assert body["run"] == run_id(spoiled)
    assert body["density"] == body["changed"] / body["numel"]
    rows = here("log", spoiled.store, "--json").body["attempts"]
    shared = ("base", "step", "changed", "numel", "dense_bytes", "wire_bytes", "density", "times_smaller")
    assert {name: rows[-1][name] for name in shared} == {name: body[name] for name in shared}


def test_unchanged_bits_and_a_lost_baseline_make_a_version_all_the_same(spoiled: Desk) -> None:
    shutil.rmtree(spoiled.root / "cache")
    done = spoiled.run("publish", spoiled.checkpoint(2), "--to", spoiled.store, "--json", "--threads", 1)
    assert (done.code, done.body["version"], done.body["changed"]) == (0, 4, 0)


def test_an_anchor_is_where_the_next_receiver_starts(here: Here, spoiled: Desk, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline"
    done = spoiled.run("anchor", spoiled.store, "--baseline", baseline)
    assert (done.code, done.out) == (0, "3\n")
    assert same_files(baseline, Path(spoiled.checkpoint(2)))
    followed = here("follow", spoiled.store, "--into", tmp_path / "into", "--once")
    assert followed.lines == ["3"]
    assert same_files(tmp_path / "into", Path(spoiled.checkpoint(2)))
    again = spoiled.run("anchor", spoiled.store, "--baseline", baseline, "--json")
    assert (again.body["version"], again.body["created"]) == (3, False)
    assert "an anchor already" in again.err
    assert [row["anchor"] for row in here("log", spoiled.store, "--json").body["attempts"]] == [
        True,
        False,
        True,
    ]


# -------------------------------------------------------------------------------- log and show


def test_log(here: Here, desk: Desk) -> None:
    table = here("log", desk.store)
    cells = [re.split(r" {2,}", line.strip()) for line in table.lines]
    assert cells[0][:4] == ["attempt", "outcome", "base", "step"]
    assert [row[:4] for row in cells[1:]] == [[str(n + 1), "COMMIT", str(n), str(10 * n)] for n in range(3)]
    assert [row[-1] == "anchor" for row in cells[1:]] == [True, False, False]
    body = here("log", desk.store, "--json").body
    assert body["run"] == run_id(desk)
    assert [row["attempt"] for row in body["attempts"]] == [1, 2, 3]
    assert all(row["wire_bytes"] < row["dense_bytes"] / 5 for row in body["attempts"][1:])
    newest = here("log", desk.store, "-n", 1, "--json").body["attempts"]
    assert newest == body["attempts"][-1:]


def test_log_does_not_trust_the_hint(here: Here, spoiled: Desk) -> None:
    (Path(spoiled.store) / "head").unlink()
    assert [row["attempt"] for row in here("log", spoiled.store, "-n", 2, "--json").body["attempts"]] == [2, 3]


def test_attempts_that_failed_or_are_open(here: Here, spoiled: Desk) -> None:
    class Failing(CheckpointSource):
        def read(self, tensor: int, start: int, stop: int) -> Any:
            raise IntegrityError("the disk is gone")

    log = RunLog.open(open_store(spoiled.store))
    publisher = Publisher(log.store, Failing(spoiled.checkpoint(3)), threads=1)
    with contextlib.closing(publisher), pytest.raises(IntegrityError, match="the disk is gone"):
        publisher.publish()
    outcome = log.version(3).outcome
    assert outcome is not None
    intent = Intent(log.run, 5, 3, outcome.digest, Mode.STAGE, "0" * 32)  # whoever opened it has died
    log.store.create(attempt_key(5, "intent"), intent.to_bytes())
    rows = here("log", spoiled.store, "-n", 3, "--json").body["attempts"]
    assert [(row["attempt"], row["outcome"], row["base"]) for row in rows] == [
        (3, "COMMIT", 2),
        (4, "ABORT", 3),
        (5, "open", 3),
    ]
    assert "the disk is gone" in rows[1]["reason"]
    text = here("log", spoiled.store, "-v")
    assert re.search(r"\n +5 +open +3 +- +- +- ", text.out)
    assert "attempt 4 was aborted: IntegrityError: the disk is gone" in text.err
    missing = here("show", spoiled.store, 4)
    found = "attempt 4 is aborted (IntegrityError: the disk is gone)"
    assert (missing.code, missing.err) == (3, f"error: version 4 is not committed; found {found}\n")
    assert spoiled.run("publish", spoiled.checkpoint(3), "--to", spoiled.store).last == "6"
    outcomes = [row["outcome"] for row in here("log", spoiled.store, "--json").body["attempts"]]
    assert outcomes == ["COMMIT", "COMMIT", "COMMIT", "ABORT", "ABORT", "COMMIT"]


def test_show(here: Here, desk: Desk) -> None:
    body = here("show", desk.store, "2", "--tensors", "--json").body
    for payload in body["payloads"]:
        path = Path(desk.store) / "a" / f"{2:010d}" / "pl" / payload["sha256"]
        assert path.stat().st_size == payload["size"]
    sizes = sum(payload["size"] for payload in body["payloads"])
    assert body["bytes_per_changed"] == sizes / body["changed"]
    counts = {name: int((desk.models[0][name] != desk.models[1][name]).sum()) for name in SHAPES}
    listed = {tensor["name"]: tensor["changed"] for tensor in body["tensors"]}
    assert {name for name, count in counts.items() if count} == set(listed)
    assert all(counts[name] <= listed[name] for name in listed)
    assert listed["layer.weight"] == counts["layer.weight"] > 100
    text = here("show", desk.store, "--tensors")
    assert text.lines[0] == "version      3 on base 2, step 20"
    assert re.search(r"\nlayer.weight +BF16 +300x100 +\d+ +\d\.\d\d %\n", text.out)


# -------------------------------------------------------------------------------- compare and verify


def test_compare(here: Here, desk: Desk, tmp_path: Path) -> None:
    equal = here("compare", desk.checkpoint(1), desk.checkpoint(1) + "/model.safetensors")
    assert (equal.code, equal.out) == (0, "equal\n")
    body = here("compare", desk.checkpoint(0), desk.checkpoint(1), "--json").body
    counts = {name: int((desk.models[0][name] != desk.models[1][name]).sum()) for name in SHAPES}
    assert {tensor["name"]: tensor["changed"] for tensor in body["tensors"]} == counts
    assert body["result"] == "differ"
    shown = here("show", desk.store, "2", "--json").body
    assert body["wire_bytes"] == sum(payload["size"] for payload in shown["payloads"])
    other = {name: array for name, array in desk.models[1].items() if name != "h.one"}
    save(other, SHAPES, tmp_path / "other.safetensors")
    text = here("compare", desk.checkpoint(1), tmp_path / "other.safetensors")
    assert (text.code, text.lines) == (4, ["only in A: h.one", "differ"])
    assert "cannot follow A in one run" in text.err


def test_verify_names_the_tensors_that_differ(here: Here, desk: Desk, tmp_path: Path) -> None:
    into = tmp_path / "into"
    assert here("follow", desk.store, "--into", into, "--once", "-q").last == "3"
    older = desk.run("verify", desk.store, into, "--version", 1, "--json")
    changed = {n: int((desk.models[0][n] != desk.models[2][n]).sum()) for n in SHAPES}
    expected = {name: count for name, count in changed.items() if count}
    assert (older.code, older.body["result"]) == (4, "differ")
    assert {tensor["name"]: tensor["changed"] for tensor in older.body["tensors"]} == expected
    weights = into / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), -3))
    found = desk.run("verify", desk.store, into)
    assert (found.code, found.last) == (4, "differ")
    assert re.fullmatch(r"layer\.weight +BF16 +300x100 +1 +0\.00\d+ %", found.lines[1])
    assert "does not hold version 3" in found.err


def test_verify_takes_any_checkpoint(here: Here, desk: Desk) -> None:
    head = here("verify", desk.store, desk.checkpoint(2))
    assert (head.code, head.last) == (0, "equal")
    older = desk.run("verify", desk.store, desk.checkpoint(1) + "/model.safetensors", "--version", 2, "--json")
    assert (older.code, older.body["result"], older.body["version"]) == (0, "equal", 2)
    assert not (Path(desk.checkpoint(2)) / ".deltarefit").exists()
