"""Strategies by name.

A package of its own can add one: an entry point of the group
``keras_towers.strategies`` whose name is the word and whose value is the class,
``mine = my_package.module:MyStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from keras_towers.errors import TowerError

GROUP = "keras_towers.strategies"


class Entry(NamedTuple):
    """A strategy of this package.

    Attributes:
        path: its class, as entry points write it.
        one_process: whether it trains in one process alone. In more, each
            would train a model of its own.
    """

    path: str
    one_process: bool = True


_HERE = "keras_towers.strategies"
STRATEGIES = {
    "async": Entry(f"{_HERE}.asynchronous:AsyncTowerStrategy"),
    "horovod": Entry(f"{_HERE}.horovod:HorovodStrategy", one_process=False),
    "noop": Entry(f"{_HERE}.noop:NoOpStrategy"),
    "parameter-server": Entry(
        f"{_HERE}.parameter_server:ParameterServerTowerStrategy"
    ),
    "tower": Entry(f"{_HERE}.tower:TowerStrategy"),
}
"""Every strategy of this package by its name."""


def strategy(name: str, **options: Any) -> Any:
    """Make the strategy that ``name`` stands for.

    Args:
        name: one of ``strategy_names()``.
        options: what its class takes.

    Raises:
        TowerError: no strategy has this name, the package that adds it is
            broken, or it does not take an option.
    """
    made_by = _load(find(name))
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
    return sorted({*STRATEGIES, *entry_points(group=GROUP).names})


def _load(entry: EntryPoint) -> Callable[..., Any]:
    """Import what an entry point stands for."""
    package = entry.dist.name if entry.dist else "keras_towers"
    says = (
        f"the strategy '{entry.name}' of the package {package} cannot be made: "
        f"its entry point '{entry.value}'"
    )
    advice = "Fix or uninstall that package, or give another name."
    try:
        made_by = entry.load()
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise TowerError(
            f"{says} cannot be imported ({cause}). {advice}"
        ) from error
    if not callable(made_by):
        raise TowerError(f"{says} is {made_by!r} and no class. {advice}")
    return made_by


def find(name: str) -> EntryPoint:
    """Find a strategy without loading it.

    Raises:
        TowerError: there is none of this name.
    """
    if not isinstance(name, str):
        raise TowerError(
            f"{name!r} is not the name of a strategy: give one of "
            f"{', '.join(map(repr, strategy_names()))}."
        )
    if name in STRATEGIES:
        return EntryPoint(name, STRATEGIES[name].path, GROUP)
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        raise TowerError(
            f"unknown strategy '{name}'; known are "
            f"{', '.join(strategy_names())}"
        )
    return found[0]
