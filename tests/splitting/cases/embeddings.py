"""Gradients with indices."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    compiled,
    differs,
    mse,
    proven,
    tokens,
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


@proven(tokens)
def words():
    return of_words(lambda g, x: g)


@proven(tokens)
def words_densely():
    return of_words(lambda g, x: tf.convert_to_tensor(g) * 2.0)


@differs(tokens)
def words_clipped():
    return of_words(
        lambda g, x: tf.clip_by_norm(tf.convert_to_tensor(g), 0.01)  # here
    )


@differs(tokens)
def words_clipped_by_row():
    def change(g, x):
        values = tf.clip_by_norm(g.values, 0.001, [1])  # here
        return tf.IndexedSlices(values, g.indices, g.dense_shape)

    return of_words(change)


@differs(tokens)
def words_times_count():
    def change(g, x):
        n = tf.cast(tf.shape(x)[0], tf.float32)
        return tf.IndexedSlices(g.values * n, g.indices, g.dense_shape)

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


@proven(tokens)
def indices_as_they_are():
    return quietly(lambda g, x: g)


@differs(tokens)
def indices_reordered():
    def change(g, x):
        at = tf.transpose(tf.reshape(g.indices, [-1, 8]))
        return tf.IndexedSlices(g.values, tf.reshape(at, [-1]), g.dense_shape)

    return quietly(change)
