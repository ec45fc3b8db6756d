"""Variables without memory: until it is needed, or of planned models."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.weights import without_memory as without_memory_module
from keras_towers.fit.weights.without_memory import (
    DeferredVariable,
    WithoutMemory,
    is_constant,
    is_repeatable,
    without_memory,
)

LIKE = types.SimpleNamespace(
    trainable=True, name="kernel", _shape=(2, 3), _dtype="float32"
)


class Deferred:
    """A variable of ones, and how often they were made."""

    def __init__(self):
        self.made = 0
        self.variable = DeferredVariable(LIKE, self.make)

    def make(self, shape, dtype):
        self.made += 1
        return tf.ones(shape, dtype)

    def held(self):
        """The entries that its handle has."""
        value = tf.raw_ops.ReadVariableOp(
            resource=self.variable._handle, dtype=tf.float32
        )
        return tf.size(value)


def test_a_read_keeps_nothing():
    one = Deferred()
    assert (one.variable.shape, one.variable.dtype) == ((2, 3), tf.float32)
    assert one.made == 0
    for made in (1, 2):
        np.testing.assert_array_equal(one.variable.numpy(), np.ones((2, 3)))
        assert one.made == made
        assert one.held() == 0


def test_what_is_written_stays():
    one = Deferred()
    with pytest.raises(ValueError, match="incompatible"):
        one.variable.assign(tf.ones((3, 3)))
    assert one.variable.first_value is not None
    one.variable.numpy()
    one.variable.assign(tf.fill((2, 3), 5.0))
    one.variable.assign_add(tf.ones((2, 3)))
    np.testing.assert_array_equal(one.variable.numpy(), np.full((2, 3), 6))
    assert one.made == 1


@pytest.mark.parametrize("add", ["assign_add", "scatter"])
def test_a_first_write_of_a_part_adds_to_the_first_value(add):
    one = Deferred()
    if add == "assign_add":
        one.variable.assign_add(tf.ones((2, 3)))
    else:
        rows = tf.IndexedSlices(tf.ones((2, 3)), [0, 1])
        one.variable.scatter_add(rows)
    np.testing.assert_array_equal(one.variable.numpy(), np.full((2, 3), 2))
    assert one.made == 1


def test_a_graph_and_a_tape_use_it_as_any_variable():
    one = Deferred()
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(one.variable * 3.0)
    gradient = tape.gradient(total, one.variable)
    np.testing.assert_array_equal(gradient, np.full((2, 3), 3))
    two = Deferred()

    @tf.function
    def add():
        return two.variable.assign_add(tf.ones((2, 3)))

    for total in (2, 3):
        np.testing.assert_array_equal(add(), np.full((2, 3), total))
    assert two.made == 1


@pytest.mark.parametrize("constant", [True, False])
def test_parts_of_the_first_value_are_parts_of_the_whole(constant):
    initializer = keras.initializers.GlorotUniform(seed=1)
    if constant:
        initializer = keras.initializers.Constant(2.0)
    variable = DeferredVariable(LIKE, initializer)
    part = variable.first_parts()([0, 1], [2, 2])
    np.testing.assert_array_equal(part, initializer((2, 3))[:, 1:])
    assert variable.first_value is not None
    # Of other entries for each row, no part is like the whole.
    assert not is_constant(keras.initializers.Constant(np.ones(3)))


def test_only_what_returns_the_same_again_is_repeatable():
    initializers = keras.initializers
    for repeatable in ("glorot_uniform", "zeros", "orthogonal"):
        assert is_repeatable(initializers.get(repeatable)), repeatable

    class Mine(initializers.RandomNormal):
        pass

    drawing = initializers.GlorotUniform(seed=keras.random.SeedGenerator(1))
    for other in (drawing, Mine(), lambda shape, dtype: tf.ones(shape, dtype)):
        assert not is_repeatable(other), other


@pytest.mark.alternate
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


@pytest.mark.parametrize(
    "name", ["GlorotUniform", "HeNormal", "Orthogonal", "TruncatedNormal"]
)
def test_a_large_first_value_is_that_of_a_small_one(name, monkeypatch):
    """It is computed in a function, where less memory is taken."""
    initializer = getattr(keras.initializers, name)(seed=3)
    found = []
    for least in (0, 2**40):
        monkeypatch.setattr(without_memory_module, "_LARGE_BYTES", least)
        found.append(DeferredVariable(LIKE, initializer).numpy())
    np.testing.assert_array_equal(*found)
