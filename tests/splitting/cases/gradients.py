"""Gradients, also such of each example."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    apply,
    by_default,
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


@proven()
def by_hand():
    return stepped(by_default)


@differs()
def clipped_by_norm():
    return handed_on(
        lambda grads, *_: [
            tf.clip_by_norm(g, 0.01)  # here
            for g in grads
        ]
    )


@differs()
def clipped_by_global_norm():
    return handed_on(
        lambda grads, *_: tf.clip_by_global_norm(grads, 0.01)[0]  # here
    )


@proven()
def gradients_times_constant():
    return handed_on(lambda grads, *_: [2.0 * g for g in grads])


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


@proven()
def centralized_gradients():
    return handed_on(
        lambda grads, *_: [
            g - tf.reduce_mean(g, 0, keepdims=True) for g in grads
        ]
    )


@proven()
def decayed_weights():
    return handed_on(
        lambda grads, weights, _: [
            g + 0.01 * w for g, w in zip(grads, weights, strict=True)
        ]
    )


@differs()
def decayed_by_count():
    def change(grads, weights, x):
        n = tf.cast(tf.shape(x)[0], tf.float32)
        return [
            g + 0.01 * w * n  # here
            for g, w in zip(grads, weights, strict=True)
        ]

    return handed_on(change)


@differs()
def gradients_times_count():
    def change(grads, weights, x):
        n = tf.cast(tf.shape(x)[0], tf.float32)
        return [g * n for g in grads]

    return handed_on(change)


@differs()
def clipped_by_value():
    return handed_on(
        lambda grads, *_: [
            tf.clip_by_value(g, -0.01, 0.01)  # here
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
def skipped_if_large():
    def change(grads, *_):
        fine = tf.linalg.global_norm(grads) < 2.0  # here
        return [tf.where(fine, g, tf.zeros_like(g)) for g in grads]

    return handed_on(change)


@differs()
def conflicting_gradients():
    def step(model, x, y):
        with tf.GradientTape(persistent=True) as tape:
            p = model(x, training=True)
            a, b = mse(y, p), tf.reduce_mean(tf.abs(p - 0.5 * y))
        weights = model.trainable_variables
        grads = []
        for w in weights:
            g, h = tape.gradient(a, w), tape.gradient(b, w)
            dot = tf.reduce_sum(g * h)  # here
            grads.append(g + h - tf.minimum(dot, 0.0) * g)
        model.optimizer.apply(grads, weights)
        return {"loss": a}

    return stepped(step)


@differs()
def sharpness_aware():
    def step(model, x, y):
        weights = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        first = tape.gradient(loss, weights)
        for w, g in zip(weights, first, strict=True):
            w.assign_add(0.5 * g)
        with tf.GradientTape() as tape:
            other = mse(y, model(x, training=True))
        grads = tape.gradient(other, weights)
        for w, g in zip(weights, first, strict=True):
            w.assign_sub(0.5 * g)
        model.optimizer.apply(grads, weights)
        return {"loss": loss}

    return stepped(step)


@differs()
def balanced_by_gradient_norms():
    def step(model, x, y):
        with tf.GradientTape(persistent=True) as tape:
            p = model(x, training=True)
            a, b = mse(y, p), tf.reduce_mean(tf.abs(y - p))
        weights = model.trainable_variables
        g, h = tape.gradient(a, weights), tape.gradient(b, weights)
        ratio = tf.norm(g[0]) / tf.norm(h[0])  # here
        grads = [u + ratio * v for u, v in zip(g, h, strict=True)]
        model.optimizer.apply(grads, weights)
        return {"loss": a}

    return stepped(step)


@unproven()
def private():
    """Every example's gradient is clipped, then the mean is taken."""

    def step(model, x, y):
        weights = model.trainable_variables
        with tf.GradientTape() as tape:
            e = tf.reduce_sum(tf.square(y - model(x, training=True)), -1)
        grads = tape.jacobian(e, [w.value for w in weights])
        clipped = []
        for g in grads:
            axes = list(range(1, len(g.shape)))
            size = tf.sqrt(tf.reduce_sum(tf.square(g), axes, True) + 1e-9)
            g = g * tf.minimum(1.0, 0.1 / size)
            clipped.append(tf.reduce_mean(g, 0))
        model.optimizer.apply(clipped, weights)
        return {"loss": tf.reduce_mean(e)}

    return stepped(step)


@differs()
def stopped_early():
    def loss_of(model, x, y):
        p = model(x, training=True)
        loss = mse(y, p)
        far = tf.reduce_mean(tf.abs(p)) > 0.5  # here
        return tf.where(far, 0.0 * loss, loss)  # here

    return stepped(minimizing(loss_of))


@differs()
def weights_of_examples_by_loss():
    def loss_of(model, x, y):
        e = tf.reduce_mean(tf.square(y - model(x, training=True)), -1)
        w = tf.stop_gradient(tf.nn.softmax(e))  # here
        return tf.reduce_sum(w * e)

    return stepped(minimizing(loss_of))


@proven()
def warmed_up():
    def step(model, x, y):
        done = tf.cast(model.optimizer.iterations, tf.float32)
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            loss *= tf.minimum(1.0, (done + 1) / 4)
        return apply(model, tape, loss)

    return stepped(step)


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


@proven()
def uncertain_weights():
    def loss_of(model, x, y):
        p = model(x, training=True)
        a, b = mse(y, p), tf.reduce_mean(tf.abs(y - p))
        s = model.scales
        return a * tf.exp(-s[0]) + b * tf.exp(-s[1]) + tf.reduce_sum(s)

    model = stepped(minimizing(loss_of))
    model.scales = model.add_weight(shape=(2,), initializer="zeros")
    return model


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
    def loss_of(model, x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            p = model(x, training=True)
        slope = inner.gradient(p, x)
        size = tf.sqrt(tf.reduce_sum(tf.square(slope), 1) + 1e-6)
        return mse(y, p) + tf.reduce_mean(tf.square(size - 1))

    return stepped(minimizing(loss_of))


@differs()
def gradient_penalty_of_mean():
    def loss_of(model, x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            p = model(x, training=True)
            first = mse(y, p)
        slope = inner.gradient(first, x)
        return first + tf.reduce_sum(tf.square(slope))

    return stepped(minimizing(loss_of))


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
