"""SGD's updates are one operation a weight, and those of Keras."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.update.one_device import updating

pytestmark = pytest.mark.core

FUSED = {"ResourceApplyKerasMomentum", "ResourceApplyGradientDescent"}


def trained(optimizer, gradients, dtype="float32", fuse=True):
    """Apply gradients to a weight.

    Returns:
        The weight and the optimizer's slots, and which operations wrote them.
    """
    weight = keras.Variable(np.linspace(-1, 1, 12).reshape(4, 3), dtype=dtype)
    optimizer.build([weight])

    @tf.function
    def apply(gradient):
        with updating(optimizer) if fuse else contextlib.nullcontext():
            optimizer.apply([gradient], [weight])

    for gradient in gradients:
        apply(gradient)
    graph = apply.get_concrete_function(gradients[0]).graph
    operations = {operation.type for operation in graph.get_operations()}
    slots = optimizer.variables[2:]
    return [v.numpy() for v in (weight, *slots)], operations & FUSED


def dense(dtype="float32"):
    """Gradients of three steps."""
    random = np.random.default_rng(1)
    return [tf.constant(random.normal(size=(4, 3)), dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.1, "clipnorm": 0.5},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_one_operation_with_the_result_of_keras(options, dtype):
    sgd = lambda: keras.optimizers.SGD(0.1, **options)  # noqa: E731
    ours, operations = trained(sgd(), dense(dtype), dtype)
    reference, none = trained(sgd(), dense(dtype), dtype, fuse=False)
    assert operations and not none
    for mine, theirs in zip(ours, reference, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


def test_gradients_of_rows_and_half_precision_are_left_to_keras():
    rows = tf.IndexedSlices(
        tf.ones((2, 3)), tf.constant([0, 2]), tf.constant([4, 3])
    )
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    assert not trained(sgd, [rows])[1]
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    assert not trained(sgd, dense("float16"), "float16")[1]


def test_own_update_of_a_subclass_is_called():
    class Halved(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient / 2, variable, learning_rate)

    ours, operations = trained(Halved(0.2), dense())
    reference, _ = trained(keras.optimizers.SGD(0.1), dense(), fuse=False)
    assert not operations
    np.testing.assert_allclose(ours[0], reference[0], rtol=1e-6)
