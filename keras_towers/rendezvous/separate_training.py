"""Whether this process may train, as one of several without a strategy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

from keras_towers.errors import TowerError

# How to connect the processes; None: this process may train.
_advice: str | None = None


def forbid_training(advice: str) -> None:
    """Forbid training in this process until a strategy connects it."""
    global _advice
    _advice = advice


def permit_training() -> None:
    """Permit training: the script has a strategy that connects processes."""
    global _advice
    _advice = None


def check_permitted(kind: str, model: str, engines: Iterable[str]) -> None:
    """Raise an error if a method would train without any strategy.

    Args:
        kind: the name of the method.
        model: the name of its model.
        engines: modules with which a script may connect its processes itself.
    """
    if _advice is None or any(map(_connects, engines)):
        return
    raise TowerError(
        f"{kind} of model {model!r}: `keras-towers run` started this script in "
        "several processes, and each would train a model of its own, since "
        "neither its options nor the script have a strategy that connects "
        f"them. {_advice}"
    )


def _connects(engine: str) -> bool:
    """Whether the script itself has connected this process by an engine."""
    module = sys.modules.get(engine)
    # size() raises unless the engine has been initialized.
    with contextlib.suppress(AttributeError, ValueError):
        return module is not None and bool(module.size() > 1)
    return False
