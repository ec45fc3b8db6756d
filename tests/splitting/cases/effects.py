"""What a step does besides computing, and its logs."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    by_default,
    differs,
    mse,
    proven,
    stepped,
    unproven,
)


@unproven()
def printed():
    def step(model, x, y):
        tf.print(tf.shape(x), output_stream="file:///dev/null")  # here
        return by_default(model, x, y)

    return stepped(step)


@proven()
def written_into_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def step(model, x, y):
        one = tf.ones([1], tf.int64)
        table.insert(one, table.lookup(one) + 1)
        steps = tf.cast(table.lookup(one)[0], tf.float32)
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True)) / steps
        return apply(model, tape, loss)

    return stepped(step)


@differs()
def examples_in_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def step(model, x, y):
        keys = tf.cast(x[:, 0] > 0, tf.int64)
        table.insert(keys, x[:, 1])  # here
        one = tf.reshape(table.lookup(tf.ones([1], tf.int64)), [])
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True)) * one
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def words_looked_up():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.range(-9, 10, dtype=tf.int64), tf.linspace(-1.0, 1.0, 19)
        ),
        0.0,
    )

    def step(model, x, y):
        found = table.lookup(tf.cast(x * 3, tf.int64))
        with tf.GradientTape() as tape:
            loss = mse(y, model(x + found, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@unproven()
def lists_looked_up():
    table = tf.lookup.experimental.MutableHashTable(
        tf.int64, tf.float32, [0.0] * 6
    )

    def step(model, x, y):
        found = table.lookup(tf.cast(x[:, 0] * 3, tf.int64))
        with tf.GradientTape() as tape:
            loss = mse(y, model(x + tf.reshape(found, [-1, 6]), training=True))
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def checked():
    def step(model, x, y):
        tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), 100.0)
        return by_default(model, x, y)

    return stepped(step)


@differs()
def log_of_largest():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = mse(y, p)
        logs = apply(model, tape, loss)
        return {**logs, "largest": tf.reduce_max(p)}  # here

    return stepped(step)


@differs()
def logged_count():
    def step(model, x, y):
        logs = by_default(model, x, y)
        return {**logs, "n": tf.cast(tf.shape(x)[0], tf.float32)}

    return stepped(step)


@proven()
def logged_rate():
    def step(model, x, y):
        logs = by_default(model, x, y)
        return {**logs, "rate": model.optimizer.learning_rate * 1.0}

    return stepped(step)
