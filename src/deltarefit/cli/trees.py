"""``tree``: who fetches from whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deltarefit.addresses import relay_url
from deltarefit.cli import options, tree_options
from deltarefit.cli.keys import notary
from deltarefit.cli.output import columns
from deltarefit.cli.verbs import Call, app, verb
from deltarefit.errors import UsageError
from deltarefit.tree import Tree, TreeRelay, parents_for_follower, parents_of
from deltarefit.treefiles import read_tree, write_tree

DEGREE = 4


@verb(app, "tree", remote=False)
def tree(
    call: Call,
    file: tree_options.MaybeTree = None,
    out: tree_options.TreeOut = None,
    root: tree_options.Roots = None,
    relay: tree_options.Relays = None,
    degree: tree_options.Degree = DEGREE,
    epoch: tree_options.Epoch = None,
    run: tree_options.RunId = "",
    name: tree_options.OfRelay = None,
    follower: tree_options.OfFollower = None,
    sign: options.Sign = None,
    trust: options.Trust = None,
) -> None:
    """Make a tree of relays, or show one: who fetches from whom.

    With --out, --root and --relay a tree is written, signed with --sign. With FILE it is read, and believed only if
    a key of --trust signed it, where that is given. Every relay of the tree is listed with its URL and the URLs that it
    fetches from, the preferred one first. The last line of stdout is the file's path, or what --name or --follower
    ask for.

    Example: [bold]deltarefit tree --root s3://bucket/run7 --relay a=https://10.0.0.1:8470 --out tree.json[/],
    then [bold]deltarefit follow $(deltarefit tree tree.json --follower $HOSTNAME -q) --into DIR[/]
    """
    if (file is None) == (out is None):
        raise UsageError("one file", expected="FILE to show a tree, or --out FILE to make one")
    if name is not None and follower is not None:
        raise UsageError("--name and --follower", expected="one of them")
    if file is not None:
        _refuse_making(root, relay, run, sign)
        found = read_tree(file, notary(trust), epoch or 0)
    else:
        found = _made(root or (), relay or (), degree, epoch or 1, run)
    asked = _asked(found, name, follower)
    if out is not None:
        write_tree(out, found, notary(trust, sign))
    _show(call, found, file or out or Path(), asked)


def _made(roots: Sequence[str], relays: Sequence[str], degree: int, epoch: int, run: str) -> Tree:
    entries = [_relay(text) for text in relays]
    above = tuple(_root(text) for text in roots)
    try:
        return Tree(run, epoch, degree, above, tuple(TreeRelay(name, url) for name, url in entries))
    except ValueError as error:
        step = "Look at --root and --relay; roots are whole paths or URLs without user and query."
        raise UsageError(f"this is no tree: {error}", next_step=step) from None


def _root(text: str) -> str:
    if text.startswith(("http://", "https://")):
        return relay_url(text)
    return f"file://{text}" if text.startswith("/") else text


def _relay(text: str) -> tuple[str, str]:
    name, mark, url = text.partition("=")
    if not mark:
        raise UsageError("bad --relay", expected="NAME=URL, as in a=https://10.0.0.1:8470")
    return name, relay_url(url)


def _refuse_making(root: object, relay: object, run: str, sign: object) -> None:
    given = {"--root": root, "--relay": relay, "--run": run, "--sign": sign}
    names = [option for option, value in given.items() if value]
    if names:
        raise UsageError(f"{' and '.join(names)} with FILE", next_step="Give --out FILE to make a tree.")


def _asked(found: Tree, name: str | None, follower: str | None) -> str | None:
    """The store URL that was asked for: parents joined by commas."""
    if name is not None:
        return ",".join(parents_of(found, name))
    return ",".join(parents_for_follower(found, follower)) if follower is not None else None


def _show(call: Call, found: Tree, path: Path, asked: str | None) -> None:
    rows = [(relay.name, relay.url, parents_of(found, relay.name)) for relay in found.relays]
    table = columns("relay", "url", "parents", left=3)
    for name, url, parents in rows:
        table.add_row(name, url, " ".join(parents))
    if not call.out.flags.quiet:
        call.out.table(table)
    head = {"tree": str(path), "run": found.run, "epoch": found.epoch, "degree": found.degree, "roots": found.roots}
    relays = [{"name": name, "url": url, "parents": parents} for name, url, parents in rows]
    call.out.result(path if asked is None else asked, {**head, "relays": relays, "store": asked})
