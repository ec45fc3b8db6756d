"""Layers, and experts that examples choose."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    Own,
    by_design,
    differs,
    proven,
    with_layers,
)


@by_design()
def batch_normalization():
    return with_layers(keras.layers.BatchNormalization())


@differs()
def moving_mean_read_at_once():
    def call(layer, x):
        layer.kept.assign(0.9 * layer.kept + 0.1 * tf.reduce_mean(x))
        return tf.nn.tanh(x - layer.kept)  # here

    return with_layers(Own(call))


@differs()
def moving_mean_read_later():
    def call(layer, x):
        before = tf.convert_to_tensor(layer.kept)
        layer.kept.assign(0.9 * before + 0.1 * tf.reduce_mean(x))
        return tf.nn.tanh(x - before)

    return with_layers(Own(call))


@differs()
def moving_maximum():
    def call(layer, x):
        before = tf.convert_to_tensor(layer.kept)
        largest = tf.reduce_max(tf.abs(x))  # here
        layer.kept.assign(tf.maximum(before, largest))
        return x / before

    return with_layers(Own(call))


@proven()
def counter_of_steps():
    def call(layer, x):
        layer.kept.assign_add(1.0)
        return x / layer.kept

    return with_layers(Own(call))


@differs()
def counter_of_examples():
    def call(layer, x):
        before = tf.convert_to_tensor(layer.kept)
        layer.kept.assign_add(tf.cast(tf.shape(x)[0], "float32"))  # here
        return x / before

    return with_layers(Own(call))


@differs()
def counter_in_cond():
    def call(layer, x):
        tf.cond(
            tf.reduce_mean(x) > 0,  # here
            lambda: layer.kept.assign_add(1.0) + 0.0,
            lambda: layer.kept + 0.0,
        )
        return x * 1.0

    return with_layers(Own(call))


@differs()
def spread_added_as_loss():
    def call(layer, x):
        layer.add_loss(tf.math.reduce_std(x))  # here
        return x

    return with_layers(keras.layers.Dense(4), Own(call))


@proven()
def size_added_as_loss():
    def call(layer, x):
        layer.add_loss(tf.reduce_mean(tf.square(x)))
        return x

    return with_layers(keras.layers.Dense(4), Own(call))


@differs()
def sum_added_as_loss():
    def call(layer, x):
        layer.add_loss(0.01 * tf.reduce_sum(tf.square(x)))
        return x

    return with_layers(keras.layers.Dense(4), Own(call))


@proven()
def regularized():
    return with_layers(keras.layers.Dense(4, kernel_regularizer="l2"))


@proven()
def activity_regularized():
    return with_layers(keras.layers.Dense(4, activity_regularizer="l2"))


@differs()
def attention_over_batch():
    def call(layer, x):
        s = tf.nn.softmax(x @ tf.transpose(x))  # here
        return s @ x

    return with_layers(Own(call))


@proven()
def attention_over_features():
    def call(layer, x):
        s = tf.nn.softmax(x[:, :, None] * x[:, None, :])
        return tf.squeeze(s @ x[:, :, None], -1)

    return with_layers(Own(call))


@differs()
def normalized_over_examples():
    def call(layer, x):
        return tf.nn.l2_normalize(x, axis=0)  # here

    return with_layers(Own(call))


@proven()
def normalized_over_features():
    def call(layer, x):
        return tf.nn.l2_normalize(x, axis=1)

    return with_layers(Own(call))


@proven()
def trainable_scale():
    def call(layer, x):
        return x * layer.kept + 0.1 * tf.reduce_sum(layer.kept**2)

    return with_layers(Own(call, shape=(WIDTH,), trainable=True))


@differs()
def memory_bank():
    def call(layer, x):
        before = tf.convert_to_tensor(layer.kept)
        layer.kept.assign(tf.concat([before, x], 0)[-4:])  # here
        return x - tf.reduce_mean(before, 0)

    return with_layers(Own(call, shape=(4, WIDTH)))


@proven()
def constrained():
    return with_layers(
        keras.layers.Dense(4, kernel_constraint="max_norm"),
        keras.layers.UnitNormalization(),
    )


@proven()
def spectral():
    return with_layers(
        keras.layers.SpectralNormalization(keras.layers.Dense(4))
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
