"""Calls of Keras other than ``fit``, on four towers and on one device.

`make test` draws some by a seed; `make test-all` has each step in each call.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.kit.compare import differences
from tests.kit.sampling import sample_of
from tests.partition.cases import CASES
from tests.partition.cases.table import BATCH, EXAMPLES
from tests.partition.steps import fit, on_towers, used

DRAWN = 30


def _evaluate(model, x, y):
    return model.evaluate(x, y, BATCH, verbose=0, return_dict=True)


def _predict(model, x, y):
    return model.predict(x, BATCH, verbose=0)


def _validate(model, x, y):
    options = {"validation_data": (x, y), "validation_batch_size": 9}
    return fit(model, x, y, **options)


def _several_steps(model, x, y):
    model.steps_per_execution = 3
    return fit(model, x, y)


def _on_batches(model, x, y):
    found = []
    for start in range(0, EXAMPLES, BATCH):
        x_part, y_part = keras.tree.map_structure(
            lambda array, start=start: array[start : start + BATCH], (x, y)
        )
        found += [
            model.train_on_batch(x_part, y_part, return_dict=True),
            model.test_on_batch(x_part, y_part, return_dict=True),
            model.predict_on_batch(x_part),
        ]
    return found


# Not each model of a step has a loss, or can be called.
_ERRORS = TypeError, ValueError, NotImplementedError, tf.errors.OpError
CALLS = {
    "evaluate": _evaluate,
    "predict": _predict,
    "validate": _validate,
    "several steps": _several_steps,
    "on batches": _on_batches,
}


def _outcome(case, scope, act):
    """The model after the call, or the type of the error."""
    try:
        return used(case, scope, act)
    except _ERRORS as error:
        return {type(error).__name__: np.array(0)}


_CASES = [(name, call) for name in CASES for call in CALLS]


@pytest.mark.parametrize(("name", "call"), sample_of(_CASES, DRAWN))
def test_a_call_is_that_of_one_device(name, call):
    case, act = CASES[name], CALLS[call]
    one = _outcome(case, contextlib.nullcontext(), act)
    many = _outcome(case, on_towers([]), act)
    assert not differences(one, many)
