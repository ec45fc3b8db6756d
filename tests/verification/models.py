"""Miniatures of well-known models, most with a training step of their own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

RANDOM = np.random.RandomState(0)
ROWS = 24
FEATURES = RANDOM.randn(ROWS, 6).astype("float32")
TARGETS = (FEATURES[:, :3] ** 2).astype("float32")
LABELS = RANDOM.randint(0, 3, ROWS).astype("int32")
WEIGHTS = RANDOM.rand(ROWS).astype("float32")
TOKENS = RANDOM.randint(1, 12, (ROWS, 5)).astype("int32")
for _row, _length in enumerate(RANDOM.randint(1, 6, ROWS)):
    TOKENS[_row, _length:] = 0
TOKEN_LABELS = RANDOM.randint(0, 3, (ROWS, 5)).astype("int32")
WALKS = np.cumsum(RANDOM.randn(ROWS, 4, 6), axis=1).astype("float32")
# Rows that a mask drops are all in one half of a batch.
MASK = (np.arange(ROWS) % 8 < 5).astype("float32")


def adam():
    return keras.optimizers.Adam(1e-2)


def dense(*sizes, activation="tanh"):
    """A network of dense layers."""
    body = [layers.Dense(n, activation=activation) for n in sizes[:-1]]
    return keras.Sequential([*body, layers.Dense(sizes[-1])])


def classifier(*middle, features=6):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((features,)),
            layers.Dense(7, activation="tanh"),
            *middle,
            layers.Dense(3, dtype="float32"),
        ]
    )


def compiled(model, loss="mse", optimizer=None, **kwargs):
    model.compile(optimizer or adam(), loss, **kwargs)
    return model


class Stepping(keras.Model):
    """A model with a step: a tape over ``loss_of``, then an update."""

    def __init__(self, *sizes, seed=2):
        super().__init__()
        keras.utils.set_random_seed(seed)
        self.body = dense(*(sizes or (8, 4)))

    def call(self, x):
        return self.body(x)

    def loss_of(self, data):
        raise NotImplementedError

    def changed(self, grads):
        return grads

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        weights = self.trainable_weights
        grads = self.changed(tape.gradient(loss, weights))
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss}


def features(data):
    """The ``x`` of what a step gets, which is no tuple without targets."""
    return data[0] if isinstance(data, tuple) else data


class VAE(Stepping):
    def __init__(self):
        super().__init__(8, 6)
        self.encoder = dense(8, 4)
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, x):
        return self.body(self.encoder(x)[:, :2])

    def loss_of(self, data):
        x = features(data)
        mean, log_var = ops.split(self.encoder(x), 2, axis=1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        z = mean + ops.exp(0.5 * log_var) * noise
        kl = -0.5 * ops.sum(1 + log_var - mean**2 - ops.exp(log_var), axis=1)
        return ops.mean(ops.sum((self.body(z) - x) ** 2, axis=1) + kl)


class GAN(keras.Model):
    """DCGAN, with noise on the labels of a stacked batch."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.generator, self.discriminator = dense(8, 6), dense(8, 1)
        self.seed_generator = keras.random.SeedGenerator(7)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self):
        super().compile()
        self.d_optimizer, self.g_optimizer = adam(), adam()

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def _noise(self, n):
        return keras.random.normal((n, 4), seed=self.seed_generator)

    def train_step(self, data):
        real = features(data)
        n = ops.shape(real)[0]
        fake = self.generator(self._noise(n))
        both = ops.concatenate([fake, real], axis=0)
        labels = ops.concatenate([ops.ones((n, 1)), ops.zeros((n, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        noise = self._noise(n)
        with tf.GradientTape() as tape:
            fake = self.generator(noise)
            g_loss = self.loss_fn(ops.zeros((n, 1)), self.discriminator(fake))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


class WGAN(GAN):
    """With a gradient penalty, and several updates of the critic."""

    def train_step(self, data):
        real = features(data)
        n = tf.shape(real)[0]
        for _ in range(2):
            noise = tf.random.normal((n, 4))
            with tf.GradientTape() as tape:
                fake = self.generator(noise)
                alpha = tf.random.uniform((n, 1))
                between = real + alpha * (fake - real)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    score = self.discriminator(between)
                slopes = inner.gradient(score, between)
                norm = tf.sqrt(tf.reduce_sum(slopes**2, axis=1) + 1e-6)
                d_loss = (
                    tf.reduce_mean(self.discriminator(fake))
                    - tf.reduce_mean(self.discriminator(real))
                    + 10.0 * tf.reduce_mean((norm - 1.0) ** 2)
                )
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            fake = self.generator(tf.random.normal((n, 4)))
            g_loss = -tf.reduce_mean(self.discriminator(fake))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


class CycleGAN(keras.Model):
    """Four networks, four optimizers, one persistent tape."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(4)
        self.nets = {name: dense(7, 6) for name in ("gen_g", "gen_f")}
        self.nets |= {name: dense(7, 1) for name in ("disc_x", "disc_y")}

    def compile(self):
        super().compile()
        self.optimizers = {name: adam() for name in self.nets}

    def train_step(self, data):
        x, y = features(data)["x"], features(data)["y"]
        gen_g, gen_f = self.nets["gen_g"], self.nets["gen_f"]
        disc_x, disc_y = self.nets["disc_x"], self.nets["disc_y"]
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = gen_g(x), gen_f(y)
            cycle = keras.losses.MeanAbsoluteError()
            cycled = cycle(x, gen_f(fake_y)) + cycle(y, gen_g(fake_x))
            mse = keras.losses.MeanSquaredError()
            score_x, score_y = disc_x(fake_x), disc_y(fake_y)
            losses = {
                "gen_g": mse(tf.ones_like(score_y), score_y) + 10 * cycled,
                "gen_f": mse(tf.ones_like(score_x), score_x) + 10 * cycled,
                "disc_x": mse(tf.ones_like(score_x), disc_x(x))
                + mse(tf.zeros_like(score_x), score_x),
                "disc_y": mse(tf.ones_like(score_y), disc_y(y))
                + mse(tf.zeros_like(score_y), score_y),
            }
        for name, loss in losses.items():
            weights = self.nets[name].trainable_weights
            grads = tape.gradient(loss, weights)
            self.optimizers[name].apply_gradients(
                zip(grads, weights, strict=True)
            )
        return losses


class DDIM(Stepping):
    """Diffusion: noises of each example's own strength, and an average."""

    def __init__(self):
        super().__init__(8, 6)
        self.ema = dense(8, 6)
        self.body.build((None, 7))
        self.ema.build((None, 7))
        self.ema.trainable = False
        self.ema.set_weights(self.body.get_weights())

    def loss_of(self, data):
        x = features(data)
        noises = keras.random.normal(ops.shape(x))
        times = keras.random.uniform((ops.shape(x)[0], 1))
        noisy = ops.cos(times) * x + ops.sin(times) * noises
        told = self.body(ops.concatenate([noisy, times], axis=1))
        return keras.losses.MeanAbsoluteError()(noises, told)

    def train_step(self, data):
        logs = super().train_step(data)
        for weight, mean in zip(
            self.body.weights, self.ema.weights, strict=True
        ):
            mean.assign(0.999 * mean + 0.001 * weight)
        return logs


class VectorQuantizer(layers.Layer):
    def __init__(self):
        super().__init__()
        self.codes = self.add_weight(shape=(4, 5), initializer="uniform")

    def call(self, x):
        distances = ops.sum(
            (x[:, :, None] - ops.convert_to_tensor(self.codes)) ** 2, axis=1
        )
        chosen = ops.one_hot(ops.argmin(distances, axis=1), 5)
        quantized = ops.matmul(chosen, ops.transpose(self.codes))
        self.add_loss(
            0.25 * ops.mean((ops.stop_gradient(quantized) - x) ** 2)
            + ops.mean((quantized - ops.stop_gradient(x)) ** 2)
        )
        return x + ops.stop_gradient(quantized - x)


class Triplets(Stepping):
    def loss_of(self, data):
        (anchor, positive, negative) = features(data)
        a, p, n = (self.body(part) for part in (anchor, positive, negative))
        gap = ops.sum((a - p) ** 2, axis=1) - ops.sum((a - n) ** 2, axis=1)
        return ops.mean(ops.maximum(gap + 0.5, 0.0))


def gpt():
    """A causal transformer of one block, with masks."""
    keras.utils.set_random_seed(5)
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(12, 8, mask_zero=True)(tokens)
    attended = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attended)
    x = layers.LayerNormalization()(x + layers.Dense(8, "relu")(x))
    return keras.Model(tokens, layers.Dense(3)(x))


class MSE(Stepping):
    def __init__(self):
        super().__init__(8, 3)

    def loss_of(self, data):
        # Of any precision.
        return ops.mean(ops.subtract(self.body(data[0]), data[1]) ** 2)
