"""Accumulators: averages of gradients that are not too old."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.replicas.accumulators import GradientSpec, accumulator
from tests.kit.compare import assert_close

pytestmark = pytest.mark.alternate

DEVICE = "/device:CPU:1"
_numbers = itertools.count()


def run(operations, *args):
    @tf.function(autograph=False)
    def function(*args):
        with tf.control_dependencies([operations(*args)]):
            return tf.constant(True)

    function(*args)


class Averaged:
    """An accumulator, as used by replicas and by their coordinator."""

    def __init__(self, shape, dtype=tf.float32, sparse=False):
        spec = GradientSpec("weight", shape, dtype, sparse, DEVICE)
        name = f"tests/accumulators_{next(_numbers)}"
        self.accumulator = accumulator(name, spec)
        self.taken = 0

    def push(self, grad, step, number=0):
        run(
            lambda grad: self.accumulator.push(
                grad, tf.constant(step, "int64"), tf.constant(number, "int64")
            ),
            grad,
        )

    def take_average(self, count):
        take = tf.function(self.accumulator.take_average, autograph=False)
        return take(tf.constant(count))

    def begin_anew(self, step):
        run(
            lambda: self.accumulator.advance_to(
                tf.constant(step, "int64"), True
            )
        )


def slices(rows, values, shape=(5, 2)):
    values = np.repeat(np.array(values, "float32")[:, None], shape[1], 1)
    return tf.IndexedSlices(
        tf.constant(values),
        tf.constant(rows, tf.int32),
        tf.constant(shape, tf.int32),
    )


def rows_of(average):
    return sorted(
        zip(average.indices.numpy(), average.values.numpy()[:, 0], strict=True)
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_are_too_old_are_dropped(sparse):
    averaged = Averaged((5, 2), sparse=sparse)
    value = slices([0], [1.0]) if sparse else tf.ones((5, 2))
    bad = slices([0], [np.nan]) if sparse else tf.fill((5, 2), np.nan)

    def is_average(step):
        averaged.push(bad, step - 1)
        averaged.push(value, step)
        average = tf.convert_to_tensor(averaged.take_average(1))
        assert_close(average, tf.convert_to_tensor(value))

    # All gradients that have arrived are averaged, also more than needed.
    averaged.push(value, step=0, number=1)
    is_average(0)
    is_average(1)
    # A new beginning drops gradients, if there are any.
    averaged.push(bad, step=2)
    averaged.begin_anew(3)
    is_average(3)
    averaged.begin_anew(7)
    is_average(7)


def test_every_slice_is_kept():
    """Also slices with equal rows, in one gradient or in several."""
    averaged = Averaged((5, 2), sparse=True)
    averaged.push(slices([4, 1, 4], [1.0, 2.0, 3.0]), step=0, number=0)
    averaged.push(slices([4, 0], [5.0, 7.0]), step=0, number=1)
    average = averaged.take_average(2)
    assert rows_of(average) == [
        (0, 3.5),
        (1, 1.0),
        (4, 0.5),
        (4, 1.5),
        (4, 2.5),
    ]
    assert average.dense_shape.numpy().tolist() == [5, 2]
    # Empty gradients count.
    averaged.push(slices([], []), step=1, number=0)
    averaged.push(slices([3], [8.0]), step=1, number=1)
    assert rows_of(averaged.take_average(2)) == [(3, 4.0)]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype, sparse):
    """The sum may be larger than what the dtype holds; the mean is not."""
    averaged = Averaged((5, 2), tf.as_dtype(dtype), sparse)
    for number in range(2):
        grad = tf.fill((5, 2), tf.cast(60_000.0, dtype))
        if sparse:
            grad = tf.IndexedSlices(grad, tf.range(5), tf.constant([5, 2]))
        averaged.push(grad, step=0, number=number)
    average = averaged.take_average(2)
    assert average.dtype == dtype
    values = average.values if sparse else average
    # Slices of two gradients come one after the other.
    total = tf.cast(values, tf.float64).numpy().sum()
    assert_close(total / 10, float(tf.cast(60_000.0, dtype)), 1e-6)


@pytest.mark.parametrize("dtype", [tf.int32, tf.complex64])
def test_a_dtype_that_has_no_average_is_refused(dtype):
    with pytest.raises(TowerError, match=f"weight is of dtype {dtype.name}"):
        Averaged((2,), dtype)


def test_rows_that_cannot_be_numbered_are_refused():
    most = (1 << 29) - 1
    averaged = Averaged((most, 2), sparse=True)
    averaged.push(slices([most - 1], [1.0], (most, 2)), step=0)
    assert rows_of(averaged.take_average(1)) == [(most - 1, 1.0)]
    with pytest.raises(TowerError, match="divide the weight into several"):
        Averaged((most + 1, 2), sparse=True)
