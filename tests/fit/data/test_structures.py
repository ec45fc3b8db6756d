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


def test_dictionaries_and_nested_structures():
    def make():
        model = m.two_headed()
        model.compile(
            m.momentum(),
            {"label": m.cross_entropy(), "target": "mse"},
            metrics={"label": ["accuracy"], "target": ["mae"]},
        )
        return model

    def act(model):
        data = (
            {"features": X, "tokens": m.TOKENS[:20]},
            {"label": Y, "target": m.TARGETS[:20]},
        )
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(8)
        trained = model.fit(dataset, verbose=0, shuffle=False).history
        return trained, model.predict(data[0], batch_size=5, verbose=0)

    # Keras logs a metric of each loss in a graph only.
    found = assert_exact(make, act, strategy_of(2), in_graph=True)
    _, predicted = found.returned
    assert set(predicted) == {"label", "target"}


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


def model_of(lazy):
    keras.utils.set_random_seed(1)
    model = Lazy()
    if not lazy:
        inputs = {
            "ragged": keras.Input((None,), ragged=True, name="ragged"),
            "sparse": keras.Input((6,), sparse=True, name="sparse"),
        }
        model = keras.Model(inputs, model(inputs))
    model.compile(m.momentum(), m.cross_entropy())
    return model


@pytest.mark.parametrize(
    "towers, batches, lazy, ahead",
    [
        (2, "each", False, False),
        # The last batch has none for a third tower.
        (3, "split", False, False),
        # TensorFlow's iterator over several devices splits these itself.
        pytest.param(2, "split", True, True, marks=pytest.mark.long),
    ],
)
def test_ragged_and_sparse(towers, batches, lazy, ahead):
    def act(model, batch=3):
        dataset = tf.data.Dataset.from_tensor_slices((INPUTS, Y))
        trained = model.fit(dataset.batch(batch), verbose=0, shuffle=False)
        if ahead:
            return trained.history
        dataset = tf.data.Dataset.from_tensor_slices(INPUTS).batch(3)
        return trained.history, model.predict(dataset, verbose=0)

    factor = 2 if batches == "each" else 1
    assert_exact(
        lambda: model_of(lazy),
        act,
        strategy_of(towers, ahead, batches=batches),
        lambda model: act(model, 3 * factor),
    )
