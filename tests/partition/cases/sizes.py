"""The number of examples: in losses, as a number, and in shapes."""

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    BATCH,
    by_loss,
    case,
    count,
    errors,
    layered,
    minimized,
    mse,
    normal,
    plain,
    positives,
    rows,
)


@case(plain)
def mean_of_mean(y, p):
    return mse(y, p) / count(p)


@case(plain)
def logarithm_of_count(y, p):
    return errors(y, p) * tf.math.log(count(p))


@case(plain)
def count_of_at_least_eight(y, p):
    n = tf.maximum(count(p), 8.0)
    return tf.reduce_sum(errors(y, p)) / n


@case(plain)
def louder_for_five(y, p):
    e = errors(y, p)
    is_five = tf.equal(rows(p), 5)
    return tf.cond(is_five, lambda: 3.0 * e, lambda: e)


@case(plain)
def factor_from_a_table(y, p):
    table = tf.linspace(0.1, 1.0, 20)
    return errors(y, p) * table[rows(p)]


@case(plain)
def sliced_from_a_table(y, p):
    table = tf.linspace(0.1, 1.0, 20)
    part = tf.slice(table, [rows(p)], [2])
    return errors(y, p) * tf.reduce_sum(part)


@case(plain)
def powers_of_nothing(y, p):
    one = tf.pow(tf.zeros_like(p), 0.0) / count(p)
    return mse(y, p) + tf.reduce_mean(one)


@case(plain)
def products_of_nothing(y, p):
    one = tf.math.cumprod(tf.zeros_like(p), 1, exclusive=True)
    return mse(y, p) + tf.reduce_mean(one) * count(p)


@case(plain)
def half_of_positives(y, p):
    k = positives(y) // 2
    return tf.reduce_mean(errors(y, p)) + tf.cast(k, tf.float32) / count(p)


@case(plain)
def mean_of_integers(y, p):
    m = tf.reduce_mean(tf.cast(10 * y, tf.int32))
    return errors(y, p) * tf.cast(m, tf.float32)


@case(plain, outputs=1)
def none_then_mean(y, p):
    return tf.reduce_mean(keras.losses.MeanSquaredError(reduction="none")(y, p))


@case(plain, outputs=1)
def sum_in_a_mean(y, p):
    """A sum inside of the loss; Keras then takes its mean."""
    return tf.reduce_sum(tf.square(y - p))


@case(by_loss)
def sum_over_what_it_should_be(y, p):
    """Divided by the batch size of the configuration."""
    return tf.reduce_sum(errors(y, p)) / BATCH


@case(by_loss)
def sum_over_count_and_one(y, p):
    """The unbiased estimate divides by one less."""
    return tf.reduce_sum(errors(y, p)) / (count(y) + 1)


@case(by_loss)
def broadcast_to_pairs(y, p):
    """Targets of [n, 1] meet predictions of [n]: all pairs, unnoticed."""
    return tf.reduce_mean(tf.square(y - p[:, 0]))


@case(by_loss, lambda: (normal(6), normal(3)), outputs=3)
def transposed_twice(y, p):
    each = tf.reduce_mean(tf.transpose(tf.square(y - p)), 0)
    return tf.tensordot(each, tf.ones_like(each), 1) / count(y)


@case(by_loss, lambda: (normal(6), normal(3)), outputs=3)
def normalized_on_all_axes(y, p):
    """l2_normalize without an axis takes all of them."""
    return mse(y, tf.math.l2_normalize(p))


@case(minimized)
def first_half_labelled(net, x, y):
    """The first half of every batch is labelled, the rest is not."""
    half, p = rows(x) // 2, net(x, training=True)
    known = mse(y[:half], p[:half])
    return known + 0.1 * tf.reduce_mean(p[half:] ** 2)


@case(by_loss)
def all_but_the_last(y, p):
    return mse(y[:-1], p[:-1])


@case(by_loss)
def none_left_out(y, p):
    """A slice that takes everything."""
    return mse(y[0 : rows(y)], p[-rows(p) :])


@case(by_loss)
def only_batches_of_more_than_four(y, p):
    """Small batches are skipped; the towers' shares are small."""
    return tf.where(rows(y) > 4, mse(y, p), 0.0 * mse(y, p))


@case(by_loss)
def parity_of_the_batch(y, p):
    """Odd batches are padded with a zero, to make pairs."""
    off = tf.pad(p - y, [[0, rows(p) % 2], [0, 0]])
    return tf.reduce_mean(tf.square(off))


@case(layered)
def batch_as_a_feature(x):
    """The size itself is a feature."""
    size = tf.fill((rows(x), 1), count(x))
    return tf.concat([x, size / 10.0], 1)


@case(layered)
def tiled_and_averaged(x):
    """Three copies of the batch, behind one another, and their mean."""
    many = tf.tile(x, [3, 1]) * 2.0
    return tf.reduce_mean(tf.reshape(many, [3, -1, 6]), 0)


@case(layered)
def repeated_and_averaged(x):
    """Repeated, but put together as if tiled."""
    many = tf.repeat(x, 3, 0)
    return tf.reduce_mean(tf.reshape(many, [3, -1, 6]), 0)
