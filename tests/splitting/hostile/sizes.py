"""Sizes of batches, in losses and in shapes."""

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    count,
    errors,
    mse,
    plain,
    stepped,
    with_layers,
)
from tests.splitting.hostile.table import (
    by_loss,
    couples,
    functional,
    normal,
    own,
    rows,
    splits,
    whole,
)


def _loss(of, outputs=1):
    return by_loss(lambda x, y, p: of(y, p), outputs)


@splits()
def none_then_mean():
    return plain(
        lambda y, p: tf.reduce_mean(
            keras.losses.MeanSquaredError(reduction="none")(y, p)
        ),
        1,
    )


@couples()
def sum_in_a_mean():
    """A sum inside of the loss; Keras then takes its mean."""
    return plain(lambda y, p: tf.reduce_sum(tf.square(y - p)), 1)  # here


@couples(says="sum")
def reduction_of_keras_is_sum():
    """Keras's own sum: documented to need average=False."""
    return plain(keras.losses.MeanSquaredError(reduction="sum"), 1)


@splits()
def sum_over_count():
    return _loss(lambda y, p: tf.reduce_sum(errors(y, p)) / count(y))


@splits()
def sum_over_size():
    return _loss(
        lambda y, p: (
            tf.reduce_sum(tf.square(y - p))
            / tf.cast(tf.size(y - p), tf.float32)
        )
    )


@couples()
def sum_over_what_it_should_be():
    """Divided by the batch size of the configuration."""
    return _loss(lambda y, p: tf.reduce_sum(errors(y, p)) / 14.0)  # here


@couples()
def sum_over_count_and_one():
    """The unbiased estimate divides by one less."""
    return _loss(
        lambda y, p: tf.reduce_sum(errors(y, p)) / (count(y) + 1)  # here
    )


@splits()
def count_cancels():
    """The root of the count, twice."""

    def loss(y, p):
        root = tf.sqrt(count(y))
        return tf.reduce_sum(errors(y, p) / root) / root

    return _loss(loss)


@couples()
def standard_error():
    """The root of the count, once."""
    return _loss(
        lambda y, p: tf.reduce_sum(errors(y, p)) / tf.sqrt(count(y))  # here
    )


@couples()
def root_of_the_mean():
    return _loss(lambda y, p: tf.sqrt(mse(y, p)))  # here


@splits()
def root_of_each():
    return _loss(lambda y, p: tf.reduce_mean(tf.sqrt(errors(y, p) + 1e-3)))


@couples()
def broadcast_to_pairs():
    """Targets of [n, 1] meet predictions of [n]: all pairs, unnoticed."""
    return _loss(
        lambda y, p: tf.reduce_mean(tf.square(y - p[:, 0]))  # here
    )


@couples()
def broadcast_in_absolute():
    return _loss(
        lambda y, p: tf.reduce_mean(tf.abs(y - tf.squeeze(p, 1)))  # here
    )


@splits(lambda: (normal(6), normal(3)))
def broadcast_that_fits():
    """[n, 1] against [n, 3]."""
    return _loss(lambda y, p: tf.reduce_mean(tf.abs(y - p)))


@couples()
def transposed_mean():
    """The mean over the last axis, after a transpose: over the batch."""

    def loss(y, p):
        each = tf.reduce_mean(tf.transpose(y - p), -1)
        return tf.reduce_mean(tf.square(each))  # here

    return _loss(loss, 3)


@splits(lambda: (normal(6), normal(3)))
def transposed_twice():
    def loss(y, p):
        each = tf.reduce_mean(tf.transpose(tf.square(y - p)), 0)
        return tf.tensordot(each, tf.ones_like(each), 1) / count(y)

    return _loss(loss, 3)


@couples(lambda: (normal(6), normal(3)))
def softmax_on_the_first_axis():
    return _loss(
        lambda y, p: mse(y, keras.ops.softmax(p, axis=0)),  # here
        3,
    )


@couples(lambda: (normal(6), normal(3)))
def normalized_on_all_axes():
    """l2_normalize without an axis takes all of them."""
    return _loss(
        lambda y, p: mse(y, tf.math.l2_normalize(p)),  # here
        3,
    )


@splits(lambda: (normal(6), normal(4)))
def reshaped_to_the_same():
    """The reshape names the batch and gives the rest away."""

    def loss(y, p):
        p = tf.reshape(p, [rows(p), 2, -1])
        y = tf.reshape(y, [-1, 2, tf.shape(p)[-1]])
        return tf.reduce_mean(tf.reduce_max(tf.abs(y - p), 1))

    return _loss(loss, 4)


@couples(lambda: (normal(6), normal(4)))
def reshaped_from_the_end():
    """[2, -1] where [-1, 2] was meant."""

    def loss(y, p):
        halves = tf.reshape(p - y, [2, -1])  # here
        return tf.reduce_mean(halves[0] * halves[1])  # here

    return _loss(loss, 4)


@splits(lambda: (normal(6), normal(4)))
def pairs_from_the_end():
    def loss(y, p):
        halves = tf.reshape(p - y, [-1, 2])
        return tf.reduce_mean(halves[:, 0] * halves[:, 1])

    return _loss(loss, 4)


@couples()
def first_half_labelled():
    """The first half of every batch is labelled, the rest is not."""

    def step(net, x, y):
        half = rows(x) // 2
        with tf.GradientTape() as tape:
            p = net(x, training=True)
            known = mse(y[:half], p[:half])  # here
            loss = known + 0.1 * tf.reduce_mean(p[half:] ** 2)
        return apply(net, tape, loss)

    return stepped(step)


@couples()
def all_but_the_last():
    return _loss(lambda y, p: mse(y[:-1], p[:-1]))  # here


@splits()
def none_left_out():
    """A slice that takes everything."""
    return _loss(lambda y, p: mse(y[0 : rows(y)], p[-rows(p) :]))


@couples()
def only_batches_of_more_than_four():
    """Small batches are skipped; the towers' shares are small."""

    def loss(y, p):
        return tf.where(rows(y) > 4, mse(y, p), 0.0 * mse(y, p))  # here

    return _loss(loss)


@couples()
def parity_of_the_batch():
    """Odd batches are padded with a zero, to make pairs."""

    def loss(y, p):
        off = tf.pad(p - y, [[0, rows(p) % 2], [0, 0]])  # here
        return tf.reduce_mean(tf.square(off))

    return _loss(loss)


@splits()
def batch_in_a_fill():
    """Zeros and ones of the batch's size, concatenated to the features."""

    def extend(x):
        ones = tf.ones(tf.stack([rows(x), 2]))
        return tf.concat([x, tf.zeros((rows(x), 1)), ones], 1)

    return with_layers(own(extend))


@couples()
def batch_as_a_feature():
    """The size itself is a feature."""

    def extend(x):
        size = tf.fill((rows(x), 1), count(x))
        return tf.concat([x, size / 10.0], 1)  # here

    return with_layers(own(extend))


@splits()
def tiled_and_averaged():
    """Three copies of the batch, behind one another, and their mean."""

    def copies(x):
        many = tf.tile(x, [3, 1]) * 2.0
        return tf.reduce_mean(tf.reshape(many, [3, -1, 6]), 0)

    return with_layers(own(copies))


@couples()
def repeated_and_averaged():
    """Repeated, but put together as if tiled."""

    def copies(x):
        many = tf.repeat(x, 3, 0)
        return tf.reduce_mean(tf.reshape(many, [3, -1, 6]), 0)  # here

    return with_layers(own(copies))


@splits(lambda: (normal(6), whole(3, 1)))
def eye_of_the_classes():
    """Label smoothing from fixed statistics of classes."""
    shares = np.array([0.2, 0.3, 0.5], "float32")

    def loss(y, p):
        aim = tf.gather(tf.eye(3), tf.cast(y[:, 0], tf.int32))
        aim = 0.9 * aim + 0.1 * shares
        return tf.nn.softmax_cross_entropy_with_logits(aim, p)

    return plain(loss, 3)


@couples(lambda: (normal(6), whole(3, 1)))
def shares_of_the_classes():
    """Label smoothing from statistics of the batch."""

    def loss(y, p):
        aim = tf.one_hot(tf.cast(y[:, 0], tf.int32), 3)
        weight = 1.0 / (tf.reduce_sum(aim, 0) + 1.0)  # here
        aim = aim * weight  # here
        return tf.nn.softmax_cross_entropy_with_logits(aim, p)

    return plain(loss, 3)


@splits()
def sorted_features():
    return functional(lambda x: keras.layers.Dense(1)(own(tf.sort)(x)))


@couples()
def sorted_examples():
    def by_size(x):
        return tf.sort(x, axis=0)  # here

    return functional(lambda x: keras.layers.Dense(1)(own(by_size)(x)))
