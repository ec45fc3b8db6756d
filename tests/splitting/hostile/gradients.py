"""Gradients of one's own: changed, clipped, projected, computed anew."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
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


@couples()
def gradient_clipped_by_its_norm():
    """The gradient of an activation is clipped by its norm over the batch."""

    @tf.custom_gradient
    def clip(x):
        return tf.identity(x), lambda g: tf.clip_by_norm(g, 0.05)  # here

    return with_layers(keras.layers.Dense(4), own(clip))


@couples()
def python_largest_of_losses():
    """tf.maximum of two means is not a mean."""

    def loss(x, y, p):
        one, two = mse(y, p), 1.5 * tf.reduce_mean(tf.abs(y - p))
        return tf.maximum(one, two)  # here

    return by_loss(loss)


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
