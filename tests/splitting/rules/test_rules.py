"""What the rules say of operations, for many layouts of their inputs."""

from __future__ import annotations

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
from tests.splitting.rules.case import exercise

CASES = [
    *(*test_effects.CASES, *elementwise.CASES),
    *(*images.CASES, *lists.CASES, *matrices.CASES, *moves.CASES),
    *(*parts.CASES, *picks.CASES, *reductions.CASES, *shapes.CASES),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case):
    exercise(case)


def test_every_rule_has_a_case():
    tested = {case.type for case in CASES}
    assert set(RULES) - tested - set(test_effects.COVERED) == set()
