"""State that a step keeps, in variables and in metrics."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    classes,
    differs,
    mse,
    with_variable,
)


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
