"""Random numbers, and what a step does besides computing."""

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    by_default,
    case,
    default_loss,
    minimized,
    plain,
    rows,
    stepped,
    with_layers,
)


@case(plain)
def random_by_seed_and_row(y, p):
    w = tf.random.stateless_uniform(tf.shape(p), (1, 2))
    return w * tf.square(p - y)


@case(plain)
def random_by_seed_for_all(y, p):
    w = tf.random.stateless_uniform([3], (1, 2))
    return w * tf.square(p - y)


@case(stepped)
def noise_for_every_example(model, x, y):
    return by_default(model, x + 0.1 * tf.random.normal(tf.shape(x)), y)


@case(stepped)
def shuffled_targets(model, x, y):
    y = tf.random.shuffle(y, seed=1)
    return by_default(model, x, y)


@case(stepped)
def mixed_up(model, x, y):
    a = tf.sigmoid(y)
    x = a * x + (1 - a) * tf.reverse(x, [0])
    return by_default(model, x, y)


@case()
def dropped_out():
    return with_layers(keras.layers.Dropout(0.5, seed=1))


@case(stepped)
def printed(model, x, y):
    tf.print(tf.shape(x), output_stream="file:///dev/null")
    return by_default(model, x, y)


def _looking_up(factor_of, *table):
    """Train by a step whose loss has a factor from a table."""
    table = tf.lookup.experimental.MutableHashTable(tf.int64, *table)
    return minimized(
        lambda net, x, y: default_loss(net, x, y) * factor_of(table, x)
    )


@case()
def written_into_a_table():
    def factor_of(table, x):
        one = tf.ones([1], tf.int64)
        table.insert(one, table.lookup(one) + 1)
        return 1 / tf.cast(table.lookup(one)[0], tf.float32)

    return _looking_up(factor_of, tf.int64, 0)


@case()
def lists_looked_up():
    table = tf.lookup.experimental.MutableHashTable(
        tf.int64, tf.float32, [0.0] * 6
    )

    def step(model, x, y):
        found = table.lookup(tf.cast(x[:, 0] * 3, tf.int64))
        return by_default(model, x + tf.reshape(found, [-1, 6]), y)

    return stepped(step)


@case(stepped)
def checked(model, x, y):
    tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), 100.0)
    return by_default(model, x, y)


@case()
def examples_in_a_table():
    def factor_of(table, x):
        table.insert(tf.cast(x[:, 0] > 0, tf.int64), x[:, 1])
        return tf.reshape(table.lookup(tf.ones([1], tf.int64)), [])

    return _looking_up(factor_of, tf.float32, 0.0)


@case()
def mixup_of_the_step():
    def step(net, x, y):
        share = keras.random.beta((rows(x), 1), 0.4, 0.4, seed=net.draws)
        order = tf.range(rows(x))
        order = keras.random.shuffle(order, seed=net.draws)
        x = share * x + (1 - share) * tf.gather(x, order)
        y = share * y + (1 - share) * tf.gather(y, order)
        return by_default(net, x, y)

    net = stepped(step)
    net.draws = keras.random.SeedGenerator(7)
    return net
