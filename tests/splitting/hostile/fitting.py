"""Ways to call fit: weights of examples, of heads and of steps."""

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import plain
from tests.splitting.hostile.table import (
    EXAMPLES,
    couples,
    dense,
    functional,
    normal,
    splits,
    tokens,
    whole,
)

layers = keras.layers


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


@splits(_two_targets)
def heads_with_weights():
    return _two_heads(
        loss={"a": "mae", "b": _CROSS},
        loss_weights={"a": 0.3, "b": 2.0},
        metrics={"a": ["mse"], "b": ["accuracy"]},
    )


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


@splits(_two_targets)
def one_head_without_loss():
    return _two_heads(loss={"a": "mse"}, metrics={"b": ["accuracy"]})


@couples(_two_targets, says="sum")
def one_head_with_a_sum():
    """Only one of two losses is a sum."""
    return _two_heads(
        loss={"a": keras.losses.MeanAbsoluteError(reduction="sum"), "b": _CROSS}
    )


@splits(
    lambda: (normal(6), whole(3)),
    lambda: {"class_weight": {0: 0.2, 1: 3.0, 2: 1.0}},
)
def weights_of_classes():
    return plain(_CROSS, weighted_metrics=["accuracy"])


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


@splits(lambda: (normal(7, 3), normal(7, 1), np.abs(normal(7))))
def weights_of_time_steps():
    return functional(dense(1), (7, 3), weighted_metrics=["mse"])


def _masked_and_weighted():
    x = tokens()[0]
    return x, normal(8, 1), np.abs(normal(8))


@splits(_masked_and_weighted)
def weights_and_masks():
    def body(x):
        return dense(1)(layers.Embedding(9, 4, mask_zero=True)(x))

    return functional(body, (8,), "int32", metrics=["mae"])


class _Negative(keras.losses.Loss):
    def call(self, y, p):
        return tf.reduce_mean(tf.square(p - y), -1)


@splits(lambda: (normal(6), normal(1), normal(1)[:, 0]))
def weights_below_zero():
    return plain(_Negative(), 1)
