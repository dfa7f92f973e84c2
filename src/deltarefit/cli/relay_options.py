"""Every option of ``relay``, defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_CACHE, _SECURITY, _PEERS, _TREE = "Cache", "Who may use it", "Budgets for each client", "Place in a tree"

Parents = Annotated[
    list[str] | None,
    typer.Option(
        "--parent",
        metavar="STORE",
        help="What is relayed: a directory or bucket (this is the root then), or the URL of another relay. May be "
        "given several times, the preferred one first; all must hold the same.",
        show_default=False,
    ),
]
Listen = Annotated[
    str,
    typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 takes any. IPv6 as [::1]:8470."),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="DIR",
        help="Where objects are kept. New, empty, or an earlier relay's, whose objects are proven before use.",
        show_default="a temporary directory, removed at the end",
        rich_help_panel=_CACHE,
    ),
]
Limit = Annotated[
    int,
    typer.Option(
        "--limit",
        metavar="BYTES",
        min=1 << 20,
        help="Most bytes that are kept. Room for two versions keeps every byte from crossing the link above twice.",
        rich_help_panel=_CACHE,
    ),
]
Streams = Annotated[
    int,
    typer.Option(
        "--streams",
        metavar="N",
        min=1,
        max=256,
        help="Fetches from the parent at once: more for links with delay and loss.",
        rich_help_panel=_CACHE,
    ),
]
ChunkBytes = Annotated[
    int,
    typer.Option(
        "--chunk-bytes",
        metavar="N",
        min=64 << 10,
        max=64 << 20,
        help="Objects are fetched, passed on and resumed in chunks of this size.",
        rich_help_panel=_CACHE,
    ),
]
Tokens = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        help="Lines `read|follow|publish TOKEN`. Without it only this machine is served (or with --client-ca).",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
Cert = Annotated[
    Path | None,
    typer.Option(
        "--cert", metavar="FILE", help="The relay's certificate, PEM: serve https.", show_default=False,
        rich_help_panel=_SECURITY,
    ),
]  # fmt: skip
Key = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", help="Its private key, if that is not in --cert.", show_default=False,
        rich_help_panel=_SECURITY,
    ),
]  # fmt: skip
ClientCa = Annotated[
    Path | None,
    typer.Option(
        "--client-ca",
        metavar="FILE",
        help="Ask clients for a certificate of these roots (mutual TLS). Without --tokens they may follow.",
        show_default=False,
        rich_help_panel=_SECURITY,
    ),
]
PlainHttp = Annotated[
    bool,
    typer.Option(
        "--plain-http",
        help="Take tokens without TLS from other machines: inside a network that nobody else can hear.",
        rich_help_panel=_SECURITY,
    ),
]
MostRequests = Annotated[
    int, typer.Option("--most-requests", metavar="N", min=1, help="Requests at once.", rich_help_panel=_PEERS)
]
MostRate = Annotated[
    float,
    typer.Option(
        "--most-rate", metavar="BYTES/S", min=0, help="Bytes a second.", show_default="no limit", rich_help_panel=_PEERS
    ),
]
LeastRate = Annotated[
    int,
    typer.Option(
        "--least-rate",
        metavar="BYTES/S",
        min=1,
        help="A client that takes or sends less than this is let go.",
        rich_help_panel=_PEERS,
    ),
]
TreeFile = Annotated[
    Path | None,
    typer.Option(
        "--tree",
        metavar="FILE",
        help="Take the parents from this tree (`deltarefit tree`).",
        show_default=False,
        rich_help_panel=_TREE,
    ),
]
RelayName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="This relay's name in the tree.",
        show_default=False,
        rich_help_panel=_TREE,
    ),
]
WorkerCount = Annotated[
    int,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        max=64,
        help="Processes that listen, where one core is not enough (TLS, or a fast network). With several, one more "
        "fetches for them, and each has its share of --limit.",
        rich_help_panel=_CACHE,
    ),
]
Worker = Annotated[
    bool, typer.Option("--worker", hidden=True, help="One of several: shares the port, ends with stdin.")
]
