"""The gradients that towers bring together, and whether they match."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError


@dataclasses.dataclass(eq=False)
class TowerGradients:
    """What one tower brings to the reduction.

    Attributes:
        names: the variables.
        grads: the gradient of each, None where there is none.
    """

    names: tuple[str, ...]
    grads: list[Any]

    def described(self) -> list[str]:
        """What there is a gradient for, and of which kind."""
        return [
            f"{name} {'sparse' if sparse else grad.shape} {grad.dtype.name}"
            for name, grad in zip(self.names, self.grads, strict=True)
            if grad is not None
            for sparse in [isinstance(grad, tf.IndexedSlices)]
        ]


def name_of(variable: Any) -> str:
    """The name that says which variable it is: Keras's path, if it has one."""
    return getattr(variable, "path", variable.name)


def check_equal(towers: Sequence[TowerGradients]) -> None:
    """Refuse towers that trained different variables, naming them.

    Args:
        towers: what each brings.

    Raises:
        TowerError: they did.
    """
    first = towers[0]
    for index, other in enumerate(towers[1:], 1):
        if other.names != first.names:
            odd = sorted(set(first.names) ^ set(other.names)) or other.names
            raise TowerError(
                f"tower {index} trains other variables than tower 0: they "
                f"differ in {', '.join(odd)}. Every tower has to run the same "
                "model: create variables in build(), not depending on data or "
                "on the replica."
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
