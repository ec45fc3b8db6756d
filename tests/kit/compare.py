"""Does the same on one device and on towers, and compares the results."""

import os

import numpy as np

from keras_towers.inspection.conformance import outcomes
from keras_towers.inspection.conformance.outcomes import (
    TOLERANCE,
    assert_close,
    assert_same,
    assert_same_values,
    assert_towers_equal as assert_towers_equal,
    values_of,
)
from tests.kit import untuned


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
    assert_same_values(values_of(found), values_of(wanted), tolerance)


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


def use_model(make, act, strategy=None, in_graph=True):
    """Use a new model, on one device or on towers.

    Args:
        make: gives a compiled model, the same every time.
        act: uses the model.
        strategy: the towers; one device where it is None.
        in_graph: False to run it eagerly, which takes less than to trace it.
            ``KERAS_TOWERS_TEST_OPTIMIZED`` traces it nevertheless.
    """
    eagerly = not in_graph and untuned.OPTIMIZED not in os.environ
    return outcomes.use_model(make, act, strategy, eagerly)


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
