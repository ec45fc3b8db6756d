"""How data comes, how fit is called; and sequences."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.partition.cases.table import (
    BATCH,
    EXAMPLES,
    case,
    compiled,
    dense,
    errors,
    mse,
    normal,
    numbers,
    plain,
    stepping,
    tokens,
    whole,
    with_layers,
)


def _of_words(change, says_nothing=False):
    """A step that changes the gradient of an embedding."""

    def step(net, x, y):
        weights = net.trainable_variables
        with tf.GradientTape() as tape:
            p = net(x, training=True)
            loss = tf.reduce_mean(y * p) if says_nothing else mse(y, p)
        first, *rest = tape.gradient(loss, weights)
        net.optimizer.apply([change(first, x), *rest], weights)
        return {"loss": 1.0 if says_nothing else loss}

    entrance = keras.Input((8,), dtype="int32")
    words = layers.Flatten()(layers.Embedding(9, 4)(entrance))
    return compiled(stepping(step)(entrance, dense(1)(words)))


@case(_of_words, tokens)
def words_clipped_by_row(g, x):
    values = tf.clip_by_norm(g.values, 0.001, [1])
    return tf.IndexedSlices(values, g.indices, g.dense_shape)


@case(_of_words, tokens, says_nothing=True)
def indices_reordered(g, x):
    at = tf.transpose(tf.reshape(g.indices, [-1, 8]))
    return tf.IndexedSlices(g.values, tf.reshape(at, [-1]), g.dense_shape)


def _long_texts():
    x = whole(9, 7)
    x[:, :4] += x[:, :4] == 0
    return x, normal(1)


@case(data=_long_texts)
def lstm_both_ways():
    both = layers.Bidirectional(layers.LSTM(3))
    words = layers.Embedding(9, 4, mask_zero=True)
    return with_layers(words, both, shape=(None,), dtype="int32")


@case(options=lambda: {"validation_data": tuple(t[:11] for t in numbers())})
def validated():
    return plain(outputs=1, metrics=["mae", keras.metrics.R2Score()])


@case(options=lambda: {"validation_split": 0.3, "batch_size": 9})
def steps_in_one_call():
    return plain(outputs=1, metrics=["mae"], steps_per_execution=2)


@case(options=lambda: {"batch_size": 1})
def batches_of_one():
    return plain(outputs=1, metrics=["mae"])


@case(options=lambda: {"batch_size": 16})
def last_batch_of_one():
    return plain(outputs=1, metrics=["mae"])


@case(options=lambda: {"steps_per_epoch": 2, "epochs": 3, "initial_epoch": 1})
def part_of_an_epoch():
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5),
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_overwrite_frequency=3,
    )
    return plain(outputs=1, optimizer=optimizer)


def _two_heads(**options):
    entrance = keras.Input((6,), name="x")
    hidden = dense(5, "tanh")(entrance)
    outs = {"a": dense(1, name="a")(hidden), "b": dense(3, name="b")(hidden)}
    return compiled(keras.Model(entrance, outs), **options)


def _two_targets():
    return normal(6), {"a": normal(1), "b": whole(3)}


_CROSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _weighted_heads():
    weight = np.abs(normal(1)[:, 0])
    x, y = _two_targets()
    return x, y, {"a": weight, "b": (weight > 0.5).astype("float32")}


@case(data=_weighted_heads)
def heads_with_weights_of_examples():
    return _two_heads(
        loss={"a": "mse", "b": _CROSS},
        weighted_metrics={"a": ["mae"], "b": ["accuracy"]},
    )


@case(data=_two_targets)
def one_head_with_a_sum():
    """Only one of two losses is a sum."""
    return _two_heads(
        loss={"a": keras.losses.MeanAbsoluteError(reduction="sum"), "b": _CROSS}
    )


@case(data=lambda: (*numbers(), np.abs(normal(1))))
def mean_weighted_by_keras():
    """Keras divides by the sum of the weights."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return plain(loss, 1)


@case(data=lambda: (*numbers(), np.arange(EXAMPLES) % BATCH < BATCH // 2))
def weights_that_are_zero_on_one_tower():
    return plain(outputs=1, metrics=["mae"], weighted_metrics=["mae"])


@case(data=lambda: (*numbers(), normal()))
def weights_below_zero():
    return plain(errors, 1)
