"""Uses a model on one device or on towers, and compares what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_towers._types import Structure
from keras_towers.conformance.ordinary import (
    Originals,
    all_variables,
    assert_ordinary,
)
from keras_towers.strategies.base import BaseStrategy

TOLERANCE = 2e-6


def assert_close(
    found: Structure,
    wanted: Structure,
    tolerance: float = TOLERANCE,
    message: str = "",
) -> None:
    """Two arrays or numbers differ by no more than the tolerance."""
    np.testing.assert_allclose(
        found, wanted, rtol=tolerance, atol=tolerance, err_msg=message
    )


def assert_towers_equal(
    model: keras.Model, variables: Iterable[keras.Variable] | None = None
) -> None:
    """Every tower holds the same trainable weights, to the last bit.

    Args:
        model: the model.
        variables: other variables to compare.
    """
    for variable in variables or model.trainable_variables:
        first, *others = getattr(variable._value, "values", [variable._value])
        for index, other in enumerate(others, 1):
            np.testing.assert_array_equal(
                first.numpy(),
                other.numpy(),
                err_msg=f"{variable.path} on tower {index}",
            )


@dataclasses.dataclass
class Outcome:
    """The result of using a model.

    Attributes:
        model: the model, off the towers.
        returned: what was returned; of a ``History`` its dict.
        values: all variables afterwards, as pairs of path and value.
    """

    model: keras.Model
    returned: Structure
    values: list[tuple[str, np.ndarray]]


def use_model(
    make: Callable[[], keras.Model],
    act: Callable[[keras.Model], Structure],
    strategy: BaseStrategy | None = None,
    eagerly: bool = False,
) -> Outcome:
    """Use a new model, on one device or on towers.

    On towers, all of them end with the same weights, and the model is an
    ordinary one afterwards, with the variables that it had.

    Args:
        make: makes a compiled model, the same every time.
        act: uses the model.
        strategy: the towers; None: one device.
        eagerly: whether to run it eagerly, which takes less than to trace it.
    """
    model = make()
    if eagerly:
        model.run_eagerly = True
    originals = Originals(model) if model.built else None
    # The same draws for shuffled data, whatever came before.
    keras.utils.set_random_seed(11)
    with strategy or contextlib.nullcontext():
        returned = act(model)
        if strategy is not None:
            assert_towers_equal(model)
    assert_ordinary(model)
    if originals is not None:
        originals.assert_back()
    returned = getattr(returned, "history", returned)
    return Outcome(model, returned, values_of(model))


def assert_same(
    found: Outcome, wanted: Outcome, tolerance: float = TOLERANCE
) -> None:
    """Two uses of a model returned the same and left the same variables."""
    tf.nest.assert_same_structure(found.returned, wanted.returned)
    if isinstance(wanted.returned, Mapping):
        for name, values in wanted.returned.items():
            assert_close(found.returned[name], values, tolerance, name)
    elif wanted.returned is not None:
        tf.nest.map_structure(
            lambda a, b: assert_close(a, b, tolerance),
            found.returned,
            wanted.returned,
        )
    assert_same_values(found.values, wanted.values, tolerance)


def values_of(model: keras.Model) -> list[tuple[str, np.ndarray]]:
    """Paths and values of all variables of a model."""
    return [(v.path, v.numpy()) for v in all_variables(model)]


def assert_same_values(
    found: Sequence[tuple[str, np.ndarray]],
    wanted: Sequence[tuple[str, np.ndarray]],
    tolerance: float,
) -> None:
    """Variables are the same, one by one: models may name them differently."""
    for (path, value), (other, reference) in zip(found, wanted, strict=True):
        assert_close(value, reference, tolerance, f"{path} {other}")
