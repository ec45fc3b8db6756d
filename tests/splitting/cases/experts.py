"""Layers that choose experts."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.own_layer import Own
from tests.splitting.cases.table import (
    WIDTH,
    differs,
    proven,
    with_layers,
)


@proven()
def mixture_of_experts():
    def call(layer, x):
        gates = tf.nn.softmax(x[:, :3])
        at = tf.argmax(gates, -1)
        each = tf.stack([x, tf.tanh(x), tf.square(x)], 1)
        return tf.gather(each, at, batch_dims=1) * tf.reduce_max(
            gates, -1, keepdims=True
        )

    return with_layers(Own(call))


@differs()
def balanced_experts():
    def call(layer, x):
        gates = tf.nn.softmax(x)
        used = tf.one_hot(tf.argmax(gates, -1), WIDTH)
        layer.add_loss(
            tf.reduce_sum(
                tf.reduce_mean(gates, 0) * tf.reduce_mean(used, 0)  # here
            )
        )
        return gates

    return with_layers(keras.layers.Dense(WIDTH), Own(call))


@differs()
def limited_experts():
    """Each expert takes the first two examples that want it."""

    def call(layer, x):
        used = tf.one_hot(tf.argmax(x, -1), WIDTH)
        before = tf.cumsum(used)  # here
        return x * tf.where(before > 2, 0.0, used)

    return with_layers(Own(call))
