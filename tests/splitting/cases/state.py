"""State that a step keeps, and steps of several models."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    apply,
    classes,
    compiled,
    differs,
    minimizing,
    mse,
    proven,
    stepped,
    with_variable,
)


@differs()
def metric_read_in_the_step():
    seen = keras.metrics.Mean()

    def loss_of(model, x, y):
        p = model(x, training=True)
        seen.update_state(tf.abs(y - p))
        return mse(y, p) * seen.result()  # here

    model = stepped(minimizing(loss_of))
    model.seen = seen
    return model


@proven()
def moving_loss_only_kept():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        model.kept.assign(0.9 * model.kept + 0.1 * loss)
        return apply(model, tape, loss)

    return with_variable(step)


@proven()
def counted_examples():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        model.kept.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return apply(model, tape, loss)

    return with_variable(step, aggregation="sum")


def with_sums(step):
    """A step with a variable for each weight."""
    model = stepped(step)
    model.sums = [
        model.add_weight(shape=w.shape, initializer="zeros", trainable=False)
        for w in model.trainable_variables
    ]
    return model


@proven()
def accumulated_by_hand():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, weights)
        for kept, g in zip(model.sums, grads, strict=True):
            kept.assign_add(g)
        scale = tf.cast(model.optimizer.iterations % 2, tf.float32)
        model.optimizer.apply([scale * kept for kept in model.sums], weights)
        for kept in model.sums:
            kept.assign(kept * (1 - scale))
        return {"loss": loss}

    return with_sums(step)


@proven()
def momentum_by_hand():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        moved = []
        grads = tape.gradient(loss, weights)
        for kept, g in zip(model.sums, grads, strict=True):
            kept.assign(0.9 * kept + g)
            moved.append(kept + 0.0)
        model.optimizer.apply(moved, weights)
        return {"loss": loss}

    return with_sums(step)


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


@differs(classes)
def groups_by_exponents():
    def step(model, x, y):
        y = tf.reshape(y, [-1])
        with tf.GradientTape() as tape:
            e = tf.square(model(x, training=True)[:, 0] - 1.0)
            n = tf.cast(tf.shape(x)[0], tf.float32)
            each = tf.math.unsorted_segment_sum(e, y, 3) / n
            q = tf.nn.softmax(model.kept + 0.1 * tf.stop_gradient(each))  # here
            loss = tf.reduce_sum(q * each)
        model.kept.assign(tf.math.log(q))
        return apply(model, tape, loss)

    return with_variable(step, (3,))


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
