"""What the steps share: small data, and a model with a step of its own."""

import keras
import numpy as np
import tensorflow as tf

CASES = {}


def case(function=None, **options):
    """Register a function that gives a compiled model, x and y (or None)."""
    if function is None:
        return lambda function: case(function, **options)
    CASES[function.__name__] = (function, options)
    return function


def floats(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def ints(high, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, high, shape)


def dense(*units, act="tanh", bias=True):
    """Dense layers, the last without an activation.

    Where a loss does not change with the last bias, its gradient is nothing but
    rounding, and it is left out.
    """
    return keras.Sequential(
        [
            *(keras.layers.Dense(unit, act) for unit in units[:-1]),
            keras.layers.Dense(units[-1], use_bias=bias),
        ]
    )


def cross(y, logits):
    """Cross-entropy of each example."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(y, "int32"), logits
    )


class Own(keras.Model):
    """A model whose step minimises `loss_of(x, y)`: a loss, or logs."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.create()

    def create(self):
        pass

    def state(self, shape, value=0.0, dtype="float32"):
        return self.add_weight(
            shape=shape,
            initializer=keras.initializers.Constant(value),
            trainable=False,
            dtype=dtype,
        )

    def call(self, x, training=False):
        return self.net(x, training=training)

    def weights_of_step(self):
        return self.trainable_variables

    def descend(self, loss_function, optimizer=None, weights=None):
        with tf.GradientTape() as tape:
            loss = loss_function()
        if weights is None:
            weights = self.weights_of_step()
        gradients = self.change(tape.gradient(loss, weights), weights)
        (optimizer or self.optimizer).apply(gradients, weights)
        return loss

    def change(self, gradients, weights):
        return gradients

    def after(self, x, y):
        pass

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        logs = {}

        def loss_function():
            loss = self.loss_of(x, y)
            if isinstance(loss, dict):
                logs.update(loss)
                loss = logs["loss"]
            return loss

        loss = self.descend(loss_function)
        self.after(x, y)
        return {**logs, "loss": loss}

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = self.loss_of(x, y)
        return loss if isinstance(loss, dict) else {"loss": loss}


def built(model, *inputs, optimizer="adam", **options):
    """The model with its weights, compiled."""
    model(*inputs)
    model.compile(optimizer, **options)
    return model
