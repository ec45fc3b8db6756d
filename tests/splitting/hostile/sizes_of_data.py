"""Sizes that follow from what a batch holds, not from how many rows."""

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import compiled, count, mse
from tests.splitting.hostile.table import (
    BATCH,
    EXAMPLES,
    by_loss,
    couples,
    dense,
    functional,
    generator,
    normal,
    own,
    rows,
    splits,
    tokens,
)


def _lengths():
    """How many of six are real; no share of a batch has the same longest."""
    lengths = 1 + np.arange(EXAMPLES) % 6
    return np.minimum(lengths, 6).astype("int32")[:, None]


def _with_lengths():
    return {"x": {"x": normal(6, 3), "n": _lengths()}, "y": normal(1)}


def _of_lengths(call):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.out = dense(4, "tanh"), dense(1)

        def call(self, data):
            n = tf.cast(data["n"][:, 0], tf.int32)
            return self.out(call(self.inner(data["x"]), n))

    return compiled(Net())


@splits(_with_lengths)
def last_of_each():
    """The output at the end of every sequence."""

    def call(x, n):
        return tf.gather(x, n - 1, batch_dims=1)

    return _of_lengths(call)


@couples(_with_lengths)
def last_of_all():
    """The output at the end of the longest sequence."""

    def call(x, n):
        return x[:, tf.reduce_max(n - 2)]  # here

    return _of_lengths(call)


@splits(_with_lengths)
def sums_by_repeated_numbers():
    """Each row is repeated as often as it is long, and summed again."""

    def call(x, n):
        flat = tf.boolean_mask(x, tf.sequence_mask(n, 6))
        number = tf.repeat(tf.range(rows(n)), n)
        return tf.math.unsorted_segment_mean(flat, number, rows(n))

    return _of_lengths(call)


def _ragged_numbers(kind="int64"):
    make = generator()
    lengths = _lengths()[:, 0].astype(kind)
    values = make.normal(size=(lengths.sum(), 3)).astype("float32")
    ragged = tf.RaggedTensor.from_row_lengths(values, lengths)
    data = tf.data.Dataset.from_tensor_slices((ragged, normal(1)))
    return {"x": data.batch(BATCH), "batch_size": None}


def _of_ragged(call):
    class Ragged(keras.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(3, 4), name="w")
            self.out = dense(1)

        def call(self, x):
            inner = x.with_values(tf.tanh(x.values @ self.w))
            return self.out(tf.ensure_shape(call(inner), (None, 4)))

    return compiled(Ragged())


@splits(lambda: _ragged_numbers("int32"))
def mean_of_rows_with_short_splits():
    return _of_ragged(lambda x: tf.reduce_mean(x, 1))


@couples(_ragged_numbers)
def dense_and_flat():
    """The mean of a padded batch, in which padding counts."""

    def call(x):
        padded = x.to_tensor()  # here
        return tf.reduce_mean(x, 1) + tf.reduce_mean(padded, 1)  # here

    return _of_ragged(call)


def _sparse_numbers():
    x = np.where(np.abs(normal(6)) > 1, normal(6), 0.0).astype("float32")
    sparse = tf.sparse.from_dense(x)
    data = tf.data.Dataset.from_tensor_slices((sparse, normal(1)))
    return {"x": data.batch(BATCH), "batch_size": None}


def _of_sparse(call):
    class Sparse(keras.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(6, 4), name="w")
            self.out = dense(1)

        def call(self, x):
            return self.out(call(x, self.w))

    return compiled(Sparse())


@splits(_sparse_numbers)
def dense_of_sparse():
    return _of_sparse(lambda x, w: tf.sparse.to_dense(x) @ w)


@couples(_sparse_numbers, says="it gets a")
def centred_entries():
    """The mean of all entries of the batch is taken from each."""

    def call(x, w):
        off = x.values - tf.reduce_mean(x.values)  # here
        x = tf.SparseTensor(x.indices, off, x.dense_shape)
        return tf.sparse.sparse_dense_matmul(x, w)  # here

    return _of_sparse(call)


@couples(_sparse_numbers, says="it gets a")
def sums_of_sparse_columns():
    def call(x, w):
        column = tf.sparse.reduce_sum(x, 0)  # here
        return tf.sparse.sparse_dense_matmul(
            x, w * tf.reshape(column, (6, 1))
        )  # here

    return _of_sparse(call)


@couples(tokens)
def classes_that_are_there():
    """One-hot over as many classes as the batch has: its width varies."""

    def spread(x):
        depth = tf.reduce_max(x[:, 0]) + 1  # here
        hot = tf.one_hot(x, depth)
        return tf.reduce_mean(hot, (1, 2))[:, None]  # here

    return functional(lambda x: dense(1)(own(spread)(x)), (8,), "int32")


@splits(tokens)
def how_many_of_each_word():
    """A bag of words for each example."""

    def call(x):
        return tf.math.bincount(x, minlength=9, maxlength=9, axis=-1)

    def bag(x):
        return tf.cast(tf.ensure_shape(call(x), (None, 9)), tf.float32)

    return functional(lambda x: dense(1)(own(bag)(x)), (8,), "int32")


@couples(tokens)
def how_many_of_each_in_all():
    """A bag of words of the batch weighs the words."""

    def call(x):
        words = tf.reshape(x, [-1])
        bag = tf.math.bincount(words, minlength=9, maxlength=9)  # here
        share = tf.cast(bag, tf.float32) / tf.cast(tf.size(x), tf.float32)
        return tf.gather(share, x)  # here

    return functional(lambda x: dense(1)(own(call)(x)), (8,), "int32")


@couples()
def nonzero_in_the_mean():
    """Keras's and TensorFlow's count_nonzero over the batch."""

    def loss(x, y, p):
        wrong = tf.nn.relu(tf.abs(y - p) - 0.3)
        some = tf.math.count_nonzero(wrong, dtype=tf.float32)
        return tf.reduce_sum(wrong) / (some + 1e-3)  # here

    return by_loss(loss)


@couples()
def whitened():
    """Features are whitened by the batch's covariance."""

    def white(x):
        off = x - tf.reduce_mean(x, 0)  # here
        cross = tf.matmul(off, off, transpose_a=True) / count(x)
        root = tf.linalg.cholesky(cross + tf.eye(6))
        return tf.transpose(tf.linalg.triangular_solve(root, tf.transpose(off)))

    return functional(lambda x: dense(1)(own(white)(dense(6)(x))))


@couples()
def every_pair_once():
    """Pairs by meshgrid: every example with every later one."""

    def loss(x, y, p):
        i, j = tf.meshgrid(tf.range(rows(p)), tf.range(rows(p)))  # here
        later = tf.boolean_mask(tf.stack([i, j], -1), i < j)  # here
        one = tf.gather(p, later[:, 0])
        two = tf.gather(p, later[:, 1])
        return mse(y, p) + 0.1 * tf.reduce_mean(tf.square(one - two))

    return by_loss(loss)
