"""Whether this process may train, as one of several without a strategy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

from keras_towers.errors import TowerError

# What the error says; None: this process may train.
_reason: str | None = None


def forbid_training(fact: str, advice: str) -> None:
    """Forbid training in this process until a strategy connects it.

    Args:
        fact: who started the processes, in an error.
        advice: how to connect them.
    """
    global _reason
    _reason = (
        f"{fact}, and each would train a model of its own, since no strategy "
        f"connects them. {advice}"
    )


def permit_training() -> None:
    """Permit training: the script has a strategy that connects processes."""
    global _reason
    _reason = None


def check_permitted(kind: str, model: str, engines: Iterable[str]) -> None:
    """Raise an error if a method would train without any strategy.

    Args:
        kind: the name of the method.
        model: the name of its model.
        engines: modules with which a script may connect its processes itself.
    """
    if _reason is None or any(map(_connects, engines)):
        return
    raise TowerError(f"{kind} of model {model!r}: {_reason}")


def _connects(engine: str) -> bool:
    """Whether the script itself has connected this process by an engine."""
    module = sys.modules.get(engine)
    # size() raises unless the engine has been initialized.
    with contextlib.suppress(AttributeError, ValueError):
        return module is not None and bool(module.size() > 1)
    return False
