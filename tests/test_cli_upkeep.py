"""``anchor`` without a baseline, its advice, and ``prune``, at the command line."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from deltarefit.advice import advise, interval_of, longest
from deltarefit.errors import NotFoundError, UsageError
from deltarefit.retention import Pin, pin_key
from deltarefit.runlog import RunLog
from deltarefit.stores import open_store
from tests import helpers as h
from tests.desk import Desk, Here, run_id, same_files

pytest_plugins = ["tests.desk_fixtures"]


@pytest.mark.parametrize("within", [True, False], ids=["in a directory", "in memory"])
def test_an_anchor_needs_no_baseline_of_anybody(spoiled: Desk, tmp_path: Path, within: bool) -> None:
    shutil.rmtree(spoiled.root / "cache")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = spoiled.run("anchor", spoiled.store, *(["--in", scratch] if within else []))
    assert (done.code, done.out) == (0, "3\n")
    assert not (spoiled.root / "cache").exists()
    assert list(scratch.iterdir()) == []
    shutil.rmtree(Path(spoiled.store) / "anchor" / f"{1:010d}")
    followed = spoiled.run("follow", spoiled.store, "--into", tmp_path / "into", "--once")
    assert followed.lines == ["3"]
    assert same_files(tmp_path / "into", Path(spoiled.checkpoint(2)))


def test_two_places_are_one_too_many(here: Here, desk: Desk, tmp_path: Path) -> None:
    done = here("anchor", desk.store, "--in", tmp_path, "--baseline", tmp_path / "b")
    assert (done.code, done.out) == (2, "")
    assert here("anchor", desk.store, "--in", tmp_path / "none").code != 0


def with_anchors(desk: Desk) -> Desk:
    """Five versions; 1, 3 and 5 are anchors."""
    for number in (None, 3, 4):
        if number is not None:
            assert desk.run("publish", desk.checkpoint(number), "--to", desk.store).code == 0
        if number != 3:
            assert desk.run("anchor", desk.store).code == 0
    return desk


def test_prune(here: Here, spoiled: Desk, tmp_path: Path) -> None:
    with_anchors(spoiled)
    store = open_store(spoiled.store)
    before = dict(store.list())
    dry = here("prune", spoiled.store, "--dry-run", "--json")
    assert (dry.code, dry.body["floor"], dry.body["anchors"], dry.body["dry_run"]) == (0, 3, [5, 3], True)
    assert "Would free" in dry.err
    assert dict(store.list()) == before
    done = here("prune", spoiled.store, "--grace", 0)
    assert (done.code, done.last) == (0, str(dry.body["objects"]))
    left = dict(store.list())
    assert sum(before.values()) - sum(size for key, size in left.items() if key in before) == dry.body["size"]
    followed = here("follow", spoiled.store, "--into", tmp_path / "into", "--once")
    assert followed.lines == ["5"]
    assert same_files(tmp_path / "into", Path(spoiled.checkpoint(4)))
    assert here("prune", spoiled.store, "--grace", 0).last == "0"
    rows = here("log", spoiled.store, "--json").body["attempts"]
    assert [(row["outcome"], row["step"] is None) for row in rows] == [("COMMIT", n < 3) for n in range(1, 6)]
    assert [row["anchor"] for row in rows] == [False, False, False, False, True]
    gone = here("show", spoiled.store, 2)
    assert (gone.code, "was pruned" in gone.err) == (3, True)
    assert here("show", spoiled.store, 4).code == 0


def test_prune_says_what_it_kept_and_why(here: Here, spoiled: Desk) -> None:
    few = here("prune", spoiled.store, "--grace", 0)
    assert (few.code, few.last) == (0, "0")
    assert "1 anchor can be read, and 2 must stay" in few.err
    with_anchors(spoiled)
    key = pin_key("a", "b")
    open_store(spoiled.store).put(key, Pin(run_id(spoiled), "a", 2, 1).to_bytes())
    held = here("prune", spoiled.store, "--grace", 0)
    assert f"{key} at version 2" in held.err
    dead = here("prune", spoiled.store, "--grace", "0.01", "--json")
    assert (dead.body["floor"], dead.body["stale_pins"]) == (3, [key])
    assert "1 pin of readers that died" in dead.err
    assert here("prune", spoiled.store, "--keep", 0).code == 2
    assert here("prune", spoiled.root / "tmp").code == 3


# -------------------------------------------------------------------------------- advice


def test_the_formula() -> None:
    """The numbers of the protocol's own table."""
    assert interval_of(0.014, 0.01) == 120
    assert interval_of(0.04, 0.01) == 71
    assert interval_of(0.04, 0.1) == 22
    assert interval_of(0.04, 0.1, 4.0) == 45
    assert interval_of(0.0, 1.0) == 1 << 32
    assert interval_of(3.0, 10.0) == 1
    assert longest(1000, 0.01, 0, 0) == 0
    assert longest(1000, 0.1, 2, 1000) == 10
    assert longest(0, 0.1, 2, 1000) == 1 << 32
    with pytest.raises(UsageError, match="--recovery-s 2 at least"):
        longest(1000, 0.1, 1.0, 1000)


def test_advice_weighs_the_run(here: Here, spoiled: Desk) -> None:
    with_anchors(spoiled)
    log = RunLog.open(open_store(spoiled.store))
    anchor = log.anchor(5)
    assert anchor is not None
    size = sum(ref.size for ref in anchor.payloads)
    deltas = [sum(ref.size for ref in log.attempt(number).payloads) for number in (2, 3, 4, 5)]
    body = here("anchor", spoiled.store, "--advise", "--joins-per-version", 0.5, "--json").body
    assert (body["versions"], body["anchor_bytes"], body["anchor"], body["since"]) == (4, size, 5, 0)
    density = sum(deltas) / 4 / size
    assert body["density"] == density
    assert body["interval"] == round(math.sqrt(2 / (0.5 * density)))
    text = here("anchor", spoiled.store, "--advise", "--recovery-s", 1, "--bandwidth", 1.1 * size / 1e6)
    assert int(text.last) == int(0.1 / density) or "cost least" in text.out
    assert "joins" in text.out
    assert here("anchor", spoiled.store, "--advise", "--recovery-s", 1).code == 2
    assert here("anchor", spoiled.store, "--advise", "--joins-per-version", 0).code == 2
    tight = advise(log, recovery_s=1.0, bandwidth=size * (1 + 1.5 * density))
    assert (tight.interval, tight.capped, tight.recovery_now_s < 1) == (1, True, True)
    roomy = advise(log, recovery_s=1.0, bandwidth=1000.0 * size)
    assert (roomy.interval, roomy.capped) == (interval_of(density, 0.01), False)
    young = RunLog.open(h.publish_chain(np.random.default_rng(1), ()).store)
    with pytest.raises(NotFoundError):
        advise(young)
