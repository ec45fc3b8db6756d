"""Means over the batch that meet what is not linear, and wrong axes."""

import functools

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    WIDTH,
    case,
    count,
    errors,
    minimizing,
    mse,
    of_parts,
    plain,
    rows,
)


@case(plain)
def centred_in_function(y, p):
    @tf.function
    def centre(p):
        return p / tf.reduce_sum(tf.square(p), 0)

    return tf.square(centre(p) - y)


@case(plain)
def barlow_twins(y, p):
    q = p * 0.5 + y
    c = tf.matmul(p, q, transpose_a=True) / count(p)
    return tf.reduce_sum(tf.square(c - tf.eye(3)))


@case(plain)
def diagonal_of_sum(y, p):
    c = tf.matmul(p, p, transpose_a=True)
    c = tf.linalg.set_diag(c, tf.ones([3]))
    return tf.reduce_sum(c) / count(p)


@case(plain)
def softmax_over_batch(y, p):
    return -y * tf.math.log(tf.nn.softmax(p, axis=0))


@case(plain)
def reverse_sequence_of_examples(y, p):
    lengths = tf.fill([3], tf.shape(p)[0])
    q = tf.reverse_sequence(p, lengths, seq_axis=0, batch_axis=1)
    return tf.square(q - y)


@case(plain)
def reverse_sequence_of_features(y, p):
    lengths = tf.fill([tf.shape(p)[0]], 2)
    q = tf.reverse_sequence(p, lengths, seq_axis=1, batch_axis=0)
    return tf.square(q - y)


@case(plain)
def least_squares(y, p):
    g = tf.matmul(p, p, transpose_a=True) + tf.eye(3)
    b = tf.linalg.solve(g, tf.matmul(p, y, transpose_a=True))
    return tf.square(p @ b - y)


@case(plain)
def solved_for_each(y, p):
    g = p[:, :, None] * p[:, None, :] + tf.eye(3)
    return tf.square(tf.linalg.solve(g, p[:, :, None])[..., 0] - y)


@case(plain)
def convolved_over_examples(y, p):
    q = tf.nn.conv1d(p[None], tf.ones([3, 3, 3]) / 9, 1, "SAME")
    return tf.reduce_mean(tf.square(q[0] - y))


@case(plain)
def cut_out_of_the_first(y, p):
    image, box = tf.reshape(p, [-1, 3, 1, 1]), [[0.0, 0.0, 1.0, 1.0]]
    part = tf.image.crop_and_resize(image, box, [0], [2, 2])
    return errors(y, p) + tf.reduce_mean(part)


_autoencoder = functools.partial(of_parts, encoder=4, decoder=WIDTH)


@case(_autoencoder)
@minimizing
def contractive_autoencoder(net, x, y):
    with tf.GradientTape() as inner:
        inner.watch(x)
        code = tf.tanh(net.encoder(x))
    jacobian = inner.batch_jacobian(code, x)
    squares = tf.reduce_sum(tf.square(jacobian), (1, 2))
    return mse(x, net.decoder(code)) + 0.1 * tf.reduce_mean(squares)


@case()
def noised_with_time():
    """DDPM: a step of the schedule for each example, noise of its level."""

    def loss_of(net, x, y):
        time = keras.random.randint((rows(x),), 0, 5, seed=net.draws)
        noise = keras.random.normal(tf.shape(x), seed=net.draws)
        kept = tf.gather(tf.linspace(0.9, 0.1, 5), time)[:, None]
        noised = tf.sqrt(kept) * x + tf.sqrt(1 - kept) * noise
        code = net.encoder(noised) + net.embedding(time)
        return tf.reduce_mean(errors(noise, net.decoder(code)))

    net = _autoencoder(minimizing(loss_of))
    net.embedding = keras.layers.Embedding(5, 4)
    net.draws = keras.random.SeedGenerator(4)
    return net


@case(_autoencoder)
@minimizing
def level_by_place(net, x, y):
    """The level of noise follows the place of an example in its batch."""
    level = tf.cast(tf.range(rows(x)) % 4, tf.float32) / 4
    noised = x + tf.sin(x * 100) * level[:, None]
    return mse(x, net.decoder(net.encoder(noised)))
