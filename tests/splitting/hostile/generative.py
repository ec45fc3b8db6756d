"""Autoencoders, adversarial networks, diffusion, flows and the like."""

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import apply, errors, minimizing, mse
from tests.splitting.hostile.table import (
    WIDTH,
    by_design,
    couples,
    dense,
    images,
    rows,
    splits,
    sub,
)


def _autoencoder(step, **options):
    def layers(net):
        net.encoder = dense(4, "tanh")
        net.decoder = dense(WIDTH)

    return sub(step, layers, lambda net, x: net.decoder(net.encoder(x)))


def _trained(loss_of):
    """A step that minimizes what a function makes of code and picture."""

    def of_net(net, x, y):
        code = net.encoder(x)
        return loss_of(x, code, net.decoder(code))

    return _autoencoder(minimizing(of_net))


@splits()
def contractive_autoencoder():
    def loss_of(net, x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            code = net.encoder(x)
        jacobian = inner.batch_jacobian(code, x)
        squares = tf.reduce_sum(tf.square(jacobian), (1, 2))
        return mse(x, net.decoder(code)) + 0.1 * tf.reduce_mean(squares)

    return _autoencoder(minimizing(loss_of))


@couples()
def sparse_autoencoder():
    def loss(x, code, again):
        rate = tf.reduce_mean(tf.sigmoid(code), 0)
        off = tf.math.log(0.1 / rate) * 0.1  # here
        off += 0.9 * tf.math.log(0.9 / (1 - rate))  # here
        return mse(x, again) + 0.2 * tf.reduce_sum(off)

    return _trained(loss)


@splits()
def sparse_by_example():
    def loss(x, code, again):
        rate = tf.reduce_mean(tf.sigmoid(code), 1)
        off = tf.math.log(0.1 / rate) * 0.1 + 0.9 * tf.math.log(
            0.9 / (1 - rate)
        )
        return mse(x, again) + 0.2 * tf.reduce_sum(off) / tf.cast(
            tf.size(rate), tf.float32
        )

    return _trained(loss)


@couples()
def information_maximizing():
    """InfoVAE: the code's distribution is compared by kernels."""

    def kernel(a, b):
        off = a[:, None] - b[None]  # here
        return tf.exp(-tf.reduce_mean(tf.square(off), -1))

    def loss(x, code, again):
        wanted = tf.linspace(-1.0, 1.0, 20)[:, None] * tf.ones((1, 4))
        same = tf.reduce_mean(kernel(code, code))
        cross = tf.reduce_mean(kernel(code, wanted))
        return mse(x, again) + same - 2 * cross

    return _trained(loss)


@splits()
def compared_with_fixed_codes():
    """Only the term between codes and fixed points: a mean over examples."""

    def loss(x, code, again):
        wanted = tf.linspace(-1.0, 1.0, 20)[:, None] * tf.ones((1, 4))
        off = code[:, None] - wanted[None]
        cross = tf.exp(-tf.reduce_mean(tf.square(off), -1))
        return mse(x, again) - 2 * tf.reduce_mean(cross)

    return _trained(loss)


@splits()
def quantized_with_straight_through():
    """VQ-VAE: nearest entry of a codebook, its gradient passed through."""

    def loss_of(net, x, y):
        code = net.encoder(x)
        far = (
            tf.reduce_sum(code**2, 1, keepdims=True)
            + tf.reduce_sum(net.book**2, 0)
            - 2 * tf.matmul(code, net.book)
        )
        chosen = tf.one_hot(tf.argmin(far, 1), 7)
        near = tf.matmul(chosen, net.book, transpose_b=True)
        passed = code + tf.stop_gradient(near - code)
        loss = mse(x, net.decoder(passed))
        loss += mse(tf.stop_gradient(code), near)
        loss += 0.25 * mse(code, tf.stop_gradient(near))
        return loss

    net = _autoencoder(minimizing(loss_of))
    net.book = net.add_weight(shape=(4, 7), initializer="uniform", name="book")
    return net


@couples()
def usage_of_the_codebook():
    """The perplexity of a codebook, as VQ-VAEs log it."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            code = net.encoder(x)
            chosen = tf.one_hot(tf.argmax(code, 1), 4)
            loss = mse(x, net.decoder(code))
        used = tf.reduce_mean(chosen, 0)
        left = -tf.reduce_sum(used * tf.math.log(used + 1e-10))  # here
        return apply(net, tape, loss) | {"perplexity": tf.exp(left)}

    return _autoencoder(step)


@couples()
def matched_features():
    """Improved GAN: means of features of real and generated are compared."""

    def loss_of(net, x, y):
        made = net.decoder(net.encoder(x))
        real = tf.reduce_mean(net.encoder(x), 0)
        fake = tf.reduce_mean(net.encoder(made), 0)
        return tf.reduce_sum(tf.square(real - fake))  # here

    return _autoencoder(minimizing(loss_of))


@splits()
def means_in_a_difference():
    """Wasserstein: the difference of two means stays a mean."""

    def loss_of(net, x, y):
        made = net.decoder(net.encoder(x))
        real = tf.reduce_mean(net.encoder(x), 0)
        fake = tf.reduce_mean(net.encoder(made), 0)
        return tf.reduce_sum((real - fake) * tf.constant([1.0, -2, 3, 0.5]))

    return _autoencoder(minimizing(loss_of))


@couples()
def relativistic():
    """RaGAN: every score is taken relative to the others' mean."""

    def loss_of(net, x, y):
        real = net.encoder(x)
        fake = net.encoder(net.decoder(real))
        off = real - tf.reduce_mean(fake, 0, keepdims=True)  # here
        return tf.reduce_mean(tf.nn.softplus(-off))  # here

    return _autoencoder(minimizing(loss_of))


@couples()
def deviation_as_a_feature():
    """StyleGAN's discriminator: deviation over the batch is one feature."""

    def loss_of(net, x, y):
        code = net.encoder(x)
        spread = tf.math.reduce_std(code, 0)  # here
        extra = tf.fill((rows(x), 1), tf.reduce_mean(spread))
        wide = tf.concat([code[:, :3], extra], 1)
        return mse(x, net.decoder(wide))

    return _autoencoder(minimizing(loss_of))


@splits()
def gradient_penalty_of_halves():
    """The halves of each example's features are interpolated."""

    def step(net, x, y):
        low, high = tf.split(x, 2, axis=1)
        between = tf.concat([low, (low + high) / 2], 1)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(between)
                score = net.encoder(between)
            slope = inner.gradient(score, between)
            norm = tf.sqrt(tf.reduce_sum(slope**2, 1) + 1e-6)
            loss = tf.reduce_mean((norm - 1) ** 2) + mse(x, net.decoder(score))
        return apply(net, tape, loss)

    return _autoencoder(step)


@couples()
def norm_of_all_slopes():
    """The penalty's norm is taken over the batch, too."""

    def loss_of(net, x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            score = net.encoder(x)
        slope = inner.gradient(score, x)
        norm = tf.norm(slope)  # here
        return (norm - 1) ** 2 + mse(x, net.decoder(score))

    return _autoencoder(minimizing(loss_of))


@splits(images)
def gram_of_each_image():
    """Style transfer: correlations of channels, of every image alone."""

    def loss_of(net, x, y):
        maps = net.convolution(x)
        gram = tf.einsum("bijc,bijd->bcd", maps, maps) / 36
        return tf.reduce_mean(tf.square(gram - net.style[None]))

    net = sub(minimizing(loss_of), lambda net: None)
    net.convolution = keras.layers.Conv2D(3, 3, padding="same")
    net.style = tf.eye(3)
    return net


@couples(images)
def gram_of_the_batch():
    """The same einsum with a letter left out."""

    def loss_of(net, x, y):
        maps = net.convolution(x)
        gram = tf.einsum("bijc,bijd->cd", maps, maps)
        gram /= tf.cast(tf.size(maps[..., 0]), tf.float32)
        return tf.reduce_mean(tf.square(gram - tf.eye(3)))  # here

    net = sub(minimizing(loss_of), lambda net: None)
    net.convolution = keras.layers.Conv2D(3, 3, padding="same")
    return net


@splits()
def affine_flow():
    """RealNVP: the logarithm of a determinant for every example."""

    def loss_of(net, x, y):
        low, high = x[:, ::2], x[:, 1::2]
        scale = tf.tanh(net.scale(low))
        out = high * tf.exp(scale) + net.shift(low)
        whole = tf.reshape(tf.stack([low, out], -1), tf.shape(x))
        prior = tf.reduce_sum(whole**2, 1) / 2
        return tf.reduce_mean(prior - tf.reduce_sum(scale, -1))

    net = sub(minimizing(loss_of), lambda net: None)
    net.scale, net.shift = dense(3), dense(3)
    return net


@by_design()
def noised_with_time():
    """DDPM: a step of the schedule for each example, noise of its level."""

    def step(net, x, y):
        time = keras.random.randint((rows(x),), 0, 5, seed=net.draws)
        noise = keras.random.normal(tf.shape(x), seed=net.draws)
        kept = tf.gather(tf.constant(np.linspace(0.9, 0.1, 5), "float32"), time)
        kept = kept[:, None]
        noised = tf.sqrt(kept) * x + tf.sqrt(1 - kept) * noise
        with tf.GradientTape() as tape:
            guess = net.decoder(net.encoder(noised) + net.embedding(time))
            loss = tf.reduce_mean(errors(noise, guess))
        return apply(net, tape, loss)

    net = _autoencoder(step)
    net.embedding = keras.layers.Embedding(5, 4)
    net.draws = keras.random.SeedGenerator(4)
    return net


@splits()
def noise_levels_in_turn():
    """The level follows a counter, so it is the same for all examples."""

    def step(net, x, y):
        level = tf.cast(net.optimizer.iterations % 4, tf.float32) / 4
        noise = tf.sin(x * 100) * level
        with tf.GradientTape() as tape:
            loss = mse(noise, net.decoder(net.encoder(x + noise)))
            loss /= level + 0.5
        return apply(net, tape, loss)

    return _autoencoder(step)


@couples()
def level_by_place():
    """The level follows the place of an example in its batch."""

    def step(net, x, y):
        level = tf.cast(tf.range(rows(x)) % 4, tf.float32) / 4  # here
        noised = x + tf.sin(x * 100) * level[:, None]
        with tf.GradientTape() as tape:
            loss = mse(x, net.decoder(net.encoder(noised)))
        return apply(net, tape, loss)

    return _autoencoder(step)
