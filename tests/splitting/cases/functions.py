"""Loops, functions of single examples, and gradients of functions."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    count,
    differs,
    plain,
    proven,
    unproven,
)


@differs()
def total_by_loop():
    def loss(y, p):
        _, total = tf.while_loop(
            lambda i, _: i < tf.shape(p)[0],
            lambda i, s: (i + 1, s + p[i]),
            (0, tf.zeros([3])),
        )
        return tf.reduce_mean(tf.square(total / count(p)))  # here

    return plain(loss)


@differs()
def scanned():
    def loss(y, p):
        s = tf.scan(lambda a, b: 0.5 * a + b, p)  # here
        return tf.square(s - y)

    return plain(loss)


@unproven()
def folded():
    def loss(y, p):
        s = tf.foldl(  # here
            lambda a, b: a + tf.square(b),
            p - y,
            tf.zeros([3]),
        )
        return tf.reduce_mean(s) / count(p)

    return plain(loss)


@unproven()
def mapped():
    return plain(lambda y, p: tf.map_fn(lambda a: tf.nn.softmax(a), p) - y)


@unproven()
def vectorized():
    def one(a):
        return tf.reduce_sum(tf.square(a - tf.reduce_mean(a)))

    return plain(lambda y, p: tf.vectorized_map(one, p - y))


@proven()
def three_rounds():
    def loss(y, p):
        _, q = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, q: (i + 1, tf.tanh(q)),
            (0, p - y),
        )
        return tf.square(q)

    return plain(loss)


@proven()
def forecast():
    """A moving average over the features of each example."""

    def loss(y, p):
        q = tf.scan(lambda a, b: 0.5 * a + b, tf.transpose(p))
        return tf.square(tf.transpose(q) - y)

    return plain(loss)


@differs()
def centred_and_recomputed():
    @tf.recompute_grad
    def centre(p):
        return tf.nn.relu(p - tf.reduce_mean(p, 0))  # here

    return plain(lambda y, p: tf.square(centre(p) - y))


@proven()
def recomputed():
    @tf.recompute_grad
    def activation(p):
        return tf.nn.tanh(p) * tf.nn.sigmoid(p)

    return plain(lambda y, p: tf.square(activation(p) - y))


@proven()
def reversed_gradient():
    @tf.custom_gradient
    def reverse(p):
        return p, lambda dy: -0.5 * dy

    return plain(lambda y, p: tf.square(reverse(p) - y))


@differs()
def gradient_of_norm_one():
    @tf.custom_gradient
    def normed(p):
        return p, lambda dy: dy / tf.norm(dy)  # here

    return plain(lambda y, p: tf.square(normed(p) - y))


@differs()
def gradient_of_batch():
    @tf.custom_gradient
    def shared(p):
        def grad(dy):
            m = tf.reduce_mean(dy, 0, keepdims=True)
            return tf.square(m) + tf.zeros_like(dy)  # here

        return p, grad

    return plain(lambda y, p: tf.square(shared(p) - y))


@differs()
def invariant_risk():
    def loss(y, p):
        scale = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(scale)
            e = tf.reduce_mean(tf.square(scale * p - y))
        return e + tf.square(tape.gradient(e, scale))  # here

    return plain(loss)
