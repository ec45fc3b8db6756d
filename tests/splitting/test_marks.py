"""What towers exchange at marks."""

import numpy as np
import pytest

from keras_towers.splitting import marks
from keras_towers.splitting.nodes import Layouts
from keras_towers.splitting.values import DoesNotSplit
from tests.splitting.kit import TOWERS, rows, same, total
from tests.splitting.kit_numbers import check_parts, made

_GIVEN = [
    kind(3, degree=degree)
    for kind in (same, total)
    for degree in (-1, 0, 1, 2, None)
] + [
    rows(-1, 3, degree=degree, outer=outer, inner=inner)
    for degree in (-1, 0, 1, None)
    for outer, inner in ((1, 1), (2, 1), (1, 2))
]


@pytest.mark.parametrize(
    ("meaning", "exchange"), [("sum", sum), ("gather", np.concatenate)]
)
def test_what_towers_get_is_what_one_device_has(meaning, exchange):
    known = 0
    for given in _GIVEN:
        try:
            value = marks._MEANINGS[meaning](given.described)
        except DoesNotSplit:
            continue
        known += 1
        for counts in TOWERS:
            generator = np.random.default_rng(0)
            one = made(given, counts, generator, Layouts().order)
            parts = [exchange(one.parts)] * len(counts)
            check_parts(value, one.whole, parts, counts)
    assert known
