"""Keras's own losses and metrics, and metrics by hand."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import (
    binary,
    by_default,
    classes,
    compiled,
    differs,
    mse,
    numbers,
    plain,
    proven,
    stepped,
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
