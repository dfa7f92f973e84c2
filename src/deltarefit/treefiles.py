"""Trees of relays in files: a record and its signature line, as records stand in a store (docs/relays.md §3)."""

from __future__ import annotations

from pathlib import Path

from deltarefit.errors import UsageError
from deltarefit.keyfiles import read_guarded
from deltarefit.localfiles import disk_errors, write_durably
from deltarefit.notary import Notary
from deltarefit.records import MAX_SIGNATURE_BYTES
from deltarefit.tree import MAX_TREE_BYTES, Tree, place_in

_MOST = MAX_TREE_BYTES + MAX_SIGNATURE_BYTES


def write_tree(path: Path, tree: Tree, notary: Notary) -> None:
    """Replace the file as a whole, signed if the notary has a key. ``SignatureError`` if readers with the same trusted
    keys would refuse it."""
    data = notary.bytes_of(tree, "", tree.place)
    with disk_errors(f"cannot write {path}"):
        write_durably(path, data)


def read_tree(path: Path, notary: Notary, seen: int = 0) -> Tree:
    """The tree in a file. With trusted keys its signature is verified before anything is parsed, without them it may be
    anybody's. ``seen`` is the newest epoch known: ``UsageError`` for an older one, and for a file that anybody may
    change; ``FormatError`` and ``SignatureError`` as for any record."""
    data = read_guarded(path, _MOST, 0o002)
    tree = notary.checked(Tree, data, _MOST, place_in(data), "")
    if tree.epoch < seen:
        step = "Give the newest tree."
        raise UsageError(f"{path} is an old tree", expected=f"epoch {seen} or newer", found=tree.epoch, next_step=step)
    return tree
