"""Whole steps, in any call: what one device does, divided over four towers.

Of each last batch three towers have no examples. `make test` draws some by a
seed; `make test-all` has each step in each call.
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
from tests.partition.computed_once import ONCE, computed_once
from tests.partition.steps import fit, on_towers, used

pytestmark = pytest.mark.alternate

STEPS_DRAWN, CALLS_DRAWN = 35, 50
_WAYS = [(name, way) for name in CASES for way in ("once", "each")]


@pytest.mark.parametrize(("name", "updates"), sample_of(_WAYS, STEPS_DRAWN))
def test_a_step_is_that_of_one_device(name, updates):
    case, programs = CASES[name], []
    one = used(case, contextlib.nullcontext(), fit)
    many = used(case, on_towers(programs, updates=updates), fit)
    assert not differences(many, one)
    # Programs are too large for pytest to show.
    once = computed_once(programs)
    assert once == ONCE.get(name, "")


def _several_steps(model, x, y):
    model.steps_per_execution = 3
    return fit(model, x, y)


def _validate(model, x, y):
    options = {"validation_data": (x, y), "validation_batch_size": 9}
    return fit(model, x, y, **options), model.predict(x, BATCH, verbose=0)


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
    "several steps": _several_steps,
    "validate": _validate,
    "on batches": _on_batches,
}


def _outcome(case, scope, act):
    """The model after the call, or the type of the error."""
    try:
        return used(case, scope, act)
    except _ERRORS as error:
        return {type(error).__name__: np.array(0)}


_CASES = [(name, call) for name in CASES for call in CALLS]


@pytest.mark.parametrize(("name", "call"), sample_of(_CASES, CALLS_DRAWN))
def test_a_call_is_that_of_one_device(name, call):
    case, act = CASES[name], CALLS[call]
    one = _outcome(case, contextlib.nullcontext(), act)
    many = _outcome(case, on_towers([]), act)
    assert not differences(one, many)
