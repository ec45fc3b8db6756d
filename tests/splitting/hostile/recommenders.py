"""Tables of columns, and recommenders."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    mse,
    with_layers,
)
from tests.splitting.hostile.table import (
    by_design,
    couples,
    dense,
    functional,
    normal,
    own,
    rows,
    splits,
    whole,
)

layers = keras.layers


@splits()
def sparse_attention_over_features():
    """TabNet's sparsemax, and its prior, of every example."""

    def sparsemax(z):
        top = tf.sort(z, direction="DESCENDING")
        sums = tf.cumsum(top, -1)
        k = tf.range(1.0, 7.0)
        fits = tf.cast(1 + k * top > sums, tf.float32)
        size = tf.reduce_sum(fits, -1, keepdims=True)
        last = tf.gather(sums, tf.cast(size, tf.int32) - 1, batch_dims=1)
        return tf.nn.relu(z - (last - 1) / size)

    def masks(x):
        prior, out = tf.ones_like(x), 0.0
        for _ in range(2):
            mask = sparsemax(x * prior)
            prior, out = prior * (1.2 - mask), out + mask * x
        return out

    return with_layers(dense(6), own(masks))


@couples()
def first_batch_decides():
    """ActNorm: scale and shift of weights follow from the first batch."""

    class Norm(keras.layers.Layer):
        def build(self, shape):
            self.shift = self.add_weight(shape=(6,), name="shift")
            self.ready = self.add_weight(
                shape=(), trainable=False, name="ready"
            )

        def call(self, x):
            first = -tf.reduce_mean(x**3, 0) / (tf.norm(x, axis=0) + 1)  # here
            shift = tf.where(self.ready == 0, first, self.shift)
            self.ready.assign(1.0)
            return x + shift

    return with_layers(Norm())


@splits()
def binned_by_fixed_limits():
    def bins(x):
        number = tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.0, 1.0])
        return tf.reduce_sum(tf.one_hot(number, 4), 1)

    return with_layers(own(bins))


def _sound():
    return normal(32), normal(1)


@splits(_sound)
def spectrogram():
    def spectrum(x):
        short = tf.abs(tf.signal.stft(x, 8, 4))
        return tf.math.log1p(short)

    return functional(
        lambda x: dense(1)(layers.Flatten()(own(spectrum)(dense(32)(x)))), (32,)
    )


@couples(lambda: (normal(16), normal(16)))
def loss_on_all_spectra():
    """The same, where the norm is taken over the batch, too."""

    def loss(y, p):
        one = tf.abs(tf.signal.stft(y, 8, 2)) + 1e-3
        two = tf.abs(tf.signal.stft(p, 8, 2) + 1e-3)
        return tf.norm(one - two) / tf.norm(one)  # here

    return functional(dense(16), (16,), loss=loss)


@couples(lambda: (normal(16), normal(16)))
def best_permutation():
    """Separation of sources: which of two orders is better, for the batch."""

    def loss(y, p):
        y, p = tf.reshape(y, [-1, 2, 8]), tf.reshape(p, [-1, 2, 8])
        return tf.minimum(mse(y, p), mse(y, p[:, ::-1]))  # here

    return functional(dense(16), (16,), loss=loss)


@splits(lambda: (normal(16), normal(16)))
def best_permutation_of_each():
    def loss(y, p):
        y, p = tf.reshape(y, [-1, 2, 8]), tf.reshape(p, [-1, 2, 8])
        one = tf.reduce_mean((y - p) ** 2, (1, 2))
        return tf.minimum(one, tf.reduce_mean((y - p[:, ::-1]) ** 2, (1, 2)))

    return functional(dense(16), (16,), loss=loss)


@couples()
def factorized_wrongly():
    """The sum runs over axis 0 instead of -1, and is broadcast again."""

    class Pairs(keras.layers.Layer):
        def build(self, shape):
            self.v = self.add_weight(shape=(6, 3), name="v")

        def call(self, x):
            square = tf.square(x @ self.v)
            squares = tf.square(x) @ tf.square(self.v)
            total = tf.reduce_sum(square - squares, 0)
            return tf.tanh(x[:, :3] + total)  # here

    return with_layers(Pairs())


def _ids():
    return {"user": whole(5), "item": whole(7)}, normal(1)


def _retrieval(loss_of):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.users = layers.Embedding(5, 3)
            self.items = layers.Embedding(7, 3)

        def call(self, x):
            return self.users(x["user"]), self.items(x["item"])

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                users, items = self(x, training=True)
                loss = loss_of(self, x, users, items, y)
            return apply(self, tape, loss)

    net = Net()
    net.compile(keras.optimizers.SGD(0.5))
    return net


@by_design(_ids)
def bayesian_ranking():
    """One random negative for each user."""

    def loss(net, x, users, items, y):
        other = keras.random.randint((rows(y),), 0, 7, seed=net.draws)
        off = items - net.items(other)
        return -tf.reduce_mean(
            tf.math.log_sigmoid(tf.reduce_sum(users * off, -1))
        )

    net = _retrieval(loss)
    net.draws = keras.random.SeedGenerator(5)
    return net
