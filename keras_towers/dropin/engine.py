"""What the shared code asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from keras_towers import compat


class Engine(Protocol):
    """The ranks, and what callbacks send between them."""

    def rank(self) -> int:
        """This process, 0 to size - 1."""
        ...

    def size(self) -> int:
        """The number of processes."""
        ...

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of float64 values [n] over the ranks."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """A picklable value of every rank, in rank order."""
        ...

    def broadcast_variables(
        self, variables: Sequence[Any], root_rank: int
    ) -> None:
        """Set variables to their values on one rank."""
        ...


def variable_key(variable: Any) -> Any:
    """A key that identifies a Keras or TensorFlow variable."""
    if isinstance(variable, compat.KerasVariable):
        variable = variable.value
    return id(variable)
