"""Gathering values with the place in the program where a rank does it."""

from __future__ import annotations

from typing import Any

from keras_towers.errors import TowerError
from keras_towers.transport.base import Transport


def gather(transport: Transport, value: Any, where: str) -> list[Any]:
    """Gather values from all ranks, which have to be in one place.

    Ranks that do different things may wait for one another nevertheless, each
    for something else, and would take the other's values for what they wanted.

    Args:
        transport: connects the processes.
        value: of this rank.
        where: what this rank does, as in "the beginning of fit".

    Returns:
        The values in rank order.

    Raises:
        TowerError: the ranks do different things; raised on every rank.
    """
    told = transport.gather_objects((where, value))
    if any(there != where for there, _ in told):
        raise TowerError(
            "the ranks do different things: "
            + ", ".join(
                f"rank {r} {there}" for r, (there, _) in enumerate(told)
            )
            + ". Every rank has to call the same methods in the same order."
        )
    return [value for _, value in told]
