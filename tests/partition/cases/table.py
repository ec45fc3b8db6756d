"""Small training steps, each of its own kind, and builders of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Two whole batches, which four towers share unevenly, and a last one, of which
# the fourth tower has nothing.
EXAMPLES, BATCH, WIDTH = 33, 15, 6


def generator() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(*shape: int) -> np.ndarray:
    return generator().normal(size=(EXAMPLES, *shape)).astype("float32")


def whole(upto: int, *shape: int) -> np.ndarray:
    return generator().integers(0, upto, (EXAMPLES, *shape)).astype("int32")


def numbers():
    return normal(WIDTH), normal(1)


def classes():
    """Features, and one of three classes for each."""
    return normal(WIDTH), whole(3, 1)


def tokens():
    """Sequences of words, of which 0 is none, and one number for each."""
    return whole(9, 8), normal(1)


def images():
    return normal(6, 6, 2), normal(1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: what it trains, and on what.

    Attributes:
        build: makes the model.
        data: makes what it trains on.
        options: makes arguments of ``fit``, for each fit.
    """

    build: Callable[[], keras.Model]
    data: Callable[[], Any] = numbers
    options: Callable[[], dict[str, Any]] = dict


CASES: dict[str, Case] = {}


def case(
    form: Callable[..., keras.Model] | None = None,
    data: Callable[[], Any] = numbers,
    options: Callable[[], dict[str, Any]] = dict,
    **given: Any,
) -> Callable[[Any], Any]:
    """Make a decorator that notes a case.

    Args:
        form: makes the model of the decorated function, and of what else is
            given; without one the function makes it.
        data: makes what it trains on.
        options: makes arguments of ``fit``.
        **given: of ``form``.
    """

    def register(function):
        assert function.__name__ not in CASES
        build = function
        if form is not None:
            build = functools.partial(form, function, **given)
        CASES[function.__name__] = Case(build, data, options)
        return function

    return register


def dense(units, activation=None, **options):
    return keras.layers.Dense(units, activation, **options)


def compiled(model, loss="mse", optimizer=None, **options):
    """Compile with an optimizer that forgives nothing."""
    optimizer = optimizer or keras.optimizers.SGD(0.05)
    model.compile(optimizer, loss, jit_compile=False, **options)
    return model


def plain(loss="mse", outputs=3, **options):
    """Train a small network by a loss: of targets and outputs."""
    return compiled(_network(keras.Model, outputs), loss, **options)


def stacked(*layers, shape=(WIDTH,), dtype=None, **options):
    """Train a stack of layers."""
    entrance = keras.Input(shape, dtype=dtype)
    return compiled(keras.Sequential([entrance, *layers]), **options)


def with_layers(*layers, **options):
    """Train a stack of layers before a last number."""
    return stacked(*layers, dense(1), **options)


def stepped(step, outputs=1, **options):
    """Train a small network by a step: of the model, features and targets."""
    return compiled(_network(stepping(step), outputs), **options)


def minimized(loss_of, outputs=1):
    """Train a small network by a loss: of the model, features and targets."""
    return stepped(minimizing(loss_of), outputs)


def by_loss(of, outputs=1):
    """Train a small network by a loss that Keras does not know."""
    return minimized(lambda net, x, y: of(y, net(x, training=True)), outputs)


def with_variable(step, shape=(), initial=0.0, outputs=1, **options):
    """Train by a step of a model that has a variable."""
    model = stepped(step, outputs)
    model.kept = _variable_of(model, shape, initial, **options)
    return model


def of_parts(step, **units):
    """Train by a step of a model that has dense layers: names, and units."""

    class Parts(stepping(step)):
        def call(self, x):
            return x

    model = Parts()
    for name, number in units.items():
        setattr(model, name, dense(number))
    return compiled(model)


class Own(keras.layers.Layer):
    """A layer of a function; it is traced anew for every tower."""

    def __init__(self, call):
        super().__init__()
        self.body = call

    def call(self, x):
        return self.body(x)


def layered(call, units=None):
    """Train a layer of a function, after a dense layer of so many units."""
    before = [dense(units)] if units else []
    return with_layers(*before, Own(call))


def weighing(call, units=None, **options):
    """Train a layer of a function of the layer, which has a variable."""
    before = [dense(units)] if units else []
    return with_layers(*before, own_weight(call, **options))


def own_weight(call, shape=(), initial=1.0, **options):
    """Make a layer of a function of the layer, which has a variable."""
    layer = Own(lambda x: call(layer, x))
    layer.kept = _variable_of(layer, shape, initial, **options)
    return layer


def with_weight(call, shape):
    """Train what a function makes of a trained weight and the data."""

    class Weighted(keras.Model):
        def __init__(self):
            super().__init__()
            self.weight = self.add_weight(shape=shape, name="weight")
            self.out = dense(1)

        def call(self, x):
            return self.out(call(self.weight, x))

    return compiled(Weighted())


def _variable_of(owner, shape, initial, trainable=False, **options):
    return owner.add_weight(
        shape=shape,
        initializer=keras.initializers.Constant(initial),
        trainable=trainable,
        name="kept",
        **options,
    )


def stepping(step):
    class Stepped(keras.Model):
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            return step(self, x, y)

    return Stepped


def _network(kind, outputs):
    entrance = keras.Input((WIDTH,))
    hidden = dense(5, "tanh", name="hidden")(entrance)
    return kind(entrance, dense(outputs, name="outputs")(hidden))


def apply(model, tape, loss):
    """Apply the gradients of a loss; return it as the log."""
    weights = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return {"loss": loss}


def minimizing(loss_of):
    """Make a step that minimizes a loss: of the model, features and targets."""

    @functools.wraps(loss_of)
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        return apply(model, tape, loss)

    return step


def default_loss(model, x, y):
    return mse(y, model(x, training=True))


by_default = minimizing(default_loss)


def gradients_of(model, x, y):
    """Return the loss, and its gradients."""
    with tf.GradientTape() as tape:
        loss = default_loss(model, x, y)
    return loss, tape.gradient(loss, model.trainable_variables)


def rows(t):
    return tf.shape(t)[0]


def count(t):
    return tf.cast(rows(t), tf.float32)


def errors(y, p):
    return tf.reduce_mean(tf.square(p - y), -1)


def positives(y):
    return tf.reduce_sum(tf.cast(y > 0, tf.int32))


def mse(y, p):
    return tf.reduce_mean(tf.square(p - y))
