"""Variables of models that are only planned."""

import keras
import pytest
import tensorflow as tf

from keras_towers.fit.weights.without_memory import (
    WithoutMemory,
    without_memory,
)

pytestmark = pytest.mark.alternate


def test_large_variables_take_no_memory_and_keep_nothing():
    with without_memory():
        large = keras.Variable("ones", shape=(400, 100), trainable=False)
        small = keras.Variable(lambda shape, dtype: tf.ones(shape, dtype), (3,))
    large.assign(large + 1)
    assert isinstance(large._value, WithoutMemory)
    assert not large.numpy().any()
    assert small.numpy().all()
    found = tf.raw_ops.ReadVariableOp(
        resource=large._value.handle, dtype=tf.float32
    )
    assert not tf.size(found)
