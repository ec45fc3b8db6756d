"""Features and users: crossed, factorized, retrieved, ranked."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import apply, mse, with_layers
from tests.splitting.hostile.table import (
    by_design,
    couples,
    dense,
    functional,
    normal,
    rows,
    splits,
    whole,
)

layers = keras.layers


@splits()
def crossed_features():
    """Deep & cross."""

    class Cross(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(6, 6), name="w")

        def call(self, first, x):
            return first * tf.matmul(x, self.w) + x

    def body(x):
        return dense(1)(layers.Concatenate()([Cross()(x, Cross()(x, x)), x]))

    return functional(body)


@splits()
def factorized():
    """Factorization machine: square of the sum less the sum of squares."""

    class Pairs(keras.layers.Layer):
        def build(self, shape):
            self.v = self.add_weight(shape=(6, 3), name="v")

        def call(self, x):
            square = tf.square(x @ self.v)
            squares = tf.square(x) @ tf.square(self.v)
            return 0.5 * tf.reduce_sum(square - squares, -1, keepdims=True)

    return with_layers(Pairs())


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


@splits(_ids)
def matrix_factorization():
    def loss(net, x, users, items, y):
        return mse(y[:, 0], tf.reduce_sum(users * items, -1))

    return _retrieval(loss)


@couples(_ids)
def negatives_of_the_batch():
    """Every other item of the batch is a negative."""

    def loss(net, x, users, items, y):
        near = tf.matmul(users, items, transpose_b=True)  # here
        right = tf.range(rows(y))
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(right, near)
        )

    return _retrieval(loss)


@splits(_ids)
def negatives_of_the_catalogue():
    """All items are negatives: a product with weights."""

    def loss(net, x, users, items, y):
        near = tf.matmul(users, net.items.embeddings, transpose_b=True)
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(x["item"], near)
        )

    return _retrieval(loss)


@couples(_ids)
def corrected_for_popularity():
    """Logits less the logarithm of how often an item is in the batch."""

    def loss(net, x, users, items, y):
        near = tf.matmul(users, net.items.embeddings, transpose_b=True)
        often = tf.reduce_mean(tf.one_hot(x["item"], 7), 0)
        near -= tf.math.log(often + 0.1)  # here
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(x["item"], near)
        )

    return _retrieval(loss)


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


@splits(_ids)
def regularized_by_rows():
    """The penalty is of the rows that the batch uses, once for each use."""

    def loss(net, x, users, items, y):
        used = tf.reduce_mean(tf.reduce_sum(users**2 + items**2, -1))
        return mse(y[:, 0], tf.reduce_sum(users * items, -1)) + 0.1 * used

    return _retrieval(loss)


@couples(_ids)
def regularized_once_for_each():
    """The penalty is of the rows that the batch uses, once however often."""

    def loss(net, x, users, items, y):
        used, _ = tf.unique(x["user"])  # here
        rows_used = net.users(used)
        penalty = tf.reduce_sum(rows_used**2)
        return mse(y[:, 0], tf.reduce_sum(users * items, -1)) + penalty

    return _retrieval(loss)
