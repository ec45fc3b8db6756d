"""Generative models, as their papers and keras.io train them."""

import keras
import tensorflow as tf
from keras import ops

from tests.exactness.strangers.base import Own, built, case, dense, floats


class Sampling(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        epsilon = keras.random.normal(ops.shape(mean), seed=self.seed)
        self.add_loss(
            -0.5 * ops.mean(1 + log_var - ops.square(mean) - ops.exp(log_var))
        )
        return mean + ops.exp(0.5 * log_var) * epsilon


@case
def vae_with_added_loss_and_annealing():
    class Vae(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = dense(8, 6), dense(8, 5)
            self.sampling = Sampling()
            self.step_count = self.add_weight(
                shape=(), dtype="int64", trainable=False, initializer="zeros"
            )
            self.kl = keras.metrics.Mean(name="kl")

        def call(self, x):
            mean, log_var = ops.split(self.encoder(x), 2, axis=-1)
            return self.decoder(self.sampling((mean, log_var)))

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, **_
        ):
            added = ops.sum(ops.stack(self.losses))
            self.kl.update_state(added)
            beta = ops.minimum(1.0, ops.cast(self.step_count, "float32") / 3.0)
            self.step_count.assign_add(1)
            return ops.mean(ops.sum((x - y_pred) ** 2, -1)) + beta * added

    return built(Vae(), floats(2, 5)), floats(20, 5), floats(20, 5)


class ActNorm(keras.layers.Layer):
    """Its first batch decides what it starts from."""

    def build(self, shape):
        self.log_scale = self.add_weight(
            shape=(shape[-1],), initializer="zeros"
        )
        self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros")
        self.started = self.add_weight(
            shape=(), dtype="bool", initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:

            def start():
                mean, variance = tf.nn.moments(x, 0)
                self.shift.assign(-mean)
                self.log_scale.assign(-0.5 * tf.math.log(variance + 1e-6))
                self.started.assign(True)
                return tf.constant(0)

            tf.cond(self.started, lambda: tf.constant(0), start)
        scale, shift = (
            ops.convert_to_tensor(self.log_scale),
            ops.convert_to_tensor(self.shift),
        )
        return (x + shift) * tf.exp(scale), tf.reduce_sum(scale)


@case
def real_nvp_with_actnorm_of_the_first_batch():
    class Flow(Own):
        def create(self):
            self.norms = [ActNorm() for _ in range(3)]
            self.couplings = [dense(8, 4) for _ in range(3)]

        def call(self, x, training=False):
            logdet = tf.zeros(tf.shape(x)[:1])
            for norm, net in zip(self.norms, self.couplings, strict=True):
                x, change = norm(x, training=training)
                logdet += change
                first, second = tf.split(x, 2, -1)
                scale, shift = tf.split(net(first), 2, -1)
                scale = tf.tanh(scale)
                second = second * tf.exp(scale) + shift
                logdet += tf.reduce_sum(scale, -1)
                x = tf.concat([second, first], -1)
            return x, logdet

        def loss_of(self, x, y):
            z, logdet = self(x, training=True)
            return tf.reduce_mean(0.5 * tf.reduce_sum(z**2, -1) - logdet)

    model = Flow()
    model(floats(2, 4))
    model.compile(keras.optimizers.Adam(1e-2))
    return model, floats(20, 4) * 2 + 1, None


@case(predict=False)
def beta_tc_vae_over_pairs_of_the_batch():
    class TcVae(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(5)

        def loss_of(self, x, y):
            mean, log_var = tf.split(self.encoder(x), 2, -1)
            z = mean + tf.exp(0.5 * log_var) * keras.random.normal(
                tf.shape(mean), seed=self.seed
            )
            pairs = -0.5 * (
                (z[:, None] - mean[None]) ** 2 * tf.exp(-log_var[None])
                + log_var[None]
            )
            count = tf.cast(tf.shape(x)[0], "float32")
            joint = tf.reduce_logsumexp(
                tf.reduce_sum(pairs, 2), 1
            ) - tf.math.log(count)
            product = tf.reduce_sum(
                tf.reduce_logsumexp(pairs, 1) - tf.math.log(count), 1
            )
            correlation = tf.reduce_mean(joint - product)
            rebuilt = tf.reduce_mean(tf.reduce_sum((self.net(z) - x) ** 2, -1))
            return {"loss": rebuilt + 4 * correlation, "tc": correlation}

    model = TcVae(encoder=dense(8, 6), net=dense(8, 5))
    model.encoder(floats(2, 5))
    return built(model, floats(2, 3)), floats(20, 5), None


@case(predict=False)
def sliced_wasserstein_autoencoder():
    class Swae(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(8)

        def loss_of(self, x, y):
            z = self.encoder(x)
            prior = keras.random.uniform(tf.shape(z), -1, 1, seed=self.seed)
            directions = tf.math.l2_normalize(
                keras.random.normal((3, 7), seed=self.seed), 0
            )
            a = tf.sort(tf.transpose(tf.matmul(z, directions)), axis=-1)
            b = tf.sort(tf.transpose(tf.matmul(prior, directions)), axis=-1)
            apart = tf.reduce_mean((a - b) ** 2)
            return {
                "loss": tf.reduce_mean((self.net(z) - x) ** 2) + apart,
                "w": apart,
            }

    model = Swae(encoder=dense(8, 3), net=dense(8, 5))
    model.encoder(floats(2, 5))
    return built(model, floats(2, 3)), floats(20, 5), None


@case
def neural_process_with_random_contexts():
    """How many points are context is drawn once per batch."""

    class Process(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(6)

        def call(self, x, training=False):
            points = x[..., :1]
            length = tf.shape(x)[1]
            number = keras.random.randint((), 2, 5, seed=self.seed)
            mask = tf.cast(tf.range(length) < number, "float32")[None, :, None]
            encoded = self.encoder(x) * mask
            summary = tf.reduce_sum(encoded, 1, keepdims=True) / tf.reduce_sum(
                mask
            )
            summary = tf.tile(summary, [1, length, 1])
            mean, raw = tf.split(
                self.decoder(tf.concat([points, summary], -1)), 2, -1
            )
            return mean, 0.1 + 0.9 * tf.nn.softplus(raw)

        def loss_of(self, x, y):
            mean, sigma = self(x)
            values = x[..., 1:]
            return tf.reduce_mean(
                ((values - mean) / sigma) ** 2 + tf.math.log(sigma)
            )

    model = Process(encoder=dense(8, 6), decoder=dense(8, 2))
    return built(model, floats(2, 6, 2)), floats(20, 6, 2), None


@case
def sliced_score_matching():
    """The loss has the gradient of a gradient."""

    class Score(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(4)

        def loss_of(self, x, y):
            v = keras.random.normal(tf.shape(x), seed=self.seed)
            with tf.GradientTape() as tape:
                tape.watch(x)
                score = self.net(x)
                along = tf.reduce_sum(score * v)
            hessian = tape.gradient(along, x)
            return tf.reduce_mean(
                tf.reduce_sum(v * hessian, -1)
                + 0.5 * tf.reduce_sum(score * v, -1) ** 2
            )

    return built(Score(net=dense(8, 8, 4)), floats(2, 4)), floats(20, 4), None


@case
def adversarial_autoencoder_with_mmd():
    class Aae(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(4)

        def loss_of(self, x, y):
            z = self.encoder(x)
            prior = keras.random.normal(tf.shape(z), seed=self.seed)

            def kernel(a, b):
                distance = tf.reduce_sum((a[:, None] - b[None]) ** 2, -1)
                return tf.add_n(
                    [tf.exp(-distance / s) for s in (0.5, 2.0, 8.0)]
                )

            off = 1 - tf.eye(tf.shape(z)[0])
            count = tf.cast(tf.shape(z)[0], "float32")
            mmd = tf.reduce_sum((kernel(z, z) + kernel(prior, prior)) * off) / (
                count * (count - 1)
            ) - 2 * tf.reduce_mean(kernel(z, prior))
            return {
                "loss": tf.reduce_mean((self.net(z) - x) ** 2) + mmd,
                "mmd": mmd,
            }

        def call(self, x):
            return self.net(self.encoder(x))

    return (
        built(Aae(encoder=dense(8, 3), net=dense(8, 5)), floats(2, 5)),
        floats(20, 5),
        None,
    )
