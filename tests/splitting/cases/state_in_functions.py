"""State that is written in loops, branches and functions."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    by_default,
    differs,
    mse,
    proven,
    with_variable,
)


def counting(times):
    """A step that counts in a loop."""

    def step(model, x, y):
        def once(i):
            model.kept.assign_add(1.0)
            return (i + 1,)

        tf.while_loop(lambda i: i < times(x), once, (0,))  # here
        return by_default(model, x, y)

    return with_variable(step)


def counting_if(chosen, otherwise=0.0):
    """A step that counts in one branch, and perhaps in the other."""

    def add(model, number):
        if number:
            model.kept.assign_add(number)
        return tf.constant(0.0)

    def step(model, x, y):
        tf.cond(
            chosen(model, x),  # here
            lambda: add(model, 1.0),
            lambda: add(model, otherwise),
        )
        return by_default(model, x, y)

    return with_variable(step)


@differs()
def state_in_nested_function():
    def step(model, x, y):
        @tf.function
        def keep(loss):
            model.kept.assign(tf.maximum(model.kept, loss))  # here
            return model.kept + 0.0

        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        keep(loss)
        return apply(model, tape, loss)

    return with_variable(step)


@differs()
def state_in_loop():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))

        def once(i):
            model.kept.assign_add(tf.square(loss))  # here
            return (i + 1,)

        tf.while_loop(lambda i: i < 3, once, (0,))
        return apply(model, tape, loss)

    return with_variable(step)


@differs()
def counted_by_loop():
    return counting(lambda x: tf.shape(x)[0])


@proven()
def counted_by_short_loop():
    return counting(lambda x: 3)


@differs()
def counted_if_positive():
    return counting_if(lambda model, x: tf.reduce_mean(x) > 0)  # here


@differs()
def counted_one_way_or_other():
    return counting_if(lambda model, x: tf.reduce_mean(x) > 0, -1.0)  # here


@proven()
def counted_by_parity():
    return counting_if(lambda model, x: model.optimizer.iterations % 2 == 0)
