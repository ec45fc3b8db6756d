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

    _, predicted = assert_exact(make, act, strategy_of(3)).returned
    assert set(predicted) == {"label", "target"}


@pytest.mark.parametrize("ahead, batches", [(False, "each"), (True, "split")])
def test_strings_beside_numbers(ahead, batches):
    assert_strings_are_exact(
        strategy_of(2, ahead, batches=batches), 2 if batches == "each" else 1
    )


def test_the_next_batch_is_read_while_the_current_one_computes():
    assert_drawn_ahead(strategy_of(2))


class SumOfRagged(keras.layers.Layer):
    """From rows of any length to their sums, a number each."""

    def call(self, inputs):
        return tf.reduce_sum(inputs, 1)[:, None]

    def compute_output_spec(self, inputs):
        return keras.KerasTensor((None, 1))


class Lazy(keras.Model):
    """Builds at its first batch, which is ragged or sparse."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs):
        if isinstance(inputs, tf.RaggedTensor):
            inputs = SumOfRagged()(inputs)
        return self.dense(inputs)


INPUTS = {
    "sparse": tf.sparse.from_dense(X * (X > 0)),
    "ragged": tf.RaggedTensor.from_row_lengths(
        np.arange(40, dtype="float32") / 50, [1, 4, 0, 5, 0] * 4
    ),
}


def model_of(kind, lazy):
    keras.utils.set_random_seed(1)
    if lazy:
        model = Lazy()
    else:
        first = {
            "ragged": [keras.Input((None,), ragged=True), SumOfRagged()],
            "sparse": [keras.Input((6,), sparse=True)],
        }[kind]
        model = keras.Sequential([*first, keras.layers.Dense(3)])
    model.compile(m.momentum(), m.cross_entropy())
    return model


@pytest.mark.parametrize(
    "kind, batches, lazy, ahead",
    [
        ("ragged", "split", True, False),
        ("sparse", "each", False, False),
        # TensorFlow's iterator over several devices splits these itself.
        ("ragged", "split", False, True),
        ("sparse", "split", True, True),
    ],
)
def test_ragged_and_sparse(kind, batches, lazy, ahead):
    inputs = INPUTS[kind]

    def act(model, batch=3):
        dataset = tf.data.Dataset.from_tensor_slices((inputs, Y))
        trained = model.fit(dataset.batch(batch), verbose=0, shuffle=False)
        if ahead:
            return trained.history
        dataset = tf.data.Dataset.from_tensor_slices(inputs).batch(3)
        return trained.history, model.predict(dataset, verbose=0)

    factor = 2 if batches == "each" else 1
    assert_exact(
        lambda: model_of(kind, lazy),
        act,
        strategy_of(2, ahead, batches=batches),
        lambda model: act(model, 3 * factor),
    )
