"""Does the same on one device and on towers, and compares the results."""

import contextlib
import dataclasses
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.kit import untuned
from tests.kit.ordinary import Originals, all_variables, assert_ordinary

TOLERANCE = 2e-6


def assert_close(found, wanted, tolerance=TOLERANCE, message=""):
    """Two arrays or numbers differ by no more than the tolerance."""
    np.testing.assert_allclose(
        found, wanted, rtol=tolerance, atol=tolerance, err_msg=message
    )


def assert_all_close(found, wanted, tolerance=TOLERANCE):
    """Variables or arrays are the same, one by one."""
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, tolerance)


def assert_finite(model):
    """All weights of a model are finite."""
    for variable in model.weights:
        assert np.isfinite(variable.numpy()).all(), variable.path


def assert_same_history(found, wanted, tolerance=TOLERANCE):
    """Two histories, or any dicts of numbers, are the same."""
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert_close(found[name], values, tolerance, name)


def assert_same_model(found, wanted, tolerance=TOLERANCE):
    """Weights, optimizer state, metrics and seeds of two models are the same.

    The stream of a random generator goes on as it did.
    """
    _same_values(_values(found), _values(wanted), tolerance)


def differences(found, wanted, tolerance=2e-5):
    """Named arrays that differ, and by how much of the largest value.

    NaNs are equal.
    """
    assert found.keys() == wanted.keys()
    off = {name: _difference(found[name], wanted[name]) for name in wanted}
    return {name: by for name, by in off.items() if by > tolerance}


def _difference(found, wanted):
    is_number = wanted.dtype.kind in "fiub"
    if found.shape != wanted.shape or not is_number:
        return 0.0 if np.array_equal(found, wanted) else np.inf
    found, wanted = found.astype("float64"), wanted.astype("float64")
    finite = np.isfinite(found) & np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return np.inf
    largest = np.abs(wanted[finite]).max(initial=1e-3)
    return np.abs(found - wanted)[finite].max(initial=0) / largest


def weights_of(model):
    """All weights except the states of random generators."""
    return {
        f"{index} {variable.name}": variable.numpy()
        for index, variable in enumerate(model.variables)
        if "seed" not in variable.path
    }


def assert_towers_equal(model, variables=None):
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
    returned: Any
    values: list[tuple[str, np.ndarray]]


def use_model(make, act, strategy=None, in_graph=True):
    """Use a new model, on one device or on towers.

    On towers, all of them end with the same weights, and the model is an
    ordinary one afterwards, with the variables that it had.

    Args:
        make: gives a compiled model, the same every time.
        act: uses the model.
        strategy: the towers; one device where it is None.
        in_graph: False to run it eagerly, which takes less than to trace it.
            ``make test-all`` traces it nevertheless.
    """
    model = make()
    if not in_graph and untuned.OPTIMIZED not in os.environ:
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
    return Outcome(model, returned, _values(model))


def assert_same(found, wanted, tolerance=TOLERANCE):
    """Two uses of a model returned the same and left the same variables."""
    tf.nest.assert_same_structure(found.returned, wanted.returned)
    if wanted.returned is not None:
        tf.nest.map_structure(
            lambda a, b: assert_close(a, b, tolerance),
            found.returned,
            wanted.returned,
        )
    _same_values(found.values, wanted.values, tolerance)


def assert_exact(
    make, act, strategy, reference=None, tolerance=TOLERANCE, in_graph=False
):
    """Assert that towers give what one device gives.

    Args:
        make: gives a compiled model, the same every time.
        act: uses the model on the towers.
        strategy: the towers.
        reference: uses the model on one device; like ``act`` where it is None.
        tolerance: largest difference allowed.
        in_graph: whether the one device needs a graph: Keras logs a metric of
            each loss, and counts executions, in a graph only.

    Returns:
        the outcome on the towers.
    """
    wanted = use_model(make, reference or act, in_graph=in_graph)
    found = use_model(make, act, strategy)
    assert_same(found, wanted, tolerance)
    return found


def _values(model):
    return [(v.path, v.numpy()) for v in all_variables(model)]


def _same_values(found, wanted, tolerance):
    # A lazily built model may number its layers differently: by order.
    for (path, value), (other, reference) in zip(found, wanted, strict=True):
        assert_close(value, reference, tolerance, f"{path} {other}")
