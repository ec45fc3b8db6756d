"""Training steps by hand."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import apply, differs, proven, stepped


def mse(y, p):
    return tf.reduce_mean(tf.square(p - y))


@proven()
def by_hand():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@differs()
def clipped_by_norm():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, weights)
        grads = [tf.clip_by_norm(g, 0.01) for g in grads]  # here
        model.optimizer.apply(grads, weights)
        return {"loss": loss}

    return stepped(step)


@differs()
def clipped_by_global_norm():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, weights)
        grads, _ = tf.clip_by_global_norm(grads, 0.01)  # here
        model.optimizer.apply(grads, weights)
        return {"loss": loss}

    return stepped(step)


@proven()
def gradients_times_constant():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = [2.0 * g for g in tape.gradient(loss, weights)]
        model.optimizer.apply(grads, weights)
        return {"loss": loss}

    return stepped(step)


@differs()
def signs_of_gradients():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = [tf.sign(g) for g in tape.gradient(loss, weights)]  # here
        model.optimizer.apply(grads, weights)
        return {"loss": loss}

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


@differs()
def metric_read_in_the_step():
    seen = keras.metrics.Mean()

    def step(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            seen.update_state(tf.abs(y - p))
            loss = mse(y, p) * seen.result()  # here
        return apply(model, tape, loss)

    model = stepped(step)
    model.seen = seen
    return model


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
def weights_of_examples_by_loss():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            e = tf.reduce_mean(tf.square(y - model(x, training=True)), -1)
            w = tf.stop_gradient(tf.nn.softmax(e))  # here
            loss = tf.reduce_sum(w * e)
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def teacher():
    def step(model, x, y):
        teacher = model.get_layer("teacher")
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = mse(y, p) + mse(tf.stop_gradient(teacher(x)), p)
        return apply(model, tape, loss)

    model = stepped(step)
    teacher = keras.layers.Dense(1, name="teacher", trainable=False)
    teacher.build((None, 6))
    model.teacher = teacher
    model.get_layer = lambda _: teacher
    return model
