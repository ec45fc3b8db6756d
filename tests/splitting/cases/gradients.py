"""Gradients, also such of each example."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    apply,
    differs,
    minimizing,
    mse,
    proven,
    stepped,
    unproven,
)


def handed_on(change):
    """A step that changes its gradients."""

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = change(tape.gradient(loss, weights), weights, x)
        model.optimizer.apply(grads, weights)
        return {"loss": loss}

    return stepped(step)


@differs()
def clipped_by_global_norm():
    return handed_on(
        lambda grads, *_: tf.clip_by_global_norm(grads, 0.01)[0]  # here
    )


@differs()
def signs_of_gradients():
    return handed_on(lambda grads, *_: [tf.sign(g) for g in grads])  # here


@unproven()
def checked_to_be_finite():
    return handed_on(
        lambda grads, *_: [
            tf.where(tf.math.is_finite(g), g, 0.0)  # here
            for g in grads
        ]
    )


@differs()
def sparse_by_size():
    return handed_on(
        lambda grads, *_: [
            tf.where(tf.abs(g) > 0.1, g, 0.0)  # here
            for g in grads
        ]
    )


@differs()
def weights_of_examples_by_loss():
    def loss_of(model, x, y):
        e = tf.reduce_mean(tf.square(y - model(x, training=True)), -1)
        w = tf.stop_gradient(tf.nn.softmax(e))  # here
        return tf.reduce_sum(w * e)

    return stepped(minimizing(loss_of))


@proven()
def every_other_step():
    def step(model, x, y):
        even = model.optimizer.iterations % 2 == 0
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = tf.cond(
                even,
                lambda: mse(y, p),
                lambda: tf.reduce_mean(tf.abs(y - p)),
            )
        return apply(model, tape, loss)

    return stepped(step)


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


@differs()
def moved_by_gradient():
    return adversarial(lambda g: 5.0 * g)


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
