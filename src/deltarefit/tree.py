"""The tree of relays: a record that says who fetches from whom, and the rule by which everybody computes the same
(docs/relays.md §3). Pure.

The order of the relays is the tree. Relay ``i`` (from 0) with ``degree`` d hangs at relay ``i // d - 1``, the first d
relays at the roots. Its parents are, in this order: that relay, whatever that one hangs at, and so on up, then the
roots. Every parent has a smaller number, so there are no loops.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

from deltarefit.addresses import relay_url
from deltarefit.errors import NotFoundError, UsageError
from deltarefit.manifest import RECEIVER
from deltarefit.records import Record
from deltarefit.relay_api import MOST_PATH

MOST_RELAYS = 1 << 16
MOST_DEGREE = 64
MOST_ROOTS = 16
MOST_ROOT = 1024
"""Characters of a root's URL."""
MOST_EPOCH = 10**10 - 1
MAX_TREE_BYTES = 32 << 20
"""Most bytes of the record: a little more than the most relays, all with the longest names, take."""
_RUN = re.compile(r"(?:[0-9a-f]{32})?")
_STORE = re.compile(r"(?:file:///|(?:memory|s3|gs|az)://)[^\s@?#,]+")
_RELAY = re.compile(r"https?://")
_START = re.compile(rb'\{"degree":[0-9]{1,2},"epoch":([0-9]{1,10}),')


@dataclass(frozen=True)
class TreeRelay(Record):
    """One relay: its name, and the URL by which its children reach it (``addresses.relay_url``)."""

    name: str
    url: str

    def __post_init__(self) -> None:
        _require(bool(RECEIVER.fullmatch(self.name)), f"bad name of a relay: {self.name[:80]!r}")
        _require(_is_relay(self.url), f"bad URL of relay {self.name}")


@dataclass(frozen=True)
class Tree(Record):
    """A tree of relays. ``run``: of which run only; empty: of any. ``epoch`` counts up: the newer tree holds. ``roots``
    are the stores (or relays outside this tree) at the top, the preferred one first."""

    run: str
    epoch: int
    degree: int
    roots: tuple[str, ...]
    relays: tuple[TreeRelay, ...]

    def __post_init__(self) -> None:
        _require(bool(_RUN.fullmatch(self.run)), "run is not empty and not 32 hex digits")
        _require(1 <= self.epoch <= MOST_EPOCH, f"epoch {self.epoch} is not in 1..{MOST_EPOCH}")
        _require(1 <= self.degree <= MOST_DEGREE, f"degree {self.degree} is not in 1..{MOST_DEGREE}")
        _require(1 <= len(self.roots) <= MOST_ROOTS, f"{len(self.roots)} roots, not 1..{MOST_ROOTS}")
        _require(1 <= len(self.relays) <= MOST_RELAYS, f"{len(self.relays)} relays, not 1..{MOST_RELAYS}")
        _require(all(map(_is_root, self.roots)), "a bad root")
        _require(len(self.index) == len(self.relays), "a relay's name stands twice")
        urls = [*self.roots, *(relay.url for relay in self.relays)]
        _require(len(set(urls)) == len(urls), "a URL stands twice: a relay would be its own parent")
        deepest = len(_above(self, len(self.relays) - 1)) + 1
        _require(deepest <= MOST_PATH, f"{deepest} relays one above the other, more than {MOST_PATH}")

    @cached_property
    def index(self) -> dict[str, int]:
        """A relay's number by its name."""
        return {relay.name: number for number, relay in enumerate(self.relays)}

    @property
    def place(self) -> str:
        """Where its signature says that it stands."""
        return place_of(self.epoch)


def parents_of(tree: Tree, name: str) -> tuple[str, ...]:
    """The URLs that relay ``name`` fetches from, the preferred one first. ``NotFoundError`` if the tree has it not."""
    if name not in tree.index:
        step = "Check the name; the list of relays may be newer than this tree."
        raise NotFoundError(f"no relay {name[:80]!r} in the tree of epoch {tree.epoch}", next_step=step)
    return _urls(tree, _above(tree, tree.index[name]))


def parents_for_follower(tree: Tree, follower: str) -> tuple[str, ...]:
    """The URLs that a receiver fetches from, the preferred one first: a leaf (a relay that no other hangs at), then
    what that leaf itself would ask. The leaf is the one with the greatest SHA-256 of ``follower 00 leaf``: even, the
    same for everybody, and a leaf that goes moves its own followers only."""
    leaves = range(_first_leaf(tree), len(tree.relays))
    leaf = max(leaves, key=lambda i: hashlib.sha256(f"{follower}\0{tree.relays[i].name}".encode()).digest())
    return _urls(tree, [leaf, *_above(tree, leaf)])


def place_of(epoch: int) -> str:
    """The place that a tree's signature names."""
    return f"tree/{epoch:010d}"


def place_in(data: bytes) -> str:
    """The place that a stored tree claims, for its signature to be held against before anything is parsed. It begins
    with its epoch, and that is all that is looked at; the place of epoch 0, which no tree has, if it does not."""
    found = _START.match(data)
    return place_of(int(found[1]) if found else 0)


def _above(tree: Tree, number: int) -> list[int]:
    """The relays above one, from the nearest up."""
    found: list[int] = []
    while (number := number // tree.degree - 1) >= 0:
        found.append(number)
    return found


def _first_leaf(tree: Tree) -> int:
    """One past the last relay that another hangs at, which is the last one's parent."""
    return (len(tree.relays) - 1) // tree.degree


def _urls(tree: Tree, numbers: list[int]) -> tuple[str, ...]:
    return (*(tree.relays[number].url for number in numbers), *tree.roots)


def _is_root(url: str) -> bool:
    if _RELAY.match(url):
        return _is_relay(url)
    return len(url) <= MOST_ROOT and url.isprintable() and _STORE.fullmatch(url) is not None


def _is_relay(url: str) -> bool:
    try:
        return relay_url(url) == url
    except UsageError:
        return False


def _require(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)
