"""Sums over the examples of each class."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    classes,
    count,
    differs,
    plain,
    proven,
)


@proven(classes)
def focal():
    def loss(y, p):
        y = tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 3)
        q = tf.nn.softmax(p)
        e = tf.pow(1 - q, 2.0) * -y * tf.math.log(q)
        return tf.reduce_mean(tf.reduce_sum(e, -1))

    return plain(loss)


@differs(classes)
def mean_of_class_means():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        e = tf.reduce_mean(tf.square(p), -1)
        return tf.reduce_mean(
            tf.math.unsorted_segment_mean(e, y, 3)  # here
        )

    return plain(loss)


@differs(classes)
def weighed_by_frequency():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        _, at, n = tf.unique_with_counts(y)  # here
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
        return tf.reduce_mean(e / tf.cast(tf.gather(n, at), tf.float32))

    return plain(loss)


@differs(classes)
def square_of_class_sums():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        s = tf.math.unsorted_segment_sum(p, y, 3) / count(p)
        return tf.reduce_mean(tf.square(s))  # here

    return plain(loss)


@proven(classes)
def class_sums():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        s = tf.math.unsorted_segment_sum(tf.square(p), y, 3) / count(p)
        return tf.reduce_sum(s * tf.constant([[1.0], [2.0], [3.0]]))

    return plain(loss)


@proven(classes)
def confusion():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        c = tf.math.confusion_matrix(y, tf.argmax(p, 1), 3, dtype=tf.float32)
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
        return tf.reduce_mean(e) + tf.linalg.trace(c) / count(p)

    return plain(loss)


@differs(classes)
def partitioned():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        parts = tf.dynamic_partition(p, y, 3)
        return sum(tf.reduce_mean(tf.square(q)) for q in parts)  # here

    return plain(loss)


@differs(classes)
def positive_weight_of_batch():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1, 1]) == 1, tf.float32)
        w = (count(y) - tf.reduce_sum(y)) / tf.reduce_sum(y)  # here
        return tf.nn.weighted_cross_entropy_with_logits(y, p[:, :1], w)  # here

    return plain(loss)


@proven(classes)
def large_margin():
    def loss(y, p):
        y = tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 3)
        c = tf.clip_by_value(tf.nn.l2_normalize(p, -1), -0.99, 0.99)
        moved = tf.cos(tf.acos(c) + 0.2)
        logits = 8 * tf.where(y > 0, moved, c)
        return tf.nn.softmax_cross_entropy_with_logits(y, logits)

    return plain(loss)
