"""Options of ``keras-towers run`` for jobs of BytePS."""

from __future__ import annotations

from typing import Annotated

import typer

from keras_towers.errors import TowerError
from keras_towers.strategies.registry import STRATEGIES

_NAME = "byteps"

Servers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Servers of BytePS to start beside the processes. Default: 1 "
        "with --strategy byteps, else none.",
    ),
]


def servers_of(
    given: int | None, strategy: str | None, only_here: bool
) -> int | None:
    """How many servers to start, None for a job without BytePS.

    Args:
        given: by the user.
        strategy: the name of the strategy, if any.
        only_here: whether this command starts a fixed number of processes.

    Raises:
        TowerError: it does not, and so cannot start servers beside them; or
            the strategy has no use for any.
    """
    if given and strategy != _NAME and strategy in STRATEGIES:
        raise TowerError(
            f"--servers is for --strategy {_NAME}: the strategy {strategy} has "
            "no use for BytePS's servers"
        )
    servers = given or (1 if strategy == _NAME else None)
    if servers and not only_here:
        raise TowerError(
            "BytePS's servers are for jobs with a fixed number of processes "
            "that this command starts: give -np, and -H for other machines"
        )
    return servers
