"""The number of examples as a number, and sums beside means."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    classes,
    count,
    differs,
    errors,
    plain,
    positives,
    proven,
)


@differs()
def mean_of_mean():
    return plain(lambda y, p: tf.reduce_mean(tf.square(p - y)) / count(p))


@differs()
def logarithm_of_count():
    def loss(y, p):
        return errors(y, p) * tf.math.log(count(p))  # here

    return plain(loss)


@differs()
def count_of_at_least_eight():
    def loss(y, p):
        n = tf.maximum(count(p), 8.0)  # here
        return tf.reduce_sum(errors(y, p)) / n

    return plain(loss)


@differs()
def louder_for_five():
    def loss(y, p):
        e = errors(y, p)
        return tf.cond(
            tf.equal(tf.shape(p)[0], 5),  # here
            lambda: 3.0 * e,  # here
            lambda: e,
        )

    return plain(loss)


@differs()
def factor_from_a_table():
    def loss(y, p):
        table = tf.linspace(0.1, 1.0, 20)
        return errors(y, p) * table[tf.shape(p)[0]]  # here

    return plain(loss)


@differs()
def sliced_from_a_table():
    def loss(y, p):
        table = tf.linspace(0.1, 1.0, 20)
        part = tf.slice(table, [tf.shape(p)[0]], [2])  # here
        return errors(y, p) * tf.reduce_sum(part)

    return plain(loss)


@differs()
def powers_of_nothing():
    def loss(y, p):
        n = count(p)
        one = tf.pow(tf.zeros_like(p), 0.0) / n
        return tf.reduce_mean(tf.square(p - y)) + tf.reduce_mean(one)

    return plain(loss)


@differs()
def products_of_nothing():
    def loss(y, p):
        one = tf.math.cumprod(tf.zeros_like(p), 1, exclusive=True)
        return tf.reduce_mean(tf.square(p - y)) + tf.reduce_mean(one) * count(p)

    return plain(loss)


@proven(classes)
def average_of_tensorflow():
    def loss(y, p):
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.cast(tf.reshape(y, [-1]), tf.int32), p
        )
        return tf.nn.compute_average_loss(e)

    return plain(loss)


@proven()
def in_double():
    def loss(y, p):
        p, y = tf.cast(p, tf.float64), tf.cast(y, tf.float64)
        return tf.cast(tf.reduce_mean(tf.math.log(tf.cosh(p - y))), tf.float32)

    return plain(loss)


@differs()
def half_of_positives():
    def loss(y, p):
        k = positives(y) // 2  # here
        return tf.reduce_mean(errors(y, p)) + tf.cast(k, tf.float32) / count(p)

    return plain(loss)


@differs()
def mean_of_integers():
    def loss(y, p):
        m = tf.reduce_mean(tf.cast(10 * y, tf.int32))  # here
        return errors(y, p) * tf.cast(m, tf.float32)

    return plain(loss)
