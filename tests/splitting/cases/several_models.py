"""Steps of several models or optimizers."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    apply,
    compiled,
    differs,
    minimizing,
    mse,
    proven,
    stepped,
    with_variable,
)


@proven()
def teacher():
    def step(model, x, y):
        teacher = model.get_layer("teacher")
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = mse(y, p) + mse(tf.stop_gradient(teacher(x)), p)
        return apply(model, tape, loss)

    model = stepped(step)
    teacher = keras.layers.Dense(1, name="teacher", trainable=False)
    teacher.build((None, 6))
    model.teacher = teacher
    model.get_layer = lambda _: teacher
    return model


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
def teacher_follows():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = mse(y, p) + mse(tf.stop_gradient(x @ model.kept), p)
        logs = apply(model, tape, loss)
        mean = model.layers[-1].kernel
        model.kept.assign(0.9 * model.kept + 0.1 * tf.reduce_mean(mean))
        return logs

    return with_variable(step, (WIDTH, 1), 0.1)


@differs()
def vector_quantized():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            h = model.layers[1](x)
            off = h[:, None] - model.kept  # here
            d = tf.reduce_sum(tf.square(off), -1)
            at = tf.argmin(d, 1)
            code = tf.gather(model.kept, at)
            q = h + tf.stop_gradient(code - h)
            p = model.layers[2](q)
            loss = mse(y, p) + 0.2 * mse(tf.stop_gradient(code), h)
        hot = tf.one_hot(at, 4)
        sums = tf.matmul(hot, h, transpose_a=True)
        mean = sums / (tf.reduce_sum(hot, 0)[:, None] + 1e-3)  # here
        logs = apply(model, tape, loss)
        model.kept.assign(0.9 * model.kept + 0.1 * mean)
        return logs

    model = with_variable(step, (4, 5), 0.1)
    model.kept.assign(keras.random.normal((4, 5), seed=1))
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


@differs()
def policy_gradient_with_baseline():
    def loss_of(model, x, y):
        logits = model(x, training=True)
        taken = tf.cast(y[:, 0] > 0, tf.int32)
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(taken, logits)
        gain = y[:, 0] - tf.reduce_mean(y[:, 0])  # here
        return tf.reduce_mean(e * gain)

    return stepped(minimizing(loss_of), 2)


@proven()
def policy_gradient():
    def loss_of(model, x, y):
        logits = model(x, training=True)
        taken = tf.cast(y[:, 0] > 0, tf.int32)
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(taken, logits)
        ratio = tf.exp(e - tf.stop_gradient(e))
        kept = tf.clip_by_value(ratio, 0.8, 1.2)
        gain = y[:, 0]
        return tf.reduce_mean(tf.maximum(ratio * gain, kept * gain))

    return stepped(minimizing(loss_of), 2)


@differs()
def normalized_advantages():
    def step(model, x, y):
        a = y - tf.reduce_mean(y)  # here
        a = a / (tf.math.reduce_std(y) + 1e-6)  # here
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(a * model(x, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def differences_in_time():
    def loss_of(model, x, y):
        v = model(x, training=True)
        later = tf.stop_gradient(x @ model.kept)
        return tf.reduce_mean(keras.losses.huber(y + 0.9 * later, v))

    return with_variable(minimizing(loss_of), (WIDTH, 1), 0.1)


@proven()
def low_rank():
    a = keras.layers.Dense(2, use_bias=False)
    b = keras.layers.Dense(WIDTH, kernel_initializer="zeros")
    frozen = keras.layers.Dense(WIDTH)
    frozen.trainable = False
    entrance = keras.Input((WIDTH,))
    h = frozen(entrance) + b(a(entrance))
    return compiled(keras.Model(entrance, keras.layers.Dense(1)(h)))
