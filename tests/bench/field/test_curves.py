"""The rule by which a row counts."""

import math

import pytest

from keras_towers.bench.field.curves import TOLERANCE, difference

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        ([2.5, 1.0], [2.5, 1.0], ""),
        ([2.5 * (1 + 0.9 * TOLERANCE)], [2.5], ""),
        (
            [2.5, 0.123, 0.4],
            [2.5, 0.456, 0.4],
            "loss differs from step 2 on (0.123 against 0.456)",
        ),
        # The sign does not matter, nor which of the two is greater.
        ([-1.0], [-2.0], "loss differs from step 1 on (-1.000 against -2.000)"),
        # Where three decimals do not show the difference, more do.
        (
            [0.0001234],
            [0.0001256],
            "loss differs from step 1 on (0.0001234 against 0.0001256)",
        ),
        (
            [1.0, math.nan],
            [1.0, 1.0],
            "loss differs from step 2 on (nan against 1.000)",
        ),
        # A reference that has diverged is none.
        (
            [math.nan],
            [math.nan],
            "loss differs from step 1 on (nan against nan)",
        ),
        (
            [math.inf],
            [math.inf],
            "loss differs from step 1 on (inf against inf)",
        ),
        ([1.0], [1.0, 1.0], "1 losses, against 2"),
        ([], [], "the reference has no losses"),
    ],
)
def test_row_counts_only_with_the_losses_of_the_reference(mine, other, said):
    assert difference(mine, other) == said
