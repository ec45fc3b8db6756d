"""Guards against processes of a job that each train a separate model."""

from __future__ import annotations

import contextlib
import sys

from keras_towers.errors import TowerError

# Against training in this process until it has met others; None: it may.
_advice: str | None = None


def refuse_alone(advice: str) -> None:
    """Refuse training in this process until it is connected."""
    global _advice
    _advice = advice


def permit_alone() -> None:
    """Permit training: the script has a strategy that connects processes."""
    global _advice
    _advice = None


def check_not_alone(kind: str, model: str) -> None:
    """Raise an error if a method would train without any strategy."""
    if _advice is None or _engine_runs():
        return
    raise TowerError(
        f"{kind} of model {model!r}: `keras-towers run` started this script in "
        "several processes, and each would train a model of its own, since "
        "neither its options nor the script have a strategy that connects "
        f"them. {_advice}"
    )


def _engine_runs() -> bool:
    """Whether the script itself has connected this process by an engine."""
    # They stand above this package.
    from keras_towers import engines

    for name in (engine.module for engine in engines.ENGINES.values()):
        engine = sys.modules.get(name)
        # It raises where it has not been started.
        with contextlib.suppress(AttributeError, ValueError):
            if engine is not None and engine.size() > 1:
                return True
    return False
