"""What the analysis says of a case, without training."""

from __future__ import annotations

import dataclasses
import linecache
import pathlib

import keras_towers as kt
from keras_towers.fit.capture import capture, sharing, splits
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
    def verdict(self) -> str:
        if self.analysis is None:
            return "unknown"
        return "proven" if self.analysis.is_proven else "refused"

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

    def keep(trace: object) -> Analysis:
        found.analysis = ours(trace)
        raise _Enough

    with kt.TowerStrategy(towers=towers):
        model = case.build()
        x, y, *weights = case.data()
        sharing.splits.analysed = keep
        try:
            model.fit(x, y, BATCH, 1, 0, sample_weight=(*weights, None)[0])
        except _Enough:
            pass
        finally:
            sharing.splits.analysed = ours
    return found


def _with_code(line: str) -> str:
    name, number, *_ = line.split(":")
    return linecache.getline(str(HERE / name), int(number)).strip()
