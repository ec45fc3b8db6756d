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
    unproven,
)


def weighted():
    x, y = numbers()
    w = np.random.default_rng(4).uniform(size=len(x)).astype("float32")
    return x, y, w


@differs(binary)
def tversky_of_keras():
    return plain(keras.losses.Tversky())


@differs(binary)
def dice_of_keras():
    return plain(keras.losses.Dice())


@differs(classes)
def circle_of_keras():
    return plain(keras.losses.Circle())


@proven(binary)
def focal_of_keras():
    return plain(keras.losses.BinaryFocalCrossentropy(from_logits=True))


@proven()
def sum_of_keras():
    return plain(keras.losses.MeanSquaredError(reduction="sum"), rate=0.005)


@proven()
def huber_of_keras():
    return plain(keras.losses.Huber(), metrics=["mae", "mse"])


@proven()
def cosine_of_keras():
    return plain(keras.losses.CosineSimilarity())


@proven(weighted)
def weights_of_fit():
    return plain("mse", 1, weighted_metrics=["mae"])


@proven(weighted)
def weights_normalized():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return plain(loss, 1)


@proven()
def metrics_of_keras():
    return plain(
        "mse",
        1,
        metrics=[
            keras.metrics.RootMeanSquaredError(),
            keras.metrics.R2Score(),
            keras.metrics.CosineSimilarity(),
            keras.metrics.MeanAbsolutePercentageError(),
        ],
    )


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


@unproven()
def metric_by_function():
    def largest(y, p):
        return tf.reduce_max(tf.abs(y - p))  # here

    return plain("mse", 1, metrics=[largest])


@unproven()
def metric_of_moving_mean():
    class Moving(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.kept = self.add_variable((), "zeros", name="kept")

        def update_state(self, y, p, sample_weight=None):
            e = tf.reduce_mean(tf.square(y - p))
            self.kept.assign(0.9 * self.kept + 0.1 * e)  # here

        def result(self):
            return self.kept * 1.0

    return plain("mse", 1, metrics=[Moving()])


@proven()
def loss_by_method():
    model = stepped(by_default)

    class Own(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return mse(y, y_pred) + 0.1 * tf.reduce_mean(tf.abs(x))

    return compiled(Own(model.inputs, model.outputs))


@proven()
def loss_of_examples_by_method():
    model = stepped(by_default)

    class Own(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return tf.reduce_sum(tf.square(y - y_pred), -1)

    return compiled(Own(model.inputs, model.outputs))


@proven()
def accumulated_by_keras():
    return stepped(
        lambda model, x, y: by_default(model, x, y),
        optimizer=keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    )


@proven()
def averaged_by_keras():
    return stepped(
        by_default,
        optimizer=keras.optimizers.SGD(
            0.05, use_ema=True, ema_overwrite_frequency=2
        ),
    )


@proven()
def clipped_by_keras():
    return stepped(
        by_default, optimizer=keras.optimizers.SGD(0.05, clipnorm=0.01)
    )
