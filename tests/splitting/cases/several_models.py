"""Steps of several models or optimizers."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    compiled,
    minimizing,
    mse,
    proven,
    stepped,
)


@proven()
def generator_and_critic():
    first = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(3)])
    second = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizers = [keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.01)]

    class Game(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second
            self.others = optimizers

        def call(self, x):
            return self.second(self.first(x))

        def train_step(self, data):
            x, y = data
            real = tf.concat([y, y * 2, y * 3], 1)
            cross = tf.nn.sigmoid_cross_entropy_with_logits
            with tf.GradientTape() as tape:
                both = self.second(tf.concat([real, self.first(x)], 0))
                n = tf.shape(x)[0]
                labels = tf.concat([tf.ones([n, 1]), tf.zeros([n, 1])], 0)
                d = tf.reduce_mean(cross(labels, both))
            w = self.second.trainable_variables
            self.others[0].apply(tape.gradient(d, w), w)
            with tf.GradientTape() as tape:
                fake = self.second(self.first(x))
                g = tf.reduce_mean(cross(tf.ones_like(fake), fake))
            w = self.first.trainable_variables
            self.others[1].apply(tape.gradient(g, w), w)
            return {"d": d, "g": g}

    return compiled(Game())


@proven()
def two_optimizers():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, weights)
        model.others[0].apply(grads[:2], weights[:2])
        model.others[1].apply(grads[2:], weights[2:])
        return {"loss": loss}

    model = stepped(step)
    model.others = [keras.optimizers.SGD(0.05), keras.optimizers.Adam()]
    return model


@proven()
def code_book_by_gradients():
    def loss_of(model, x, y):
        h = model.layers[1](x)
        d = tf.reduce_sum(tf.square(h[:, None] - model.book), -1)
        code = tf.gather(model.book, tf.argmin(d, 1))
        p = model.layers[2](h + tf.stop_gradient(code - h))
        return mse(y, p) + mse(tf.stop_gradient(h), code)

    model = stepped(minimizing(loss_of))
    model.book = model.add_weight(
        shape=(4, 5), initializer=keras.initializers.RandomNormal(seed=1)
    )
    return model
