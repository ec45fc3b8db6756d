import numpy as np
import tensorflow as tf

from keras_towers.reduction.placed import same_device
from keras_towers.reduction.sparse import sum_slices
from tests.reduction.cases import cpus


def test_rows_of_all_towers_in_their_order():
    one = tf.IndexedSlices(
        tf.constant([[1.0]]), tf.constant([4]), tf.constant([9, 1])
    )
    two = tf.IndexedSlices(
        tf.constant([[2.0], [3.0]]), tf.constant([4, 7]), tf.constant([9, 1])
    )
    totals = sum_slices([one, two], "/device:CPU:1", cpus(2))
    for total, device in zip(totals, cpus(2), strict=True):
        np.testing.assert_array_equal(total.values, [[1], [2], [3]])
        np.testing.assert_array_equal(total.indices, [4, 4, 7])
        np.testing.assert_array_equal(total.dense_shape, [9, 1])
        assert same_device(total.values.device, device)
        assert same_device(total.indices.device, device)


def test_put_together_on_the_main_device_once():
    part = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]))

    @tf.function
    def step():
        return sum_slices([part, part], "/device:CPU:3", cpus(2))

    graph = step.get_concrete_function().graph
    concats = [op for op in graph.get_operations() if "Concat" in op.type]
    assert len(concats) == 2
    assert all(same_device(op.device, "/device:CPU:3") for op in concats)
