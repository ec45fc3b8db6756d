"""The analysis of steps that are made to defeat it, and what they do."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import pathlib
from typing import Any

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.capture import capture, judging, splits
from keras_towers.splitting import Analysis
from keras_towers.splitting.lines import line_of
from tests.kit.long import long_but
from tests.splitting.cases import CASES
from tests.splitting.cases.table import (
    BATCH,
    BY_DESIGN,
    DIFFERS,
    PROVEN,
    UNPROVEN,
    Case,
)

HERE = pathlib.Path(__file__).parent
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
    own: Any = {"random": "tower"} if case.verdict == BY_DESIGN else {}
    try:
        many = fitted(case, kt.TowerStrategy(towers=3, **own))
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


class _Enough(BaseException):
    """The analysis is all that is asked for."""


@dataclasses.dataclass
class Found:
    """What is said of a step; None for one that towers trace each."""

    analysis: Analysis | None = None

    @property
    def lines(self) -> list[str]:
        """The lines that are named, with their code."""
        analysis = self.analysis
        assert analysis is not None
        named = [
            line_of(found.operation, capture.__file__)
            for found in (*analysis.differences, *analysis.effects)
        ]
        return [_with_code(line) for line in named if line is not None]


def analysed(case: Case, towers: int = 3) -> Found:
    """Trace and analyse the step of a case; stop before it runs."""
    found = Found()
    ours = splits.analysed

    def keep(trace: object, predicts: bool) -> Analysis:
        found.analysis = ours(trace, predicts)
        raise _Enough

    with kt.TowerStrategy(towers=towers):
        model = case.build()
        x, y, *weights = case.data()
        judging.splits.analysed = keep
        try:
            model.fit(x, y, BATCH, 1, 0, sample_weight=(*weights, None)[0])
        except _Enough:
            pass
        finally:
            judging.splits.analysed = ours
    return found


def fitted(case: Case, scope: Any) -> list[np.ndarray]:
    """Return all variables and the history of a short training."""
    keras.utils.set_random_seed(0)
    with scope:
        model = case.build()
        x, y, *weights = case.data()
        weighted = {"sample_weight": weights[0]} if weights else {}
        history = model.fit(x, y, BATCH, 2, 0, shuffle=False, **weighted)
        optimizers = [model.optimizer, *getattr(model, "others", ())]
        variables = [
            *model.variables,
            *(v for optimizer in optimizers for v in optimizer.variables),
        ]
        return [
            *(np.array(v) for v in variables if "seed" not in v.path),
            *(np.array(values) for values in history.history.values()),
        ]


def _with_code(line: str) -> str:
    name, number, *_ = line.split(":")
    return linecache.getline(str(HERE / name), int(number)).strip()
