"""What the analysis says of a case, without training."""

from __future__ import annotations

import dataclasses
import linecache
import pathlib
from typing import Any

import keras
import numpy as np

import keras_towers as kt
from keras_towers.fit.capture import capture, judging, splits
from keras_towers.splitting import Analysis
from keras_towers.splitting.lines import line_of
from tests.splitting.cases.table import BATCH, Case

HERE = pathlib.Path(__file__).parent


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
