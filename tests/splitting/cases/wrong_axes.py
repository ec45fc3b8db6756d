"""Operations along the axis of examples, and along others."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    differs,
    errors,
    plain,
    proven,
)


@differs()
def cumulative():
    return plain(
        lambda y, p: tf.square(tf.cumsum(p) - y)  # here
    )


@differs()
def softmax_over_batch():
    return plain(
        lambda y, p: -y * tf.math.log(tf.nn.softmax(p, axis=0))  # here
    )


@differs()
def halves():
    def loss(y, p):
        first, second = tf.split(p, 2)  # here
        return tf.square(first - second)

    return plain(lambda y, p: tf.reduce_mean(loss(y, p)))


@differs()
def rolled():
    return plain(
        lambda y, p: tf.square(p - tf.roll(y, 1, 0))  # here
    )


@differs()
def reversed_targets():
    return plain(
        lambda y, p: tf.square(p - y[::-1])  # here
    )


@differs()
def reverse_sequence_of_examples():
    def loss(y, p):
        lengths = tf.fill([3], tf.shape(p)[0])
        q = tf.reverse_sequence(p, lengths, seq_axis=0, batch_axis=1)  # here
        return tf.square(q - y)

    return plain(loss)


@proven()
def reverse_sequence_of_features():
    def loss(y, p):
        lengths = tf.fill([tf.shape(p)[0]], 2)
        q = tf.reverse_sequence(p, lengths, seq_axis=1, batch_axis=0)
        return tf.square(q - y)

    return plain(loss)


@differs()
def least_squares():
    def loss(y, p):
        g = tf.matmul(p, p, transpose_a=True) + tf.eye(3)  # here
        b = tf.linalg.solve(g, tf.matmul(p, y, transpose_a=True))  # here
        return tf.square(p @ b - y)

    return plain(loss)


@differs()
def singular_values():
    def loss(y, p):
        s = tf.linalg.svd(p, compute_uv=False)  # here
        return tf.reduce_sum(s) + tf.reduce_mean(tf.square(p - y))

    return plain(loss)


@proven()
def solved_for_each():
    def loss(y, p):
        g = p[:, :, None] * p[:, None, :] + tf.eye(3)
        return tf.square(tf.linalg.solve(g, p[:, :, None])[..., 0] - y)

    return plain(loss)


@differs()
def convolved_over_examples():
    def loss(y, p):
        q = tf.nn.conv1d(p[None], tf.ones([3, 3, 3]) / 9, 1, "SAME")  # here
        return tf.square(q[0] - y)

    return plain(lambda y, p: tf.reduce_mean(loss(y, p)))


@differs()
def pooled_over_examples():
    def loss(y, p):
        q = tf.nn.max_pool1d(p[None], 2, 1, "SAME")  # here
        return tf.square(q[0] - y)

    return plain(lambda y, p: tf.reduce_mean(loss(y, p)))


@differs()
def response_normalized_over_examples():
    def loss(y, p):
        q = tf.transpose(p)[:, None, None, :]
        q = tf.nn.local_response_normalization(q, 2)  # here
        return tf.square(tf.transpose(q[:, 0, 0, :]) - y)

    return plain(loss)


@differs()
def fourier_over_examples():
    def loss(y, p):
        f = tf.signal.fft(tf.cast(tf.transpose(p - y), tf.complex64))  # here
        return tf.reduce_mean(tf.abs(f))

    return plain(loss)


@differs()
def cut_out_of_the_first():
    def loss(y, p):
        image = tf.reshape(p, [-1, 3, 1, 1])
        part = tf.image.crop_and_resize(  # here
            image,
            [[0.0, 0.0, 1.0, 1.0]],
            [0],
            [2, 2],  # here
        )
        return errors(y, p) + tf.reduce_mean(part)

    return plain(loss)
