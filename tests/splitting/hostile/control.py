"""Branches, loops and functions."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    minimizing,
    mse,
    stepped,
    with_layers,
)
from tests.splitting.hostile.table import (
    by_loss,
    couples,
    own,
    rows,
    splits,
)


@splits()
def branch_of_every_example():
    def each(row):
        return tf.cond(row[0] > 0, lambda: row * 2, lambda: tf.tanh(row))

    return with_layers(own(lambda x: tf.map_fn(each, x)))


@splits()
def branch_of_the_step():
    def loss_of(net, x, y):
        p = net(x, training=True)
        return tf.switch_case(
            tf.cast(net.optimizer.iterations, tf.int32) % 3,
            [
                lambda: mse(y, p),
                lambda: tf.reduce_mean(tf.abs(y - p)),
                lambda: tf.reduce_mean(keras.losses.log_cosh(y, p)),
            ],
        )

    return stepped(minimizing(loss_of))


@splits()
def same_on_both_branches():
    """Whichever way a batch goes, it computes the same."""

    def loss(x, y, p):
        high = tf.reduce_mean(x[:, 0]) > 0
        square = tf.square(y - p)
        return tf.reduce_mean(tf.where(high, square, square))

    return by_loss(loss)


@couples()
def loop_until_all_are_done():
    """As many rounds as the slowest example of the batch takes."""

    def halve(x):
        def body(x):
            return [x / 1.5]

        def large(x):
            return tf.reduce_max(tf.abs(x)) > 1.0  # here

        return tf.while_loop(large, body, [x])[0]  # here

    return with_layers(own(halve))


@splits()
def vectorized_over_examples():
    def each(row):
        return tf.linalg.matvec(tf.linalg.diag(row) + tf.eye(6), tf.tanh(row))

    return with_layers(own(lambda x: tf.vectorized_map(each, x)))


@couples()
def vectorized_over_features():
    """The map runs over columns, and centres each one."""

    def each(column):
        return column - tf.reduce_mean(column)

    def centre(x):
        return tf.transpose(tf.vectorized_map(each, tf.transpose(x)))  # here

    return with_layers(own(lambda x: tf.tanh(centre(x) * 2)))


@couples()
def array_written_backwards():
    def turn(x):
        size = rows(x)
        array = tf.TensorArray(tf.float32, size, element_shape=(6,))
        for i in tf.range(size):  # here
            array = array.write(size - 1 - i, x[i])  # here
        return array.stack() + x  # here

    return with_layers(own(tf.function(turn)))


@splits()
def array_written_forwards():
    def copy(x):
        size = rows(x)
        array = tf.TensorArray(tf.float32, size, element_shape=(6,))
        for i in tf.range(size):
            array = array.write(i, tf.tanh(x[i]))
        return array.stack() + x

    return with_layers(own(tf.function(copy)))
