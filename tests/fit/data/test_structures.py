"""Structures, strings, ragged and sparse tensors give what one device gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from tests.fit.data.prefetched import (
    assert_drawn_ahead,
    assert_strings_are_exact,
)
from tests.kit.compare import assert_exact
from tests.kit.sampling import sample_of
from tests.kit.training import seeded, strategy_of

pytestmark = pytest.mark.alternate

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


FEATURES = {
    "sparse": lambda x: x,
    "ragged": lambda x: tf.reduce_sum(x, 1)[:, None],
    "nested": lambda x: tf.reduce_sum(tf.reduce_sum(x, 2), 1)[:, None],
}


class Lazy(keras.Model):
    """Builds at its first batch, and draws for each example."""

    def __init__(self):
        super().__init__()
        self.heads = {name: keras.layers.Dense(3) for name in INPUTS}
        self.dropout = keras.layers.Dropout(0.3, seed=1)

    def call(self, inputs, training=False):
        scores = [
            self.heads[name](FEATURES[name](x)) for name, x in inputs.items()
        ]
        return self.dropout(tf.add_n(scores), training=training)


def dataset_of(names, batch=3):
    inputs = {name: INPUTS[name] for name in names}
    return tf.data.Dataset.from_tensor_slices((inputs, Y)).batch(batch)


DIVIDED = "sparse", "ragged"


@pytest.mark.parametrize(
    "names, towers, options",
    [
        *sample_of(
            [
                (DIVIDED, 2, {"batches": "each"}),
                # The last batch has none for a third tower.
                (INPUTS, 3, {}),
                (INPUTS, 2, {"micro_batches": 2}),
                (DIVIDED, 3, {"batches": "each", "eager": True}),
            ],
            4,
        ),
        # TensorFlow's iterator over several devices splits these itself.
        pytest.param(DIVIDED, 2, {"prefetch": True}, marks=pytest.mark.long),
    ],
)
def test_ragged_and_sparse(names, towers, options):
    options = {"eager": False, "prefetch": False, **options}
    make = seeded(Lazy, run_eagerly=options.pop("eager"))
    predicts = not options["prefetch"]

    def act(model, batch=3):
        data = dataset_of(names, batch)
        history = model.fit(data, verbose=0, shuffle=False).history
        if not predicts:
            return history
        data = dataset_of(names).map(lambda x, _: x)
        return history, model.predict(data, verbose=0)

    factor = towers if "batches" in options else 1
    assert_exact(
        make,
        act,
        strategy_of(towers, **options),
        lambda model: act(model, 3 * factor),
    )


def test_nested_ragged_rows_in_batches_of_towers_own_are_refused():
    with (
        pytest.raises(kt.TowerError, match="ragged in several axes"),
        strategy_of(2, batches="each"),
    ):
        seeded(Lazy)().fit(dataset_of(INPUTS), verbose=0)
