"""Steps of functions, branches and loops, also such that write state."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    by_default,
    count,
    differs,
    mse,
    plain,
    proven,
    stepped,
    with_variable,
)


@differs()
def total_by_loop():
    def loss(y, p):
        _, total = tf.while_loop(
            lambda i, _: i < tf.shape(p)[0],  # here
            lambda i, s: (i + 1, s + p[i]),
            (0, tf.zeros([3])),
        )
        return tf.reduce_mean(tf.square(total / count(p)))  # here

    return plain(loss)


@differs()
def scanned():
    def loss(y, p):
        s = tf.scan(lambda a, b: 0.5 * a + b, p)  # here
        return tf.square(s - y)

    return plain(loss)


@proven()
def folded():
    def loss(y, p):
        s = tf.foldl(
            lambda a, b: a + tf.square(b),
            p - y,
            tf.zeros([3]),
        )
        return tf.reduce_mean(s) / count(p)

    return plain(loss)


@proven()
def mapped():
    return plain(lambda y, p: tf.map_fn(lambda a: tf.nn.softmax(a), p) - y)


@differs()
def mapped_by_number():
    def loss(y, p):
        numbers = tf.range(count(p))  # here
        return tf.map_fn(
            lambda pair: pair[0] * tf.square(pair[1]),
            (numbers, p - y),
            fn_output_signature=tf.float32,
        )

    return plain(loss)


@differs()
def folded_and_decayed():
    def loss(y, p):
        s = tf.foldl(  # here
            lambda a, b: 0.5 * a + tf.square(b), p - y, tf.zeros([3])
        )
        return tf.reduce_mean(s)

    return plain(loss)


@proven()
def private_by_map():
    """The gradient of each example is clipped by itself."""

    def step(model, x, y):
        weights = model.trainable_variables

        def one(pair):
            a, b = pair
            with tf.GradientTape() as tape:
                loss = mse(b[None], model(a[None], training=True))
            grads = tape.gradient(loss, weights)
            return [tf.clip_by_norm(g, 0.1) for g in grads]

        types = [tf.float32] * len(weights)
        each = tf.map_fn(one, (x, y), fn_output_signature=types)
        grads = [tf.reduce_mean(g, 0) for g in each]
        model.optimizer.apply(grads, weights)
        return {"loss": mse(y, model(x))}

    return stepped(step)


@proven()
def recomputed_by_keras():
    def layer(x):
        return keras.remat(lambda t: tf.tanh(t) * tf.sigmoid(t))(x)

    return plain(lambda y, p: tf.square(layer(p) - y))


@differs()
def centred_and_recomputed():
    @tf.recompute_grad
    def centre(p):
        return tf.nn.relu(p - tf.reduce_mean(p, 0))  # here

    return plain(lambda y, p: tf.square(centre(p) - y))


@proven()
def recomputed():
    @tf.recompute_grad
    def activation(p):
        return tf.nn.tanh(p) * tf.nn.sigmoid(p)

    return plain(lambda y, p: tf.square(activation(p) - y))


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
