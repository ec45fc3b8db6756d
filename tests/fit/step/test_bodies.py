"""A traced function that stays one operation and takes other variables."""

import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.step.bodies import Body


def traced(function):
    return compat.func_graph_from_py_func(
        "body", function, [tf.TensorSpec([None], tf.float32)], {}
    )


def test_other_variables_on_other_devices():
    first, second = tf.Variable(1.0), tf.Variable(10.0)

    def add(x):
        first.assign_add(tf.reduce_sum(x))
        return [x + first]

    body = Body(traced(add))

    @tf.function
    def both(x):
        outputs = []
        for device, variable in (("CPU:0", first), ("CPU:1", second)):
            with tf.device(device):
                outputs += body([x, variable.handle])
        return outputs

    one, other = both(tf.constant([1.0, 2.0]))
    np.testing.assert_array_equal(one, [5, 6])
    np.testing.assert_array_equal(other, [14, 15])
    assert (first.numpy(), second.numpy()) == (4, 13)


def test_it_is_optimised_once_and_not_inlined():
    def long(x):
        for _ in range(50):
            x = tf.identity(x) * 1.0
        return [x]

    graph = traced(long)
    body = Body(graph)
    assert len(body._function.graph.get_operations()) < 10
    assert body._function.definition.attr["_noinline"].b
    (result,) = tf.function(lambda x: body([x]))(tf.constant([3.0]))
    assert result.numpy() == [3]


def test_control_flow():
    def grows(x):
        return [tf.while_loop(lambda x: x[0] < 9, lambda x: [2 * x], [x])[0]]

    body = Body(traced(grows))
    (result,) = tf.function(lambda x: body([x]))(tf.constant([3.0]))
    assert result.numpy() == [12]
    assert result.shape == [1]
