"""What a step keeps in Python attributes, as one device does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.fit.step import acts, written
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y, fit


class Holder:
    """An object of the user's own, which can be called."""

    def __init__(self):
        self.loss = None
        self.trail = []

    def __call__(self):
        return self.loss


class Quantizer(keras.layers.Layer):
    """Adds a loss of its own, as a vector quantizer does."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1],), name="codes")

    def call(self, x):
        self.add_loss(tf.reduce_mean((x - self.codes) ** 2))
        return x + 0.1 * self.codes


class Keeping(acts.Stepping):
    """Keeps tensors in attributes over an update, in several ways."""

    def prepare(self):
        self.cache = {}
        self.holder = Holder()
        self.calls, self.seen = 0, np.zeros(2)

    def before(self, x):
        self.features = x
        self.cache["mean"] = 0 * tf.reduce_mean(x)
        self.holder.trail.append(0 * tf.reduce_sum(x))

    def after(self, x, p):
        # The losses of its layers were made before the update.
        kept = self.cache["mean"] + self.holder.trail.pop()
        self.codes = tf.add_n(self.losses) + kept
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            again = self(self.features, training=True)
            self.holder.loss = tf.reduce_mean(again**2) + kept
        self.update(tape.gradient(self.holder(), variables), variables)

    def train_step(self, data):
        return {**super().train_step(data), "codes": self.codes}


class Counting(Keeping):
    """Trains in every other call, counted in Python."""

    def train_step(self, data):
        self.calls += 1
        self.seen[1] += 1
        if self.calls % 2:
            return super().train_step(data)
        loss = tf.reduce_mean(self(data[0]))
        return {"mine": loss, "codes": loss}


@pytest.mark.parametrize("kind, eager", [(Keeping, False), (Counting, True)])
def test_exact(kind, eager):
    def trained(model):
        # The last step is one that keeps, on two towers.
        history = fit(model, 1, X[:36], Y[:36], 12)
        assert model.holder.trail == []
        return history, model.calls, model.seen.tolist()

    make = written.made(kind, Quantizer, run_eagerly=eager)
    found = assert_exact(make, trained, kt.TowerStrategy(2), tolerance=5e-6)
    if eager:
        np.testing.assert_array_equal(found.model.features, X[24:36])
