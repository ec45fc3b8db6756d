"""Small training steps, each of its own kind, and what they are made of."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_towers.inspection.conformance.case_models import ByHand as ByHand

# Two whole batches, which four towers share unevenly, and a last one of a
# single example.
EXAMPLES, BATCH, WIDTH = 31, 15, 6


def generator():
    return np.random.default_rng(11)


def normal(*shape):
    return generator().normal(size=(EXAMPLES, *shape)).astype("float32")


def whole(upto, *shape):
    return generator().integers(0, upto, (EXAMPLES, *shape)).astype("int32")


def numbers():
    return normal(WIDTH), normal(1)


def tokens():
    """Sequences of words, of which 0 is none, and one number for each."""
    return whole(9, 8), normal(1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: what it trains, and on what.

    Attributes:
        build: makes the model.
        data: makes the features and targets that it trains on.
    """

    build: Callable[[], keras.Model]
    data: Callable[[], Any]


CASES: dict[str, Case] = {}


def compiled_model(data=numbers):
    """Note a function that makes a compiled model, as a case of its name."""

    def register(build):
        assert build.__name__ not in CASES
        CASES[build.__name__] = Case(build, data)
        return build

    return register


def step(data=numbers, **parts):
    """Note a step that is written by hand, as a case of its name.

    It takes the model, features and targets, and returns a loss of what is
    trained, or logs if it trains by itself.

    Args:
        data: makes what it trains on.
        **parts: functions that make attributes of the model; a small network
            if none makes ``net``.
    """

    def register(function):
        def build():
            made = {name: make() for name, make in parts.items()}
            return compiled(ByHand(function, **{"net": mlp(5, 1)(), **made}))

        build.__name__ = function.__name__
        compiled_model(data)(build)
        return function

    return register


def compiled(model, **options):
    """Compile with an optimizer that forgives nothing."""
    options = {"loss": "mse", **options}
    model.compile(keras.optimizers.SGD(0.05), jit_compile=False, **options)
    return model


def stack(*given, shape=(WIDTH,), dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *given])


def mlp(*units, **options):
    """A function that makes a network of dense layers."""

    def make():
        hidden = [layers.Dense(n, "tanh") for n in units[:-1]]
        return stack(*hidden, layers.Dense(units[-1]), **options)

    return make


def state(*shape, value=0.0, dtype="float32"):
    """A function that makes a variable that is not trained."""
    return lambda: keras.Variable(np.full(shape, value, dtype), trainable=False)


def gradients_of(model, x, y):
    """Return the loss, and its gradients."""
    with tf.GradientTape() as tape:
        loss = default_loss(model, x, y)
    return loss, tape.gradient(loss, model.trainable_variables)


def default_loss(model, x, y):
    return mse(y, model.net(x))


def mse(y, p):
    return tf.reduce_mean(tf.square(p - y))


def rows(x):
    return tf.shape(x)[0]
