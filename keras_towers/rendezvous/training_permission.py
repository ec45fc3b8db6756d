"""Whether this process may train, or would train a model of its own."""

from __future__ import annotations

import contextlib
import sys

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


def check_permitted(kind: str, model: str) -> None:
    """Raise an error if a method would train without any strategy."""
    if _advice is None or _is_connected_by_script():
        return
    raise TowerError(
        f"{kind} of model {model!r}: `keras-towers run` started this script in "
        "several processes, and each would train a model of its own, since "
        "neither its options nor the script have a strategy that connects "
        f"them. {_advice}"
    )


def _is_connected_by_script() -> bool:
    """Whether the script itself has connected this process by an engine."""
    # Imported here because engines are a layer above this package.
    from keras_towers import engines

    for name in (engine.module for engine in engines.ENGINES.values()):
        module = sys.modules.get(name)
        # size() raises unless the engine has been initialized.
        with contextlib.suppress(AttributeError, ValueError):
            if module is not None and module.size() > 1:
                return True
    return False
