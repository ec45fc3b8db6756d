"""Shapes, places and numbers of rows that follow from the data."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    differs,
    errors,
    plain,
    positives,
    unproven,
)


@differs()
def boolean_mask():
    def loss(y, p):
        e = tf.reduce_mean(tf.square(p - y), -1)
        return tf.reduce_mean(tf.boolean_mask(e, y[:, 0] > 0))  # here

    return plain(loss)


@differs()
def split_by_positives():
    def loss(y, p):
        k = tf.minimum(positives(y), 5)  # here
        a, _ = tf.split(tf.linspace(0.1, 1.0, 6), [k, 6 - k])  # here
        return errors(y, p) * tf.reduce_sum(a)

    return plain(loss)


@differs()
def divided_by_positives():
    def loss(y, p):
        a, _ = tf.split(
            tf.linspace(0.1, 1.0, 60),
            tf.stack([positives(y), 60 - positives(y)]),  # here
        )
        return errors(y, p) * tf.reduce_sum(a)  # here

    return plain(loss)


@differs()
def reshaped_by_positives():
    def loss(y, p):
        k = positives(y)
        w = tf.reshape(tf.linspace(0.1, 1.0, 720720), [-1, k])  # here
        return errors(y, p) * tf.reduce_sum(w[0])  # here

    return plain(loss)


@differs()
def element_by_positives():
    def loss(y, p):
        factors = tf.TensorArray(tf.float32, 20, clear_after_read=False)
        factors = factors.unstack(tf.linspace(0.1, 1.0, 20))
        return errors(y, p) * factors.read(positives(y))  # here

    return plain(loss)


@unproven()
def sparse_product():
    def loss(y, p):
        q = tf.sparse.from_dense(tf.where(p > 0, p, 0.0))
        return tf.square(tf.sparse.sparse_dense_matmul(q, tf.eye(3)) - y)

    return plain(loss)


@unproven()
def ragged_means():
    def loss(y, p):
        lengths = tf.cast(y[:, 0] > 0, tf.int32) + 1
        q = tf.RaggedTensor.from_tensor(p, lengths)
        return tf.square(tf.reduce_mean(q, 1) - y[:, 0])

    return plain(loss)


@differs()
def ragged_mean_of_all():
    def loss(y, p):
        lengths = tf.cast(y[:, 0] > 0, tf.int32) + 1
        q = tf.RaggedTensor.from_tensor(tf.square(p), lengths)
        return tf.reduce_mean(q.flat_values)  # here

    return plain(loss)
