"""Random numbers, and what a step does besides computing."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    by_default,
    by_design,
    differs,
    minimizing,
    mse,
    plain,
    proven,
    stepped,
    unproven,
    with_layers,
)


@by_design()
def random_by_seed_and_row():
    def loss(y, p):
        w = tf.random.stateless_uniform(tf.shape(p), (1, 2))  # here
        return w * tf.square(p - y)

    return plain(loss)


@proven()
def random_by_seed_for_all():
    def loss(y, p):
        w = tf.random.stateless_uniform([3], (1, 2))
        return w * tf.square(p - y)

    return plain(loss)


@by_design()
def noise_for_every_example():
    def step(model, x, y):
        noise = tf.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            loss = mse(y, model(x + 0.1 * noise, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@differs()
def shuffled_targets():
    return stepped(
        lambda model, x, y: by_default(
            model,
            x,
            tf.random.shuffle(y, seed=1),  # here
        )
    )


@differs()
def mixed_up():
    def step(model, x, y):
        a = tf.sigmoid(y)
        x = a * x + (1 - a) * tf.reverse(x, [0])  # here
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@by_design()
def dropped_out():
    return with_layers(keras.layers.Dropout(0.5, seed=1))


@proven()
def variational():
    def loss_of(model, x, y):
        mean, log_var = tf.split(model(x, training=True), 2, -1)
        z = mean + tf.exp(0.5 * log_var) * x[:, :2]
        kl = -0.5 * tf.reduce_sum(
            1 + log_var - tf.square(mean) - tf.exp(log_var), 1
        )
        loss = mse(y, tf.reduce_sum(z, 1, keepdims=True))
        loss += tf.reduce_mean(kl)
        return loss

    return stepped(minimizing(loss_of), 4)


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
