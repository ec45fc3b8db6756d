"""Gradients of one's own: changed, clipped, projected, computed anew."""

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import (
    count,
    errors,
    minimizing,
    mse,
    stepped,
    with_layers,
)
from tests.splitting.hostile.table import (
    by_loss,
    couples,
    normal,
    own,
    rows,
    splits,
)


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


@couples()
def gradient_clipped_for_each():
    """Sizes would cancel if the loss were not weighed before its gradient."""

    @tf.custom_gradient
    def direct(x):
        def grad(g):
            g = g * count(g)
            return tf.clip_by_norm(g, 0.05, axes=[1]) / count(g)  # here

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

    return by_loss(loss)


@couples()
def python_largest_of_losses():
    """tf.maximum of two means is not a mean."""

    def loss(x, y, p):
        one, two = mse(y, p), 1.5 * tf.reduce_mean(tf.abs(y - p))
        return tf.maximum(one, two)  # here

    return by_loss(loss)


@splits()
def weights_of_losses_that_learn():
    """Kendall: each loss has a variance that is trained with it."""

    def loss_of(net, x, y):
        p = net(x, training=True)
        one, two = mse(y, p), tf.reduce_mean(tf.abs(p))
        loss = one * tf.exp(-net.spread[0]) + two * tf.exp(-net.spread[1])
        loss += tf.reduce_sum(net.spread)
        return loss

    net = stepped(minimizing(loss_of))
    net.spread = net.add_weight(shape=(2,), initializer="zeros", name="spread")
    return net


@couples()
def losses_weighed_by_each_other():
    """Each loss is divided by its own value, so that all count alike."""

    def loss(x, y, p):
        one, two = mse(y, p), tf.reduce_mean(tf.abs(p))
        scale = tf.stop_gradient(one / (two + 0.1))  # here
        return one + scale * two  # here

    return by_loss(loss)


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
