"""Random numbers, and what a step does besides computing."""

import tensorflow as tf

from tests.partition.cases.table import (
    by_default,
    case,
    default_loss,
    minimized,
    stepped,
)


@case(stepped)
def noise_for_every_example(model, x, y):
    return by_default(model, x + 0.1 * tf.random.normal(tf.shape(x)), y)


@case(stepped)
def shuffled_targets(model, x, y):
    y = tf.random.shuffle(y, seed=1)
    return by_default(model, x, y)


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
