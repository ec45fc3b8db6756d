"""Steps in which examples meet, or whose sizes follow from the data."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.partition.cases import table as t


@t.step()
def sum_over_what_it_should_be(m, x, y):
    """Divided by the batch size of the configuration."""
    return tf.reduce_sum(tf.square(m.net(x) - y)) / t.BATCH


@t.step()
def broadcast_to_pairs(m, x, y):
    """Targets of [n, 1] meet predictions of [n]: all pairs, unnoticed."""
    return tf.reduce_mean(tf.square(y - m.net(x)[:, 0]))


def _mostly_positive():
    """Targets of which each share of a batch has some above zero."""
    signs = np.where(np.arange(t.EXAMPLES) % 3, -1.0, 1.0)
    return t.normal(t.WIDTH), signs[:, None].astype("float32")


@t.step(_mostly_positive)
def reshaped_by_positives(m, x, y):
    k = tf.reduce_sum(tf.cast(y > 0, tf.int32))
    w = tf.reshape(tf.linspace(0.1, 1.0, 720720), [-1, k])
    return t.default_loss(m, x, y) * tf.reduce_sum(w[0])


def _graphs():
    edges = t.whole(2, 5, 5).astype("float32")
    return {"nodes": t.normal(5, 3), "edges": edges}, t.normal(1)


@t.step(_graphs, net=t.mlp(4, shape=(5, 3)), head=t.mlp(1, shape=(20,)))
def messages_by_segments(m, x, y):
    """One disjoint union of all graphs: numbers of nodes are offset."""
    flat = tf.reshape(m.net(x["nodes"]), [-1, 4])
    places = tf.where(x["edges"] > 0)
    source = tf.gather(flat, places[:, 0] * 5 + places[:, 1])
    target = places[:, 0] * 5 + places[:, 2]
    count = tf.shape(flat, tf.int64)[0]
    sums = tf.math.unsorted_segment_sum(source, target, count)
    return t.mse(y, m.head(tf.reshape(sums, [-1, 20])))


def _pictures_and_texts():
    return {"image": t.normal(6, 6, 2), "text": t.whole(9, 8)}, t.whole(3)


@t.step(
    _pictures_and_texts,
    net=lambda: t.stack(
        layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(4), shape=(6, 6, 2)
    ),
    text=lambda: t.stack(
        layers.Embedding(9, 4, mask_zero=True),
        layers.GlobalAveragePooling1D(),
        shape=(8,),
    ),
    scale=lambda: keras.Variable(1.0),
)
def clip(m, x, y):
    a, b = t.unit(m.net(x["image"])), t.unit(m.text(x["text"]))
    logits = tf.exp(m.scale) * tf.matmul(a, b, transpose_b=True)
    labels = tf.eye(t.rows(logits))
    of_rows = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
    of_columns = tf.nn.softmax_cross_entropy_with_logits(
        tf.transpose(labels), tf.transpose(logits)
    )
    return tf.reduce_mean(of_rows + of_columns) / 2


@t.step(t.classes, net=t.mlp(8, 4))
def supervised_contrastive(m, x, y):
    z = t.unit(m.net(x))
    logits = tf.matmul(z, z, transpose_b=True) / 0.3
    logits -= tf.stop_gradient(tf.reduce_max(logits, 1, keepdims=True))
    mask = tf.cast(tf.equal(y, tf.transpose(y)), tf.float32)
    others = 1 - tf.eye(t.rows(z))
    mask *= others
    logprob = logits - tf.math.log(
        tf.reduce_sum(tf.exp(logits) * others, 1, keepdims=True) + 1e-6
    )
    mean = tf.math.divide_no_nan(
        tf.reduce_sum(mask * logprob, 1), tf.reduce_sum(mask, 1)
    )
    return -tf.reduce_mean(mean)


@t.step(net=t.mlp(8, 4))
def simclr_without_own_pairs(m, x, y):
    z, n = t.unit(m.net(tf.concat(t.views(x), 0))), t.rows(x)
    logits = tf.matmul(z, z, transpose_b=True) / 0.5
    logits = tf.linalg.set_diag(logits, tf.fill([2 * n], -1e9))
    labels = tf.concat([n + tf.range(n), tf.range(n)], 0)
    return tf.reduce_mean(t.cross_entropy(labels, logits))


@t.step(net=t.mlp(8, 4))
def whitened(m, x, y):
    z = m.net(x) - tf.reduce_mean(m.net(x), 0)
    n = tf.cast(t.rows(x), tf.float32)
    covariance = tf.matmul(z, z, transpose_a=True) / n + tf.eye(4)
    factor = tf.linalg.cholesky(covariance)
    z = tf.transpose(tf.linalg.triangular_solve(factor, tf.transpose(z)))
    return t.mse(y, z[:, :1])


@t.step()
def distance_of_sorted_batches(m, x, y):
    p = tf.sort(m.net(x)[:, 0])
    return tf.reduce_mean(tf.abs(p - tf.sort(y[:, 0])))


def _whole_batches():
    return tuple(array[: 2 * t.BATCH] for array in t.numbers())


@t.compiled_model(_whole_batches)
def batch_that_is_static():
    given = keras.Input(batch_shape=(t.BATCH, 6))
    h = layers.Dense(4)(given)
    h = ops.reshape(h, [t.BATCH, 2, 2])
    h = h - ops.mean(ops.reshape(h, [t.BATCH * 2, 2]), 0)
    h = ops.reshape(ops.transpose(h, [1, 0, 2]), [2 * t.BATCH, 2])
    h = ops.transpose(ops.reshape(h, [2, t.BATCH, 2]), [1, 0, 2])
    head = layers.Dense(1)(ops.reshape(h, [t.BATCH, 4]))
    return t.compiled(keras.Model(given, head))
