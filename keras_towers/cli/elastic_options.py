"""Options of ``keras-towers run`` for jobs whose ranks come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_ELASTIC = "Elastic jobs, in which ranks may join and leave"

MinNp = Annotated[
    int | None,
    typer.Option(
        help="Minimum number of ranks.",
        rich_help_panel=_ELASTIC,
    ),
]
MaxNp = Annotated[
    int | None,
    typer.Option(help="Maximum number of ranks.", rich_help_panel=_ELASTIC),
]
HostDiscoveryScript = Annotated[
    Path | None,
    typer.Option(
        help="A program that prints the available hosts, one host:slots "
        "per line; run once a second.",
        rich_help_panel=_ELASTIC,
    ),
]
Slots = Annotated[
    int,
    typer.Option(
        min=1,
        help="Slots of hosts that it prints without a number.",
        rich_help_panel=_ELASTIC,
    ),
]
ElasticTimeout = Annotated[
    int,
    typer.Option(
        min=1,
        help="Seconds to wait for --min-np slots before giving up.",
        rich_help_panel=_ELASTIC,
    ),
]
BlacklistCooldownRange = Annotated[
    tuple[int, int],
    typer.Option(
        metavar="SECONDS SECONDS",
        help="Shortest and longest time to avoid a host after a worker "
        "failed on it; doubles with each failure.",
        rich_help_panel=_ELASTIC,
    ),
]
ResetLimit = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="End the job after ranks have joined or left this many times.",
        rich_help_panel=_ELASTIC,
    ),
]
