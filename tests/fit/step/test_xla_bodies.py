"""What XLA is asked before it compiles a function."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.step.xla import Uncompilable, XlaBody


def body_of(function, *specs):
    def run(*tensors):
        with compat.xla_context():
            return [function(*tensors)]

    trace = compat.func_graph_from_py_func
    graph = trace("body", run, [tf.TensorSpec(*spec) for spec in specs], {})
    captures = [outside for outside, _ in graph.captures]
    return XlaBody(graph), [*graph.inputs[: len(specs)], *captures]


def test_a_body_with_its_variables_between_its_tensors():
    with tf.device("CPU:1"):
        total = tf.Variable([1.0, 2.0])
    constant = tf.constant([5.0, 7.0])

    def add(x):
        total.assign_add(x)
        return total * constant

    body, inputs = body_of(add, ([2], tf.float32))
    device = total.device
    body.check(inputs, device)

    @tf.function
    def run(x):
        with tf.device(device):
            return body([x, *inputs[1:]])[0]

    np.testing.assert_array_equal(run(tf.constant([1.0, 1.0])), [10, 21])
    np.testing.assert_array_equal(total, [2, 3])
    with pytest.raises(Uncompilable, match="CPU:1 from .*CPU:0"):
        body.check(inputs, device.replace("CPU:1", "CPU:0"))


@pytest.mark.parametrize(
    "function, spec, reason",
    [
        (tf.strings.length, ([], tf.string), "uses strings"),
        (tf.identity, (None, tf.float32), "of an unknown rank"),
        (
            lambda x: tf.linalg.logm(tf.cast(x, tf.complex64)),
            ([4, 4], tf.float32),
            "XLA does not have: MatrixLogarithm",
        ),
        (
            lambda x: tf.reshape(x, [11, -1]),
            ([None, 5], tf.float32),
            "cannot be compiled",
        ),
    ],
)
def test_what_xla_cannot_compile(function, spec, reason):
    body, inputs = body_of(function, spec)
    with pytest.raises(Uncompilable, match=reason):
        body.check(inputs, tf.config.list_logical_devices("CPU")[0].name)


@pytest.mark.parametrize(
    "function, shape",
    [
        # A kernel of 9 fits into none of the smaller images.
        (
            lambda x: tf.nn.conv1d(x, tf.ones([9, 3, 2]), 1, "VALID"),
            [None, None, 3],
        ),
        # Three views of each example.
        (lambda x: tf.reduce_mean(tf.reshape(x, [-1, 3, 5]), 1), [None, 5]),
    ],
)
def test_sizes_that_are_not_known_may_be_large(function, shape):
    body, inputs = body_of(function, (shape, tf.float32))
    body.check(inputs, tf.config.list_logical_devices("CPU")[0].name)
