"""Examples that meet examples."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    binary,
    classes,
    differs,
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
