"""Which line has added an operation."""

import keras
import pytest
import tensorflow as tf

from keras_towers.fit.step.graph.code_lines import (
    SharedLines,
    cause_of,
    line_of,
)

pytestmark = pytest.mark.alternate


def _causes(function, *shape, scope="gradient_tape/"):
    """The causes of the operations that a gradient tape adds in a scope."""

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = function(x)
        return tape.gradient(total, x)

    graph = gradient.get_concrete_function(tf.ones(shape)).graph
    added = [
        operation
        for operation in graph.get_operations()
        if operation.name.startswith(scope)
    ]
    return {cause_of(operation).rpartition(": ")[2] for operation in added}


def test_a_gradient_is_that_of_its_line():
    def summed(x):
        return tf.cumsum(x)

    assert _causes(summed, 3) == {"return tf.cumsum(x)"}


def test_a_gradient_is_not_that_of_the_first_line_of_its_layer():
    """An operation of the same scope, which may have no gradient."""

    class Several(keras.layers.Layer):
        def call(self, x):
            best = tf.argmax(x, 1)
            found = tf.nn.softmax(x)
            found = keras.ops.einsum("...a,...a->...", found, found)
            return found * tf.cast(best, tf.float32)

    assert _causes(Several(), 3, 4) == {
        "found = tf.nn.softmax(x)",
        'found = keras.ops.einsum("...a,...a->...", found, found)',
        "return found * tf.cast(best, tf.float32)",
    }


def test_of_several_lines_the_layer_is_named():
    class Twice(keras.layers.Layer):
        def call(self, x):
            left = tf.nn.softmax(x)
            right = tf.nn.softmax(-x)
            return left + right

    causes = _causes(Twice(name="twice"), 3, 4)
    # The first of its operations takes what has an operation as its result.
    lines = {"left = tf.nn.softmax(x)", "right = tf.nn.softmax(-x)"}
    (other,) = causes - lines
    assert other.startswith("the gradient of twice")


def test_a_gradient_that_a_user_has_written_is_that_of_its_line():
    @tf.custom_gradient
    def cubed(x):
        def gradient(upstream):
            return upstream * tf.sin(x)

        return x**3, gradient

    assert "return upstream * tf.sin(x)" in _causes(cubed, 3, scope="")


def test_operations_of_one_line_share_their_traceback():
    with tf.Graph().as_default() as graph:
        x = tf.zeros([2])
        for _ in range(3):
            x = tf.sin(x)
        tf.cos(x)
    operations = graph.get_operations()
    shared = SharedLines()
    lines = [line_of(operation) for operation in operations]
    assert [shared.line_of(operation) for operation in operations] == lines
    assert len(shared._tracebacks) == len({*lines}) == 3
    assert [line_of(operation) for operation in operations] == lines
