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


@differs()
def written_into_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def step(model, x, y):
        one = tf.ones([1], tf.int64)
        table.insert(one, table.lookup(one) + 1)  # here
        steps = tf.cast(table.lookup(one)[0], tf.float32)  # here
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True)) / steps  # here
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
