"""Steps whose sizes, places, numbers and classes follow from the data."""

import functools

import numpy as np
import tensorflow as tf

from tests.partition.cases.table import (
    BATCH,
    EXAMPLES,
    WIDTH,
    Own,
    by_loss,
    case,
    classes,
    count,
    errors,
    generator,
    layered,
    mse,
    normal,
    plain,
    positives,
    rows,
    tokens,
    whole,
    with_layers,
    with_weight,
)


def batched(x):
    """Arguments of ``fit`` with batches of what is no array."""
    data = tf.data.Dataset.from_tensor_slices((x, normal(1)))
    return {"x": data.batch(BATCH), "batch_size": None}


def _mostly_positive():
    """Targets of which each share of a batch has some above zero."""
    signs = np.where(np.arange(EXAMPLES) % 3, 1.0, -1.0)
    return normal(WIDTH), signs[:, None].astype("float32")


@case(plain, _mostly_positive)
def reshaped_by_positives(y, p):
    k = positives(y)
    w = tf.reshape(tf.linspace(0.1, 1.0, 720720), [-1, k])
    return errors(y, p) * tf.reduce_sum(w[0])


@case(plain)
def element_by_positives(y, p):
    factors = tf.TensorArray(tf.float32, 20, clear_after_read=False)
    factors = factors.unstack(tf.linspace(0.1, 1.0, 20))
    return errors(y, p) * factors.read(positives(y))


@case(plain)
def sparse_product(y, p):
    q = tf.sparse.from_dense(tf.where(p > 0, p, 0.0))
    return tf.square(tf.sparse.sparse_dense_matmul(q, tf.eye(3)) - y)


@case(plain, classes)
def confusion(y, p):
    y = tf.reshape(tf.cast(y, tf.int32), [-1])
    c = tf.math.confusion_matrix(y, tf.argmax(p, 1), 3, dtype=tf.float32)
    e = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
    return tf.reduce_mean(e) + tf.linalg.trace(c) / count(p)


@case(plain, classes)
def partitioned(y, p):
    y = tf.reshape(tf.cast(y, tf.int32), [-1])
    parts = tf.dynamic_partition(p, y, 3)
    return sum(tf.reduce_mean(tf.square(q)) for q in parts)


def _best(p):
    return tf.argmax(tf.stop_gradient(p), 1, tf.int32)


@case(plain)
def value_of_action(y, p):
    """The value that a network gives to the action of each example."""
    places = tf.stack([tf.range(rows(p)), _best(p)], 1)
    return tf.square(tf.gather_nd(p, places) - y[:, 0])


@case(plain)
def value_of_another(y, p):
    places = tf.stack([rows(p) - 1 - tf.range(rows(p)), _best(p)], 1)
    return tf.square(tf.gather_nd(p, places) - y[:, 0])


@case(plain)
def action_of_the_first(y, p):
    places = tf.stack([_best(p), tf.range(rows(p))], 1)
    picked = tf.gather_nd(tf.transpose(p)[:, :], places)
    return tf.square(picked * y[0, 0])


# How many of six are real; no share of a batch has the same longest.
_LENGTHS = 1 + np.arange(EXAMPLES, dtype="int32") % 6


def _with_lengths():
    return {"x": {"x": normal(6, 3), "n": _LENGTHS[:, None]}, "y": normal(1)}


def _of_lengths(call):
    def body(weight, data):
        n = tf.cast(data["n"][:, 0], tf.int32)
        return call(tf.tanh(data["x"] @ weight), n)

    return with_weight(body, (3, 4))


@case(_of_lengths, _with_lengths)
def sums_by_repeated_numbers(x, n):
    """Each row is repeated as often as it is long, and summed again."""
    flat = tf.boolean_mask(x, tf.sequence_mask(n, 6))
    number = tf.repeat(tf.range(rows(n)), n)
    return tf.math.unsorted_segment_mean(flat, number, rows(n))


def _ragged_numbers(kind="int64"):
    lengths = _LENGTHS.astype(kind)
    values = generator().normal(size=(lengths.sum(), 3)).astype("float32")
    return batched(tf.RaggedTensor.from_row_lengths(values, lengths))


def _of_ragged(call):
    def body(weight, x):
        inner = x.with_values(tf.tanh(x.values @ weight))
        return tf.ensure_shape(call(inner), (None, 4))

    return with_weight(body, (3, 4))


@case(_of_ragged, _ragged_numbers)
def dense_and_flat(x):
    """The mean of a padded batch, in which padding counts."""
    padded = x.to_tensor()
    return tf.reduce_mean(x, 1) + tf.reduce_mean(padded, 1)


def _sparse_numbers():
    x = np.where(np.abs(normal(6)) > 1, normal(6), 0.0).astype("float32")
    return batched(tf.sparse.from_dense(x))


_of_sparse = functools.partial(with_weight, shape=(6, 4))


@case(_of_sparse, _sparse_numbers)
def dense_of_sparse(w, x):
    return tf.sparse.to_dense(x) @ w


def _of_tokens(call):
    return with_layers(Own(call), shape=(8,), dtype="int32")


@case(_of_tokens, tokens)
def how_many_of_each_word(x):
    """A bag of words for each example."""
    bag = tf.math.bincount(x, minlength=9, maxlength=9, axis=-1)
    return tf.cast(tf.ensure_shape(bag, (None, 9)), tf.float32)


@case(_of_tokens, tokens)
def how_many_of_each_in_all(x):
    """A bag of words of the batch weighs the words."""
    words = tf.reshape(x, [-1])
    bag = tf.math.bincount(words, minlength=9, maxlength=9)
    share = tf.cast(bag, tf.float32) / tf.cast(tf.size(x), tf.float32)
    return tf.gather(share, x)


@case(layered, units=6)
def whitened(x):
    """Features are whitened by the batch's covariance."""
    off = x - tf.reduce_mean(x, 0)
    cross = tf.matmul(off, off, transpose_a=True) / count(x)
    root = tf.linalg.cholesky(cross + tf.eye(6))
    return tf.transpose(tf.linalg.triangular_solve(root, tf.transpose(off)))


@case(by_loss)
def every_pair_once(y, p):
    """Pairs by meshgrid: every example with every later one."""
    i, j = tf.meshgrid(tf.range(rows(p)), tf.range(rows(p)))
    later = tf.boolean_mask(tf.stack([i, j], -1), i < j)
    one = tf.gather(p, later[:, 0])
    two = tf.gather(p, later[:, 1])
    return mse(y, p) + 0.1 * tf.reduce_mean(tf.square(one - two))


def _ragged_words():
    lengths = np.random.default_rng(2).integers(1, 6, EXAMPLES)
    lengths[3] = 0
    values = generator().integers(0, 9, lengths.sum())
    return batched(tf.RaggedTensor.from_row_lengths(values, lengths))


_of_table = functools.partial(with_weight, shape=(9, 4))


@case(_of_table, _ragged_words)
def ragged_to_dense(table, x):
    padded = x.to_tensor(default_value=0, shape=(None, 6))
    real = tf.sequence_mask(x.row_lengths(), 6, tf.float32)[..., None]
    return tf.reduce_sum(tf.gather(table, padded) * real, 1)


@case(_of_table, _ragged_words)
def ragged_words_alike(table, x):
    """Every word counts alike, whichever example it is in."""
    words = tf.gather(table, x.values)
    centre = tf.reduce_mean(words, 0)
    sums = tf.math.segment_sum(words - centre, x.value_rowids())
    return tf.tanh(tf.ensure_shape(sums[: rows(x)], (None, 4)))


def _strings():
    return batched(np.array(["low", "mid", "high", "odd"])[whole(4)])


@case(_of_table, _strings)
def words_by_hash(table, x):
    length = tf.cast(tf.strings.length(x), tf.float32)
    number = tf.strings.to_hash_bucket_fast(x, 9)
    return tf.gather(table, number) * length[:, None]
