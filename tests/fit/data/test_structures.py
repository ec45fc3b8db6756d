"""Structures, strings, ragged and sparse tensors give what one device gives."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.exactness import models as m
from tests.fit.data.prefetched import (
    assert_drawn_ahead,
    assert_strings_are_exact,
)
from tests.kit.compare import assert_exact
from tests.kit.training import strategy_of

X, Y = m.FEATURES[:20], m.LABELS[:20]


def test_strings_beside_numbers():
    assert_strings_are_exact(strategy_of(2, True))


def test_the_next_batch_is_read_while_the_current_one_computes():
    assert_drawn_ahead(strategy_of(2))


INPUTS = {
    "sparse": tf.sparse.from_dense(X * (X > 0)),
    "ragged": tf.RaggedTensor.from_row_lengths(
        np.arange(40, dtype="float32") / 50, [1, 4, 0, 5, 0] * 4
    ),
    # Ragged rows of ragged rows, of which towers are given all.
    "nested": tf.RaggedTensor.from_nested_row_lengths(
        np.arange(30, dtype="float32") / 50, [[1, 2] * 10, [0, 1, 2] * 10]
    ),
}


class Lazy(keras.Model):
    """Builds at its first batch, which is ragged and sparse."""

    def __init__(self):
        super().__init__()
        self.heads = [keras.layers.Dense(3) for _ in range(3)]

    def call(self, inputs):
        nested = tf.reduce_sum(inputs["nested"], 2)
        features = (
            inputs["sparse"],
            tf.reduce_sum(inputs["ragged"], 1)[:, None],
            tf.reduce_sum(nested, 1)[:, None],
        )
        pairs = zip(self.heads, features, strict=True)
        return tf.add_n([head(x) for head, x in pairs])


def lazy(**options):
    keras.utils.set_random_seed(1)
    model = Lazy()
    model.compile(m.momentum(), m.cross_entropy(), **options)
    return model


@pytest.mark.parametrize(
    "towers, batches, ahead, eager, parts",
    [
        (2, "each", False, False, 1),
        # The last batch has none for a third tower.
        (3, "split", False, False, 1),
        (2, "split", False, False, 2),
        (3, "each", False, True, 1),
        # TensorFlow's iterator over several devices splits these itself.
        pytest.param(2, "split", True, False, 1, marks=pytest.mark.long),
    ],
)
def test_ragged_and_sparse(towers, batches, ahead, eager, parts):
    def act(model, batch=3):
        dataset = tf.data.Dataset.from_tensor_slices((INPUTS, Y))
        trained = model.fit(dataset.batch(batch), verbose=0, shuffle=False)
        if ahead:
            return trained.history
        dataset = tf.data.Dataset.from_tensor_slices(INPUTS).batch(3)
        return trained.history, model.predict(dataset, verbose=0)

    factor = towers if batches == "each" else 1
    assert_exact(
        functools.partial(lazy, run_eagerly=eager),
        act,
        strategy_of(towers, ahead, batches=batches, micro_batches=parts),
        lambda model: act(model, 3 * factor),
    )


def test_rows_of_sparse_and_ragged_tensors_are_divided():
    inputs = {name: INPUTS[name] for name in ("sparse", "ragged")}
    data = tf.data.Dataset.from_tensor_slices((inputs, Y)).batch(5)
    model = lazy()
    model.call = lambda x: (
        model.heads[0](x["sparse"])
        + model.heads[1](tf.reduce_sum(x["ragged"], 1)[:, None])
    )
    with strategy_of(2) as strategy:
        model.fit(data, verbose=0)
    assert "computed once" not in strategy.describe()
