"""Steps of functions, branches and loops, also such that write state."""

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    by_default,
    by_loss,
    case,
    count,
    gradients_of,
    layered,
    minimized,
    mse,
    plain,
    rows,
    stepped,
    with_variable,
)


@case(plain)
def folded(y, p):
    s = tf.foldl(lambda a, b: a + tf.square(b), p - y, tf.zeros([3]))
    return tf.reduce_mean(s) / count(p)


@case(plain)
def mapped(y, p):
    return tf.map_fn(tf.nn.softmax, p) - y


@case(plain)
def mapped_by_number(y, p):
    def each(pair):
        return pair[0] * tf.square(pair[1])

    numbers = tf.range(count(p))
    return tf.map_fn(each, (numbers, p - y), fn_output_signature=tf.float32)


@case(plain)
def folded_and_decayed(y, p):
    def decayed(a, b):
        return 0.5 * a + tf.square(b)

    s = tf.foldl(decayed, p - y, tf.zeros([3]))
    return tf.reduce_mean(s)


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


@case(plain)
def centred_and_recomputed(y, p):
    @tf.recompute_grad
    def centre(p):
        return tf.nn.relu(p - tf.reduce_mean(p, 0))

    return tf.square(centre(p) - y)


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


@case(counting)
def counted_by_short_loop(x):
    return 3


@case(counting_if)
def counted_if_positive(model, x):
    return tf.reduce_mean(x) > 0


@case(counting_if, otherwise=-1.0)
def counted_one_way_or_other(model, x):
    return tf.reduce_mean(x) > 0


@case(counting_if)
def counted_by_parity(model, x):
    return model.optimizer.iterations % 2 == 0


@case(layered)
def branch_of_every_example(x):
    def each(row):
        return tf.cond(row[0] > 0, lambda: row * 2, lambda: tf.tanh(row))

    return tf.map_fn(each, x)


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


@case(by_loss)
def same_on_both_branches(y, p):
    """Whichever way a batch goes, it computes the same."""
    square = tf.square(y - p)
    return tf.reduce_mean(tf.where(tf.reduce_mean(y) > 0, square, square))


@case(layered)
def loop_until_all_are_done(x):
    """As many rounds as the slowest example of the batch takes."""

    def large(x):
        return tf.reduce_max(tf.abs(x)) > 1.0

    return tf.while_loop(large, lambda x: [x / 1.5], [x])[0]


@case(layered)
def vectorized_over_examples(x):
    def each(row):
        return tf.linalg.matvec(tf.linalg.diag(row) + tf.eye(6), tf.tanh(row))

    return tf.vectorized_map(each, x)


@case(layered)
def vectorized_over_features(x):
    """The map runs over columns, and centres each one."""

    def each(column):
        return column - tf.reduce_mean(column)

    centred = tf.transpose(tf.vectorized_map(each, tf.transpose(x)))
    return tf.tanh(centred * 2)


@case(layered)
@tf.function
def array_written_backwards(x):
    array = tf.TensorArray(tf.float32, rows(x), element_shape=(6,))
    for i in tf.range(rows(x)):
        array = array.write(rows(x) - 1 - i, x[i])
    return array.stack() + x


@case(layered)
@tf.function
def array_written_forwards(x):
    array = tf.TensorArray(tf.float32, rows(x), element_shape=(6,))
    for i in tf.range(rows(x)):
        array = array.write(i, tf.tanh(x[i]))
    return array.stack() + x
