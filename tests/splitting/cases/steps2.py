"""More training steps by hand: state, several gradients, several models."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    WIDTH,
    apply,
    compiled,
    differs,
    proven,
    stepped,
    tokens,
    unproven,
)


def mse(y, p):
    return tf.reduce_mean(tf.square(p - y))


def handed_on(change):
    """A step that changes its gradients."""

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = change(tape.gradient(loss, weights), weights, x)
        model.optimizer.apply(grads, weights)
        return {"loss": loss}

    return stepped(step)


@proven()
def centralized_gradients():
    return handed_on(
        lambda grads, *_: [
            g - tf.reduce_mean(g, 0, keepdims=True) for g in grads
        ]
    )


@proven()
def decayed_weights():
    return handed_on(
        lambda grads, weights, _: [
            g + 0.01 * w for g, w in zip(grads, weights, strict=True)
        ]
    )


@differs()
def decayed_by_count():
    def change(grads, weights, x):
        n = tf.cast(tf.shape(x)[0], tf.float32)
        return [
            g + 0.01 * w * n  # here
            for g, w in zip(grads, weights, strict=True)
        ]

    return handed_on(change)


@differs()
def gradients_times_count():
    def change(grads, weights, x):
        n = tf.cast(tf.shape(x)[0], tf.float32)
        return [g * n for g in grads]

    return handed_on(change)


@differs()
def clipped_by_value():
    return handed_on(
        lambda grads, *_: [
            tf.clip_by_value(g, -0.01, 0.01)  # here
            for g in grads
        ]
    )


@differs()
def sparse_by_size():
    return handed_on(
        lambda grads, *_: [
            tf.where(tf.abs(g) > 0.1, g, 0.0)  # here
            for g in grads
        ]
    )


@differs()
def skipped_if_large():
    def change(grads, *_):
        fine = tf.linalg.global_norm(grads) < 1.0  # here
        return [tf.where(fine, g, tf.zeros_like(g)) for g in grads]

    return handed_on(change)


@differs()
def conflicting_gradients():
    def step(model, x, y):
        with tf.GradientTape(persistent=True) as tape:
            p = model(x, training=True)
            a, b = mse(y, p), tf.reduce_mean(tf.abs(p - 0.5 * y))
        weights = model.trainable_variables
        grads = []
        for w in weights:
            g, h = tape.gradient(a, w), tape.gradient(b, w)
            dot = tf.reduce_sum(g * h)  # here
            grads.append(g + h - tf.minimum(dot, 0.0) * g)
        model.optimizer.apply(grads, weights)
        return {"loss": a}

    return stepped(step)


@differs()
def sharpness_aware():
    def step(model, x, y):
        weights = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        first = tape.gradient(loss, weights)
        for w, g in zip(weights, first, strict=True):
            w.assign_add(0.5 * g)
        with tf.GradientTape() as tape:
            other = mse(y, model(x, training=True))
        grads = tape.gradient(other, weights)
        for w, g in zip(weights, first, strict=True):
            w.assign_sub(0.5 * g)
        model.optimizer.apply(grads, weights)
        return {"loss": loss}

    return stepped(step)


@proven()
def warmed_up():
    def step(model, x, y):
        done = tf.cast(model.optimizer.iterations, tf.float32)
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            loss *= tf.minimum(1.0, (done + 1) / 4)
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def every_other_step():
    def step(model, x, y):
        even = model.optimizer.iterations % 2 == 0
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = tf.cond(
                even,
                lambda: mse(y, p),
                lambda: tf.reduce_mean(tf.abs(y - p)),
            )
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def accumulated_by_keras():
    return stepped(
        lambda model, x, y: by_default(model, x, y),
        optimizer=keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    )


def by_default(model, x, y):
    with tf.GradientTape() as tape:
        loss = mse(y, model(x, training=True))
    return apply(model, tape, loss)


@proven()
def averaged_by_keras():
    return stepped(
        by_default,
        optimizer=keras.optimizers.SGD(
            0.05, use_ema=True, ema_overwrite_frequency=2
        ),
    )


@proven()
def clipped_by_keras():
    return stepped(
        by_default, optimizer=keras.optimizers.SGD(0.05, clipnorm=0.01)
    )


def with_variable(step, shape=(), initial=0.0, **options):
    """A step with a variable of the model's."""
    model = stepped(step)
    model.kept = model.add_weight(
        shape=shape,
        initializer=keras.initializers.Constant(initial),
        trainable=False,
        name="kept",
        **options,
    )
    return model


@differs()
def loss_scaled_by_moving_loss():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            kept = 0.9 * model.kept + 0.1 * tf.stop_gradient(loss)
            loss = loss / kept  # here
        model.kept.assign(kept)
        return apply(model, tape, loss)

    return with_variable(step, initial=1.0)


@differs()
def loss_less_moving_loss():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            e = tf.reduce_mean(tf.square(y - model(x, training=True)), -1)
            advantage = tf.stop_gradient(e - model.kept)  # here
            loss = tf.reduce_mean(e * advantage)
        model.kept.assign(0.9 * model.kept + 0.1 * tf.reduce_mean(e))
        return apply(model, tape, loss)

    return with_variable(step)


@proven()
def moving_loss_only_kept():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        model.kept.assign(0.9 * model.kept + 0.1 * loss)
        return apply(model, tape, loss)

    return with_variable(step)


@differs()
def last_loss_squared():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        model.kept.assign(tf.square(loss))  # here
        return apply(model, tape, loss)

    return with_variable(step)


@differs()
def summed_examples():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            loss = loss / (1.0 + 0.01 * model.kept)  # here
        model.kept.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return apply(model, tape, loss)

    return with_variable(step, aggregation="sum")


@proven()
def counted_examples():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        model.kept.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return apply(model, tape, loss)

    return with_variable(step, aggregation="sum")


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
            d = tf.reduce_sum(tf.square(h[:, None] - model.kept), -1)
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
    def step(model, x, y):
        with tf.GradientTape() as tape:
            h = model.layers[1](x)
            d = tf.reduce_sum(tf.square(h[:, None] - model.book), -1)
            code = tf.gather(model.book, tf.argmin(d, 1))
            p = model.layers[2](h + tf.stop_gradient(code - h))
            loss = mse(y, p) + mse(tf.stop_gradient(h), code)
        return apply(model, tape, loss)

    model = stepped(step)
    model.book = model.add_weight(
        shape=(4, 5), initializer=keras.initializers.RandomNormal(seed=1)
    )
    return model


@proven()
def diffusion():
    def step(model, x, y):
        noise, level = x[:, :3], tf.sigmoid(y)
        clean = tf.concat([x[:, 3:], level, level, level], 1)
        alpha = tf.gather(
            tf.linspace(0.9, 0.1, 10), tf.cast(level[:, 0] * 10, tf.int32)
        )[:, None]
        with tf.GradientTape() as tape:
            mixed = tf.sqrt(alpha) * clean + tf.sqrt(1 - alpha) * tf.concat(
                [noise, noise], 1
            )
            loss = mse(model(mixed, training=True), noise)
        return apply(model, tape, loss)

    return stepped(step, 3)


@proven()
def radiance():
    def step(model, x, y):
        t = tf.linspace(0.0, 1.0, 5)
        points = x[:, None, :] * t[None, :, None]
        with tf.GradientTape() as tape:
            raw = model(tf.reshape(points, [-1, WIDTH]), training=True)
            raw = tf.reshape(raw, [-1, 5, 2])
            alpha = 1 - tf.exp(-tf.nn.relu(raw[..., 0]))
            seen = tf.math.cumprod(1 - alpha + 1e-6, 1, exclusive=True)
            color = tf.reduce_sum(alpha * seen * raw[..., 1], 1)
            loss = mse(y[:, 0], color)
        return apply(model, tape, loss)

    return stepped(step, 2)


@differs()
def policy_gradient_with_baseline():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            taken = tf.cast(y[:, 0] > 0, tf.int32)
            e = tf.nn.sparse_softmax_cross_entropy_with_logits(taken, logits)
            gain = y[:, 0] - tf.reduce_mean(y[:, 0])  # here
            loss = tf.reduce_mean(e * gain)
        return apply(model, tape, loss)

    return stepped(step, 2)


@proven()
def policy_gradient():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            taken = tf.cast(y[:, 0] > 0, tf.int32)
            e = tf.nn.sparse_softmax_cross_entropy_with_logits(taken, logits)
            ratio = tf.exp(e - tf.stop_gradient(e))
            kept = tf.clip_by_value(ratio, 0.8, 1.2)
            gain = y[:, 0]
            loss = tf.reduce_mean(tf.maximum(ratio * gain, kept * gain))
        return apply(model, tape, loss)

    return stepped(step, 2)


@proven()
def variational():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            mean, log_var = tf.split(model(x, training=True), 2, -1)
            z = mean + tf.exp(0.5 * log_var) * x[:, :2]
            kl = -0.5 * tf.reduce_sum(
                1 + log_var - tf.square(mean) - tf.exp(log_var), 1
            )
            loss = mse(y, tf.reduce_sum(z, 1, keepdims=True))
            loss += tf.reduce_mean(kl)
        return apply(model, tape, loss)

    return stepped(step, 4)


@differs()
def mixed_up():
    def step(model, x, y):
        a = tf.sigmoid(y)
        x = a * x + (1 - a) * tf.reverse(x, [0])  # here
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@unproven()
def private():
    """Every example's gradient is clipped, then the mean is taken."""

    def step(model, x, y):
        weights = model.trainable_variables
        with tf.GradientTape() as tape:
            e = tf.reduce_sum(tf.square(y - model(x, training=True)), -1)
        grads = tape.jacobian(e, [w.value for w in weights])
        clipped = []
        for g in grads:
            axes = list(range(1, len(g.shape)))
            size = tf.sqrt(tf.reduce_sum(tf.square(g), axes, True) + 1e-9)
            g = g * tf.minimum(1.0, 0.1 / size)
            clipped.append(tf.reduce_mean(g, 0))
        model.optimizer.apply(clipped, weights)
        return {"loss": tf.reduce_mean(e)}

    return stepped(step)


@differs()
def logged_count():
    def step(model, x, y):
        logs = by_default(model, x, y)
        return {**logs, "n": tf.cast(tf.shape(x)[0], tf.float32)}

    return stepped(step)


@proven()
def logged_rate():
    def step(model, x, y):
        logs = by_default(model, x, y)
        return {**logs, "rate": model.optimizer.learning_rate * 1.0}

    return stepped(step)


@differs()
def metric_reset_in_step():
    seen = keras.metrics.Mean()

    def step(model, x, y):
        logs = by_default(model, x, y)
        seen.reset_state()
        seen.update_state(tf.reduce_mean(tf.square(x), 1))
        return {**logs, "seen": tf.sqrt(seen.result())}  # here

    model = stepped(step)
    model.seen = seen
    return model


def of_words(change):
    """A step that changes the gradient of an embedding."""

    class Words(keras.Model):
        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = mse(y, self(x, training=True))
            first, *rest = tape.gradient(loss, weights)
            self.optimizer.apply([change(first, x), *rest], weights)
            return {"loss": loss}

    entrance = keras.Input((8,), dtype="int32")
    h = keras.layers.Embedding(9, 4)(entrance)
    h = keras.layers.Flatten()(h)
    return compiled(Words(entrance, keras.layers.Dense(1)(h)))


@proven(tokens)
def words():
    return of_words(lambda g, x: g)


@proven(tokens)
def words_densely():
    return of_words(lambda g, x: tf.convert_to_tensor(g) * 2.0)


@differs(tokens)
def words_clipped():
    return of_words(
        lambda g, x: tf.clip_by_norm(tf.convert_to_tensor(g), 0.01)  # here
    )


@differs(tokens)
def words_clipped_by_row():
    def change(g, x):
        values = tf.clip_by_norm(g.values, 0.001, [1])  # here
        return tf.IndexedSlices(values, g.indices, g.dense_shape)

    return of_words(change)


@differs(tokens)
def words_times_count():
    def change(g, x):
        n = tf.cast(tf.shape(x)[0], tf.float32)
        return tf.IndexedSlices(g.values * n, g.indices, g.dense_shape)

    return of_words(change)


@proven()
def checked():
    def step(model, x, y):
        tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), 100.0)
        return by_default(model, x, y)

    return stepped(step)


@unproven()
def checked_to_be_finite():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, weights)
        grads = [tf.where(tf.math.is_finite(g), g, 0.0) for g in grads]
        model.optimizer.apply(grads, weights)
        return {"loss": loss}

    return stepped(step)
