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

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        ([2.5, 1.0], [2.5, 1.0], ""),
        ([2.5 * (1 + 0.9 * TOLERANCE)], [2.5], ""),
        ([2.5, 0.123, 0.4], [2.5, 0.456, 0.4], (2, "0.123", "0.456")),
        # The sign does not matter, nor which of the two is greater.
        ([-1.0], [-2.0], (1, "-1.000", "-2.000")),
        # Where three decimals do not show the difference, more do.
        ([0.0001234], [0.0001256], (1, "0.0001234", "0.0001256")),
        ([1.0, math.nan], [1.0, 1.0], (2, "nan", "1.000")),
        # A reference that has diverged is none.
        ([math.nan], [math.nan], (1, "nan", "nan")),
        ([math.inf], [math.inf], (1, "inf", "inf")),
        ([1.0], [1.0, 1.0], "1 losses, against 2"),
        ([], [], "the reference has no losses"),
    ],
)
def test_row_counts_only_with_the_losses_of_the_reference(mine, other, said):
    if isinstance(said, tuple):
        said = "loss differs from step {} on ({} against {})".format(*said)
    assert difference(mine, other) == said


@pytest.mark.parametrize(
    ("reference", "still", "said"),
    [
        ([2.0, 1.0], [2.0, 2.0], ""),
        # It is enough that one step shows it, and in either direction.
        ([2.0, 2.0], [2.0, 1.9], ""),
        ([0.0], [1e-9], ""),
        ([2.0, 2.0], [2.0, 2.0], "at most 0% in 2 steps"),
        ([2.0, 2.0 - 1e-4], [2.0, 2.0], "at most 0.005% in 2 steps"),
        # It would pass with half of the effect of training.
        ([1.0], [1.0 + 1.9 * TOLERANCE], "at most 0.19% in 1 steps"),
    ],
)
def test_losses_have_to_show_that_a_row_trains(reference, still, said):
    why = undecided(reference, still)
    assert said in why
    assert bool(said) == bool(why)


def test_frozen_optimizer_updates_nothing():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(frozen(keras.optimizers.Adam()), "mse")
    before = model.get_weights()
    x = keras.ops.ones((8, 3))
    losses = model.fit(x, x[:, :1] + 5, 4, 2, verbose=0).history["loss"]
    assert losses[0] == losses[1]
    assert (model.get_weights()[0] == before[0]).all()
