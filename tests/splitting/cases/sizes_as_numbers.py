"""The number of examples as a number, and sums beside means."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    BATCH,
    classes,
    count,
    differs,
    errors,
    plain,
    positives,
    proven,
)


@differs()
def gradient_times_count():
    @tf.custom_gradient
    def louder(p):
        return p, lambda dy: dy * count(p)

    return plain(lambda y, p: tf.square(louder(p) - y))


@differs()
def gradient_by_count():
    @tf.custom_gradient
    def quieter(p):
        return p, lambda dy: dy / count(p)

    return plain(lambda y, p: tf.square(quieter(p) - y))


@differs()
def mean_of_mean():
    return plain(lambda y, p: tf.reduce_mean(tf.square(p - y)) / count(p))


@differs()
def plain_sum():
    return plain(lambda y, p: tf.reduce_sum(tf.square(p - y)))


@proven()
def sum_by_count():
    return plain(lambda y, p: tf.reduce_sum(tf.square(p - y)) / count(p))


@differs()
def sum_by_constant():
    return plain(lambda y, p: tf.reduce_sum(tf.square(p - y)) / BATCH)


@proven()
def masked_mean_of_all():
    def loss(y, p):
        m = tf.cast(y > 0, tf.float32)
        return tf.reduce_sum(m * tf.square(p - y)) / count(m)

    return plain(loss)


@proven()
def mean_by_matmul_with_ones():
    def loss(y, p):
        e = tf.square(p - y)
        ones = tf.ones([1, tf.shape(p)[0]])
        return tf.matmul(ones, e) / count(p)

    return plain(lambda y, p: tf.reduce_mean(loss(y, p)))


@differs()
def count_halved():
    def loss(y, p):
        n = tf.shape(p)[0] // 2  # here
        n = tf.cast(n, tf.float32)  # here
        return tf.reduce_sum(errors(y, p)) / n

    return plain(loss)


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


@proven()
def size_and_width():
    def loss(y, p):
        n = tf.cast(tf.size(p), tf.float32)
        return tf.reduce_sum(tf.square(p - y)) / n * 3.0

    return plain(loss)


@differs()
def only_if_large():
    def loss(y, p):
        e = errors(y, p)
        return tf.cond(
            tf.shape(p)[0] > 6,  # here
            lambda: e,
            lambda: 0.1 * e,  # here
        )

    return plain(loss)


@differs()
def weighed_by_position():
    def loss(y, p):
        return errors(y, p) * tf.range(count(p))  # here

    return plain(loss)


@differs()
def weighed_by_linspace():
    def loss(y, p):
        w = tf.linspace(0.0, 1.0, tf.shape(p)[0])  # here
        return errors(y, p) * w  # here

    return plain(loss)


@differs()
def power_by_loop():
    def loss(y, p):
        _, factor = tf.while_loop(
            lambda i, _: i < tf.shape(p)[0],  # here
            lambda i, f: (i + 1, 0.9 * f),
            (0, 1.0),
        )
        return errors(y, p) * factor  # here

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


@differs()
def deviation_from_constant_size():
    def loss(y, p):
        m = tf.reduce_sum(p, 0) / 16.0
        return tf.reduce_sum(tf.square(m)) + errors(y, p)  # here

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


@proven()
def last_block():
    def loss(y, p):
        both = tf.concat([p, tf.square(p - y)], 0)
        return tf.reduce_mean(both[-tf.shape(p)[0] :])

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
