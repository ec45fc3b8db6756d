"""Tests that search for what is left on towers start from what is there."""

import gc
from collections.abc import Callable

import keras
import pytest
import tensorflow as tf


@pytest.fixture
def variables_on_towers() -> Callable[[], list[str]]:
    """Paths of this test's Keras variables, of any owner, on towers."""
    # Other tests leave some on towers for good.
    before = {id(variable): variable for variable in _all_on_towers()}
    return lambda: [v.path for v in _all_on_towers() if id(v) not in before]


def _all_on_towers() -> list[keras.Variable]:
    gc.collect()
    return [
        item
        for item in gc.get_objects()
        if issubclass(type(item), keras.Variable)
        and isinstance(item._value, tf.distribute.DistributedValues)
    ]
