"""Text, speech and time series: masks, recurrence, attention, alignment."""

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import compiled
from tests.splitting.hostile.table import (
    couples,
    dense,
    functional,
    normal,
    own,
    series,
    splits,
    tokens,
    whole,
)

layers = keras.layers


def _words(body, **options):
    """Train on sequences of words."""
    return functional(body, (8,), "int32", **options)


@splits(tokens)
def masked_bidirectional():
    def body(x):
        x = layers.Embedding(9, 4, mask_zero=True)(x)
        x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
        return dense(1)(layers.GlobalAveragePooling1D()(x))

    return _words(body)


@splits(tokens)
def decoder_with_causal_mask():
    def body(x):
        x = layers.Embedding(9, 4, mask_zero=True)(x)
        x = x + layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(x)
        return dense(1)(x[:, -1])

    return _words(body)


@couples(tokens)
def attention_over_the_batch():
    """An einsum whose letters are in the wrong order."""

    def attend(x):
        score = tf.einsum("bsd,csd->sbc", x, x)  # here
        return tf.einsum("sbc,csd->bsd", tf.nn.softmax(score), x)

    def body(x):
        return dense(1)(
            layers.Flatten()(own(attend)(layers.Embedding(9, 4)(x)))
        )

    return _words(body)


@splits(tokens)
def attention_time_first():
    """Time comes first, as in older code, and the batch stays apart."""

    def attend(x):
        x = tf.transpose(x, [1, 0, 2])
        score = tf.einsum("sbd,tbd->bst", x, x)
        out = tf.einsum("bst,tbd->sbd", tf.nn.softmax(score), x)
        return tf.reduce_mean(tf.transpose(out, [1, 0, 2]), 1)

    def body(x):
        return dense(1)(own(attend)(layers.Embedding(9, 4)(x)))

    return _words(body)


@couples(series)
def time_taken_for_the_batch():
    """A recurrence that was written for time first, and is given rows."""

    class Cell(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(3, 3), name="w")

        def call(self, x):
            def step(state, now):
                return tf.tanh(tf.matmul(now, self.w) + state)

            first = tf.zeros_like(x[0])
            return tf.scan(step, x, first)  # here

    def body(x):
        return dense(1)(layers.Flatten()(Cell()(x)))

    return functional(body, (7, 3))


def _speech():
    lengths = np.tile([2, 3, 1], 11)
    labels = np.where(np.arange(3) < lengths[:, None], whole(3, 3) + 1, 0)
    return normal(7, 3), labels.astype("int32")


@splits(_speech)
def classification_of_keras():
    return functional(
        lambda x: dense(5)(layers.GRU(4, return_sequences=True)(x)),
        (7, 3),
        loss=keras.losses.CTC(),
    )


def _next_words():
    x = whole(9, 8)
    return x, np.roll(x, -1, 1)


@splits(_next_words)
def mean_over_real_words_of_each():
    def loss(y, p):
        y = tf.cast(y, tf.int32)
        real = tf.cast(y > 0, tf.float32)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
        return tf.math.divide_no_nan(
            tf.reduce_sum(each * real, 1), tf.reduce_sum(real, 1)
        )

    return _words(lambda x: dense(9)(layers.Embedding(9, 4)(x)), loss=loss)


@splits(_next_words)
def padding_ignored_by_keras():
    return _words(
        lambda x: dense(9)(layers.Embedding(9, 4)(x)),
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=0, reduction="sum_over_batch_size"
        ),
    )


@splits(series)
def own_cell_with_projection():
    class Cell(keras.layers.Layer):
        state_size = (3, 2)
        output_size = 2

        def build(self, shape):
            self.gates = dense(6)
            self.out = dense(2)

        def call(self, inputs, states):
            hidden, memory = states
            gates = self.gates(tf.concat([inputs, memory], -1))
            keep, new = tf.split(gates, 2, -1)
            hidden = tf.sigmoid(keep) * hidden + tf.tanh(new)
            memory = self.out(hidden)
            return memory, (hidden, memory)

    return functional(lambda x: dense(1)(layers.RNN(Cell())(x)), (7, 3))


@splits(lambda: (normal(7, 3), normal(7, 3)))
def scaled_by_each_series():
    """Reversible instance normalization: statistics of each series."""

    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = dense(3)

        def call(self, x):
            mean, variance = tf.nn.moments(x, [1], keepdims=True)
            deviation = tf.sqrt(variance + 1e-3)
            return self.body((x - mean) / deviation) * deviation + mean

    return compiled(Scaled())
