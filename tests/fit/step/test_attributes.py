"""What a step keeps in Python attributes is its own tower's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.fit.step.written import Stepping, made, sparse
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y


class Holder:
    """An object of the user's own, which can be called."""

    def __init__(self):
        self.loss = None
        self.trail = []

    def __call__(self):
        return self.loss


class Keeping(Stepping):
    """Keeps tensors in attributes over an update, in several ways."""

    def prepare(self):
        self.cache = {}
        self.holder = Holder()

    def before(self, x):
        self.features = x
        self.cache["mean"] = 0 * tf.reduce_mean(x)
        self.holder.trail.append(0 * tf.reduce_sum(x))

    def after(self, x, p):
        kept = self.cache["mean"] + self.holder.trail.pop()
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            again = self(self.features, training=True)
            self.holder.loss = tf.reduce_mean(again**2) + kept
        grads = tape.gradient(self.holder(), variables)
        self.optimizer.apply(grads, variables)


class Counting(Stepping):
    """Trains another part in every other call, counted in Python."""

    def prepare(self):
        self.calls = 0
        self.seen = np.zeros(2)

    def train_step(self, data):
        self.calls += 1
        self.seen[1] += 1
        if self.calls % 2:
            return super().train_step(data)
        return {"mine": tf.reduce_mean(self(data[0]))}

    def state(self):
        return [self.calls, self.seen.tolist()]


class Quantizer(keras.layers.Layer):
    """Adds a loss of its own, as a vector quantizer does."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1],), name="codes")

    def call(self, x):
        self.add_loss(tf.reduce_mean((x - self.codes) ** 2))
        return x + 0.1 * self.codes


class Quantizing(Stepping):
    """Reads the losses of its layers after an update."""

    def train_step(self, data):
        x, y = data
        first, rest = self.trainable_variables[:2], self.trainable_variables[2:]
        with tf.GradientTape(persistent=True) as tape:
            loss = sparse(y, self(x, training=True))
            whole = loss + tf.add_n(self.losses)
        self.optimizer.build(self.trainable_variables)
        self.optimizer.apply(tape.gradient(whole, first), first)
        self.optimizer.apply(tape.gradient(whole, rest), rest)
        return {"mine": loss, "codes": tf.add_n(self.losses)}


def quantizing():
    model = Quantizing([*m.mlp(Quantizer()).layers])
    model.compile(keras.optimizers.SGD(0.02))
    return model


def trained(model):
    history = model.fit(X, Y, batch_size=12, shuffle=False, verbose=0).history
    return history, getattr(model, "state", list)()


MAKES = {
    "keeping": made(Keeping),
    "counting eagerly": made(Counting, run_eagerly=True),
    "quantizing": quantizing,
}


@pytest.mark.parametrize("name", MAKES)
def test_exact(name):
    assert_exact(MAKES[name], trained, kt.TowerStrategy(2), tolerance=5e-6)


def test_attributes_end_as_on_one_device():
    model = made(Keeping, run_eagerly=True)()
    with kt.TowerStrategy(3):
        model.train_on_batch(X[:12], Y[:12])
        np.testing.assert_array_equal(model.features, X[:4])
    assert model.holder.trail == []
