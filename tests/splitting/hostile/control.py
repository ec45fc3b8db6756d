"""Branches, loops, functions, gradients of one's own, and Python."""

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    count,
    errors,
    mse,
    stepped,
    with_layers,
)
from tests.splitting.hostile.table import couples, normal, own, rows, splits


def _loss(of, outputs=1):
    def step(net, x, y):
        with tf.GradientTape() as tape:
            loss = of(x, y, net(x, training=True))
        return apply(net, tape, loss)

    return stepped(step, outputs)


@splits()
def branch_of_every_example():
    def each(row):
        return tf.cond(row[0] > 0, lambda: row * 2, lambda: tf.tanh(row))

    return with_layers(own(lambda x: tf.map_fn(each, x)))


@couples()
def branch_of_the_batch():
    def loss(x, y, p):
        high = tf.reduce_mean(x[:, 0]) > 0  # here
        return tf.cond(  # here
            high, lambda: mse(y, p), lambda: tf.reduce_mean(tf.abs(y - p))
        )

    return _loss(loss)


@splits()
def branch_of_the_step():
    def step(net, x, y):
        with tf.GradientTape() as tape:
            p = net(x, training=True)
            loss = tf.switch_case(
                tf.cast(net.optimizer.iterations, tf.int32) % 3,
                [
                    lambda: mse(y, p),
                    lambda: tf.reduce_mean(tf.abs(y - p)),
                    lambda: tf.reduce_mean(keras.losses.log_cosh(y, p)),
                ],
            )
        return apply(net, tape, loss)

    return stepped(step)


@couples()
def branch_on_any():
    """Clipped only if any example is large."""

    def large(x):
        any_large = tf.reduce_any(tf.abs(x) > 2.2)  # here
        return tf.cond(any_large, lambda: tf.tanh(x), lambda: x)  # here

    return with_layers(own(large))


@splits()
def same_on_both_branches():
    """Whichever way a batch goes, it computes the same."""

    def loss(x, y, p):
        high = tf.reduce_mean(x[:, 0]) > 0
        square = tf.square(y - p)
        return tf.reduce_mean(tf.where(high, square, square))

    return _loss(loss)


@splits()
def loop_until_every_one_is_done():
    """Newton's steps, a fixed number of them, in a while loop."""

    def root(x):
        value = tf.abs(x) + 1.0

        def body(i, guess):
            return i + 1, (guess + value / guess) / 2

        start = (0, tf.ones_like(x))
        return tf.while_loop(lambda i, _: i < 4, body, start)[1]

    return with_layers(own(root))


@couples()
def loop_until_all_are_done():
    """As many rounds as the slowest example of the batch takes."""

    def halve(x):
        def body(x):
            return [x / 1.5]

        def large(x):
            return tf.reduce_max(tf.abs(x)) > 1.0  # here

        return tf.while_loop(large, body, [x])[0]  # here

    return with_layers(own(halve))


@splits()
def loop_until_each_is_done():
    """The same loop, where those that are done stay as they are."""

    def halve(x):
        for _ in tf.range(5):
            x = tf.where(tf.abs(x) > 1.0, x / 1.5, x)
        return x

    return with_layers(own(tf.function(halve)))


@splits()
def vectorized_over_examples():
    def each(row):
        return tf.linalg.matvec(tf.linalg.diag(row) + tf.eye(6), tf.tanh(row))

    return with_layers(own(lambda x: tf.vectorized_map(each, x)))


@couples()
def vectorized_over_features():
    """The map runs over columns, and centres each one."""

    def each(column):
        return column - tf.reduce_mean(column)

    def centre(x):
        return tf.transpose(tf.vectorized_map(each, tf.transpose(x)))  # here

    return with_layers(own(lambda x: tf.tanh(centre(x) * 2)))


@couples()
def carried_from_example_to_example():
    """A fold over the batch: what one leaves, the next one finds."""

    def smooth(x):
        return tf.scan(lambda a, b: 0.5 * a + 0.5 * b, x)  # here

    return with_layers(own(smooth))


@couples()
def array_written_backwards():
    def turn(x):
        size = rows(x)
        array = tf.TensorArray(tf.float32, size, element_shape=(6,))
        for i in tf.range(size):
            array = array.write(size - 1 - i, x[i])  # here
        return array.stack() + x  # here

    return with_layers(own(tf.function(turn)))


@splits()
def array_written_forwards():
    def copy(x):
        size = rows(x)
        array = tf.TensorArray(tf.float32, size, element_shape=(6,))
        for i in tf.range(size):
            array = array.write(i, tf.tanh(x[i]))
        return array.stack() + x

    return with_layers(own(tf.function(copy)))


@splits()
def gradient_reversed():
    """Domain-adversarial training: a gradient that is turned around."""

    @tf.custom_gradient
    def turn(x):
        return x, lambda upstream: -0.3 * upstream

    return with_layers(keras.layers.Dense(4), own(turn))


@couples()
def gradient_clipped_by_its_norm():
    """The gradient of an activation is clipped by its norm over the batch."""

    @tf.custom_gradient
    def clip(x):
        return tf.identity(x), lambda g: tf.clip_by_norm(g, 0.05)  # here

    return with_layers(keras.layers.Dense(4), own(clip))


@splits()
def gradient_clipped_for_each():
    """Directions of the gradients of each example: sizes cancel."""

    @tf.custom_gradient
    def direct(x):
        def grad(g):
            g = g * count(g)
            return tf.clip_by_norm(g, 0.05, axes=[1]) / count(g)

        return tf.identity(x), grad

    return with_layers(keras.layers.Dense(4), own(direct))


@couples()
def gradient_of_a_fixed_length():
    """Clipped for each example, but its gradient has the batch's size in it."""

    @tf.custom_gradient
    def clip(x):
        def grad(g):
            return tf.clip_by_norm(g, 0.01, axes=[1])  # here

        return tf.identity(x), grad

    return with_layers(keras.layers.Dense(4), own(clip))


@splits()
def numpy_that_is_constant():
    """A matrix from numpy with a seed is the same wherever it is made."""

    def project(x):
        matrix = np.random.default_rng(0).normal(size=(6, 4))
        return x @ matrix.astype("float32")

    return with_layers(own(project))


@couples()
def numpy_of_the_batch():
    """numpy_function sees a tower's rows, and centres them."""

    def centre(x):
        def inside(a):
            return (a - a.mean(0)).astype("float32")

        out = tf.numpy_function(inside, [x], tf.float32)  # here
        return tf.ensure_shape(out, (None, 6)) + x

    return with_layers(own(centre))


@splits()
def python_sum_of_losses():
    """A Python list of losses, and the built-in sum."""

    def loss(x, y, p):
        parts = [tf.reduce_mean(tf.square(y - p * k)) for k in (0.5, 1.0, 2.0)]
        return sum(parts) / len(parts)

    return _loss(loss)


@couples()
def python_largest_of_losses():
    """tf.maximum of two means is not a mean."""

    def loss(x, y, p):
        one, two = mse(y, p), 1.5 * tf.reduce_mean(tf.abs(y - p))
        return tf.maximum(one, two)  # here

    return _loss(loss)


@splits()
def weights_of_losses_that_learn():
    """Kendall: each loss has a variance that is trained with it."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            p = net(x, training=True)
            one, two = mse(y, p), tf.reduce_mean(tf.abs(p))
            loss = one * tf.exp(-net.spread[0]) + two * tf.exp(-net.spread[1])
            loss += tf.reduce_sum(net.spread)
        return apply(net, tape, loss)

    net = stepped(step)
    net.spread = net.add_weight(shape=(2,), initializer="zeros", name="spread")
    return net


@couples()
def losses_weighed_by_each_other():
    """Each loss is divided by its own value, so that all count alike."""

    def loss(x, y, p):
        one, two = mse(y, p), tf.reduce_mean(tf.abs(p))
        scale = tf.stop_gradient(one / (two + 0.1))  # here
        return one + scale * two  # here

    return _loss(loss)


@couples()
def gradients_projected():
    """PCGrad: one task's gradient is projected if the tasks disagree."""

    def step(net, x, y):
        weights = net.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            p = net(x, training=True)
            one, two = mse(y, p), tf.reduce_mean(tf.abs(p - 1))
        first, second = tape.gradient(one, weights), tape.gradient(two, weights)
        moves = []
        for a, b in zip(first, second, strict=True):
            dot = tf.reduce_sum(a * b)  # here
            away = tf.where(dot < 0, dot / tf.reduce_sum(b * b), 0.0)  # here
            moves.append(a - away * b + b)  # here
        net.optimizer.apply(moves, weights)
        return {"loss": one}

    return stepped(step)


@splits()
def gradients_added():
    """Two tapes, whose gradients are added with fixed weights."""

    def step(net, x, y):
        weights = net.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            p = net(x, training=True)
            one, two = mse(y, p), tf.reduce_mean(tf.abs(p - 1))
        first, second = tape.gradient(one, weights), tape.gradient(two, weights)
        moves = [a - 0.3 * b for a, b in zip(first, second, strict=True)]
        net.optimizer.apply(moves, weights)
        return {"loss": one}

    return stepped(step)


@couples()
def gradient_signs():
    """SignSGD by hand."""

    def step(net, x, y):
        weights = net.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, net(x, training=True))
        slopes = tape.gradient(loss, weights)
        net.optimizer.apply([tf.sign(g) for g in slopes], weights)  # here
        return {"loss": loss}

    return stepped(step)


@couples()
def gradient_clipped_by_example_twice():
    """DP-SGD without noise, whose mean is made by the batch in Python."""

    def step(net, x, y):
        weights = net.trainable_variables
        with tf.GradientTape() as tape:
            each = errors(y, net(x, training=True))
        slopes = tape.jacobian(each, weights)
        moves = []
        for g in slopes:
            flat = tf.clip_by_norm(tf.reshape(g, [rows(x), -1]), 0.3, axes=[1])
            mean = tf.reduce_sum(flat, 0) / 14.0  # here
            moves.append(tf.reshape(mean, tf.shape(g)[1:]))
        net.optimizer.apply(moves, weights)
        return {"loss": tf.reduce_mean(each)}

    return stepped(step)


@splits(lambda: (normal(6), normal(1)))
def recomputed():
    """Gradient checkpointing."""
    inner = keras.layers.Dense(4, "tanh")
    inner.build((None, 6))

    class Remat(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return keras.remat(self.inner)(x)

    return with_layers(Remat())


@splits()
def fixed_point():
    """Deep equilibrium: iterated without gradient, then one step with it."""

    class Equal(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(6, 6), name="w")

        def call(self, x):
            z = tf.zeros_like(x)
            for _ in range(6):
                z = tf.tanh(z @ self.w * 0.3 + x)
            z = tf.stop_gradient(z)
            return tf.tanh(z @ self.w * 0.3 + x)

    return with_layers(Equal())


@couples()
def stopped_when_all_converged():
    """The same, with a test of convergence over the batch."""

    class Equal(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(6, 6), name="w")

        def call(self, x):
            def far(z, old):
                return tf.reduce_mean(tf.abs(z - old)) > 0.05  # here

            def body(z, old):
                return tf.tanh(z @ self.w * 0.7 + x), z

            start = (tf.tanh(x), tf.zeros_like(x))
            z, _ = tf.while_loop(far, body, start)  # here
            z = tf.stop_gradient(z)
            return tf.tanh(z @ self.w * 0.7 + x)

    return with_layers(Equal())
