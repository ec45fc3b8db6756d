"""Every rule has a test."""

from __future__ import annotations

from keras_towers.splitting.rules import RULES
from tests.splitting.rules import (
    test_arithmetic,
    test_effects,
    test_elementwise,
    test_images,
    test_joins,
    test_lists,
    test_matrices,
    test_moves,
    test_parts,
    test_picks,
    test_products,
    test_reductions,
    test_repeats,
    test_sizes_of,
)

_ROOMS = [
    *(test_arithmetic, test_effects, test_elementwise, test_images),
    *(test_joins, test_lists, test_matrices, test_moves, test_parts),
    *(test_picks, test_products, test_reductions, test_repeats, test_sizes_of),
]


def test_every_rule_has_a_case():
    tested = {case.type for room in _ROOMS for case in room.CASES}
    assert set(RULES) - tested - set(test_effects.COVERED) == set()
