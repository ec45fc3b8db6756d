"""Data, and miniatures of models with a training step of their own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.exactness import models as m

ROWS = 24
FEATURES, LABELS = m.FEATURES[:ROWS], m.LABELS[:ROWS]
TARGETS = (FEATURES[:, :3] ** 2).astype("float32")
WEIGHTS = m.WEIGHTS[:ROWS]
WALKS = np.cumsum(FEATURES.reshape(ROWS, 2, 3).repeat(2, 1), 1)

classifier = m.mlp


def adam():
    return keras.optimizers.Adam(1e-2)


def compiled(model, loss="mse", optimizer=None, **kwargs):
    """A compiled model; what XLA compiles takes longer, and is the same."""
    options = {"jit_compile": False, **kwargs}
    model.compile(optimizer or adam(), loss, **options)
    return model


def own(cls, *args, **kwargs):
    """A compiled model with a step of its own."""
    return compiled(cls(*args), None, **kwargs)


def kinds(report):
    """What a report finds, in alphabetical order."""
    return sorted(finding.kind for finding in report.findings)


def dense(*sizes):
    """A network of dense layers."""
    body = [layers.Dense(n, activation="tanh") for n in sizes[:-1]]
    return keras.Sequential([*body, layers.Dense(sizes[-1])])


class MSE(keras.Model):
    """A model with a step: a tape over ``loss_of``, then an update."""

    def __init__(self, *sizes):
        super().__init__()
        keras.utils.set_random_seed(2)
        self.body = dense(*(sizes or (8, 3)))

    def call(self, x):
        return self.body(x)

    def loss_of(self, data):
        # Of any precision.
        return ops.mean(ops.subtract(self.body(data[0]), data[1]) ** 2)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def scalar(self):
        """A variable that a step may write."""
        return self.add_weight(shape=(), initializer="zeros", trainable=False)


class SSE(MSE):
    def loss_of(self, data):
        return ops.sum((self.body(data[0]) - data[1]) ** 2)


class Clipping(MSE):
    """Changes gradients between the tape and the optimizer."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        weights = self.trainable_weights
        grads, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.05)
        self.optimizer.apply(grads, weights)
        return {"loss": loss}


class VAE(MSE):
    def __init__(self):
        super().__init__(8, 6)
        self.encoder = dense(8, 4)
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, x):
        return self.body(self.encoder(x)[:, :2])

    def loss_of(self, data):
        # A step gets no tuple where there are no targets.
        x = data[0] if isinstance(data, tuple) else data
        mean, log_var = ops.split(self.encoder(x), 2, axis=1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        # Without a seed of its own.
        noise += keras.random.uniform((ops.shape(mean)[0], 1))
        z = mean + ops.exp(0.5 * log_var) * noise
        kl = -0.5 * ops.sum(1 + log_var - mean**2 - ops.exp(log_var), axis=1)
        return ops.mean(ops.sum((self.body(z) - x) ** 2, axis=1) + kl)
