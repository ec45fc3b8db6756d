"""How data comes, how fit is called; and sequences."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.partition.cases.table import (
    BATCH,
    EXAMPLES,
    WIDTH,
    Own,
    case,
    compiled,
    dense,
    errors,
    mse,
    normal,
    numbers,
    own_weight,
    plain,
    stacked,
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
def indices_rolled(g, x):
    at = tf.roll(g.indices, 8, 0)
    return tf.IndexedSlices(g.values, at, g.dense_shape)


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


@case(data=tokens)
def decoder_with_causal_mask():
    entrance = keras.Input((8,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(entrance)
    x = x + layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    return compiled(keras.Model(entrance, dense(1)(x[:, -1])))


def _attending(call):
    """Train a number from what a function makes of the vectors of words."""
    words = layers.Embedding(9, 4), Own(call), layers.Flatten()
    return with_layers(*words, shape=(8,), dtype="int32")


@case(_attending, tokens)
def attention_over_the_batch(x):
    """An einsum whose letters are in the wrong order."""
    score = tf.einsum("bsd,csd->sbc", x, x)
    return tf.einsum("sbc,csd->bsd", tf.nn.softmax(score), x)


@case(_attending, tokens)
def attention_time_first(x):
    """Time comes first, as in older code, and the batch stays apart."""
    x = tf.transpose(x, [1, 0, 2])
    score = tf.einsum("sbd,tbd->bst", x, x)
    out = tf.einsum("bst,tbd->sbd", tf.nn.softmax(score), x)
    return tf.reduce_mean(tf.transpose(out, [1, 0, 2]), 1)


@case(data=lambda: (normal(7, 3), normal(1)))
def time_taken_for_the_batch():
    """A recurrence that was written for time first, and is given rows."""

    def call(layer, x):
        def step(state, now):
            return tf.tanh(tf.matmul(now, layer.kept) + state)

        return tf.scan(step, x, tf.zeros_like(x[0]))

    cell = own_weight(call, shape=(3, 3), trainable=True)
    return with_layers(cell, layers.Flatten(), shape=(7, 3))


def _speech():
    lengths = 1 + np.arange(EXAMPLES) % 3
    labels = np.where(np.arange(3) < lengths[:, None], whole(3, 3) + 1, 0)
    return normal(7, 3), labels.astype("int32")


@case(data=_speech)
def classification_of_keras():
    gru = layers.GRU(4, return_sequences=True)
    return stacked(gru, dense(5), shape=(7, 3), loss=keras.losses.CTC())


def _next_words():
    x = whole(9, 8)
    return x, np.roll(x, -1, 1)


@case(data=_next_words)
def padding_ignored_by_keras():
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=0, reduction="sum_over_batch_size"
    )
    words = layers.Embedding(9, 4), dense(9)
    return stacked(*words, shape=(8,), dtype="int32", loss=loss)


def _fed(call):
    """Train a number from what a function makes of what a batch has."""

    class Fed(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = dense(1)

        def call(self, given):
            return self.out(call(given))

    return compiled(Fed())


def _of_known_size(change):
    """What a function makes of each batch, of which sizes are known."""

    def data():
        whole = tf.data.Dataset.from_tensor_slices(numbers())
        batches = whole.batch(BATCH, drop_remainder=True)
        return {"x": batches.map(change), "batch_size": None}

    return data


def _with_constants(x, y):
    matrix = tf.reshape(tf.linspace(-1.0, 1.0, WIDTH * WIDTH), [WIDTH, WIDTH])
    return (x, tf.constant(0.3), matrix), y


@case(_fed, _of_known_size(_with_constants))
def parts_without_rows(given):
    x, factor, matrix = given
    return x @ matrix * factor


def _transposed(x, y):
    return tf.transpose(x), y


@case(_fed, _of_known_size(_transposed))
def examples_along_the_second_axis(x):
    return tf.sin(tf.transpose(x))


def _one_target():
    return {"x": normal(WIDTH), "y": [normal(1), None]}


@case(data=_one_target)
def target_that_is_none():
    entrance = keras.Input((WIDTH,))
    hidden = dense(4, "tanh")(entrance)
    model = keras.Model(entrance, [dense(1)(hidden), dense(1)(hidden)])
    return compiled(model, ["mse", None])
