"""The exactness contract: a case on towers is the case on one device."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest

from tests.exactness.cases import CASES, HARDEST
from tests.kit.compare import Outcome, assert_same, outcome

# All cases; the hardest belong to the inner loop.
NAMES = [
    pytest.param(name, marks=pytest.mark.core) if name in HARDEST else name
    for name in CASES
]


@functools.cache
def on_one_device(name: str) -> Outcome:
    """The reference of a case."""
    return outcome(CASES[name].build, CASES[name].fit)


def assert_contract(
    name: str,
    strategy: Any,
    spoil: Callable[[keras.Model], None] | None = None,
    seen_by_fit: Callable[[keras.Model], Any] = lambda model: model,
) -> Outcome:
    """Assert that a case trains on towers as on one device.

    Args:
        name: the case.
        strategy: the towers.
        spoil: called with the model after ``fit``, while it is on the towers.
        seen_by_fit: what the case's ``fit`` is given for the model.

    Returns:
        the outcome on the towers.
    """
    case = CASES[name]

    def act(model: keras.Model) -> Any:
        history = case.fit(seen_by_fit(model))
        if spoil is not None:
            spoil(model)
        return history

    found = outcome(case.build, act, strategy)
    assert_same(found, on_one_device(name), case.tolerance)
    return found
