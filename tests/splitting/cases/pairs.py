"""Steps in which examples meet: extremes, and all pairs."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import (
    binary,
    differs,
    errors,
    plain,
    proven,
    unproven,
)


@differs()
def contrastive():
    def loss(y, p):
        a = tf.nn.l2_normalize(p, -1)
        b = tf.nn.l2_normalize(p + 0.1 * y, -1)
        s = tf.matmul(a, b, transpose_b=True) / 0.2  # here
        at = tf.range(tf.shape(p)[0])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(at, s)

    return plain(loss)


@differs()
def kernel_distance():
    def loss(y, p):
        def kernel(a, b):
            d = tf.reduce_sum(tf.square(a[:, None] - b[None]), -1)  # here
            return tf.reduce_mean(tf.exp(-d))

        z = tf.concat([y, y, y], 1)
        return kernel(p, p) + kernel(z, z) - 2 * kernel(p, z)

    return plain(loss)


@proven()
def alike_pairs():
    """Two views of one example, as in SimSiam."""

    def loss(y, p):
        a = tf.nn.l2_normalize(p, -1)
        b = tf.nn.l2_normalize(tf.stop_gradient(p + y), -1)
        return -tf.reduce_sum(a * b, -1)

    return plain(loss)


@differs(binary)
def area_under_curve():
    def loss(y, p):
        up = tf.boolean_mask(p, y > 0)
        down = tf.boolean_mask(p, y < 1)
        return tf.reduce_mean(tf.nn.sigmoid(down[:, None] - up[None]))  # here

    return plain(loss)


@differs()
def product_of_all():
    return plain(
        lambda y, p: tf.reduce_prod(tf.abs(p - y))  # here
    )


@differs()
def best_example():
    def loss(y, p):
        e = errors(y, p)
        return tf.gather(e, tf.argmin(e)) + tf.reduce_mean(e)  # here

    return plain(loss)


@differs()
def above_median():
    def loss(y, p):
        e = errors(y, p)
        middle = tf.sort(e)[tf.shape(e)[0] // 2]  # here
        return tf.where(e > middle, e, 0.5 * e)

    return plain(loss)


@differs()
def quantile_of_keras():
    def loss(y, p):
        e = errors(y, p)
        return keras.ops.minimum(e, keras.ops.quantile(e, 0.5))  # here

    return plain(loss)


@differs()
def quantized_by_range():
    def loss(y, p):
        q = tf.quantization.fake_quant_with_min_max_vars(
            p,
            tf.reduce_min(p),  # here
            tf.reduce_max(p),
            3,  # here
        )
        return tf.square(q - y)

    return plain(loss)


@unproven()
def quantized_by_constants():
    def loss(y, p):
        q = tf.quantization.fake_quant_with_min_max_args(p, -2.0, 2.0, 3)
        return tf.square(q - y)

    return plain(loss)


@differs()
def by_numpy():
    def loss(y, p):
        def largest(a):
            return np.float32(a.max())

        top = tf.numpy_function(largest, [p], tf.float32)  # here
        return errors(y, p) * tf.ensure_shape(top, [])

    return plain(loss)
