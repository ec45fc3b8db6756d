"""Accumulators: the average of those gradients that are not too old."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.sync_replicas.accumulators import Accumulators, GradientSpec
from tests.kit.compare import close

DEVICE = "/device:CPU:1"
_numbers = itertools.count()


class Averaged:
    """One accumulator, as it is used by replicas and by their coordinator."""

    def __init__(self, shape, dtype=tf.float32, sparse=False):
        spec = GradientSpec("weight", shape, dtype, sparse, DEVICE)
        name = f"tests/accumulators_{next(_numbers)}"
        self.accumulators = Accumulators(name, [spec])
        self.taken = 0

    def push(self, grad, step, number=0):
        @tf.function(autograph=False)
        def push(grad):
            done = self.accumulators.push(
                [grad],
                tf.constant(step, tf.int64),
                tf.constant(number, "int64"),
            )
            with tf.control_dependencies(done):
                return tf.constant(True)

        push(grad)

    def take(self, count):
        (average,) = tf.function(self.accumulators.take, autograph=False)(
            tf.constant(count)
        )
        return average

    def begin_anew(self, step):
        @tf.function(autograph=False)
        def begin():
            begun = self.accumulators.begin_anew(tf.constant(step, tf.int64))
            with tf.control_dependencies(begun):
                return tf.constant(True)

        begin()


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


def test_mean_of_dense_gradients():
    averaged = Averaged((2, 3))
    for number in range(4):
        averaged.push(tf.fill((2, 3), float(number)), step=0)
    close(averaged.take(4), np.full((2, 3), 1.5))
    # Nothing of it is left.
    averaged.push(tf.fill((2, 3), 7.0), step=1)
    close(averaged.take(1), np.full((2, 3), 7.0))


def test_all_that_have_come_are_averaged():
    averaged = Averaged(())
    for number in range(4):
        averaged.push(tf.constant(float(number)), step=0)
    close(averaged.take(2), 1.5)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_are_too_old_are_dropped(sparse):
    averaged = Averaged((5, 2), sparse=sparse)
    value = slices([0], [1.0]) if sparse else tf.ones((5, 2))
    bad = slices([0], [np.nan]) if sparse else tf.fill((5, 2), np.nan)
    averaged.push(value, step=0)
    averaged.take(1)
    averaged.push(bad, step=0)
    averaged.push(value, step=1)
    close(tf.convert_to_tensor(averaged.take(1)), tf.convert_to_tensor(value))


def test_every_slice_is_kept():
    """Also several of one row, in one gradient or in several."""
    averaged = Averaged((5, 2), sparse=True)
    averaged.push(slices([4, 1, 4], [1.0, 2.0, 3.0]), step=0, number=0)
    averaged.push(slices([4, 0], [5.0, 7.0]), step=0, number=1)
    average = averaged.take(2)
    assert rows_of(average) == [
        (0, 3.5),
        (1, 1.0),
        (4, 0.5),
        (4, 1.5),
        (4, 2.5),
    ]
    assert average.dense_shape.numpy().tolist() == [5, 2]


def test_gradients_without_any_slice_count():
    averaged = Averaged((5, 2), sparse=True)
    averaged.push(slices([], []), step=0, number=0)
    averaged.push(slices([3], [8.0]), step=0, number=1)
    assert rows_of(averaged.take(2)) == [(3, 4.0)]


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
    average = averaged.take(2)
    assert average.dtype == dtype
    values = average.values if sparse else average
    # Slices of two gradients come one after the other.
    total = tf.cast(values, tf.float64).numpy().sum()
    close(total / 10, float(tf.cast(60_000.0, dtype)), 1e-6)


@pytest.mark.parametrize("dtype", [tf.int32, tf.complex64])
def test_a_dtype_that_has_no_average_is_refused(dtype):
    with pytest.raises(TowerError, match=f"weight is of dtype {dtype.name}"):
        Averaged((2,), dtype)


@pytest.mark.parametrize("sparse", [False, True])
def test_beginning_anew_drops_what_is_left(sparse):
    averaged = Averaged((5, 2), sparse=sparse)
    value = slices([0], [1.0]) if sparse else tf.ones((5, 2))
    bad = slices([0], [np.nan]) if sparse else tf.fill((5, 2), np.nan)
    averaged.push(bad, step=0)
    averaged.begin_anew(1)
    averaged.push(bad, step=0)
    averaged.push(value, step=1)
    close(tf.convert_to_tensor(averaged.take(1)), tf.convert_to_tensor(value))
    # Where nothing is left, too.
    averaged.begin_anew(5)
    averaged.push(bad, step=4)
    averaged.push(value, step=5)
    close(tf.convert_to_tensor(averaged.take(1)), tf.convert_to_tensor(value))
