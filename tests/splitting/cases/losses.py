"""Losses that are functions of a batch, some of them in disguise."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    BATCH,
    binary,
    classes,
    differs,
    plain,
    proven,
    unproven,
)


def count(t):
    return tf.cast(tf.shape(t)[0], tf.float32)


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
def gradient_times_count():
    @tf.custom_gradient
    def louder(p):
        return p, lambda dy: dy * count(p)

    return plain(lambda y, p: tf.square(louder(p) - y))


@differs()
def gradient_of_norm_one():
    @tf.custom_gradient
    def normed(p):
        return p, lambda dy: dy / tf.norm(dy)  # here

    return plain(lambda y, p: tf.square(normed(p) - y))


@differs()
def centred_and_recomputed():
    @tf.recompute_grad
    def centre(p):
        return tf.nn.relu(p - tf.reduce_mean(p, 0))  # here

    return plain(lambda y, p: tf.square(centre(p) - y))


@differs()
def covariance():
    def loss(y, p):
        c = tf.einsum("bi,bj->ij", p, p) / count(p)
        return tf.reduce_sum(tf.square(c - tf.eye(3)))  # here

    return plain(loss)


@proven()
def einsum_of_rows():
    return plain(lambda y, p: tf.einsum("bi,bj->b", p, p) - y[:, 0])


@differs()
def gram():
    def loss(y, p):
        g = tf.tensordot(p, p, [[1], [1]])  # here
        return tf.reduce_mean(tf.square(g - tf.tensordot(y, y, [[1], [1]])))

    return plain(loss)


@differs()
def halves():
    def loss(y, p):
        first, second = tf.split(p, 2)  # here
        return tf.square(first - second)

    return plain(lambda y, p: tf.reduce_mean(loss(y, p)))


@differs()
def reshaped_columns():
    def loss(y, p):
        q = tf.reshape(p, [3, -1])  # here
        return tf.reduce_mean(tf.square(tf.reduce_mean(q, 0)))  # here

    return plain(loss)


@differs()
def cumulative():
    return plain(
        lambda y, p: tf.square(tf.cumsum(p) - y)  # here
    )


@differs()
def weighed_by_rank():
    def loss(y, p):
        e = tf.sort(tf.reduce_mean(tf.square(p - y), -1))  # here
        return tf.reduce_mean(e * tf.range(count(p)) / count(p))

    return plain(loss)


@differs()
def hardest_examples():
    def loss(y, p):
        e = tf.reduce_mean(tf.square(p - y), -1)
        return tf.reduce_mean(tf.math.top_k(e, 2)[0])  # here

    return plain(loss)


@differs()
def softmax_over_batch():
    return plain(
        lambda y, p: -y * tf.math.log(tf.nn.softmax(p, axis=0))  # here
    )


@differs()
def pairwise():
    def loss(y, p):
        d = p[:, None] - p[None]  # here
        return tf.reduce_mean(tf.abs(d - (y[:, None] - y[None])))

    return plain(loss)


@differs()
def against_first():
    return plain(
        lambda y, p: tf.square(p - p[0])  # here
    )


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


@unproven()
def reversed_together():
    return plain(
        lambda y, p: tf.reduce_mean(tf.square(p[::-1] - y[::-1]))  # here
    )


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


@differs()
def masked_mean():
    def loss(y, p):
        m = tf.cast(y > 0, tf.float32)
        e = tf.reduce_sum(m * tf.square(p - y))
        return e / tf.reduce_sum(m)  # here

    return plain(loss)


@proven()
def masked_mean_of_all():
    def loss(y, p):
        m = tf.cast(y > 0, tf.float32)
        return tf.reduce_sum(m * tf.square(p - y)) / count(m)

    return plain(loss)


@differs()
def largest():
    return plain(
        lambda y, p: tf.reduce_max(tf.abs(p - y))  # here
    )


@differs()
def boolean_mask():
    def loss(y, p):
        e = tf.reduce_mean(tf.square(p - y), -1)
        return tf.reduce_mean(tf.boolean_mask(e, y[:, 0] > 0))  # here

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


@proven()
def pinball():
    def loss(y, p):
        q = tf.constant([0.1, 0.5, 0.9])
        return tf.maximum(q * (y - p), (q - 1) * (y - p))

    return plain(loss)


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
def norm_of_all():
    return plain(
        lambda y, p: tf.norm(p - y)  # here
    )


@proven()
def norm_of_rows():
    return plain(lambda y, p: tf.norm(p - y, axis=-1))


@proven()
def mean_by_matmul_with_ones():
    def loss(y, p):
        e = tf.square(p - y)
        ones = tf.ones([1, tf.shape(p)[0]])
        return tf.matmul(ones, e) / count(p)

    return plain(lambda y, p: tf.reduce_mean(loss(y, p)))


@differs()
def variance_by_moments():
    def loss(y, p):
        _, v = tf.nn.moments(p - y, [0])  # here
        return tf.reduce_mean(v)

    return plain(loss)
