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
