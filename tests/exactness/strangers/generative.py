"""Generative models, as their papers and keras.io train them."""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from .base import CASES, Own, built, case, dense, floats, ints


class Adversaries(Own):
    """Two networks with an optimizer each."""

    def compile(self, *args, **options):
        super().compile(*args, **options)
        self.d_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5)
        self.g_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)

    def create(self):
        self.d_mean = keras.metrics.Mean(name="d_loss")
        self.seed = keras.random.SeedGenerator(3)

    def noise(self, x, width=4):
        return keras.random.normal((ops.shape(x)[0], width), seed=self.seed)


@case
def dcgan_with_noisy_labels():
    class Gan(Adversaries):
        def train_step(self, x):
            count = tf.shape(x)[0]
            fake = self.g(self.noise(x), training=True)
            both = tf.concat([fake, x], 0)
            labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], 0)
            labels += 0.05 * keras.random.uniform(
                tf.shape(labels), seed=self.seed
            )
            entropy = keras.losses.BinaryCrossentropy(from_logits=True)
            d = self.descend(
                lambda: entropy(labels, self.d(both, training=True)),
                self.d_optimizer,
                self.d.trainable_weights,
            )
            latent = self.noise(x)
            g = self.descend(
                lambda: entropy(
                    tf.zeros((count, 1)), self.d(self.g(latent, training=True))
                ),
                self.g_optimizer,
                self.g.trainable_weights,
            )
            self.d_mean.update_state(d)
            return {"d": self.d_mean.result(), "g": g}

        def test_step(self, x):
            return {"score": tf.reduce_mean(self.d(x))}

        def call(self, x):
            return self.d(x)

    g = keras.Sequential(
        [
            keras.layers.Dense(8, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.LeakyReLU(),
            keras.layers.Dense(6),
        ]
    )
    d = keras.Sequential(
        [
            keras.layers.Dense(8),
            keras.layers.Dropout(0.3, seed=4),
            keras.layers.Dense(1),
        ]
    )
    model = Gan(g=g, d=d)
    g(floats(2, 4))
    return built(model, floats(2, 6)), floats(20, 6), None


@case
def wgan_gp_three_critic_steps():
    class Wgan(Adversaries):
        def penalty(self, real, fake):
            mix = keras.random.uniform(
                (tf.shape(real)[0], 1, 1, 1), seed=self.seed
            )
            between = fake + mix * (real - fake)
            with tf.GradientTape() as tape:
                tape.watch(between)
                scores = self.d(between, training=True)
            slopes = tape.gradient(scores, [between])[0]
            norm = tf.sqrt(tf.reduce_sum(slopes**2, axis=[1, 2, 3]) + 1e-6)
            return tf.reduce_mean((norm - 1.0) ** 2)

        def train_step(self, real):
            if isinstance(real, tuple):
                real = real[0]
            for _ in range(3):
                fake = self.g(self.noise(real), training=True)
                d = self.descend(
                    lambda fake=fake: (
                        tf.reduce_mean(self.d(fake))
                        - tf.reduce_mean(self.d(real))
                        + 10.0 * self.penalty(real, fake)
                    ),
                    self.d_optimizer,
                    self.d.trainable_variables,
                )
            g = self.descend(
                lambda: (
                    -tf.reduce_mean(
                        self.d(self.g(self.noise(real), training=True))
                    )
                ),
                self.g_optimizer,
                self.g.trainable_variables,
            )
            return {"d": d, "g": g}

        def test_step(self, x):
            return {"penalty": self.penalty(x, x + 1.0)}

        def call(self, x):
            return self.d(x)

    g = keras.Sequential(
        [
            keras.layers.Dense(16),
            keras.layers.LayerNormalization(),
            keras.layers.Reshape((4, 4, 1)),
            keras.layers.Conv2DTranspose(
                1, 3, padding="same", activation="tanh"
            ),
        ]
    )
    d = keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, 2, padding="same"),
            keras.layers.LeakyReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    g(floats(2, 4))
    return built(Wgan(g=g, d=d), floats(2, 4, 4, 1)), floats(20, 4, 4, 1), None


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


@case
def cyclegan_with_a_pool_of_images():
    class Cycle(Own):
        def create(self):
            self.pool = self.state((5, 6), 0.3)
            self.pointer = self.state((), 0, "int32")

        def compile(self, *args, **options):
            super().compile(*args, **options)
            self.o1, self.o2, self.o3, self.o4 = self.o = [
                keras.optimizers.Adam(1e-3) for _ in range(4)
            ]

        def call(self, xy):
            return self.g(xy[0]), self.f(xy[1])

        def train_step(self, data):
            real_x, real_y = data[0]
            with tf.GradientTape(persistent=True) as tape:
                fake_y, fake_x = self.g(real_x), self.f(real_y)
                cycle = tf.reduce_mean(
                    tf.abs(self.f(fake_y) - real_x)
                ) + tf.reduce_mean(tf.abs(self.g(fake_x) - real_y))
                same = tf.reduce_mean(tf.abs(self.g(real_y) - real_y))
                g = (
                    tf.reduce_mean((self.dy(fake_y) - 1) ** 2)
                    + 10 * cycle
                    + 5 * same
                )
                f = tf.reduce_mean((self.dx(fake_x) - 1) ** 2) + 10 * cycle
                # The discriminator sees earlier fakes, too.
                old = tf.concat([tf.stop_gradient(fake_x)[:4], self.pool], 0)
                dx = 0.5 * (
                    tf.reduce_mean(self.dx(old) ** 2)
                    + tf.reduce_mean((self.dx(real_x) - 1) ** 2)
                )
                dy = tf.reduce_mean(self.dy(fake_y) ** 2)
            for net, loss, optimizer in zip(
                (self.g, self.f, self.dx, self.dy),
                (g, f, dx, dy),
                self.o,
                strict=True,
            ):
                weights = net.trainable_variables
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, weights), weights, strict=True)
                )
            slot = self.pointer % 5
            self.pool.assign(
                tf.tensor_scatter_nd_update(self.pool, [[slot]], fake_x[-1:])
            )
            self.pointer.assign_add(1)
            return {"g": g, "f": f, "dx": dx, "dy": dy}

    model = Cycle(g=dense(7, 6), f=dense(7, 6), dx=dense(5, 1), dy=dense(5, 1))
    built(model, (floats(2, 6), floats(2, 6)))
    model.dx(floats(2, 6)), model.dy(floats(2, 6))
    return model, (floats(20, 6), floats(20, 6, seed=1)), None


@case
def ddpm_with_ema_network():
    class Diffusion(Own):
        def create(self):
            self.normalizer = keras.layers.Normalization()
            self.normalizer.adapt(floats(50, 6) * 3 + 1)
            self.seed = keras.random.SeedGenerator(9)
            betas = np.linspace(1e-4, 0.1, 10)
            self.alphas = tf.constant(np.cumprod(1 - betas), "float32")

        def denoise(self, net, noisy, times):
            angles = tf.cast(times, "float32")[:, None] * tf.exp(
                tf.linspace(0.0, -3.0, 3)
            )
            embedding = tf.concat([tf.sin(angles), tf.cos(angles)], -1)
            return net(tf.concat([noisy, embedding], -1))

        def call(self, x):
            return self.denoise(self.ema, x, tf.zeros(tf.shape(x)[:1], "int32"))

        def loss_of(self, x, y):
            x = self.normalizer(x)
            count = tf.shape(x)[0]
            times = keras.random.randint((count,), 0, 10, seed=self.seed)
            noise = keras.random.normal(tf.shape(x), seed=self.seed)
            alpha = tf.gather(self.alphas, times)[:, None]
            noisy = tf.sqrt(alpha) * x + tf.sqrt(1 - alpha) * noise
            error = (self.denoise(self.net, noisy, times) - noise) ** 2
            snr = tf.minimum(alpha / (1 - alpha), 5.0)
            return {
                "loss": tf.reduce_mean(snr * error),
                "noise": tf.reduce_mean(error),
            }

        def after(self, x, y):
            for weight, average in zip(
                self.net.weights, self.ema.weights, strict=True
            ):
                average.assign(0.9 * average + 0.1 * weight)

        def weights_of_step(self):
            return self.net.trainable_weights

    model = Diffusion(net=dense(12, 6), ema=dense(12, 6))
    model.net(floats(2, 12))
    built(model, floats(2, 6), optimizer=keras.optimizers.AdamW(1e-2))
    model.ema.set_weights(model.net.get_weights())
    return model, floats(20, 6), None


@case
def vq_vae_with_ema_codebook_and_restarts():
    class VqVae(Own):
        def create(self):
            self.codes = self.add_weight(
                shape=(5, 3),
                initializer=keras.initializers.RandomNormal(seed=1),
                trainable=False,
            )
            self.counts = self.state((5,), 1.0)
            self.sums = self.state((5, 3), 0.1)

        def nearest(self, z):
            distances = (
                tf.reduce_sum(z**2, 1, keepdims=True)
                + tf.reduce_sum(tf.convert_to_tensor(self.codes) ** 2, 1)
                - 2
                * tf.matmul(
                    z, tf.convert_to_tensor(self.codes), transpose_b=True
                )
            )
            return tf.argmin(distances, 1)

        def call(self, x):
            return self.decoder(
                tf.gather(self.codes, self.nearest(self.encoder(x)))
            )

        def loss_of(self, x, y):
            z = self.encoder(x)
            ids = self.nearest(z)
            hot = tf.one_hot(ids, 5)
            q = tf.matmul(hot, tf.convert_to_tensor(self.codes))
            through = z + tf.stop_gradient(q - z)
            usage = tf.reduce_mean(hot, 0)
            perplexity = tf.exp(
                -tf.reduce_sum(usage * tf.math.log(usage + 1e-9))
            )
            commit = tf.reduce_mean((tf.stop_gradient(q) - z) ** 2)
            loss = (
                tf.reduce_mean((self.decoder(through) - x) ** 2) + 0.25 * commit
            )
            return {"loss": loss, "perplexity": perplexity}

        def after(self, x, y):
            z = self.encoder(x)
            ids = self.nearest(z)
            counts = tf.math.unsorted_segment_sum(
                tf.ones_like(ids, "float32"), ids, 5
            )
            self.counts.assign(0.9 * self.counts + 0.1 * counts)
            self.sums.assign(
                0.9 * self.sums + 0.1 * tf.math.unsorted_segment_sum(z, ids, 5)
            )
            total = tf.reduce_sum(self.counts)
            smoothed = (self.counts + 1e-5) / (total + 5e-5) * total
            codes = self.sums / smoothed[:, None]
            # A code that nobody uses becomes an example of this batch.
            dead = tf.reduce_min(self.counts) < 0.85
            worst = tf.argmin(self.counts)
            codes = tf.cond(
                dead,
                lambda: tf.tensor_scatter_nd_update(codes, [[worst]], z[:1]),
                lambda: codes,
            )
            self.codes.assign(codes)

    model = VqVae(encoder=dense(8, 3), decoder=dense(8, 6))
    return built(model, floats(2, 6)), floats(20, 6), None


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


@case
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


CASES["beta_tc_vae_over_pairs_of_the_batch"][1]["predict"] = False


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


@case(evaluate=False)
def gan_with_adaptive_augmentation():
    """The probability of augmentation follows the discriminator's accuracy."""

    class Ada(Adversaries):
        def create(self):
            super().create()
            self.probability = self.state((), 0.4)
            self.augmenter = keras.Sequential(
                [
                    keras.layers.RandomFlip("horizontal", seed=1),
                    keras.layers.RandomTranslation(0.2, 0.2, seed=2),
                ]
            )

        def call(self, x):
            return self.d(self.augment(x))

        def augment(self, x):
            changed = self.augmenter(x, training=True)
            draw = keras.random.uniform(
                (tf.shape(x)[0], 1, 1, 1), seed=self.seed
            )
            return tf.where(draw < self.probability, changed, x)

        def train_step(self, x):
            latent = self.noise(x)
            with tf.GradientTape(persistent=True) as tape:
                fake = self.g(latent)
                real_logits = self.d(self.augment(x))
                fake_logits = self.d(self.augment(fake))
                d = tf.reduce_mean(
                    tf.nn.relu(1 - real_logits)
                ) + tf.reduce_mean(tf.nn.relu(1 + fake_logits))
                g = -tf.reduce_mean(fake_logits)
            for net, loss, optimizer in (
                (self.d, d, self.d_optimizer),
                (self.g, g, self.g_optimizer),
            ):
                weights = net.trainable_weights
                optimizer.apply(tape.gradient(loss, weights), weights)
            accuracy = 0.5 * (
                tf.reduce_mean(tf.cast(real_logits > 0, "float32"))
                + tf.reduce_mean(tf.cast(fake_logits < 0, "float32"))
            )
            self.probability.assign(
                tf.clip_by_value(
                    self.probability + 0.1 * (accuracy - 0.5), 0.0, 1.0
                )
            )
            return {"d": d, "g": g, "p": self.probability.value}

    g = keras.Sequential(
        [keras.layers.Dense(18), keras.layers.Reshape((3, 3, 2))]
    )
    d = keras.Sequential(
        [
            keras.layers.Conv2D(3, 2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(1),
        ]
    )
    g(floats(2, 4))
    return built(Ada(g=g, d=d), floats(2, 3, 3, 2)), floats(20, 3, 3, 2), None


@case
def energy_model_with_langevin_and_a_replay_buffer():
    class Energy(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(2)
            self.buffer = self.state((16, 4), 0.1)

        def loss_of(self, x, y):
            count = tf.shape(x)[0]
            places = keras.random.randint((count,), 0, 16, seed=self.seed)
            start = tf.gather(self.buffer, places)
            fresh = keras.random.uniform((count, 1), seed=self.seed) < 0.2
            sample = tf.where(
                fresh, keras.random.normal((count, 4), seed=self.seed), start
            )
            for _ in range(3):
                with tf.GradientTape() as tape:
                    tape.watch(sample)
                    energy = tf.reduce_sum(self.net(sample))
                slope = tf.clip_by_value(
                    tape.gradient(energy, sample), -0.1, 0.1
                )
                sample -= slope + 0.01 * keras.random.normal(
                    tf.shape(sample), seed=self.seed
                )
            sample = tf.stop_gradient(sample)
            # A place drawn twice takes the last that was drawn for it.
            self.buffer.assign(
                tf.tensor_scatter_nd_update(
                    self.buffer, places[:, None], sample
                )
            )
            both = self.net(tf.concat([x, sample], 0))
            real, fake = both[:count], both[count:]
            return tf.reduce_mean(real - fake) + 0.1 * tf.reduce_mean(
                real**2 + fake**2
            )

        def test_step(self, data):
            return {"energy": tf.reduce_mean(self.net(data))}

    return built(Energy(net=dense(8, 1)), floats(2, 4)), floats(20, 4), None


@case
def neural_process_with_random_contexts():
    """How many context points is drawn once per batch; the mask selects them."""

    class Process(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(6)

        def call(self, x, training=False):
            points, values = x[..., :1], x[..., 1:]
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


class SpectralDense(keras.layers.Layer):
    """Power iteration in `call`, and a weight that is divided by it."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units))
        self.u = self.add_weight(
            shape=(1, self.units),
            initializer=keras.initializers.RandomNormal(seed=7),
            trainable=False,
        )

    def call(self, x, training=False):
        u, kernel = (
            ops.convert_to_tensor(self.u),
            ops.convert_to_tensor(self.kernel),
        )
        v = tf.math.l2_normalize(tf.matmul(u, kernel, transpose_b=True))
        u = tf.math.l2_normalize(tf.matmul(v, kernel))
        u, v = tf.stop_gradient(u), tf.stop_gradient(v)
        sigma = tf.squeeze(tf.matmul(tf.matmul(v, kernel), u, transpose_b=True))
        if training:
            self.u.assign(u)
        return tf.matmul(x, kernel / sigma)


@case
def projection_discriminator_with_spectral_norm():
    class Projection(Adversaries):
        def call(self, inputs):
            x, y = inputs
            features = tf.nn.relu(self.d(x, training=False))
            return self.head(features) + tf.reduce_sum(
                self.embed(y) * features, -1, keepdims=True
            )

        def score(self, x, y):
            features = tf.nn.relu(self.d(x, training=True))
            return self.head(features) + tf.reduce_sum(
                self.embed(y) * features, -1, keepdims=True
            )

        def fakes(self, y, latent):
            return self.g(tf.concat([latent, tf.one_hot(y, 3)], -1))

        def train_step(self, data):
            ((x, y),) = data
            latent = self.noise(x, 2)
            weights = [
                *self.d.trainable_weights,
                *self.embed.trainable_weights,
                *self.head.trainable_weights,
            ]
            d = self.descend(
                lambda: (
                    tf.reduce_mean(tf.nn.relu(1 - self.score(x, y)))
                    + tf.reduce_mean(
                        tf.nn.relu(1 + self.score(self.fakes(y, latent), y))
                    )
                ),
                self.d_optimizer,
                weights,
            )
            g = self.descend(
                lambda: -tf.reduce_mean(self.score(self.fakes(y, latent), y)),
                self.g_optimizer,
                self.g.trainable_weights,
            )
            return {"d": d, "g": g}

    model = Projection(
        g=dense(7, 5),
        d=SpectralDense(6),
        embed=keras.layers.Embedding(3, 6),
        head=keras.layers.Dense(1),
    )
    model.g(floats(2, 5))
    built(model, (floats(2, 5), ints(3, 2)))
    return model, (floats(20, 5), ints(3, 20)), None


CASES["projection_discriminator_with_spectral_norm"][1]["evaluate"] = False


@case
def made_that_samples_in_test_step():
    class Masked(keras.layers.Layer):
        def __init__(self, units, mask, act=None):
            super().__init__()
            self.units, self.mask = units, tf.constant(mask, "float32")
            self.act = keras.activations.get(act)

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], self.units))
            self.bias = self.add_weight(
                shape=(self.units,), initializer="zeros"
            )

        def call(self, x):
            return self.act(tf.matmul(x, self.kernel * self.mask) + self.bias)

    order, hidden = np.arange(5), np.arange(10) % 4

    class Made(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(1)

        def loss_of(self, x, y):
            return tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(
                    labels=x, logits=self.net(x)
                )
            )

        def test_step(self, x):
            count = tf.shape(x)[0]

            def body(i, sample):
                draw = keras.random.uniform((count,), seed=self.seed)
                bit = tf.cast(
                    draw < tf.sigmoid(self.net(sample)[:, i]), "float32"
                )
                return i + 1, tf.tensor_scatter_nd_update(
                    sample,
                    tf.stack([tf.range(count), tf.fill([count], i)], 1),
                    bit,
                )

            _, sample = tf.while_loop(
                lambda i, s: i < 5, body, (0, tf.zeros((count, 5)))
            )
            return {
                "loss": self.loss_of(x, None),
                "ones": tf.reduce_mean(sample),
            }

    net = keras.Sequential(
        [
            Masked(10, hidden[None, :] >= order[:, None], "relu"),
            Masked(5, order[None, :] > hidden[:, None]),
        ]
    )
    return (
        built(Made(net=net), floats(2, 5)),
        (floats(20, 5) > 0).astype("float32"),
        None,
    )


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
def flow_matching_with_minibatch_transport():
    """Noise and data are paired by a Sinkhorn plan over the batch."""

    class Flow(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(4)

        def loss_of(self, x, y):
            noise = keras.random.normal(tf.shape(x), seed=self.seed)
            cost = tf.reduce_sum((noise[:, None] - x[None]) ** 2, -1)
            kernel = -cost / (0.5 * tf.reduce_mean(cost))

            def body(i, f, g):
                f = -tf.reduce_logsumexp(kernel + g[None], 1)
                return i + 1, f, -tf.reduce_logsumexp(kernel + f[:, None], 0)

            zeros = tf.zeros(tf.shape(x)[:1])
            _, f, g = tf.while_loop(
                lambda i, f, g: i < 8, body, (0, zeros, zeros)
            )
            partner = tf.gather(x, tf.argmax(kernel + f[:, None] + g[None], 1))
            t = keras.random.uniform((tf.shape(x)[0], 1), seed=self.seed)
            velocity = self.net(
                tf.concat([t * partner + (1 - t) * noise, t], -1)
            )
            return tf.reduce_mean((velocity - (partner - noise)) ** 2)

        def call(self, x):
            step = lambda state, t: (
                state
                + 0.25
                * self.net(  # noqa: E731
                    tf.concat([state, tf.fill([tf.shape(x)[0], 1], t)], -1)
                )
            )
            return tf.scan(step, tf.linspace(0.0, 0.75, 4), initializer=x)[-1]

    model = Flow(net=dense(8, 4))
    return built(model, floats(2, 4)), floats(20, 4), None


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


CASES["cyclegan_with_a_pool_of_images"][1]["evaluate"] = False
