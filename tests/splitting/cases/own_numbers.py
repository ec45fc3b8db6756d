"""Steps that number the examples, to pick from each of them."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    differs,
    mse,
    plain,
    proven,
    stepped,
)


def _best(p):
    return tf.argmax(tf.stop_gradient(p), 1, tf.int32)


@proven()
def value_of_action():
    """The value that a network gives to the action of each example."""

    def loss(y, p):
        places = tf.stack([tf.range(tf.shape(p)[0]), _best(p)], 1)
        return tf.square(tf.gather_nd(p, places) - y[:, 0])

    return plain(loss)


@proven()
def value_of_action_by_columns():
    def loss(y, p):
        number = tf.range(tf.shape(p, tf.int64)[0])[:, None]
        best = tf.reshape(tf.cast(_best(p), tf.int64), [-1, 1])
        return tf.square(
            tf.gather_nd(p, tf.concat([number, best], 1)) - y[:, 0]
        )

    return plain(loss)


@proven()
def last_of_each_sequence():
    def loss(y, p):
        steps = tf.reshape(tf.concat([p, p**2], 1), [-1, 3, 2])
        lengths = tf.cast(y[:, 0] > 0, tf.int32) + 1
        places = tf.stack([tf.range(tf.shape(p)[0]), lengths], -1)
        return tf.square(tf.gather_nd(steps, places) - y)

    return plain(loss)


@differs()
def value_of_another():
    def loss(y, p):
        count = tf.shape(p)[0]
        places = tf.stack([count - 1 - tf.range(count), _best(p)], 1)
        return tf.square(tf.gather_nd(p, places) - y[:, 0])

    return plain(loss)


@differs()
def action_of_the_first():
    def loss(y, p):
        places = tf.stack([_best(p), tf.range(tf.shape(p)[0])], 1)
        return tf.square(tf.gather_nd(tf.transpose(p)[:, :], places) * y[0, 0])

    return plain(loss)


@differs()
def every_second():
    def step(model, x, y):
        number = tf.range(tf.shape(x)[0])[::2]
        places = tf.stack([number, tf.zeros_like(number)], 1)
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = mse(y[::2, 0], tf.gather_nd(p, places))
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def largest_two():
    def loss(y, p):
        best, _ = tf.math.top_k(tf.concat([p, 2 * p], 1), 2)
        return tf.reduce_sum(tf.square(best - y), 1)

    return plain(loss)


@proven()
def sorted_rows():
    def loss(y, p):
        rows = tf.reshape(tf.concat([p, 2 * p], 1), [-1, 2, 3])
        sorted_ = tf.sort(rows, direction="DESCENDING")
        steps = tf.constant([1.0, 2.0, 3.0])
        return tf.reduce_sum(tf.square(sorted_ * steps - y[:, None]), (1, 2))

    return plain(loss)


@differs()
def largest_of_all():
    def loss(y, p):
        best, _ = tf.math.top_k(tf.transpose(p), 2)  # here
        return tf.reduce_sum(tf.square(best))

    return plain(loss)
