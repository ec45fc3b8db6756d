"""Steps of functions, branches and loops, also such that write state."""

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    by_default,
    case,
    gradients_of,
    layered,
    minimized,
    mse,
    rows,
    stepped,
    with_variable,
)


@case(stepped)
def private_by_map(model, x, y):
    """The gradient of each example is clipped by itself."""
    weights = model.trainable_variables

    def one(pair):
        _, grads = gradients_of(model, pair[0][None], pair[1][None])
        return [tf.clip_by_norm(g, 0.1) for g in grads]

    types = [tf.float32] * len(weights)
    each = tf.map_fn(one, (x, y), fn_output_signature=types)
    model.optimizer.apply([tf.reduce_mean(g, 0) for g in each], weights)
    return {"loss": mse(y, model(x))}


def counting(times):
    """A step that counts in a loop."""

    def step(model, x, y):
        def once(i):
            model.kept.assign_add(1.0)
            return (i + 1,)

        tf.while_loop(lambda i: i < times(x), once, (0,))
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
            chosen(model, x),
            lambda: add(model, 1.0),
            lambda: add(model, otherwise),
        )
        return by_default(model, x, y)

    return with_variable(step)


@case(with_variable)
def state_in_nested_function(model, x, y):
    @tf.function
    def keep(loss):
        model.kept.assign(tf.maximum(model.kept, loss))
        return model.kept + 0.0

    logs = by_default(model, x, y)
    keep(logs["loss"])
    return logs


@case(with_variable)
def state_in_loop(model, x, y):
    logs = by_default(model, x, y)

    def once(i):
        model.kept.assign_add(tf.square(logs["loss"]))
        return (i + 1,)

    tf.while_loop(lambda i: i < 3, once, (0,))
    return logs


@case(counting)
def counted_by_loop(x):
    return rows(x)


@case(counting_if)
def counted_if_positive(model, x):
    return tf.reduce_mean(x) > 0


@case(counting_if)
def counted_by_parity(model, x):
    return model.optimizer.iterations % 2 == 0


@case(minimized)
def branch_of_the_step(net, x, y):
    p = net(x, training=True)
    return tf.switch_case(
        tf.cast(net.optimizer.iterations, tf.int32) % 3,
        [
            lambda: mse(y, p),
            lambda: tf.reduce_mean(tf.abs(y - p)),
            lambda: tf.reduce_mean(keras.losses.log_cosh(y, p)),
        ],
    )


@case(layered)
def vectorized_over_examples(x):
    def each(row):
        return tf.linalg.matvec(tf.linalg.diag(row) + tf.eye(6), tf.tanh(row))

    return tf.vectorized_map(each, x)
