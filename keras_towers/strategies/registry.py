"""Strategies by name.

A package of its own can add one: an entry point of the group
``keras_towers.strategies`` whose name is the word and whose value is the class,
``mine = my_package.module:MyStrategy``.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from keras_towers.errors import TowerError

GROUP = "keras_towers.strategies"
_OWN = {
    "async": "keras_towers.strategies.asynchronous:AsyncTowerStrategy",
    "horovod": "keras_towers.strategies.horovod:HorovodStrategy",
    "noop": "keras_towers.strategies.noop:NoOpStrategy",
    "parameter-server": (
        "keras_towers.strategies.parameter_server:ParameterServerTowerStrategy"
    ),
    "tower": "keras_towers.strategies.tower:TowerStrategy",
}
# In more processes than one, each would train a model of its own.
ONE_PROCESS = ("async", "noop", "parameter-server", "tower")


def strategy(name: str, **options: Any) -> Any:
    """Make the strategy that ``name`` stands for.

    Args:
        name: one of ``strategy_names()``.
        options: what its class takes.

    Raises:
        TowerError: no strategy has this name, or it does not take an option.
    """
    made_by = find(name).load()
    try:
        return made_by(**options)
    except TypeError as error:
        # Told from an error inside: that one comes from deeper down.
        if error.__traceback__ and error.__traceback__.tb_next:
            raise
        given = ", ".join(options)
        raise TowerError(
            f"the strategy '{name}' does not take these options: {given} "
            f"({error})"
        ) from error


def strategy_names() -> list[str]:
    """The names that ``strategy`` knows."""
    return sorted({*_OWN, *entry_points(group=GROUP).names})


def find(name: str) -> EntryPoint:
    """Find a strategy without loading it.

    Raises:
        TowerError: there is none of this name.
    """
    if name in _OWN:
        return EntryPoint(name, _OWN[name], GROUP)
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        raise TowerError(
            f"unknown strategy '{name}'; known are "
            f"{', '.join(strategy_names())}"
        )
    return found[0]
