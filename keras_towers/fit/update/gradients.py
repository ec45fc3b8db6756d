"""The towers' gradients, and the check that they match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_towers._strategy import Strategy
from keras_towers.errors import TowerError
from keras_towers.fit.contract import NamedGradients


def check_on_all_towers(context: Any, grads: Sequence[Any]) -> None:
    """Check that all towers have the same ones of N gradients."""
    names = tuple(f"gradient {index}" for index in range(len(grads)))

    def merge(strategy: Strategy, towers: Any) -> None:
        check_equal(strategy.experimental_local_results(towers))

    context.merge_call(merge, args=(NamedGradients(names, list(grads)),))


def name_of(variable: Any) -> str:
    """Return the Keras path of a variable if it has one, else its name."""
    return getattr(variable, "path", variable.name)


def check_equal(towers: Sequence[NamedGradients]) -> None:
    """Raise a TowerError that says how K towers' gradients differ."""
    first = towers[0]
    for index, other in enumerate(towers[1:], 1):
        if other.names != first.names:
            odd = sorted(set(first.names) ^ set(other.names)) or other.names
            raise TowerError(
                f"tower {index} and tower 0 train different variables: they "
                f"differ in {', '.join(odd)}. Every tower has to run the same "
                "model: create variables in build(), independent of the data "
                "and of the replica."
            )
        odd = [
            name
            for name, a, b in zip(
                first.names, first.grads, other.grads, strict=True
            )
            if (a is None) != (b is None)
        ]
        if odd:
            raise TowerError(
                f"tower {index} and tower 0 do not have gradients for the same "
                f"variables: they differ in {', '.join(odd)}. Every tower has "
                "to compute the same loss."
            )
