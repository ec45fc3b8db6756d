"""Gradients of several towers, and what their sums have to be."""

import numpy as np
import tensorflow as tf

from keras_towers import reduction
from keras_towers.devices import same_device
from keras_towers.reduction.gradients import is_sparse

ROWS = 11

REDUCTIONS = {
    "host": reduction.sum_on_host,
    "towers": reduction.sum_on_towers,
    "hierarchical": reduction.hierarchical_all_reduce,
    "collective": None,
}


def cpus(number):
    return [f"/device:CPU:{k}" for k in range(number)]


def make_reduction(name, towers):
    """The reduction of that name, or None if it cannot do K towers."""
    if name == "hierarchical" and towers > 1 and towers % 2:
        return None
    if name == "collective":
        return reduction.CollectiveAllReduce(cpus(towers))
    return REDUCTIONS[name]


def make_gradients(towers, seed=0):
    """Dense and sparse ones of several dtypes, holding small integers.

    Sums of small integers are exact, also in float16 and in any order.
    """
    random = np.random.default_rng(seed)

    def integers(shape, dtype):
        return tf.constant(random.integers(-9, 9, shape), dtype)

    def slices(rows, dtype, known):
        indices = tf.constant(random.integers(0, ROWS, [rows]), tf.int64)
        shape = tf.constant([ROWS, 3], tf.int64) if known else None
        return tf.IndexedSlices(integers([rows, 3], dtype), indices, shape)

    return [
        [
            integers([4, 3], tf.float32),
            integers([], tf.float32),
            slices(2 + tower, tf.float32, known=True),
            integers([7], tf.float16),
            integers([2, 1, 5], tf.float64),
            integers([0, 3], tf.float32),
            slices(3, tf.float64, known=False),
            integers([33], tf.float32),
            integers([3], tf.int64),
            integers([5], tf.bfloat16),
        ]
        for tower in range(towers)
    ]


def dense(gradient):
    """A gradient as a NumPy array, duplicate rows of slices added up."""
    if not isinstance(gradient, tf.IndexedSlices):
        return np.asarray(gradient)
    array = np.zeros([ROWS, 3], gradient.values.dtype.as_numpy_dtype)
    np.add.at(array, gradient.indices.numpy(), gradient.values.numpy())
    return array


def assert_sums(results, grads):
    """Every tower has the sum of each gradient."""
    assert len(results) == len(grads)
    for row in results:
        for i, total in enumerate(row):
            expected = np.sum([dense(tower[i]) for tower in grads], axis=0)
            assert total.dtype == grads[0][i].dtype
            assert is_sparse(total) == is_sparse(grads[0][i])
            np.testing.assert_array_equal(dense(total), expected)
        assert len(row) == len(grads[0])


def assert_placed(results, devices):
    """Every tower's sums are on its device."""
    for row, device in zip(results, devices, strict=True):
        assert all(same_device(total.device, device) for total in row)


def compiled(reduce, devices):
    """A reduction in a graph, where the places of its sums are checked.

    What a ``tf.function`` returns may be moved: its places say nothing.
    """

    @tf.function
    def step(grads):
        results = reduce(grads, devices)
        if not tf.executing_eagerly() and len(grads) > 1:
            assert_placed(results, devices)
        return results

    return step


def ops_of(function, grads, devices):
    """All ops of the graph of one reduction."""
    traced = tf.function(lambda values: function(values, devices))
    return traced.get_concrete_function(grads).graph.get_operations()
