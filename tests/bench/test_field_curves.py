"""The rule by which a row of the field counts."""

import math

import keras
import pytest

from keras_towers.bench.field.curves import (
    TOLERANCE,
    difference,
    frozen,
    undecided,
)


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        ([2.5 * (1 + 0.9 * TOLERANCE)], [2.5], ""),
        ([2.5, 0.123], [2.5, 0.456], "step 2 on (0.123 against 0.456)"),
        # Where three decimals do not show the difference, more do.
        ([0.0001234], [0.0001256], "step 1 on (0.0001234 against 0.0001256)"),
        ([math.nan], [1.0], "step 1 on (nan against 1.000)"),
        # A reference that has diverged is none.
        ([math.nan], [math.nan], "step 1 on (nan against nan)"),
        ([1.0], [1.0, 1.0], "1 losses, against 2"),
        ([], [], "the reference has no losses"),
    ],
)
def test_row_counts_only_with_the_losses_of_the_reference(mine, other, said):
    found = difference(mine, other)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("reference", "still", "said"),
    [
        # It is enough that one step shows it, and in either direction.
        ([2.0, 2.0], [2.0, 1.9], ""),
        ([2.0, 2.0], [2.0, 2.0], "at most 0% in 2 steps"),
        # It would pass with half of the effect of training.
        ([1.0], [1.0 + 1.9 * TOLERANCE], "at most 0.19% in 1 steps"),
    ],
)
def test_losses_have_to_show_that_a_row_trains(reference, still, said):
    why = undecided(reference, still)
    assert said in why and bool(said) == bool(why)


def test_frozen_optimizer_updates_nothing():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(frozen(keras.optimizers.Adam()), "mse")
    before = model.get_weights()
    x = keras.ops.ones((8, 3))
    losses = model.fit(x, x[:, :1] + 5, 4, 2, verbose=0).history["loss"]
    assert losses[0] == losses[1]
    assert (model.get_weights()[0] == before[0]).all()
