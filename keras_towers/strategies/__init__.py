"""Strategies by name.

Other packages can add strategies by entry points in the group
``keras_towers.strategies``, such as ``mine = my_package.module:MyStrategy``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, get_args

from keras_towers._imports import broken_entry, load_entry
from keras_towers.errors import TowerError, did_you_mean
from keras_towers.known_engines import ENGINES

GROUP = "keras_towers.strategies"


class RegisteredStrategy(NamedTuple):
    """A strategy of this package, by its class's name in ``keras_towers``."""

    kind: str
    # Whether each process of a job would train its own model.
    one_process: bool = True
    # The roles of TF_CONFIG that a job on TensorFlow's runtime needs.
    roles: tuple[str, ...] = ()


STRATEGIES = {
    **{
        engine.strategy: RegisteredStrategy(
            engine.strategy_class, False, engine.roles
        )
        for engine in ENGINES.values()
    },
    "async": RegisteredStrategy("AsyncTowerStrategy"),
    "distributed-parameter-server": RegisteredStrategy(
        "DistributedParameterServerStrategy", False, ("worker", "ps")
    ),
    "distributed-replicated": RegisteredStrategy(
        "DistributedReplicatedStrategy", False, ("worker", "ps")
    ),
    "noop": RegisteredStrategy("NoOpStrategy"),
    "parameter-server": RegisteredStrategy("ParameterServerTowerStrategy"),
    "sync-replicas": RegisteredStrategy(
        "SyncReplicasStrategy", False, ("worker", "ps")
    ),
    "tower": RegisteredStrategy("TowerStrategy"),
}
"""The strategies of this package by name."""


def strategy(name: str, **options: Any) -> Any:
    """Create a strategy by name.

    Args:
        name: one of ``strategy_names()``, such as ``"horovod"``.
        options: arguments of its class.

    Raises:
        TowerError: no strategy has this name, the package that adds it is
            broken, or an option is unknown.

    Example:
        >>> with keras_towers.strategy("tower", towers=4):
        ...     model.fit(x, y)
    """
    return check_options(name, options)(**options)


def check_options(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Check options without creating the strategy, and return its class."""
    factory = _load(find(name))
    signature = inspect.signature(factory)
    known = signature.parameters
    try:
        signature.bind(**options)
    except TypeError as error:
        hints = [did_you_mean(o, known) for o in options if o not in known]
        raise TowerError(
            f"the strategy '{name}' does not take these options: "
            f"{', '.join(options)} ({error}{''.join(hints)})"
        ) from error
    if "options" in known and name in STRATEGIES:
        from keras_towers.fit.options import options_of

        hint = inspect.get_annotations(factory.__init__, eval_str=True)
        (keywords,) = get_args(hint["options"])
        named = {n: v for n, v in options.items() if n not in known}
        options_of(factory, keywords, named)
    return factory


def strategy_names() -> list[str]:
    """The names that ``strategy`` accepts."""
    return sorted({*STRATEGIES, *entry_points(group=GROUP).names})


def _load(entry: EntryPoint) -> Callable[..., Any]:
    """Import the class that an entry point names."""
    factory = load_entry(entry, "strategy")
    if not callable(factory):
        cause = f"is {factory!r}, not a class"
        raise broken_entry(entry, "strategy", cause)
    return factory


def find(name: str) -> EntryPoint:
    """Find a strategy by name without importing it."""
    if not isinstance(name, str):
        raise TowerError(
            f"{name!r} is not the name of a strategy: give one of "
            f"{', '.join(map(repr, strategy_names()))}."
        )
    if name in STRATEGIES:
        return EntryPoint(name, f"keras_towers:{STRATEGIES[name].kind}", GROUP)
    entries = list(entry_points(group=GROUP, name=name))
    if not entries:
        known = strategy_names()
        raise TowerError(
            f"unknown strategy '{name}'; known are {', '.join(known)}"
            f"{did_you_mean(name, known)}"
        )
    return entries[0]
