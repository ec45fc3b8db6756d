"""What a test leaves on towers, apart from what was there before."""

import gc
from collections.abc import Callable

import keras
import pytest
import tensorflow as tf


@pytest.fixture
def variables_on_towers() -> Callable[[], list[str]]:
    """Paths of this test's Keras variables, of any owner, on towers."""
    # Some tests leave variables on towers for good.
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
