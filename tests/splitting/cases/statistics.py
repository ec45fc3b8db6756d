"""Means over the batch that meet what is not linear."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    binary,
    count,
    differs,
    errors,
    plain,
    proven,
    unproven,
)


@differs()
def centred_in_cond():
    def loss(y, p):
        c = tf.cond(
            tf.size(p) > 0,
            lambda: p - tf.reduce_mean(p, 0),  # here
            lambda: p,
        )
        return tf.square(c - y)  # here

    return plain(loss)


@differs()
def centred_in_function():
    @tf.function
    def centre(p):
        return p / tf.reduce_sum(tf.square(p), 0)  # here

    return plain(lambda y, p: tf.square(centre(p) - y))


@unproven()
def centred_and_back():
    def loss(y, p):
        m = tf.stop_gradient(tf.reduce_mean(p, 0))
        return tf.square((p - m) + m - y)  # here

    return plain(loss)


@differs()
def straight_through():
    def loss(y, p):
        m = tf.reduce_mean(p, 0, keepdims=True)
        return tf.square(p + tf.stop_gradient(m - p) - y)  # here

    return plain(loss)


@differs()
def variance_by_moments():
    def loss(y, p):
        _, v = tf.nn.moments(p - y, [0])  # here
        return tf.reduce_mean(v)

    return plain(loss)


@differs()
def mean_of_the_hard():
    def loss(y, p):
        e = errors(y, p)
        hard = tf.cast(e > 0.5, tf.float32)
        return tf.reduce_sum(e * hard) / tf.reduce_sum(hard)  # here

    return plain(loss)


@differs()
def mean_of_the_hard_without_nan():
    def loss(y, p):
        e = errors(y, p)
        hard = tf.cast(e > 0.5, tf.float32)
        return tf.math.divide_no_nan(  # here
            tf.reduce_sum(e * hard), tf.reduce_sum(hard)
        )

    return plain(loss)


@differs()
def covariance():
    def loss(y, p):
        c = tf.einsum("bi,bj->ij", p, p) / count(p)
        return tf.reduce_sum(tf.square(c - tf.eye(3)))  # here

    return plain(loss)


@differs()
def barlow_twins():
    def loss(y, p):
        q = p * 0.5 + y
        c = tf.matmul(p, q, transpose_a=True) / count(p)
        return tf.reduce_sum(tf.square(c - tf.eye(3)))  # here

    return plain(loss)


@differs()
def correlation():
    def loss(y, p):
        a = p - tf.reduce_mean(p)  # here
        b = y - tf.reduce_mean(y)  # here
        return 1 - tf.reduce_mean(a * b)

    return plain(loss)


@differs()
def entropy_of_mean():
    def loss(y, p):
        m = tf.reduce_mean(tf.nn.softmax(p), 0)
        return tf.reduce_sum(m * tf.math.log(m))  # here

    return plain(loss)


@differs()
def root_of_mean():
    return plain(
        lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(p - y)))  # here
    )


@differs()
def log_sum_exp():
    return plain(
        lambda y, p: tf.reduce_logsumexp(p - y)  # here
    )


@differs(binary)
def dice_by_hand():
    def loss(y, p):
        p = tf.sigmoid(p)
        return 1 - 2 * tf.reduce_sum(p * y) / tf.reduce_sum(p + y)  # here

    return plain(loss)


@differs(binary)
def f1_by_sums():
    def loss(y, p):
        p = tf.sigmoid(p)
        both = tf.reduce_sum(p * y, 0)
        each = tf.reduce_sum(p + y, 0)
        return 1 - tf.reduce_mean(tf.math.divide_no_nan(2 * both, each))  # here

    return plain(loss)


@proven(binary)
def jaccard_of_each():
    def loss(y, p):
        p = tf.sigmoid(p)
        both = tf.reduce_sum(p * y, -1)
        return 1 - both / (tf.reduce_sum(p + y, -1) - both + 1.0)

    return plain(loss)


@differs()
def masked_mean():
    def loss(y, p):
        m = tf.cast(y > 0, tf.float32)
        e = tf.reduce_sum(m * tf.square(p - y))
        return e / tf.reduce_sum(m)  # here

    return plain(loss)


@differs()
def smoothed_by_batch():
    def loss(y, p):
        y = 0.8 * y + 0.2 * tf.reduce_mean(y)  # here
        return tf.square(p - y)  # here

    return plain(loss)


@differs()
def above_mean():
    def loss(y, p):
        e = tf.reduce_mean(tf.square(p - y), -1)
        return tf.where(e > tf.reduce_mean(e), e, 0.1 * e)  # here

    return plain(loss)


@differs()
def variance_invariance_covariance():
    def loss(y, p):
        c = p - tf.reduce_mean(p, 0)  # here
        spread = tf.sqrt(tf.reduce_mean(tf.square(c), 0) + 1e-4)
        return tf.reduce_mean(tf.nn.relu(1 - spread)) + errors(y, p)

    return plain(loss)


@differs()
def explained_variance():
    def loss(y, p):
        rest = tf.reduce_mean(tf.square(p - y))
        whole = tf.reduce_mean(tf.square(y)) + 0.1
        return rest / whole  # here

    return plain(loss)


@differs()
def histogram_by_hand():
    def loss(y, p):
        at = tf.linspace(-1.0, 1.0, 5)
        near = tf.exp(-tf.square(p[:, :1] - at))
        h = tf.reduce_mean(near, 0)
        return tf.reduce_sum(tf.square(h - 0.2))  # here

    return plain(loss)


@differs()
def histogram_matched():
    def loss(y, p):
        h = tf.histogram_fixed_width(y, [-2.0, 2.0], 4)  # here
        h = tf.cast(h, tf.float32) / count(y)
        return errors(y, p) * tf.reduce_max(h)  # here

    return plain(loss)


@differs()
def diagonal_of_sum():
    def loss(y, p):
        c = tf.matmul(p, p, transpose_a=True)
        c = tf.linalg.set_diag(c, tf.ones([3]))  # here
        return tf.reduce_sum(c) / count(p)

    return plain(loss)


@differs()
def sinkhorn():
    def loss(y, p):
        q = tf.exp(tf.stop_gradient(p))
        for _ in range(2):
            q /= tf.reduce_sum(q, 0, keepdims=True)  # here
            q /= tf.reduce_sum(q, 1, keepdims=True)
        return -tf.reduce_sum(q * tf.nn.log_softmax(p), -1)

    return plain(loss)
