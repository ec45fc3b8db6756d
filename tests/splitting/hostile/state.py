"""What layers, metrics, callbacks and constraints keep from step to step."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    by_default,
    mse,
    with_layers,
    with_variable,
)
from tests.splitting.hostile.table import (
    by_design,
    couples,
    dense,
    rows,
    splits,
)

WIDTH = 6


@couples()
def last_example_is_kept():
    def step(net, x, y):
        net.kept.assign(x[-1])  # here
        return by_default(net, x - net.kept, y)

    return with_variable(step, (WIDTH,))


@couples()
def table_of_the_examples():
    """An embedding of each example is kept under its number."""

    def step(net, x, y):
        place = tf.cast(tf.abs(x[:, 0]) * 10, tf.int32) % 5
        net.kept.assign(
            tf.tensor_scatter_nd_update(  # here
                net.kept, place[:, None], tf.reduce_mean(x, 1)
            )
        )
        return by_default(net, x, y)

    return with_variable(step, (5,))


@couples()
def loss_against_the_last_one():
    """Stops learning once the loss has grown."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, net(x, training=True))
            scaled = loss * tf.cast(loss < net.kept, tf.float32)  # here
        net.kept.assign(loss)
        return apply(net, tape, scaled)

    return with_variable(step, (), 100.0)


class _Spectral(keras.layers.Layer):
    """A dense layer whose weight is divided by its largest singular value."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 4), name="w")
        self.u = self.add_weight(shape=(1, 4), trainable=False, name="u")

    def call(self, x, training=False):
        v = tf.math.l2_normalize(self.u @ tf.transpose(self.w))
        u = tf.math.l2_normalize(v @ self.w)
        sigma = tf.reduce_sum(v @ self.w @ tf.transpose(u))
        if training:
            self.u.assign(tf.stop_gradient(u))
        return x @ (self.w / sigma)


@splits()
def spectral_by_hand():
    return with_layers(_Spectral())


@splits()
def spectral_of_keras():
    return with_layers(keras.layers.SpectralNormalization(dense(4)))


@by_design()
def renormalized_batch():
    return with_layers(dense(4), keras.layers.BatchNormalization(), dense(3))


class _Ghost(keras.layers.Layer):
    """TabNet's ghost normalization: over pieces of a fixed size."""

    def call(self, x):
        def each(part):
            mean, variance = tf.nn.moments(part, [0])  # here
            return (part - mean) * tf.math.rsqrt(variance + 0.1)  # here

        half = rows(x) // 2
        return tf.concat([each(x[:half]), each(x[half:])], 0)  # here


@couples()
def normalized_by_ghosts():
    return with_layers(dense(4), _Ghost())


@splits()
def normalized_by_groups():
    return with_layers(
        dense(4),
        keras.layers.GroupNormalization(2),
        keras.layers.UnitNormalization(),
    )
