"""How data comes, and how fit is called."""

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import compiled, plain
from tests.splitting.hostile.table import (
    BATCH,
    EXAMPLES,
    couples,
    dense,
    normal,
    numbers,
    rows,
    splits,
    whole,
)

layers = keras.layers


def _ragged():
    make = np.random.default_rng(2)
    lengths = make.integers(1, 6, EXAMPLES)
    lengths[3] = 0
    values = make.integers(0, 9, lengths.sum())
    ragged = tf.RaggedTensor.from_row_lengths(values, lengths)
    data = tf.data.Dataset.from_tensor_slices((ragged, normal(1)))
    return data.batch(BATCH)


class Words(keras.Model):
    """Takes a function of the words' vectors, ragged."""

    def __init__(self, of):
        super().__init__()
        self.of = of
        self.table = self.add_weight(shape=(9, 4), name="table")
        self.out = dense(1)

    def call(self, x):
        return self.out(self.of(self.table, x))


def _batched(data):
    return lambda: {"x": data(), "batch_size": None}


@splits(_batched(_ragged))
def ragged_to_dense():
    def of(table, x):
        padded = x.to_tensor(default_value=0, shape=(None, 6))
        real = tf.sequence_mask(x.row_lengths(), 6, tf.float32)[..., None]
        return tf.reduce_sum(tf.gather(table, padded) * real, 1)

    return compiled(Words(of))


@couples(_batched(_ragged))
def ragged_to_the_longest():
    """Padded to the batch's longest, and the padding is counted."""

    def of(table, x):
        return tf.reduce_mean(tf.gather(table, x.to_tensor()), 1)  # here

    return compiled(Words(of))


@couples(_batched(_ragged))
def ragged_words_alike():
    """Every word counts alike, whichever example it is in."""

    def of(table, x):
        words = tf.gather(table, x.values)
        centre = tf.reduce_mean(words, 0)  # here
        sums = tf.math.segment_sum(words - centre, x.value_rowids())  # here
        return tf.tanh(tf.ensure_shape(sums[: rows(x)], (None, 4)))

    return compiled(Words(of))


def _sparse():
    x = np.where(np.abs(normal(6)) > 1, normal(6), 0.0).astype("float32")
    data = tf.data.Dataset.from_tensor_slices(
        (tf.sparse.from_dense(x), normal(1))
    )
    return data.batch(BATCH)


@splits(_batched(_sparse))
def sparse_product_of_rows():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(6, 1), name="w")

        def call(self, x):
            return tf.sparse.sparse_dense_matmul(x, self.w)

    return compiled(Net())


@couples(_batched(_sparse), says="it gets a")
def sparse_softmax_of_all():
    """The number of entries of the whole batch scales each one."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(6, 1), name="w")

        def call(self, x):
            filled = tf.cast(tf.size(x.values), tf.float32)
            out = tf.sparse.sparse_dense_matmul(x, self.w)
            return out * 10.0 / filled  # here

    return compiled(Net())


def _strings():
    words = np.array(["low", "mid", "high", "odd"])[whole(4)]
    data = tf.data.Dataset.from_tensor_slices((words, normal(1)))
    return data.batch(BATCH)


@splits(_batched(_strings))
def words_in_a_table():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.lookup = layers.StringLookup(vocabulary=["low", "high"])
            self.embedding = layers.Embedding(3, 4)
            self.out = dense(1)

        def call(self, x):
            return self.out(self.embedding(self.lookup(x)))

    return compiled(Net())


@splits(_batched(_strings))
def words_by_hash():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(7, 4)
            self.out = dense(1)

        def call(self, x):
            number = tf.strings.to_hash_bucket_fast(x, 7)
            length = tf.cast(tf.strings.length(x), tf.float32)
            out = self.embedding(number) * length[:, None]
            return self.out(out)

    return compiled(Net())


@couples(_batched(_strings))
def words_numbered_by_the_batch():
    """tf.unique numbers words in the order in which they come."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(7, 4)
            self.out = dense(1)

        def call(self, x):
            return self.out(self.embedding(tf.unique(x)[1]))  # here

    return compiled(Net())


@splits(
    options=lambda: {"validation_data": tuple(t[:11] for t in numbers())},
)
def validated():
    return plain("mse", 1, metrics=["mae", keras.metrics.R2Score()])


@splits(options=lambda: {"validation_split": 0.3, "batch_size": 9})
def steps_in_one_call():
    return plain("mse", 1, metrics=["mae"], steps_per_execution=2)


@splits(options=lambda: {"batch_size": 1})
def batches_of_one():
    return plain("mse", 1, metrics=["mae"])


@splits(options=lambda: {"batch_size": 16})
def last_batch_of_one():
    return plain("mse", 1, metrics=["mae"])


@splits(options=lambda: {"steps_per_epoch": 2, "epochs": 3, "initial_epoch": 1})
def part_of_an_epoch():
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5),
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_overwrite_frequency=3,
    )
    return plain("mse", 1, optimizer=optimizer)


def _two_heads(**options):
    entrance = keras.Input((6,), name="x")
    hidden = dense(5, "tanh")(entrance)
    outs = {"a": dense(1, name="a")(hidden), "b": dense(3, name="b")(hidden)}
    model = keras.Model(entrance, outs)
    model.compile(keras.optimizers.SGD(0.05), **options)
    return model


def _two_targets():
    return normal(6), {"a": normal(1), "b": whole(3)}


_CROSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _weighted_heads():
    weight = np.abs(normal(1)[:, 0])
    x, y = _two_targets()
    return x, y, {"a": weight, "b": (weight > 0.5).astype("float32")}


@splits(_weighted_heads)
def heads_with_weights_of_examples():
    return _two_heads(
        loss={"a": "mse", "b": _CROSS},
        weighted_metrics={"a": ["mae"], "b": ["accuracy"]},
    )


@couples(_two_targets, says="sum")
def one_head_with_a_sum():
    """Only one of two losses is a sum."""
    return _two_heads(
        loss={"a": keras.losses.MeanAbsoluteError(reduction="sum"), "b": _CROSS}
    )


@couples(
    lambda: (normal(6), normal(1), np.abs(normal(1))),
    says="mean_with_sample_weight",
)
def mean_weighted_by_keras():
    """Keras divides by the sum of the weights."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return plain(loss, 1)


@splits(
    lambda: (
        normal(6),
        normal(1),
        np.where(np.arange(EXAMPLES) % 14 < 7, 1.0, 0.0),
    )
)
def weights_that_are_zero_on_one_tower():
    return plain("mse", 1, metrics=["mae"], weighted_metrics=["mae"])


class _Negative(keras.losses.Loss):
    def call(self, y, p):
        return tf.reduce_mean(tf.square(p - y), -1)


@splits(lambda: (normal(6), normal(1), normal(1)[:, 0]))
def weights_below_zero():
    return plain(_Negative(), 1)
