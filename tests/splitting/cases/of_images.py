"""Layers of images."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    differs,
    images,
    proven,
    with_layers,
)


@proven(images)
def convolutions():
    return with_layers(
        keras.layers.Conv2D(3, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.SeparableConv2D(4, 2),
        keras.layers.GroupNormalization(2),
        keras.layers.Flatten(),
        shape=(6, 6, 2),
    )


@differs(images)
def deviation_of_minibatch():
    """The extra channel of a critic in progressive growing."""

    def call(layer, x):
        s = tf.reduce_mean(tf.math.reduce_std(x, 0))  # here
        return tf.concat([x, tf.zeros_like(x) + s], -1)  # here

    return with_layers(
        keras.layers.Conv2D(2, 3),
        keras.layers.Lambda(lambda x: call(None, x), output_shape=(4, 4, 4)),
        keras.layers.Flatten(),
        shape=(6, 6, 2),
    )


@proven(images)
def standardized_images():
    def call(x):
        return tf.image.per_image_standardization(x)

    return with_layers(
        keras.layers.Lambda(call, output_shape=(6, 6, 2)),
        keras.layers.Flatten(),
        shape=(6, 6, 2),
    )


@proven(images)
def patches():
    """A vision transformer's patches, mixed within an image."""

    def call(x):
        p = tf.image.extract_patches(
            x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"
        )
        return tf.reshape(p, [-1, 9, 8])

    return with_layers(
        keras.layers.Lambda(call, output_shape=(9, 8)),
        keras.layers.Dense(4),
        keras.layers.LayerNormalization(),
        keras.layers.GlobalAveragePooling1D(),
        shape=(6, 6, 2),
    )
