"""Every argument and option of `tree`, defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltarefit.tree import MOST_DEGREE, MOST_EPOCH

_MAKE, _ASK = "Making a tree", "Asking a tree"

MaybeTree = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="A tree made before, to show; or make one: --out.", show_default=False),
]
TreeOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Where the tree goes; an older one is replaced at once and as a whole.",
        show_default=False,
        rich_help_panel=_MAKE,
    ),
]
Roots = Annotated[
    list[str] | None,
    typer.Option(
        "--root",
        metavar="STORE",
        help="What lies at the top: a store, or a relay that is not of this tree. May be given several times, the "
        "preferred one first; all must hold the same.",
        show_default=False,
        rich_help_panel=_MAKE,
    ),
]
Relays = Annotated[
    list[str] | None,
    typer.Option(
        "--relay",
        metavar="NAME=URL",
        help="A relay, and the http:// or https:// URL by which others reach it. Given once for each; their order is "
        "the tree.",
        show_default=False,
        rich_help_panel=_MAKE,
    ),
]
Degree = Annotated[
    int,
    typer.Option(
        "--degree",
        metavar="N",
        min=1,
        max=MOST_DEGREE,
        help="How many relays hang at each one, and at the roots.",
        rich_help_panel=_MAKE,
    ),
]
Epoch = Annotated[
    int | None,
    typer.Option(
        "--epoch",
        metavar="N",
        min=1,
        max=MOST_EPOCH,
        help="The tree's number, higher than that of the one it replaces. With FILE: refuse an older one.",
        show_default="1; any for FILE",
    ),
]
RunId = Annotated[
    str,
    typer.Option("--run", metavar="ID", help="For this run only.", show_default="for any run", rich_help_panel=_MAKE),
]
OfRelay = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="The last line of stdout is the store URL from which this relay fetches.",
        show_default=False,
        rich_help_panel=_ASK,
    ),
]
OfFollower = Annotated[
    str | None,
    typer.Option(
        "--follower",
        metavar="NAME",
        help="The last line of stdout is the store URL for a receiver of this name.",
        show_default=False,
        rich_help_panel=_ASK,
    ),
]
