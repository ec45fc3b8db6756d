"""Random numbers of a step."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    apply,
    by_default,
    by_design,
    differs,
    mse,
    plain,
    proven,
    stepped,
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
def constant_of_numpy():
    make = np.random.default_rng(0)

    def step(model, x, y):
        noise = make.normal(size=(1, WIDTH)).astype("float32")
        with tf.GradientTape() as tape:
            loss = mse(y, model(x + 0 * noise, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def variational():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            mean, log_var = tf.split(model(x, training=True), 2, -1)
            z = mean + tf.exp(0.5 * log_var) * x[:, :2]
            kl = -0.5 * tf.reduce_sum(
                1 + log_var - tf.square(mean) - tf.exp(log_var), 1
            )
            loss = mse(y, tf.reduce_sum(z, 1, keepdims=True))
            loss += tf.reduce_mean(kl)
        return apply(model, tape, loss)

    return stepped(step, 4)


@proven()
def diffusion():
    def step(model, x, y):
        noise, level = x[:, :3], tf.sigmoid(y)
        clean = tf.concat([x[:, 3:], level, level, level], 1)
        alpha = tf.gather(
            tf.linspace(0.9, 0.1, 10), tf.cast(level[:, 0] * 10, tf.int32)
        )[:, None]
        with tf.GradientTape() as tape:
            mixed = tf.sqrt(alpha) * clean + tf.sqrt(1 - alpha) * tf.concat(
                [noise, noise], 1
            )
            loss = mse(model(mixed, training=True), noise)
        return apply(model, tape, loss)

    return stepped(step, 3)
