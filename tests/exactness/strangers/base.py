"""What the steps share: small data, and a model with a step of its own."""

import re

import keras
import numpy as np
import tensorflow as tf

CASES = {}


def case(function=None, **options):
    """Register a function that gives a compiled model, x and y (or None).

    Args:
        function: is named as its case.
        **options: of ``test_strangers.used``, and the tolerance.
    """
    if function is None:
        return lambda function: case(function, **options)
    CASES[function.__name__] = (function, options)
    return function


def step(x, y=None, net=None, optimizer="adam", batches=None, **options):
    """Register a class of ``Own``, whose name is the case's, with its data.

    Args:
        x: arrays with one row for each example.
        y: likewise; None where there are no targets.
        net: the units of its dense layers, or a function that makes its net;
            None where ``create`` makes all of its layers.
        optimizer: its name, or a function that makes it.
        batches: makes batches of a ``tf.data.Dataset`` of the examples; None to
            train on the arrays.
        **options: as of ``case``.
    """

    def register(cls):
        def make():
            made = dense(*net) if isinstance(net, tuple) else net and net()
            model = cls(made)
            if batches:
                data = batches(tf.data.Dataset.from_tensor_slices((x, y))), None
                first, *_ = next(iter(data[0]))
            else:
                data = x, y
                first = tf.nest.map_structure(lambda rows: rows[:2], x)
            model(first)
            model.compile(optimizer() if callable(optimizer) else optimizer)
            return model, *data

        words = re.findall("[A-Z][a-z0-9]*", cls.__name__)
        CASES["_".join(words).lower()] = (make, options)
        return cls

    return register


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


def with_layer(layer, shape=(6,), head=1, loss="mse", optimizer="adam", **more):
    """A model that ends with a layer and a dense one, and its x and y."""
    x = keras.Input(shape)
    model = keras.Model(x, keras.layers.Dense(head)(layer(x)))
    model.compile(optimizer, loss, **more)
    return model, floats(20, *shape), floats(20, head, seed=1)


def cross(y, logits):
    """Cross-entropy of each example."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(y, "int32"), logits
    )


class Own(keras.Model):
    """A model whose step minimises ``loss_of(x, y)``: a loss, or logs."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net
        self.create()

    def create(self):
        """Make the layers and variables beside the net."""

    def state(self, shape, value=0.0, dtype="float32"):
        return self.add_weight(
            shape=shape,
            initializer=keras.initializers.Constant(value),
            trainable=False,
            dtype=dtype,
        )

    def call(self, x, training=False):
        return self.net(x, training=training)

    def loss_of(self, x, y):
        return tf.reduce_mean((self(x) - y) ** 2)

    def change(self, gradients, weights):
        return gradients

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            logs = self.logs_of(x, y)
        weights = self.trainable_variables
        gradients = tape.gradient(logs["loss"], weights)
        self.optimizer.apply(self.change(gradients, weights), weights)
        return logs

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.logs_of(x, y)

    def logs_of(self, x, y):
        loss = self.loss_of(x, y)
        return loss if isinstance(loss, dict) else {"loss": loss}
