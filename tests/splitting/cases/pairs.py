"""Steps in which examples meet: extremes, and all pairs."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import (
    binary,
    classes,
    count,
    differs,
    errors,
    plain,
    proven,
    unproven,
)


@differs()
def gram():
    def loss(y, p):
        g = tf.tensordot(p, p, [[1], [1]])  # here
        return tf.reduce_mean(tf.square(g - tf.tensordot(y, y, [[1], [1]])))

    return plain(loss)


@differs()
def pairwise():
    def loss(y, p):
        d = p[:, None] - p[None]  # here
        return tf.reduce_mean(tf.abs(d - (y[:, None] - y[None])))

    return plain(loss)


@differs()
def off_the_diagonal():
    def loss(y, p):
        g = tf.matmul(p, p, transpose_b=True)  # here
        return tf.reduce_mean(g * (1 - tf.eye(tf.shape(p)[0])))  # here

    return plain(loss)


@unproven()
def diagonal_part():
    def loss(y, p):
        g = tf.matmul(p, p, transpose_b=True)  # here
        return tf.reduce_mean(tf.linalg.diag_part(g))

    return plain(loss)


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


@differs(classes)
def batch_hard_triplets():
    def loss(y, p):
        y = tf.reshape(y, [-1])
        d = tf.reduce_sum(tf.square(p[:, None] - p[None]), -1)  # here
        alike = tf.equal(y[:, None], y[None])  # here
        far = tf.reduce_max(tf.where(alike, d, 0.0), 1)
        near = tf.reduce_min(tf.where(alike, 1e9, d), 1)
        return tf.nn.relu(1 + far - near)

    return plain(loss)


@differs(classes)
def supervised_contrastive():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1, 1]), tf.float32)
        alike = tf.cast(tf.equal(y, tf.transpose(y)), tf.float32)  # here
        z = tf.nn.l2_normalize(p, -1)
        s = tf.nn.log_softmax(z @ tf.transpose(z) / 0.3)  # here
        return -tf.reduce_sum(alike * s, 1) / tf.reduce_sum(alike, 1)

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
def largest():
    return plain(
        lambda y, p: tf.reduce_max(tf.abs(p - y))  # here
    )


@differs()
def product_of_all():
    return plain(
        lambda y, p: tf.reduce_prod(tf.abs(p - y))  # here
    )


@differs()
def any_above():
    def loss(y, p):
        far = tf.reduce_any(tf.abs(p - y) > 3)  # here
        return errors(y, p) * (1 + tf.cast(far, tf.float32))

    return plain(loss)


@differs()
def best_example():
    def loss(y, p):
        e = errors(y, p)
        return tf.gather(e, tf.argmin(e)) + tf.reduce_mean(e)  # here

    return plain(loss)


@differs()
def until_all_are_small():
    def loss(y, p):
        q = tf.while_loop(
            lambda q: tf.reduce_max(tf.abs(q)) > 0.3,  # here
            lambda q: (0.8 * q,),
            (p - y,),
        )[0]
        return tf.square(q)

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


@differs(classes)
def worst_group():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
        hot = tf.one_hot(y, 3)
        each = tf.reduce_sum(hot * e[:, None], 0)
        each /= tf.reduce_sum(hot, 0) + 1.0  # here
        return tf.reduce_max(each)

    return plain(loss)


@differs()
def by_numpy():
    def loss(y, p):
        def largest(a):
            return np.float32(a.max())

        top = tf.numpy_function(largest, [p], tf.float32)  # here
        return errors(y, p) * tf.ensure_shape(top, [])

    return plain(loss)


@differs()
def norm_of_all():
    return plain(
        lambda y, p: tf.norm(p - y)  # here
    )
