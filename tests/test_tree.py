"""The tree of relays: its rule, its record, its signature, its file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit.errors import FormatError, NotFoundError, SignatureError, UsageError
from deltarefit.manifest import Run
from deltarefit.notary import Notary
from deltarefit.records import MAX_SIGNATURE_BYTES
from deltarefit.relay_api import MOST_PATH
from deltarefit.tree import MAX_TREE_BYTES, MOST_RELAYS, Tree, TreeRelay, parents_for_follower, parents_of, place_in
from deltarefit.treefiles import read_tree, write_tree
from deltarefit.trust import Role
from tests.signed import KINDS, new_signer, trust_in, trusted

RUN_ID = "0123456789abcdef" * 2
ROOTS = ("s3://bucket/run7", "https://mirror:8470")


def relays(count: int) -> tuple[TreeRelay, ...]:
    return tuple(TreeRelay(f"r{n}", f"https://h{n}:8470") for n in range(count))


def tree(count: int = 7, degree: int = 2, **other: Any) -> Tree:
    return dataclasses.replace(Tree("", 3, degree, ROOTS, relays(count)), **other)


def parent(found: Tree, url: str) -> str:
    """What the relay at ``url`` asks first."""
    (name,) = [relay.name for relay in found.relays if relay.url == url]
    return parents_of(found, name)[0]


def levels(count: int, degree: int) -> int:
    """How many levels of ``degree``, ``degree`` squared, ... hold so many."""
    deep = room = 0
    while room < count:
        deep += 1
        room += degree**deep
    return deep


shapes = st.tuples(st.integers(1, 300), st.integers(2, 64))


# ------------------------------------------------------------------------------------------------- the rule


def test_a_tree_in_full() -> None:
    """Seven relays, degree 2: r0 and r1 hang at the roots, r2 and r3 at r0, r4 and r5 at r1, r6 at r2."""
    found = tree()
    above = {relay.name: [url.removeprefix("https://h")[:1] for url in parents_of(found, relay.name)[:-2]]
             for relay in found.relays}  # fmt: skip
    assert above == {
        "r0": [], "r1": [], "r2": ["0"], "r3": ["0"], "r4": ["1"], "r5": ["1"], "r6": ["2", "0"],
    }  # fmt: skip
    assert all(parents_of(found, relay.name)[-2:] == ROOTS for relay in found.relays)


@given(shapes)
def test_every_chain_of_parents_ends_at_the_roots(shape: tuple[int, int]) -> None:
    count, degree = shape
    found, depths = tree(count, degree), []
    for relay in found.relays:
        chain = [relay.url]
        while chain[-1] not in ROOTS:
            chain.append(parent(found, chain[-1]))
            assert len(chain) <= MOST_PATH + 1
        assert len(set(chain)) == len(chain), "a loop"
        assert parents_of(found, relay.name) == (*chain[1:-1], *ROOTS), "grandparents in order, then all roots"
        depths.append(len(chain) - 1)
    assert max(depths) == levels(count, degree), "balanced"
    assert depths == sorted(depths)


@given(shapes)
def test_nobody_feeds_more_than_degree(shape: tuple[int, int]) -> None:
    found = tree(*shape)
    children = Counter(parents_of(found, relay.name)[0] for relay in found.relays)
    assert max(children.values()) <= found.degree
    partly = [url for url, number in children.items() if number < found.degree]
    assert len(partly) <= 1, "the last one only has room"


@given(shapes, st.data())
def test_whichever_relay_dies_everybody_else_has_a_living_parent(shape: tuple[int, int], data: st.DataObject) -> None:
    found = tree(*shape)
    dead = {relay.url for relay in data.draw(st.lists(st.sampled_from(found.relays), max_size=20))}
    numbers = {relay.url: number for number, relay in enumerate(found.relays)}
    for number, relay in enumerate(found.relays):
        living = [url for url in parents_of(found, relay.name) if url not in dead]
        assert living
        assert relay.url not in living
        assert all(numbers.get(url, -1) < number for url in living), "no loop whoever is dead"


@given(shapes, st.integers(0, 1000))
def test_a_follower_uses_a_leaf_and_what_lies_above_it(shape: tuple[int, int], number: int) -> None:
    found = tree(*shape)
    first, *rest = parents_for_follower(found, f"node-{number}")
    feeding = {parents_of(found, relay.name)[0] for relay in found.relays}
    assert first not in feeding, "a leaf"
    (name,) = [relay.name for relay in found.relays if relay.url == first]
    assert tuple(rest) == parents_of(found, name)


def test_followers_are_spread_evenly_and_as_documented() -> None:
    found = tree(20, 4)
    leaves = found.relays[4:]
    uses = {n: parents_for_follower(found, f"node-{n}")[0] for n in range(1600)}
    load = Counter(uses.values())
    assert set(load) == {leaf.url for leaf in leaves}
    assert 60 < min(load.values()) <= max(load.values()) < 150, "100 each, and chance"
    by_rule = max(leaves, key=lambda leaf: hashlib.sha256(b"node-7\0" + leaf.name.encode()).digest())
    assert uses[7] == by_rule.url


def test_a_leaf_that_goes_moves_its_own_followers_only() -> None:
    before = tree(20, 4)
    after = dataclasses.replace(before, relays=before.relays[:-1])
    gone = before.relays[-1].url
    for number in range(300):
        was, now = (parents_for_follower(found, f"n{number}")[0] for found in (before, after))
        assert (was != now) == (was == gone)


def test_the_largest_tree() -> None:
    long = "https://" + ".".join(["h" * 60] * 4)
    many = tuple(TreeRelay(f"r{n:063d}", f"{long}{n}:8470") for n in range(MOST_RELAYS))
    found = Tree("", 1, 2, ROOTS, many)
    assert len(found.to_bytes()) <= MAX_TREE_BYTES
    assert len(parents_of(found, many[-1].name)) <= MOST_PATH - 1 + len(ROOTS)
    with pytest.raises(ValueError, match="65537 relays"):
        dataclasses.replace(found, relays=(*many, TreeRelay("more", "https://more:1")))


# ----------------------------------------------------------------------------------------------- the record


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "run": ("run is not", {"run": "x"}),
    "epoch 0": ("epoch 0", {"epoch": 0}),
    "epoch of 11 digits": ("epoch 1", {"epoch": 10**10}),
    "degree 0": ("degree 0", {"degree": 0}),
    "degree 65": ("degree 65", {"degree": 65}),
    "no root": ("0 roots", {"roots": ()}),
    "roots": ("17 roots", {"roots": tuple(f"s3://b/{n}" for n in range(17))}),
    "one root twice": ("URL stands twice", {"roots": (ROOTS[0], ROOTS[0])}),
    "a root that is a relay of it": ("URL stands twice", {"roots": ("https://h3:8470",)}),
    "a root without a port": ("a bad root", {"roots": ("https://mirror",)}),
    "no relay": ("0 relays", {"relays": ()}),
    "one name twice": ("name stands twice", {"relays": (*relays(2), TreeRelay("r1", "https://other:1"))}),
    "one URL twice": ("URL stands twice", {"relays": (*relays(2), TreeRelay("other", "https://h1:8470"))}),
    "a chain too long": ("one above the other", {"degree": 1, "relays": relays(MOST_PATH + 1)}),
}
BAD_ROOTS = [
    "", "store", "/store", "file://", "file://store",
    "./store", "s3://", "s3://key:secret@bucket", "s3://bucket?x", "s3://bucket#x", "s3://a,s3://b",
    "ftp://host", "s3://a b", "s3://a\n", "s3://" + "b" * 1024, "http://h:1/path", "https://h", "https://H:1",
]  # fmt: skip


@pytest.mark.parametrize(("why", "change"), BAD.values(), ids=BAD)
def test_trees_that_are_none(why: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=why):
        tree(**change)


@pytest.mark.parametrize("root", BAD_ROOTS)
def test_roots_that_are_none(root: str) -> None:
    with pytest.raises(ValueError, match="root"):
        tree(roots=(root,))


def test_roots_that_are_some() -> None:
    for root in ("file:///shared/run7", "memory://m", "gs://b/p", "az://c", "http://[::1]:1"):
        assert parents_of(tree(roots=(root,)), "r0") == (root,)
    deepest = tree(MOST_PATH, 1)
    assert len(parents_of(deepest, deepest.relays[-1].name)) == MOST_PATH - 1 + len(ROOTS)


@pytest.mark.parametrize("name", ["", "a b", "../a", "-a", "a" * 65, "a/b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        TreeRelay(name, "https://a:1")


def test_an_unknown_relay() -> None:
    with pytest.raises(NotFoundError, match="no relay 'r9'"):
        parents_of(tree(), "r9")


# ------------------------------------------------------------------------------------- signatures and files


@pytest.mark.parametrize("kind", KINDS)
def test_a_signed_tree_is_read(kind: Any, tmp_path: Path) -> None:
    signer, path = new_signer(kind), tmp_path / "tree.json"
    for notary in (Notary(), Notary(signer), Notary(signer, trust_in(signer))):
        write_tree(path, tree(), notary)
        assert [entry.name for entry in tmp_path.iterdir()] == ["tree.json"]
        assert read_tree(path, Notary()) == tree()
    assert read_tree(path, Notary(trust=trust_in(signer))) == tree()
    assert path.read_bytes().startswith(tree().to_bytes())


def test_a_tree_that_no_trusted_key_signed(tmp_path: Path) -> None:
    signer, stranger, path = new_signer(), new_signer(name="stranger"), tmp_path / "tree.json"
    reader = Notary(trust=trust_in(signer))
    write_tree(path, tree(), Notary())
    with pytest.raises(SignatureError, match="is not signed"):
        read_tree(path, reader)
    write_tree(path, tree(), Notary(stranger))
    with pytest.raises(SignatureError, match="unknown key"):
        read_tree(path, reader)
    write_tree(path, tree(), Notary(new_signer()))  # the same name, another key
    with pytest.raises(SignatureError, match="does not fit"):
        read_tree(path, reader)
    with pytest.raises(SignatureError):
        write_tree(path, tree(), Notary(stranger, trust_in(signer)))
    assert read_tree(path, Notary()) == tree(), "nothing was written that readers would refuse"


def test_only_a_coordinator_signs_trees_and_attempts_do_not_bound_it(tmp_path: Path) -> None:
    signer, path = new_signer(), tmp_path / "tree.json"
    write_tree(path, tree(), Notary(signer))
    late = trusted(signer, frozenset({Role.COORDINATOR}), first_attempt=400, last_attempt=410)
    assert read_tree(path, Notary(trust=trust_in(late))) == tree()
    with pytest.raises(SignatureError, match="may not sign this"):
        read_tree(path, Notary(trust=trust_in(trusted(signer, frozenset({Role.PRODUCER, Role.ANCHOR})))))
    with pytest.raises(SignatureError, match="revoked"):
        read_tree(path, Notary(trust=trust_in(trusted(signer, revoked=True))))


def test_a_tree_of_another_run(tmp_path: Path) -> None:
    signer, path = new_signer(), tmp_path / "tree.json"
    mine = dataclasses.replace(trust_in(signer), run=RUN_ID)
    for run, good in (("", True), (RUN_ID, True), ("f" * 32, False)):
        write_tree(path, tree(run=run), Notary(signer))
        if good:
            assert read_tree(path, Notary(trust=mine)).run == run
        else:
            with pytest.raises(SignatureError, match="not the trusted one"):
                read_tree(path, Notary(trust=mine))


def test_an_older_epoch_than_one_seen(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    write_tree(path, tree(), Notary())
    assert read_tree(path, Notary(), seen=3).epoch == 3
    with pytest.raises(UsageError, match="an old tree; expected epoch 4 or newer; found 3"):
        read_tree(path, Notary(), seen=4)


def test_the_signature_of_another_epoch(tmp_path: Path) -> None:
    """A tree cannot be given another number, nor one record's signature to another."""
    signer, path = new_signer(), tmp_path / "tree.json"
    line = signer.sign("", "tree/0000000004", tree().to_bytes()).to_line()
    path.write_bytes(tree().to_bytes() + line)
    with pytest.raises(SignatureError):
        read_tree(path, Notary(trust=trust_in(signer)))
    run = Run(RUN_ID, "ab" * 32)
    path.write_bytes(Notary(signer).bytes_of(run, "", "run"))
    with pytest.raises(SignatureError):
        read_tree(path, Notary(trust=trust_in(signer)))
    with pytest.raises(FormatError, match="wrong record"):
        read_tree(path, Notary())


@pytest.mark.parametrize("signed", [True, False])
def test_every_flipped_bit_and_every_cut_is_refused(signed: bool, tmp_path: Path) -> None:
    signer, path = new_signer(KINDS[1]), tmp_path / "tree.json"
    reader = Notary(trust=trust_in(signer)) if signed else Notary()
    write_tree(path, tree(3), Notary(signer if signed else None))
    data = path.read_bytes()
    assert reader.checked(Tree, data, 1 << 20, place_in(data), "") == tree(3)
    broken = [data[:n] for n in range(len(data))]
    for at in range(len(data)):
        broken += [data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for bit in range(8)]
    for bad in broken:
        with pytest.raises((FormatError, SignatureError)):
            reader.checked(Tree, bad, 1 << 20, place_in(bad), "")


def test_nothing_is_parsed_before_it_is_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    write_tree(path, tree(), Notary(new_signer(name="stranger")))

    def parse(*_: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(json, "loads", parse)
    with pytest.raises(SignatureError):
        read_tree(path, Notary(trust=trust_in(new_signer())))


def test_files_of_trees_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_bytes(b"{}\n")
    with pytest.raises(FormatError):
        read_tree(path, Notary())
    with path.open("wb") as file:
        file.truncate(MAX_TREE_BYTES + MAX_SIGNATURE_BYTES + 1)
    with pytest.raises(UsageError, match="too large"):
        read_tree(path, Notary())
    with pytest.raises(NotFoundError):
        read_tree(tmp_path / "none", Notary())
    write_tree(path, tree(), Notary())
    path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o002)
    with pytest.raises(UsageError, match="others may change"):
        read_tree(path, Notary())


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_the_place_of_anything(data: bytes) -> None:
    assert place_in(data) == "tree/0000000000"
