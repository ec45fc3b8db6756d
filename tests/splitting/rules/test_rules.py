"""What the rules say of operations, for many layouts of their inputs."""

import pytest

from keras_towers.splitting.rules import RULES
from tests.splitting.rules import (
    elementwise,
    images,
    lists,
    matrices,
    moves,
    parts,
    picks,
    reductions,
    shapes,
    test_effects,
)

_FAMILIES = [
    *(test_effects, elementwise, images, lists, matrices),
    *(moves, parts, picks, reductions, shapes),
]
CASES = [case for family in _FAMILIES for case in family.CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case):
    case.exercise()


def test_every_rule_has_a_case():
    tested = {case.type for case in CASES}
    assert set(RULES) - tested - set(test_effects.COVERED) == set()
