"""Steps whose places, numbers and classes follow from the data."""

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
    unproven,
)


@differs()
def split_by_positives():
    def loss(y, p):
        k = tf.minimum(positives(y), 5)  # here
        a, _ = tf.split(tf.linspace(0.1, 1.0, 6), [k, 6 - k])  # here
        return errors(y, p) * tf.reduce_sum(a)

    return plain(loss)


@differs()
def divided_by_positives():
    def loss(y, p):
        a, _ = tf.split(
            tf.linspace(0.1, 1.0, 60),
            tf.stack([positives(y), 60 - positives(y)]),  # here
        )
        return errors(y, p) * tf.reduce_sum(a)  # here

    return plain(loss)


@differs()
def reshaped_by_positives():
    def loss(y, p):
        k = positives(y)
        w = tf.reshape(tf.linspace(0.1, 1.0, 720720), [-1, k])  # here
        return errors(y, p) * tf.reduce_sum(w[0])  # here

    return plain(loss)


@differs()
def element_by_positives():
    def loss(y, p):
        factors = tf.TensorArray(tf.float32, 20, clear_after_read=False)
        factors = factors.unstack(tf.linspace(0.1, 1.0, 20))
        return errors(y, p) * factors.read(positives(y))  # here

    return plain(loss)


@unproven()
def sparse_product():
    def loss(y, p):
        q = tf.sparse.from_dense(tf.where(p > 0, p, 0.0))
        return tf.square(tf.sparse.sparse_dense_matmul(q, tf.eye(3)) - y)

    return plain(loss)


@unproven()
def ragged_means():
    def loss(y, p):
        lengths = tf.cast(y[:, 0] > 0, tf.int32) + 1
        q = tf.RaggedTensor.from_tensor(p, lengths)
        return tf.square(tf.reduce_mean(q, 1) - y[:, 0])

    return plain(loss)


@differs()
def ragged_mean_of_all():
    def loss(y, p):
        lengths = tf.cast(y[:, 0] > 0, tf.int32) + 1
        q = tf.RaggedTensor.from_tensor(tf.square(p), lengths)
        return tf.reduce_mean(q.flat_values)  # here

    return plain(loss)


@differs(classes)
def weighed_by_frequency():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        _, at, n = tf.unique_with_counts(y)  # here
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
        return tf.reduce_mean(e / tf.cast(tf.gather(n, at), tf.float32))

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


def _best(p):
    return tf.argmax(tf.stop_gradient(p), 1, tf.int32)


@proven()
def value_of_action():
    """The value that a network gives to the action of each example."""

    def loss(y, p):
        places = tf.stack([tf.range(tf.shape(p)[0]), _best(p)], 1)
        return tf.square(tf.gather_nd(p, places) - y[:, 0])

    return plain(loss)


@differs()
def value_of_another():
    def loss(y, p):
        count = tf.shape(p)[0]
        places = tf.stack([count - 1 - tf.range(count), _best(p)], 1)
        return tf.square(tf.gather_nd(p, places) - y[:, 0])

    return plain(loss)


@differs()
def action_of_the_first():
    def loss(y, p):
        places = tf.stack([_best(p), tf.range(tf.shape(p)[0])], 1)
        return tf.square(tf.gather_nd(tf.transpose(p)[:, :], places) * y[0, 0])

    return plain(loss)


@proven()
def largest_two():
    def loss(y, p):
        best, _ = tf.math.top_k(tf.concat([p, 2 * p], 1), 2)
        return tf.reduce_sum(tf.square(best - y), 1)

    return plain(loss)


@differs()
def largest_of_all():
    def loss(y, p):
        best, _ = tf.math.top_k(tf.transpose(p), 2)  # here
        return tf.reduce_sum(tf.square(best))

    return plain(loss)
