"""Structures, strings, ragged and sparse tensors give what one device gives."""

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


class SumOfRagged(keras.layers.Layer):
    """From rows of any length to their sums, a number each."""

    def call(self, inputs):
        return tf.reduce_sum(inputs, 1)[:, None]

    def compute_output_spec(self, inputs):
        return keras.KerasTensor((None, 1))


class Lazy(keras.Model):
    """Builds at its first batch, which is ragged and sparse."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(3) for _ in range(2)]

    def call(self, inputs):
        of_ragged, of_sparse = self.parts
        sums = of_ragged(SumOfRagged()(inputs["ragged"]))
        return sums + of_sparse(inputs["sparse"])


INPUTS = {
    "sparse": tf.sparse.from_dense(X * (X > 0)),
    "ragged": tf.RaggedTensor.from_row_lengths(
        np.arange(40, dtype="float32") / 50, [1, 4, 0, 5, 0] * 4
    ),
}


def model_of():
    keras.utils.set_random_seed(1)
    model = Lazy()
    model.compile(m.momentum(), m.cross_entropy())
    return model


@pytest.mark.parametrize(
    "towers, batches, ahead",
    [
        (2, "each", False),
        # The last batch has none for a third tower.
        (3, "split", False),
        # TensorFlow's iterator over several devices splits these itself.
        pytest.param(2, "split", True, marks=pytest.mark.long),
    ],
)
def test_ragged_and_sparse(towers, batches, ahead):
    def act(model, batch=3):
        dataset = tf.data.Dataset.from_tensor_slices((INPUTS, Y))
        trained = model.fit(dataset.batch(batch), verbose=0, shuffle=False)
        if ahead:
            return trained.history
        dataset = tf.data.Dataset.from_tensor_slices(INPUTS).batch(3)
        return trained.history, model.predict(dataset, verbose=0)

    factor = 2 if batches == "each" else 1
    assert_exact(
        model_of,
        act,
        strategy_of(towers, ahead, batches=batches),
        lambda model: act(model, 3 * factor),
    )
