"""State that a step keeps, in variables and in metrics."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    by_default,
    classes,
    differs,
    minimizing,
    mse,
    proven,
    stepped,
    with_variable,
)


@differs()
def metric_read_in_the_step():
    seen = keras.metrics.Mean()

    def loss_of(model, x, y):
        p = model(x, training=True)
        seen.update_state(tf.abs(y - p))
        return mse(y, p) * seen.result()  # here

    model = stepped(minimizing(loss_of))
    model.seen = seen
    return model


@differs()
def metric_reset_in_step():
    seen = keras.metrics.Mean()

    def step(model, x, y):
        logs = by_default(model, x, y)
        seen.reset_state()
        seen.update_state(tf.reduce_mean(tf.square(x), 1))
        return {**logs, "seen": tf.sqrt(seen.result())}  # here

    model = stepped(step)
    model.seen = seen
    return model


@differs()
def loss_scaled_by_moving_loss():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            kept = 0.9 * model.kept + 0.1 * tf.stop_gradient(loss)
            loss = loss / kept  # here
        model.kept.assign(kept)
        return apply(model, tape, loss)

    return with_variable(step, initial=1.0)


@differs()
def loss_less_moving_loss():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            e = tf.reduce_mean(tf.square(y - model(x, training=True)), -1)
            advantage = tf.stop_gradient(e - model.kept)  # here
            loss = tf.reduce_mean(e * advantage)
        model.kept.assign(0.9 * model.kept + 0.1 * tf.reduce_mean(e))
        return apply(model, tape, loss)

    return with_variable(step)


@proven()
def moving_loss_only_kept():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        model.kept.assign(0.9 * model.kept + 0.1 * loss)
        return apply(model, tape, loss)

    return with_variable(step)


@differs()
def last_loss_squared():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        model.kept.assign(tf.square(loss))  # here
        return apply(model, tape, loss)

    return with_variable(step)


@differs()
def summed_examples():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            loss = loss / (1.0 + 0.01 * model.kept)  # here
        model.kept.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return apply(model, tape, loss)

    return with_variable(step, aggregation="sum")


@proven()
def counted_examples():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        model.kept.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return apply(model, tape, loss)

    return with_variable(step, aggregation="sum")


def with_sums(step):
    """A step with a variable for each weight."""
    model = stepped(step)
    model.sums = [
        model.add_weight(shape=w.shape, initializer="zeros", trainable=False)
        for w in model.trainable_variables
    ]
    return model


@proven()
def accumulated_by_hand():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, weights)
        for kept, g in zip(model.sums, grads, strict=True):
            kept.assign_add(g)
        scale = tf.cast(model.optimizer.iterations % 2, tf.float32)
        model.optimizer.apply([scale * kept for kept in model.sums], weights)
        for kept in model.sums:
            kept.assign(kept * (1 - scale))
        return {"loss": loss}

    return with_sums(step)


@proven()
def momentum_by_hand():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        moved = []
        grads = tape.gradient(loss, weights)
        for kept, g in zip(model.sums, grads, strict=True):
            kept.assign(0.9 * kept + g)
            moved.append(kept + 0.0)
        model.optimizer.apply(moved, weights)
        return {"loss": loss}

    return with_sums(step)


@differs()
def squares_by_hand():
    """RMSprop: the mean square of gradients is kept, and divides them."""

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        w = model.trainable_variables[-1]
        (g,) = tape.gradient(loss, [w])
        model.kept.assign(0.9 * model.kept + 0.1 * tf.square(g))  # here
        model.optimizer.apply([g / tf.sqrt(model.kept + 1e-6)], [w])  # here
        return {"loss": loss}

    return with_variable(step, (1,), 1.0)


@differs()
def queue_of_keys():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = mse(y, p) + tf.reduce_mean(
                tf.nn.sigmoid(p @ tf.transpose(model.kept))
            )
        keys = tf.stop_gradient(p)[:4]  # here
        model.kept.assign(tf.concat([model.kept[4:], keys], 0))
        return apply(model, tape, loss)

    return with_variable(step, (12, 1), 0.5)


@differs()
def centre_of_outputs():
    """DINO: the teacher's outputs are centred by a moving mean."""

    def step(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            soft = tf.nn.softmax(tf.stop_gradient(p) - model.kept)  # here
            loss = -tf.reduce_mean(soft * tf.nn.log_softmax(p))
        mean = tf.reduce_mean(p, 0)
        model.kept.assign(0.9 * model.kept + 0.1 * mean)
        return apply(model, tape, loss)

    return with_variable(step, (3,), outputs=3)


@differs(classes)
def centres_of_classes():
    def step(model, x, y):
        y = tf.reshape(y, [-1])
        with tf.GradientTape() as tape:
            h = model(x, training=True)
            off = h - tf.gather(model.kept, y)  # here
            loss = tf.reduce_mean(tf.square(off))
        n = tf.math.unsorted_segment_sum(tf.ones_like(off), y, 3)
        moved = tf.math.unsorted_segment_sum(off, y, 3) / (1 + n)  # here
        model.kept.assign_add(0.5 * moved)
        return apply(model, tape, loss)

    return with_variable(step, (3, 1), 0.1)


@differs(classes)
def groups_by_exponents():
    def step(model, x, y):
        y = tf.reshape(y, [-1])
        with tf.GradientTape() as tape:
            e = tf.square(model(x, training=True)[:, 0] - 1.0)
            n = tf.cast(tf.shape(x)[0], tf.float32)
            each = tf.math.unsorted_segment_sum(e, y, 3) / n
            q = tf.nn.softmax(model.kept + 0.1 * tf.stop_gradient(each))  # here
            loss = tf.reduce_sum(q * each)
        model.kept.assign(tf.math.log(q))
        return apply(model, tape, loss)

    return with_variable(step, (3,))
