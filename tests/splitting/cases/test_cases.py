"""The analysis of steps that are made to defeat it, and what they do."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.capture import capture, judging, splits
from keras_towers.splitting import Analysis
from keras_towers.splitting.lines import line_of
from tests.splitting.cases import CASES
from tests.splitting.cases.table import (
    BATCH,
    BY_DESIGN,
    DIFFERS,
    PROVEN,
    UNPROVEN,
    Case,
)
from tests.splitting.trial import difference, trained

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
KEPT = [*ONCE_PROVEN, *list(CASES)[::33]]


@pytest.mark.parametrize("name", KEPT)
def test_analysis(name: str) -> None:
    """Nothing is proven that differs, and the line is named that does it."""
    case = CASES[name]
    with _analysed(stop=True) as found, contextlib.suppress(_Enough):
        _fitted(case, kt.TowerStrategy(towers=3))
    found.check(case)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_truth(name: str) -> None:
    """A step does what is expected of its analysis: it differs, or not."""
    case = CASES[name]
    one = _fitted(case, contextlib.nullcontext())
    own: Any = {"random": "tower"} if case.truth == BY_DESIGN else {}
    many: dict[str, np.ndarray] = {}
    with _analysed() as found:
        try:
            many = _fitted(case, kt.TowerStrategy(towers=3, **own))
        except Exception as error:
            # It counts on all examples being there.
            assert case.truth == DIFFERS, error
    same = difference(one, many) <= TOLERANCE
    assert same == (case.truth not in (DIFFERS, BY_DESIGN))
    found.check(case)


def _fitted(case: Case, scope: Any) -> dict[str, np.ndarray]:
    return trained(case, scope, BATCH)


class _Enough(BaseException):
    """The analysis is all that is asked for."""


@dataclasses.dataclass
class Found:
    """What is said of a step; None for one that towers trace each."""

    analysis: Analysis | None = None

    def check(self, case: Case) -> None:
        """Check it, unless every tower traces the step by itself."""
        if self.analysis is None:
            return
        proven = self.analysis.is_proven
        assert proven or case.truth not in (PROVEN, BY_DESIGN)
        assert not proven or case.truth != DIFFERS
        of_examples = any(d.value.rows for d in self.analysis.draws)
        assert not of_examples or case.truth == BY_DESIGN
        if case.truth in (DIFFERS, UNPROVEN) and case.marked:
            assert any(MARK in line for line in self.lines), self.lines

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


@contextlib.contextmanager
def _analysed(stop: bool = False) -> Iterator[Found]:
    """Keep what is said of the first step that is analysed in a block.

    Args:
        stop: whether it goes no further then.
    """
    found = Found()
    ours = splits.analysed

    def keep(trace: object, *rest: Any) -> Analysis:
        analysis = ours(trace, *rest)
        found.analysis = found.analysis or analysis
        if stop:
            raise _Enough
        return analysis

    judging.splits.analysed = keep
    try:
        yield found
    finally:
        judging.splits.analysed = ours


def _with_code(line: str) -> str:
    name, number, *_ = line.split(":")
    return linecache.getline(str(HERE / name), int(number)).strip()
