"""One device as a reference: without a graph, which gives the same for less."""

from collections.abc import Callable
from typing import Any

import keras

from tests.kit import compare
from tests.kit.compare import Act, Make, Outcome, outcome


def eager(make: Make) -> Make:
    """A function that makes the same model, which runs eagerly."""

    def build() -> keras.Model:
        model = make()
        model.run_eagerly = True
        return model

    return build


def assert_exact(
    make: Make,
    act: Act,
    strategy: Any,
    reference: Callable[[keras.Model], Any] | None = None,
    tolerance: float = compare.TOLERANCE,
) -> Outcome:
    """Assert that towers give what one device gives eagerly.

    Args:
        make: gives a compiled model, the same every time.
        act: uses the model on the towers.
        strategy: the towers.
        reference: uses the model on one device; like ``act`` where it is None.
        tolerance: largest difference allowed.

    Returns:
        the outcome on the towers.
    """
    wanted = outcome(eager(make), reference or act)
    found = outcome(make, act, strategy)
    compare.assert_same(found, wanted, tolerance)
    return found
