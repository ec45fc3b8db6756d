"""Steps in which examples meet, or whose sizes follow from the data."""

import numpy as np
import tensorflow as tf

from tests.partition.cases import table as t


def _mostly_positive():
    """Targets of which each share of a batch has some above zero."""
    signs = np.where(np.arange(t.EXAMPLES) % 3, -1.0, 1.0)
    return t.normal(t.WIDTH), signs[:, None].astype("float32")


@t.step(_mostly_positive)
def reshaped_by_positives(m, x, y):
    k = tf.reduce_sum(tf.cast(y > 0, tf.int32))
    w = tf.reshape(tf.linspace(0.1, 1.0, 720720), [-1, k])
    return t.default_loss(m, x, y) * tf.reduce_sum(w[0])


@t.step(net=t.mlp(8, 4))
def simclr_without_own_pairs(m, x, y):
    z, n = t.unit(m.net(tf.concat(t.views(x), 0))), t.rows(x)
    logits = tf.matmul(z, z, transpose_b=True) / 0.5
    logits = tf.linalg.set_diag(logits, tf.fill([2 * n], -1e9))
    labels = tf.concat([n + tf.range(n), tf.range(n)], 0)
    return tf.reduce_mean(t.cross_entropy(labels, logits))


@t.step()
def distance_of_sorted_batches(m, x, y):
    p = tf.sort(m.net(x)[:, 0])
    return tf.reduce_mean(tf.abs(p - tf.sort(y[:, 0])))
