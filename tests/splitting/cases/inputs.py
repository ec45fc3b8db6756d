"""Words, sequences and images."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    EXAMPLES,
    compiled,
    differs,
    generator,
    images,
    mse,
    proven,
    tokens,
    with_layers,
)


def of_words(change, loss_of=mse, **logs):
    """A step that changes the gradient of an embedding."""

    class Words(keras.Model):
        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = loss_of(y, self(x, training=True))
            first, *rest = tape.gradient(loss, weights)
            self.optimizer.apply([change(first, x), *rest], weights)
            return logs or {"loss": loss}

    entrance = keras.Input((8,), dtype="int32")
    h = keras.layers.Embedding(9, 4)(entrance)
    h = keras.layers.Flatten()(h)
    return compiled(Words(entrance, keras.layers.Dense(1)(h)))


@differs(tokens)
def words_clipped_by_row():
    def change(g, x):
        values = tf.clip_by_norm(g.values, 0.001, [1])  # here
        return tf.IndexedSlices(values, g.indices, g.dense_shape)

    return of_words(change)


def quietly(change):
    """A step that says nothing of its loss."""
    return of_words(change, lambda y, p: tf.reduce_mean(y * p), one=1.0)


@differs(tokens)
def indices_rolled():
    return quietly(
        lambda g, x: tf.IndexedSlices(
            g.values,
            tf.roll(g.indices, 8, 0),  # here
            g.dense_shape,
        )
    )


@differs(tokens)
def indices_reordered():
    def change(g, x):
        at = tf.transpose(tf.reshape(g.indices, [-1, 8]))
        return tf.IndexedSlices(g.values, tf.reshape(at, [-1]), g.dense_shape)

    return quietly(change)


def long_texts():
    make = generator()
    x = make.integers(1, 9, (EXAMPLES, 7)).astype("int32")
    x[:, 4:] *= make.integers(0, 2, (EXAMPLES, 3)).astype("int32")
    return x, make.normal(size=(EXAMPLES, 1)).astype("float32")


def of_any_length(*layers):
    return compiled(
        keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                *layers,
                keras.layers.Dense(1),
            ]
        )
    )


@proven(long_texts)
def gru():
    return of_any_length(keras.layers.GRU(3))


@proven(long_texts)
def lstm_both_ways():
    return of_any_length(keras.layers.Bidirectional(keras.layers.LSTM(3)))


@proven(long_texts)
def dense_at_all_times():
    return of_any_length(
        keras.layers.TimeDistributed(keras.layers.Dense(3)),
        keras.layers.GlobalAveragePooling1D(),
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
