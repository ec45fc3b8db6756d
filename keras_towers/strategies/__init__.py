"""Strategies by name.

Other packages can add strategies by entry points in the group
``keras_towers.strategies``, such as ``mine = my_package.module:MyStrategy``.

``base``
  The base of all strategies: a TensorFlow strategy of three components.
``composed``
  A strategy composed of parts that other packages write.
``description``
  The lines of ``describe()`` about a strategy.
``device_mesh``
  A mesh of devices in each process, whose rows are towers.
``keras_distribution``
  ``keras.distribution`` on the TensorFlow backend.
``layout_map``
  Divides weights over a mesh as Keras's ``LayoutMap`` says.
``model_parallel``
  Towers of several devices, which divide each layer: tensor parallelism.
``modes``
  Modes of exchanges among towers, and the update that a mode needs.
``noop``
  A strategy under which ``fit`` runs callbacks but no steps.
``parameter_server_strategies``
  Strategies whose weights are on parameter servers.
``replica_strategies``
  Strategies whose towers or workers each take the next whole batch.
``tower``
  ``TowerStrategy``: the towers of one process divide each step.
``tower_extended``
  ``strategy.extended``: what TensorFlow uses outside of ``fit``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, NamedTuple

import keras_towers
from keras_towers.fit import options as fit_options
from keras_towers.foundation.errors import TowerError, did_you_mean
from keras_towers.foundation.import_hooks import broken_entry, load_entry
from keras_towers.jobs.known_engines import ENGINES, SERVED, Engine

GROUP = "keras_towers.strategies"


class RegisteredStrategy(NamedTuple):
    """A strategy of this package.

    Attributes:
        kind: its class's name in ``keras_towers``.
        engine: what connects its processes; None: each process of a job would
            train its own model.
    """

    kind: str
    engine: Engine | None = None


STRATEGIES = {
    **{
        engine.strategy: RegisteredStrategy(engine.strategy_class, engine)
        for engine in (*ENGINES.values(), SERVED)
    },
    "async": RegisteredStrategy("AsyncTowerStrategy"),
    "distributed-parameter-server": RegisteredStrategy(
        "DistributedParameterServerStrategy", SERVED
    ),
    "distributed-replicated": RegisteredStrategy(
        "DistributedReplicatedStrategy", SERVED
    ),
    "noop": RegisteredStrategy("NoOpStrategy"),
    "parameter-server": RegisteredStrategy("ParameterServerTowerStrategy"),
    "tower": RegisteredStrategy("TowerStrategy"),
}
"""The strategies of this package by name."""


def strategy(name: str, *arguments: object, **options: object) -> Any:
    """Create a strategy by name.

    ``ModelParallelStrategy`` has no name, since it needs a layout map, which
    you cannot write in a command.

    Args:
        name: ``"tower"``, ``"parameter-server"``, ``"async"``, ``"horovod"``,
            ``"byteps"``, ``"multi-worker"``, ``"sync-replicas"``,
            ``"distributed-parameter-server"``, ``"distributed-replicated"``,
            ``"noop"``, or what the entry point of a package says.
        *arguments: arguments of its class.
        **options: its options, by name.

    Raises:
        TowerError: no strategy has this name, the package that adds it is
            broken, or an option is unknown.

    Example:
        >>> with keras_towers.strategy("tower", towers=4):
        ...     model.fit(x, y)
    """
    entry = find(name)
    if name in STRATEGIES:
        check_options(name, options)
        return _load(entry)(*arguments, **options)
    factory = _load(entry)
    try:
        inspect.signature(factory).bind(*arguments, **options)
    except TypeError as error:
        raise TowerError(
            f"the strategy {name!r} does not take these arguments: {error}"
        ) from error
    return factory(*arguments, **options)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of ``"horovod:towers=2:mode=host"``.

    A value is a Python literal that JSON has, or a text. Neither name nor
    options are checked.

    Raises:
        TowerError: an option is given twice, or has no value.
    """
    name, *texts = text.split(":")
    options: dict[str, Any] = {}
    for each in texts:
        key, equals, value = each.partition("=")
        if not equals:
            raise TowerError(
                f"{text!r} gives {key} no value: write {key}=VALUE."
            )
        if key in options:
            raise TowerError(f"{text!r} gives {key} twice: leave one out.")
        try:
            options[key] = ast.literal_eval(value)
            # A process that is started with them gets them so.
            json.dumps(options[key])
        except (ValueError, SyntaxError, TypeError):
            options[key] = value
    return name, options


def check_options(name: str, options: Mapping[str, object]) -> None:
    """Check the options of a strategy of this package, without TensorFlow.

    Raises:
        TowerError: it has no such option, a value is not allowed, or options
            contradict one another.
    """
    kind = STRATEGIES[name].kind
    hints = hints_of(kind)
    fit_options.check_names(kind, options, [*hints])
    fit_options.check_values(
        options, {n: hint for n, hint in hints.items() if hint}
    )


@functools.cache
def hints_of(kind: str) -> Mapping[str, str]:
    """Read the parameters of a strategy's constructor, and their types.

    Importing the strategy would import TensorFlow, which takes seconds: a
    command that has a wrong option is to end before.

    Args:
        kind: its class in ``keras_towers``.

    Returns:
        Annotations by name; empty ones for options that are declared in
        ``StrategyOptions``.
    """
    path = f"{keras_towers._home_of(kind)}".replace(".", "/")
    source = pkgutil.get_data("keras_towers", f"{path}.py")
    (given,) = (
        inner.args
        for node in ast.parse(source or b"").body
        if isinstance(node, ast.ClassDef) and node.name == kind
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"
    )
    hints = {
        each.arg: ast.unparse(each.annotation)
        for each in (*given.args[1:], *given.kwonlyargs)
        if each.annotation
    }
    if given.kwarg and given.kwarg.annotation:
        unpacked = given.kwarg.annotation  # Unpack[RankKeywords]
        assert isinstance(unpacked, ast.Subscript)
        keywords = getattr(fit_options, ast.unparse(unpacked.slice))
        hints |= dict.fromkeys(keywords.__annotations__, "")
    return MappingProxyType(hints)


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
