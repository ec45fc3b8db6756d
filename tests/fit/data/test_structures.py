"""Structures, strings, ragged and sparse tensors give what one device gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.training import strategy_of

X, Y = m.FEATURES, m.LABELS


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
        count = 21
        data = (
            {"features": X[:count], "tokens": m.TOKENS[:count]},
            {"label": Y[:count], "target": m.TARGETS[:count]},
        )
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(8)
        trained = model.fit(dataset, verbose=0, shuffle=False).history
        return trained, model.predict(data[0], batch_size=5, verbose=0)

    assert_exact(make, act, strategy_of(3))
    # Here a step takes a batch from each tower.
    assert_exact(
        make,
        lambda model: fit_nested(model, 4),
        strategy_of(2, batches="each"),
        lambda model: fit_nested(model, 8),
    )


def fit_nested(model, batch):
    data = (
        {"features": X[:21], "tokens": m.TOKENS[:21]},
        {"label": Y[:21], "target": m.TARGETS[:21]},
    )
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(batch)
    return model.fit(dataset, verbose=0, shuffle=False)


@pytest.mark.parametrize("each", [False, True])
def test_strings(each):
    words = np.array(["a", "b", "c", "b"] * 5)

    def make():
        keras.utils.set_random_seed(1)
        lookup = keras.layers.StringLookup(
            vocabulary=["a", "b", "c"], output_mode="one_hot"
        )
        model = keras.Sequential(
            [keras.Input((), dtype="string"), lookup, keras.layers.Dense(3)]
        )
        model.compile(m.momentum(), m.cross_entropy())
        return model

    def act(model, batch=3):
        dataset = tf.data.Dataset.from_tensor_slices((words, Y[:20]))
        return model.fit(dataset.batch(batch), verbose=0, shuffle=False)

    strategy = strategy_of(2, batches="each" if each else "split")
    assert_exact(
        make, act, strategy, lambda model: act(model, 6 if each else 3)
    )


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
            inputs = tf.reduce_sum(inputs, 1)[:, None]
        return self.dense(inputs)


def inputs_of(kind, count=20):
    if kind == "sparse":
        return tf.sparse.from_dense(X[:count] * (X[:count] > 0))
    values = tf.constant(np.arange(50, dtype="float32") / 50)
    lengths = [1, 4, 0, 5, 0] * 5
    return tf.RaggedTensor.from_row_lengths(values, lengths)[:count]


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
    model.compile(m.momentum(), m.cross_entropy(), metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    "kind, each, lazy",
    [
        ("ragged", False, True),
        ("ragged", True, False),
        ("sparse", False, False),
        ("sparse", True, True),
    ],
)
def test_ragged_and_sparse(kind, each, lazy):
    def act(model, batch=3):
        dataset = tf.data.Dataset.from_tensor_slices((inputs_of(kind), Y[:20]))
        trained = model.fit(dataset.batch(batch), verbose=0, shuffle=False)
        dataset = tf.data.Dataset.from_tensor_slices(inputs_of(kind)).batch(3)
        return trained.history, model.predict(dataset, verbose=0)

    strategy = strategy_of(2, batches="each" if each else "split")
    assert_exact(
        lambda: model_of(kind, lazy),
        act,
        strategy,
        lambda model: act(model, 6 if each else 3),
    )


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_ahead(kind):
    # TensorFlow's iterator over several devices splits these batches itself.
    def act(model):
        dataset = tf.data.Dataset.from_tensor_slices((inputs_of(kind), Y[:20]))
        return model.fit(dataset.batch(7), verbose=0, shuffle=False)

    assert_exact(lambda: model_of(kind, False), act, strategy_of(2, True))


def test_a_fit_without_targets():
    class Own(keras.Sequential):
        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            return tf.reduce_mean((y_pred - x) ** 2)

    def make():
        keras.utils.set_random_seed(1)
        model = Own([keras.Input((6,)), keras.layers.Dense(6)])
        model.compile("sgd")
        return model

    def act(model):
        return model.fit(X[:10], batch_size=4, verbose=0, shuffle=False)

    assert_exact(make, act, strategy_of(3))
