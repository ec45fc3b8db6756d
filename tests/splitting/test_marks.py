"""What towers exchange at marks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keras_towers.splitting import marks
from keras_towers.splitting.nodes import Layouts
from keras_towers.splitting.values import DoesNotSplit
from tests.splitting.kit import Given, rows, same, total
from tests.splitting.kit_numbers import assert_alike, made, whole_of

_GIVEN = [
    kind(3, degree=degree)
    for kind in (same, total)
    for degree in (-1, 0, 1, 2, None)
] + [
    rows(-1, 3, degree=degree, outer=outer, inner=inner)
    for degree in (-1, 0, 1, None)
    for outer, inner in ((1, 1), (2, 1), (1, 2))
]
_EXCHANGES: dict[str, Any] = {
    "sum": lambda parts, counts: [sum(parts)] * len(parts),
    "gather": lambda parts, counts: [np.concatenate(parts)] * len(parts),
}


@pytest.mark.parametrize("meaning", _EXCHANGES)
def test_what_towers_get_is_what_one_device_has(meaning):
    known = 0
    for given in _GIVEN:
        known += _checked(meaning, given)
    assert known


def _checked(meaning: str, given: Given) -> bool:
    try:
        value = marks._MEANINGS[meaning](given.described)
    except DoesNotSplit:
        return False
    for counts in ((5, 2), (2, 3, 1)):
        generator = np.random.default_rng(0)
        one = made(given, counts, generator, Layouts().order)
        parts = _EXCHANGES[meaning](one.parts, counts)
        said = f"{meaning} of {given.described}: {value}"
        expected = whole_of(value, parts, counts, 3e-4, said)
        assert_alike(one.whole, expected, 3e-4, said)
    return True
