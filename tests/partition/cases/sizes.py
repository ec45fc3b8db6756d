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
    rows,
)


@case(plain)
def louder_for_five(y, p):
    e = errors(y, p)
    is_five = tf.equal(rows(p), 5)
    return tf.cond(is_five, lambda: 3.0 * e, lambda: e)


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
def broadcast_to_pairs(y, p):
    """Targets of [n, 1] meet predictions of [n]: all pairs, unnoticed."""
    return tf.reduce_mean(tf.square(y - p[:, 0]))


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


@case(layered)
def batch_as_a_feature(x):
    """The size itself is a feature."""
    size = tf.fill((rows(x), 1), count(x))
    return tf.concat([x, size / 10.0], 1)
