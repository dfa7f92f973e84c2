"""``deltarefit tree``."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltarefit.notary import Notary
from deltarefit.tree import Tree, TreeRelay, parents_for_follower
from deltarefit.treefiles import read_tree, write_tree
from tests.desk import Here, flipped

pytest_plugins = ["tests.desk_fixtures"]

MAKE = ["--root", "s3://bucket/run7", "--relay", "a=https://10.0.0.1", "--relay", "b=https://B.example:9/",
        "--relay", "c=http://[::1]:8470", "--degree", 1]  # fmt: skip
URLS = {"a": "https://10.0.0.1:8470", "b": "https://b.example:9", "c": "http://[::1]:8470"}
PARENTS = {
    "a": ["s3://bucket/run7"],
    "b": [URLS["a"], "s3://bucket/run7"],
    "c": [URLS["b"], URLS["a"], "s3://bucket/run7"],
}
TREE = Tree("", 1, 1, ("s3://bucket/run7",), tuple(TreeRelay(name, url) for name, url in URLS.items()))


@pytest.fixture
def keys(here: Here, tmp_path: Path) -> Path:
    for name in ("trainer", "stranger"):
        assert here("keygen", tmp_path / "keys", "--name", name, "--kind", "hmac").code == 0
    return tmp_path / "keys"


def test_make_and_show(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    made = here("tree", *MAKE, "--out", path)
    assert (made.code, made.last, made.err) == (0, str(path), "")
    assert [line.split() for line in made.lines[1:-1]] == [[name, URLS[name], *PARENTS[name]] for name in URLS]
    assert read_tree(path, Notary()) == TREE
    assert path.read_bytes() == TREE.to_bytes()
    shown = here("tree", path)
    assert (shown.code, shown.out) == (0, made.out)
    quiet = here("tree", path, "--quiet")
    assert (quiet.code, quiet.out) == (0, f"{path}\n")


def test_json(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    run = "ab" * 16
    made = here("tree", *MAKE, "--epoch", 7, "--run", run, "--out", path, "--json")
    assert made.body == {
        "tree": str(path), "run": run, "epoch": 7, "degree": 1, "roots": ["s3://bucket/run7"], "store": None,
        "relays": [{"name": name, "url": URLS[name], "parents": PARENTS[name]} for name in URLS],
    }  # fmt: skip
    assert here("tree", path, "--json").body == made.body


def test_a_root_that_is_a_directory(here: Here, tmp_path: Path) -> None:
    """Several paths joined by a comma would be one path, so they are written as URLs."""
    roots = ["--root", tmp_path / "a", "--root", tmp_path / "b"]
    made = here("tree", *roots, "--relay", "r=https://h", "--out", tmp_path / "t", "--name", "r", "-q")
    assert made.out == f"file://{tmp_path}/a,file://{tmp_path}/b\n"


def test_where_one_fetches_from(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    write_tree(path, TREE, Notary())
    assert here("tree", path, "--name", "b").last == ",".join(PARENTS["b"])
    asked = here("tree", path, "--follower", "node-1", "-q")
    assert asked.out == ",".join(parents_for_follower(TREE, "node-1")) + "\n"
    assert here("tree", path, "--name", "c", "--json").body["store"] == ",".join(PARENTS["c"])
    unknown = here("tree", path, "--name", "z")
    assert (unknown.code, "no relay 'z'" in unknown.err) == (3, True)


def test_a_tree_is_replaced_as_a_whole_or_not_at_all(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    assert here("tree", *MAKE, "--out", path).code == 0
    before = path.read_bytes()
    assert here("tree", *MAKE, "--epoch", 2, "--relay", "a=https://h", "--out", path).code == 2
    assert here("tree", *MAKE, "--epoch", 2, "--name", "z", "--out", path).code == 3
    assert path.read_bytes() == before
    assert here("tree", *MAKE, "--epoch", 2, "--out", path).code == 0
    assert read_tree(path, Notary()).epoch == 2
    assert here("tree", path, "--epoch", 2).code == 0
    old = here("tree", path, "--epoch", 3)
    assert (old.code, "an old tree" in old.err) == (2, True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree.json"]


def test_signed(here: Here, keys: Path, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    trust = ["--trust", keys / "trainer.trust"]
    wrong = here("tree", *MAKE, "--out", path, "--sign", keys / "stranger.key", *trust)
    assert (wrong.code, path.exists()) == (4, False)
    assert here("tree", *MAKE, "--out", path, "--sign", keys / "trainer.key", *trust).code == 0
    assert here("tree", path, *trust).code == here("tree", path).code == 0
    stranger = here("tree", path, "--trust", keys / "stranger.trust")
    assert (stranger.code, "unknown key" in stranger.err) == (4, True)
    path.write_bytes(flipped(path.read_bytes(), 40))
    spoiled = here("tree", path, *trust)
    assert (spoiled.code, "does not fit" in spoiled.err) == (4, True)
    assert here("tree", *MAKE, "--out", path).code == 0
    unsigned = here("tree", path, *trust)
    assert (unsigned.code, "is not signed" in unsigned.err) == (4, True)


WRONG = {
    "nothing": ([], "one file"),
    "no root": (["--relay", "a=https://h"], "0 roots"),
    "no relay": (["--root", "s3://b"], "0 relays"),
    "a relay without a name": ([*MAKE, "--relay", "-=https://h"], "bad name of a relay"),
    "a relay without a mark": ([*MAKE, "--relay", "https:h"], "bad --relay"),
    "a relay that is a store": ([*MAKE, "--relay", "d=s3://b"], "scheme 's3'"),
    "a password": ([*MAKE, "--relay", "d=https://u:hunter2@h"], "a user"),
    "a password in a root": (["--root", "s3://u:hunter2@b", "--relay", "a=https://h"], "a bad root"),
    "a password in a relay that is a root": (["--root", "https://u:hunter2@b", "--relay", "a=https://h"], "a user"),
    "a relative root": (["--root", "./store", "--relay", "a=https://h"], "a bad root"),
    "a loop": ([*MAKE, "--root", "https://10.0.0.1"], "its own parent"),
    "degree": ([*MAKE, "--degree", 65], "less than or equal to 64"),
    "run": ([*MAKE, "--run", "x"], "run is not"),
    "two questions": ([*MAKE, "--name", "a", "--follower", "b"], "--name and --follower"),
}


@pytest.mark.parametrize(("arguments", "why"), WRONG.values(), ids=WRONG)
def test_what_is_no_tree(here: Here, tmp_path: Path, arguments: list[object], why: str) -> None:
    done = here("tree", *arguments, *(["--out", tmp_path / "t"] if arguments else []))
    assert (done.code, done.out) == (2, "")
    assert why in done.err
    assert "hunter2" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_go_with_a_file(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    write_tree(path, TREE, Notary())
    for option in (["--root", "/a"], ["--relay", "a=https://h"], ["--run", "ab" * 16], ["--sign", "key"]):
        done = here("tree", path, *option)
        assert (done.code, f"{option[0]} with FILE" in done.err) == (2, True), option
    assert here("tree", path, "--out", path).code == 2
    assert here("tree", tmp_path / "none").code == 3
