"""Gradients of several towers, and what their sums have to be."""

import numpy as np
import tensorflow as tf

from keras_towers.reduction.gradients import is_sparse
from keras_towers.strategies.modes import MODES
from keras_towers.transport.devices import same_device

ROWS = 11
DENSE = [
    ([4, 3], "float32"),
    ([], "float32"),
    ([7], "float16"),
    ([2, 1, 5], "float64"),
    ([0, 3], "float32"),
    ([33], "float32"),
    ([3], "int64"),
    ([5], "bfloat16"),
    ([2, 3], "complex64"),
    ([4], "complex128"),
    ([6], "int32"),
    ([3], "int8"),
]


def cpus(number):
    return [f"/device:CPU:{k}" for k in range(number)]


ON_CPUS = {name: make for name, make in MODES.items() if name != "nccl"}


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

    def gradients(tower):
        found = [integers(*form) for form in DENSE]
        found.insert(2, slices(2 + tower, "float32", known=True))
        found.insert(6, slices(3, "float64", known=False))
        found.append(slices(2, "bfloat16", known=True))
        found.append(slices(2, "complex64", known=False))
        return found

    return [gradients(tower) for tower in range(towers)]


def dense(gradient):
    """A gradient in NumPy's complex128, duplicate rows of slices added up."""
    if not isinstance(gradient, tf.IndexedSlices):
        return np.asarray(gradient, "complex128")
    array = np.zeros([ROWS, 3], "complex128")
    np.add.at(array, gradient.indices.numpy(), gradient.values.numpy())
    return array


def assert_sums(results, grads, tolerance=0):
    """Every tower has the sum of each gradient, to the last bit alike."""
    assert len(results) == len(grads)
    for row in results:
        for first, total, *parts in zip(results[0], row, *grads, strict=True):
            found = dense(total)
            expected = sum(map(dense, parts))
            assert total.dtype == parts[0].dtype
            assert is_sparse(total) == is_sparse(parts[0])
            assert found.shape == expected.shape
            assert found.tobytes() == dense(first).tobytes()
            apart = tolerance * max(1, np.abs(expected).max(initial=0))
            np.testing.assert_allclose(found, expected, rtol=0, atol=apart)


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
