"""Generative models, as their papers and keras.io train them."""

import keras
import tensorflow as tf
from keras import ops

from tests.exactness.strangers.base import Own, case, dense, floats, step


class Sampling(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        epsilon = keras.random.normal(ops.shape(mean), seed=self.seed)
        self.add_loss(
            -0.5 * ops.mean(1 + log_var - ops.square(mean) - ops.exp(log_var))
        )
        return mean + ops.exp(0.5 * log_var) * epsilon


class Vae(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = dense(8, 6), dense(8, 5)
        self.sampling = Sampling()
        self.step_count = self.add_weight(
            shape=(), dtype="int64", trainable=False, initializer="zeros"
        )
        self.kl = keras.metrics.Mean(name="kl")

    def call(self, x):
        mean, log_var = ops.split(self.encoder(x), 2, axis=-1)
        return self.decoder(self.sampling((mean, log_var)))

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, **_
    ):
        added = ops.sum(ops.stack(self.losses))
        self.kl.update_state(added)
        beta = ops.minimum(1.0, ops.cast(self.step_count, "float32") / 3.0)
        self.step_count.assign_add(1)
        return ops.mean(ops.sum((x - y_pred) ** 2, -1)) + beta * added


@case
def vae_with_added_loss_and_annealing():
    model = Vae()
    model(floats(2, 5))
    model.compile("adam")
    return model, floats(20, 5), floats(20, 5)


class ActNorm(keras.layers.Layer):
    """Its first batch decides what it starts from."""

    def build(self, shape):
        self.log_scale = self.add_weight(
            shape=(shape[-1],), initializer="zeros"
        )
        self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros")
        self.started = self.add_weight(
            shape=(), dtype="bool", initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:

            def start():
                mean, variance = tf.nn.moments(x, 0)
                self.shift.assign(-mean)
                self.log_scale.assign(-0.5 * tf.math.log(variance + 1e-6))
                self.started.assign(True)
                return tf.constant(0)

            tf.cond(self.started, lambda: tf.constant(0), start)
        scale = ops.convert_to_tensor(self.log_scale)
        shift = ops.convert_to_tensor(self.shift)
        return (x + shift) * tf.exp(scale), tf.reduce_sum(scale)


@step(floats(20, 4) * 2 + 1, optimizer=lambda: keras.optimizers.Adam(1e-2))
class RealNvpWithActnormOfTheFirstBatch(Own):
    def create(self):
        self.norms = [ActNorm() for _ in range(3)]
        self.couplings = [dense(8, 4) for _ in range(3)]

    def call(self, x, training=False):
        logdet = tf.zeros(tf.shape(x)[:1])
        for norm, net in zip(self.norms, self.couplings, strict=True):
            x, change = norm(x, training=training)
            logdet += change
            first, second = tf.split(x, 2, -1)
            scale, shift = tf.split(net(first), 2, -1)
            scale = tf.tanh(scale)
            second = second * tf.exp(scale) + shift
            logdet += tf.reduce_sum(scale, -1)
            x = tf.concat([second, first], -1)
        return x, logdet

    def loss_of(self, x, y):
        z, logdet = self(x, training=True)
        return tf.reduce_mean(0.5 * tf.reduce_sum(z**2, -1) - logdet)


@step(floats(20, 6, 2))
class NeuralProcessWithRandomContexts(Own):
    """How many points are context is drawn once per batch."""

    def create(self):
        self.encoder, self.decoder = dense(8, 6), dense(8, 2)
        self.seed = keras.random.SeedGenerator(6)

    def call(self, x, training=False):
        points = x[..., :1]
        length = tf.shape(x)[1]
        number = keras.random.randint((), 2, 5, seed=self.seed)
        mask = tf.cast(tf.range(length) < number, "float32")[None, :, None]
        summary = tf.reduce_sum(self.encoder(x) * mask, 1, keepdims=True)
        summary = tf.tile(summary / tf.reduce_sum(mask), [1, length, 1])
        out = self.decoder(tf.concat([points, summary], -1))
        mean, raw = tf.split(out, 2, -1)
        return mean, 0.1 + 0.9 * tf.nn.softplus(raw)

    def loss_of(self, x, y):
        mean, sigma = self(x)
        errors = (x[..., 1:] - mean) / sigma
        return tf.reduce_mean(errors**2 + tf.math.log(sigma))
