"""The analysis of steps that are made to defeat it, and what they do."""

import contextlib

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.kit.long import long_but
from tests.splitting.cases import CASES
from tests.splitting.cases.analysed import analysed, fitted
from tests.splitting.cases.table import (
    BY_DESIGN,
    DIFFERS,
    PROVEN,
    UNPROVEN,
    Case,
)

MARK = "# here"
TOLERANCE = 2e-5
# What was proven once, although it differs.
ONCE_PROVEN = [
    "louder_for_five",
    "factor_from_a_table",
    "sliced_from_a_table",
    "diagonal_of_sum",
    "element_by_positives",
    "powers_of_nothing",
    "products_of_nothing",
    "counted_by_loop",
    "counted_if_positive",
    "counted_one_way_or_other",
    "indices_rolled",
    "printed",
]
KEPT = {*ONCE_PROVEN, *list(CASES)[::32]}


@pytest.mark.parametrize("name", long_but(KEPT.__contains__, CASES))
def test_analysis(name: str) -> None:
    """Nothing is proven that differs, and the line is named that does it."""
    case = CASES[name]
    found = analysed(case)
    if found.analysis is None:
        pytest.skip("every tower traces this step by itself")
    assert found.analysis.is_proven or case.verdict not in (PROVEN, BY_DESIGN)
    assert not found.analysis.is_proven or case.verdict != DIFFERS
    of_examples = any(d.value.rows for d in found.analysis.draws)
    assert not of_examples or case.verdict == BY_DESIGN
    if case.verdict in (DIFFERS, UNPROVEN) and case.marked:
        assert any(MARK in line for line in found.lines), found.lines


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_truth(name: str) -> None:
    """Steps do what is expected of the analysis: they differ, or not."""
    case = CASES[name]
    same = _is_same(case)
    assert same == (case.verdict not in (DIFFERS, BY_DESIGN))


def _is_same(case: Case) -> bool:
    one = fitted(case, contextlib.nullcontext())
    try:
        many = fitted(case, kt.TowerStrategy(towers=3))
    except Exception as error:
        # It counts on all examples being there.
        assert case.verdict == DIFFERS, error
        return False
    keras.backend.clear_session()
    return all(
        np.array_equal(a, b, equal_nan=True)
        or np.abs(a - b).max() <= TOLERANCE * (np.abs(a).max() + 1e-3)
        for a, b in zip(one, many, strict=True)
    )
