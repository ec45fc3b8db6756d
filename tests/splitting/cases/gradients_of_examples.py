"""Steps that use the gradients of examples."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    apply,
    differs,
    mse,
    proven,
    stepped,
)


def adversarial(change):
    """A step on examples that were moved along their gradients."""

    def step(model, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = mse(y, model(x, training=True))
        moved = x + change(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            loss = mse(y, model(moved, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def gradient_penalty():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                p = model(x, training=True)
            slope = inner.gradient(p, x)
            size = tf.sqrt(tf.reduce_sum(tf.square(slope), 1) + 1e-6)
            loss = mse(y, p) + tf.reduce_mean(tf.square(size - 1))
        return apply(model, tape, loss)

    return stepped(step)


@differs()
def gradient_penalty_of_mean():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                p = model(x, training=True)
                first = mse(y, p)
            slope = inner.gradient(first, x)
            loss = first + tf.reduce_sum(tf.square(slope))
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def moved_by_sign():
    return adversarial(lambda g: 0.1 * tf.sign(g))


@proven()
def moved_by_direction():
    return adversarial(lambda g: g / tf.reduce_max(tf.abs(g), 1, keepdims=True))


@differs()
def moved_by_gradient():
    return adversarial(lambda g: 5.0 * g)


@differs()
def moved_by_norm_of_all():
    return adversarial(lambda g: g / tf.norm(g))  # here


@differs()
def moved_by_norm_and_a_bit():
    return adversarial(
        lambda g: g / (tf.norm(g, axis=1, keepdims=True) + 0.1)  # here
    )


@proven()
def radiance():
    def step(model, x, y):
        t = tf.linspace(0.0, 1.0, 5)
        points = x[:, None, :] * t[None, :, None]
        with tf.GradientTape() as tape:
            raw = model(tf.reshape(points, [-1, WIDTH]), training=True)
            raw = tf.reshape(raw, [-1, 5, 2])
            alpha = 1 - tf.exp(-tf.nn.relu(raw[..., 0]))
            seen = tf.math.cumprod(1 - alpha + 1e-6, 1, exclusive=True)
            color = tf.reduce_sum(alpha * seen * raw[..., 1], 1)
            loss = mse(y[:, 0], color)
        return apply(model, tape, loss)

    return stepped(step, 2)
