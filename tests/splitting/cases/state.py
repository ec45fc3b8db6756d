"""State that a step keeps, in variables and in metrics."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
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


@proven()
def moving_loss_only_kept():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        model.kept.assign(0.9 * model.kept + 0.1 * loss)
        return apply(model, tape, loss)

    return with_variable(step)


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
