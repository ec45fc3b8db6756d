"""Keras's own losses and metrics, those by hand, and layers."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    Own,
    binary,
    by_default,
    by_design,
    classes,
    compiled,
    differs,
    mse,
    numbers,
    plain,
    proven,
    stepped,
    with_layers,
)


def weighted():
    x, y = numbers()
    w = np.random.default_rng(4).uniform(size=len(x)).astype("float32")
    return x, y, w


@differs(classes)
def circle_of_keras():
    return plain(keras.losses.Circle())


@proven()
def cosine_of_keras():
    return plain(keras.losses.CosineSimilarity())


@proven(weighted)
def weights_normalized():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return plain(loss, 1)


@proven(binary)
def metrics_of_classes():
    return plain(
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.AUC(from_logits=True, multi_label=True),
            keras.metrics.Precision(),
            keras.metrics.F1Score(),
            keras.metrics.BinaryIoU(),
            keras.metrics.RecallAtPrecision(0.5),
            keras.metrics.TopKCategoricalAccuracy(2),
        ],
    )


@proven()
def loss_by_method():
    model = stepped(by_default)

    class Own(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return mse(y, y_pred) + 0.1 * tf.reduce_mean(tf.abs(x))

    return compiled(Own(model.inputs, model.outputs))


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
def moving_maximum():
    def call(layer, x):
        before = tf.convert_to_tensor(layer.kept)
        largest = tf.reduce_max(tf.abs(x))  # here
        layer.kept.assign(tf.maximum(before, largest))
        return x / before

    return with_layers(Own(call))


@proven()
def regularized():
    return with_layers(keras.layers.Dense(4, kernel_regularizer="l2"))


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
