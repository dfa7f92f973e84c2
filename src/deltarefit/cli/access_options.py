"""How every verb that uses a store gets at a relay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_ACCESS = "Relay access"

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The token for a relay, alone on the first line. If not given: $DELTAREFIT_TOKEN.",
        show_default=False,
        rich_help_panel=_ACCESS,
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="Roots of relays' certificates, PEM. If not given: $DELTAREFIT_CA, or the system's.",
        show_default=False,
        rich_help_panel=_ACCESS,
    ),
]
ClientCert = Annotated[
    Path | None,
    typer.Option(
        "--client-cert",
        metavar="FILE",
        help="Certificate and private key for relays that ask for one, PEM.",
        show_default=False,
        rich_help_panel=_ACCESS,
    ),
]
