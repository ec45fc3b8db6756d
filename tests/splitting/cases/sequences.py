"""Texts, of any length."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    EXAMPLES,
    compiled,
    generator,
    proven,
)


def long_texts():
    make = generator()
    x = make.integers(1, 9, (EXAMPLES, 7)).astype("int32")
    x[:, 4:] *= make.integers(0, 2, (EXAMPLES, 3)).astype("int32")
    return x, make.normal(size=(EXAMPLES, 1)).astype("float32")


def of_any_length(*layers):
    return compiled(
        keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                *layers,
                keras.layers.Dense(1),
            ]
        )
    )


@proven(long_texts)
def gru():
    return of_any_length(keras.layers.GRU(3))


@proven(long_texts)
def lstm_both_ways():
    return of_any_length(keras.layers.Bidirectional(keras.layers.LSTM(3)))


@proven(long_texts)
def dense_at_all_times():
    return of_any_length(
        keras.layers.TimeDistributed(keras.layers.Dense(3)),
        keras.layers.GlobalAveragePooling1D(),
    )


@proven(long_texts)
def attention_to_texts():
    class Attends(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.heads = keras.layers.MultiHeadAttention(2, 3)

        def call(self, x):
            return tf.reduce_mean(self.heads(x, x), 1)

        def compute_output_spec(self, x):
            return keras.KerasTensor((x.shape[0], 4), x.dtype)

    return of_any_length(Attends())
